"""checkpoints.jsonl: saves and removals with their reasons, read as lives of checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.catalog.history import CheckpointHistory, Life
from trainer_cli.files.json_lines import parse_rows, read_rows


def told(file: Path) -> list[tuple[Any, ...]]:
    return [(one.name, one.step, one.kind, one.reason, one.removed_reason) for one in Life.read_all(read_rows(file))]


def test_a_reason_outlives_its_checkpoint_and_a_second_life_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.jsonl"
    history = CheckpointHistory(file)
    history.saved("step5", 5, "ephemeral", "every 5 steps, ephemeral")
    history.saved("step10", 10, "ephemeral", "every 5 steps, ephemeral")
    history.removed("step5", "ephemeral, and step10 is newer")
    # The word of older versions, which manifests have too.
    history.saved("step10", 10, "permanent", "every 10 steps")
    history.saved("step5", 5, "regular", 'asked "by" a file\n')
    history.removed("step1", "a checkpoint of before the record")
    assert told(file) == [
        ("step5", 5, "ephemeral", "every 5 steps, ephemeral", "ephemeral, and step10 is newer"),
        ("step10", 10, "regular", "every 10 steps", None),
        ("step5", 5, "regular", 'asked "by" a file\n', None),
        ("step1", None, "", "", "a checkpoint of before the record"),
    ]
    first, *_ = Life.read_all(read_rows(file))
    assert first.saved_at is not None
    assert first.removed_at is not None
    assert first.saved_at <= first.removed_at


def test_a_torn_line_spoils_neither_the_one_before_it_nor_the_next(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.jsonl"
    history = CheckpointHistory(file)
    history.saved("step1", 1, "permanent", "one")
    file.write_bytes(file.read_bytes() + b'{"time": 17, "eve')
    history.saved("step2", 2, "permanent", "two")
    assert [one[0] for one in told(file)] == ["step1", "step2"]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\x00\x00", b"[]", b"7", b'{"event": "saved"}', b'{"time": "x", "event": "saved", "name": "a"}',
        b'{"time": 1, "event": "saved", "name": "a", "step": [], "reason": ""}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_line_of_another_kind_is_left_out(line: bytes) -> None:
    good = json.dumps({"time": 1, "event": "saved", "name": "a", "step": 1, "kind": "permanent", "reason": "r"})
    assert [one.name for one in Life.read_all(parse_rows([line, good.encode()]))] == ["a"]


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("trainer_cli").propagate = True
    history = CheckpointHistory(tmp_path / "gone" / "checkpoints.jsonl")
    history.saved("step1", 1, "permanent", "one")
    history.removed("step1", "two")
    # An earlier test may have left the handler at a second logger: then the one record is there twice.
    (record,) = {id(record): record for record in caplog.records}.values()
    assert "checkpoints.jsonl could not be written: No such file or directory" in record.getMessage()
