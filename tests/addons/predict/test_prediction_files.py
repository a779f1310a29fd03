"""Parts of predictions: written once, by one process or several, whole or not at all, and never mixed with others."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from small_parts import note

from trainer_cli.addons.predict.predict import _write_missing
from trainer_cli.addons.predict.prediction_files import PredictionFile
from trainer_cli.addons.predict.prediction_writers import PredictionWriter
from trainer_cli.errors import ExitCode, TrainError, UserError
from trainer_cli.ranks import Ranks


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


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG])
def test_an_error_of_a_users_writer_stays_as_it_is(tmp_path: Path, number: int) -> None:
    file = PredictionFile(tmp_path, "val", Filling("write", number), 1, {})
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        file.write(0, [{"sample": 0}])
    assert not isinstance(caught.value, TrainError)


def predictions(folder: Path, parts: int = 5, **facts: Any) -> PredictionFile:
    return PredictionFile(folder, "val", PredictionWriter(), parts, facts)


def write(file: PredictionFile, *numbers: int) -> None:
    for number in numbers:
        file.write(number, [{"sample": number}])


@pytest.mark.parametrize(("parts", "world_size"), [(5, 1), (5, 2), (5, 3), (2, 4), (0, 2)])
def test_processes_share_all_parts_and_each_has_one_stretch(parts: int, world_size: int, tmp_path: Path) -> None:
    shares = [predictions(tmp_path, parts).missing(rank, world_size) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(parts))


def test_the_file_is_made_when_the_last_part_is_there_and_only_once(tmp_path: Path) -> None:
    first, second = predictions(tmp_path, 3), predictions(tmp_path, 3)
    assert not first.finish()
    write(first, 0, 2)
    assert not first.finish()
    assert second.missing() == [1]
    write(second, 1)
    assert second.finish()
    content = second.path.read_bytes()
    assert content == b'{"sample": 0}\n{"sample": 1}\n{"sample": 2}\n'
    assert first.finish()
    assert first.path.read_bytes() == content
    done = predictions(tmp_path, 3)
    assert done.is_done
    assert done.missing() == []


@pytest.mark.parametrize("left", ["nothing", "a staged part", "a part", "the file"])
def test_predictions_of_other_facts_are_refused_where_some_are_there(left: str, tmp_path: Path) -> None:
    before = predictions(tmp_path, 1, samples=1, checkpoint="a")
    if left == "a staged part":
        before.part(0).with_name(f".tmp.7.{before.part(0).name}").touch()
    elif left != "nothing":
        write(before, 0)
    if left == "the file":
        assert before.finish()
    if left in ("a part", "the file"):
        with pytest.raises(UserError, match="were made with another checkpoint"):
            predictions(tmp_path, 1, samples=1, checkpoint="b")
        again = predictions(tmp_path, 1, samples=1, checkpoint="a")
        assert again.missing() == []
    else:
        assert predictions(tmp_path, 1, samples=1, checkpoint="b").missing() == [0]


def test_a_file_without_facts_is_not_taken_for_these_predictions(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"there is no val\.jsonl\.predictions\.json that describes it"):
        predictions(tmp_path)
    assert (tmp_path / "val.jsonl").read_text() == "mine"


def test_a_part_and_the_file_are_durable_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    file = predictions(tmp_path, 1)
    fsync, rename = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        calls.append("fsync of the folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (note(calls, "rename"), rename(old, new)))
    write(file, 0)
    assert calls == ["fsync", "rename", "fsync of the folder"]
    calls.clear()
    assert file.finish()
    assert calls == ["fsync", "rename", "fsync of the folder"]


def test_two_processes_that_write_the_same_part_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = predictions(tmp_path, 1), predictions(tmp_path, 1)

    def rows() -> Iterable[Mapping[str, Any]]:
        yield {"sample": 0}
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 7)
            second.write(0, [{"sample": 0}, {"sample": 1}])
        yield {"sample": 1}

    first.write(0, rows())
    assert first.part(0).read_text() == '{"sample": 0}\n{"sample": 1}\n'


class Numbers:
    """A loader of 10 batches of 512 samples, two of which are a part; a batch is its rows."""

    samples_per_batch = 512

    def __len__(self) -> int:
        return 10

    def iterate(self, epoch: int, *, batch: int, samples: int) -> Iterator[list[dict[str, int]]]:
        assert samples == 512 * batch
        for number in range(batch, 10):
            yield [{"value": 512 * number + row} for row in range(512)]


class AsTheyAre:
    def __init__(self, *_: Any) -> None: ...

    def rows(self, batch: list[dict[str, int]]) -> list[dict[str, int]]:
        return batch


@pytest.mark.parametrize("there", [(), (0,), (1,), (0, 2), (1, 3), (4,)])
def test_the_parts_that_are_missing_hold_their_own_samples_also_after_a_gap(
    there: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of processes leaves gaps."""
    monkeypatch.setattr("trainer_cli.trainer.predict.Predictor", AsTheyAre)
    file = predictions(tmp_path)
    for number in there:
        file.write(
            number, ({"sample": sample, "value": sample} for sample in range(1024 * number, 1024 * number + 1024))
        )
    _write_missing(cast("Any", None), Numbers(), file, (), Ranks())
    assert file.finish()
    rows = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert rows == [{"sample": sample, "value": sample} for sample in range(5120)]
