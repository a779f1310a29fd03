"""A disk that is full while predictions are written costs the part that was being written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.errors import ExitCode, TrainError
from trainer_cli.runs.prediction_files import PredictionFile
from trainer_cli.runs.prediction_writers import PredictionWriter


class Filling(PredictionWriter):
    """The disk is full once, after a part of what is to be written."""

    def __init__(self, method: str, number: int) -> None:
        self.method, self.number = method, number

    def write(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        super().write(path, rows)
        self._fill("write")

    def join(self, parts: Sequence[Path], path: Path) -> None:
        super().join(parts, path)
        self._fill("join")

    def _fill(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("method", ["write", "join"])
def test_a_full_disk_is_one_message_and_the_command_continues(method: str, tmp_path: Path) -> None:
    writer = Filling(method, errno.ENOSPC)

    def predict() -> None:
        file = PredictionFile(tmp_path, "val", writer, 2, {"samples": 2})
        for number in file.missing():
            file.write(number, [{"sample": number}])
        assert file.finish()

    with pytest.raises(TrainError) as caught:
        predict()
    assert str(caught.value) == (
        f"cannot write predictions: No space left on device ({tmp_path}/val.jsonl). Free some space on the disk. "
        "Then run the same command again: it continues with the parts that are missing."
    )
    assert caught.value.exit_code == ExitCode.FAILED
    # Nothing of the failed write takes space.
    kept = ["00000000.jsonl", "00000001.jsonl"] if method == "join" else []
    assert sorted(path.name for path in (tmp_path / ".val.jsonl.parts").iterdir()) == kept
    predict()
    assert (tmp_path / "val.jsonl").read_text() == '{"sample": 0}\n{"sample": 1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["val.jsonl", "val.jsonl.predictions.json"]


def test_an_error_of_a_users_writer_stays_as_it_is(tmp_path: Path) -> None:
    file = PredictionFile(tmp_path, "val", Filling("write", errno.ENOENT), 1, {})
    with pytest.raises(FileNotFoundError):
        file.write(0, [{"sample": 0}])
