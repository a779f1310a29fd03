"""metrics.jsonl: valid JSON lines that a resume cuts back exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.text_files import JsonlLogger, encode


def write(folder: Path, steps: list[int]) -> Path:
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=folder))
    for step in steps:
        logger.log(Record(step, 0.0, 1e9, {"train/loss": float(step)}))
    logger.close()
    return folder / "metrics.jsonl"


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_one_line_with_its_keys_in_order(tmp_path: Path) -> None:
    line = encode(Record(3, 0.5, 1234.56789, {"train/loss": 0.25, "val/accuracy": 1}))
    assert line == b'{"step": 3, "epoch": 0.5, "time": 1234.568, "train/loss": 0.25, "val/accuracy": 1}\n'


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**60), 2**60)))
def test_every_value_comes_back_as_it_was_through_float(metrics: dict[str, float]) -> None:
    own = {"step", "epoch", "time"}
    line = json.loads(
        encode(Record(1, 0.0, 0.0, metrics)), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    for key in metrics.keys() - own:
        assert repr(float(line[key])) == repr(float(metrics[key]))


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(Record(1, 0.0, 0.0, {"train/loss": 1.0}))
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    logger.close()


def test_a_resume_appends(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    assert steps_in(write(tmp_path, [3])) == [1, 2, 3]


@pytest.mark.parametrize(
    ("step", "left"), [(-1, []), (0, [0]), (15, [0, 10]), (20, [0, 10, 20]), (99, [0, 10, 20, 30])]
)
def test_rewinding_drops_what_is_later_than_the_step(step: int, left: list[int], tmp_path: Path) -> None:
    path = write(tmp_path, [0, 10, 20, 30])
    JsonlLogger().rewind(tmp_path, step)
    assert steps_in(path) == left


@pytest.mark.parametrize(
    "tail",
    [b'{"step": 3', b'{"step": 3, "epoch": 0.0}', b"\0" * 100, b"\0\0\0\n", b"\xff\xfe\n", b"[1]\n", b"7\n"],
)
def test_rewinding_drops_what_a_crash_left_at_the_end(tail: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    JsonlLogger().rewind(tmp_path, 10)
    assert path.read_bytes() == whole


def test_rewinding_drops_damage_in_the_middle_and_keeps_what_follows(tmp_path: Path) -> None:
    path = write(tmp_path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"st\n' + lines[2])
    JsonlLogger().rewind(tmp_path, 10)
    assert path.read_bytes() == lines[0] + lines[2]


def test_rewinding_what_needs_no_cut_touches_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, [1, 2])
    os.utime(path, ns=(1, 1))
    before = path.stat()
    JsonlLogger().rewind(tmp_path, 2)
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    logger = JsonlLogger(str(tmp_path / "elsewhere" / "m.jsonl"))
    logger.start(RunFacts(run_dir=tmp_path / "run"))
    logger.log(Record(1, 0.0, 0.0, {"train/loss": 1.0}))
    logger.close()
    assert steps_in(tmp_path / "elsewhere" / "m.jsonl") == [1]
    assert not (tmp_path / "run").exists()
