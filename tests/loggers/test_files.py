"""Loggers that write files: what is logged comes back, a resume cuts it back exactly, and a full disk loses nothing."""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_cli.loggers import tensorboard, text_files
from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.loggers.record_keeper import RecordKeeper
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger, read_records


def _of_jsonl(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _of_csv(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["metric"] == "train/loss"]


def _of_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")] if events.Tags()["scalars"] else []


# A logger, the pattern of its files, and a function that reads the steps in them.
FILES: dict[str, tuple[Callable[[], Logger], str, Callable[[Path], list[int]]]] = {
    "jsonl": (JsonlLogger, "metrics.jsonl", _of_jsonl),
    "csv": (CsvLogger, "metrics.csv", _of_csv),
    "tensorboard": (TensorBoardLogger, "tensorboard/events*", _of_tensorboard),
}
every_kind = pytest.mark.parametrize("kind", FILES)


def a_record(step: int) -> Record:
    metrics = {"train/loss": step / 7, **{f"more{number}": 1.0 for number in range(7)}}
    return Record(step, step / 10, 1e9 + step, metrics)


def attempt(kind: str, folder: Path, steps: list[int], *, since: int | None = None) -> list[int]:
    """Log these steps as one attempt, which goes on from step `since`. Returns the steps that the files have then."""
    make, _, read = FILES[kind]
    logger = make()
    if since is not None:
        logger.rewind(folder, since)
    logger.start(RunFacts(run_dir=folder))
    for step in steps:
        logger.log(a_record(step))
    logger.flush(durable=True)
    logger.close()
    return read(folder)


@every_kind
@pytest.mark.parametrize(
    ("since", "left"), [(-1, []), (0, [0]), (15, [0, 10]), (20, [0, 10, 20]), (99, [0, 10, 20, 30])]
)
def test_rewinding_drops_what_is_later_than_the_step(kind: str, since: int, left: list[int], tmp_path: Path) -> None:
    attempt(kind, tmp_path, [0, 10, 20, 30])
    assert attempt(kind, tmp_path, [since + 1], since=since) == [*left, since + 1]


@every_kind
def test_resumes_neither_double_nor_lose_a_step(kind: str, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [10, 20, 30, 40])
    attempt(kind, tmp_path, [30, 40, 50], since=20)
    assert attempt(kind, tmp_path, [50, 60], since=40) == [10, 20, 30, 40, 50, 60]
    assert attempt(kind, tmp_path, [20], since=10) == [10, 20], "also behind an earlier resume"


NOISE = random.Random(5).randbytes(64)
TAILS = {
    "jsonl": [b'{"step": 3', b'{"step": 3, "epoch": 0.0}', b"\0" * 100, b"\0\0\0\n", b"\xff\xfe\n", b"[1]\n", b"7\n"],
    "csv": [b"2,0.5,1", b"\0" * 64],
    "tensorboard": [b"\0" * 64, NOISE, b"\xff" * 12],
}


@pytest.mark.parametrize(("kind", "tail"), [(kind, tail) for kind, tails in TAILS.items() for tail in tails])
def test_a_resume_drops_what_a_crash_left_at_the_end(kind: str, tail: bytes, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [1, 2])
    (path,) = tmp_path.glob(FILES[kind][1])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert attempt(kind, tmp_path, [3], since=2) == [1, 2, 3]
    assert min(tmp_path.glob(FILES[kind][1])).read_bytes().startswith(whole)


@every_kind
def test_a_resume_that_needs_no_cut_touches_nothing(kind: str, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [1, 2])
    (path,) = tmp_path.glob(FILES[kind][1])
    os.utime(path, ns=(1, 1))
    inode = path.stat().st_ino
    if kind == "tensorboard":
        attempt(kind, tmp_path, [3], since=2)  # It rewinds at its first record, which has a file of its own.
    else:
        FILES[kind][0]().rewind(tmp_path, 2)
    first = min(tmp_path.glob(FILES[kind][1]))
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (1, inode)


def test_rewinding_drops_damage_in_the_middle_and_keeps_what_follows(tmp_path: Path) -> None:
    attempt("jsonl", tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"st\n' + lines[2])
    JsonlLogger().rewind(tmp_path, 10)
    assert path.read_bytes() == lines[0] + lines[2]


def test_a_record_is_one_line_of_json_with_its_keys_in_order() -> None:
    line = JsonlLogger.encode(Record(3, 0.5, 1234.56789, {"train/loss": 0.25, "val/accuracy": 1}))
    assert line == b'{"step": 3, "epoch": 0.5, "time": 1234.568, "train/loss": 0.25, "val/accuracy": 1}\n'


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**60), 2**60)))
def test_every_value_comes_back_from_json_as_it_was_through_float(metrics: dict[str, float]) -> None:
    line = json.loads(
        JsonlLogger.encode(Record(1, 0.0, 0.0, metrics)), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    for key in metrics.keys() - {"step", "epoch", "time"}:
        assert repr(float(line[key])) == repr(float(metrics[key]))


def test_the_records_between_two_steps_are_read_without_a_truncated_last_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [JsonlLogger.encode(a_record(step)) for step in (1, 2, 3, 3, 4, 3)]
    path.write_bytes(b"".join(lines).rstrip(b"\n"))
    assert [record.step for record in read_records(path, 1, 3)] == [2, 3, 3]
    assert next(read_records(path, 1, 3)).metrics == a_record(2).metrics
    assert list(read_records(tmp_path / "none", 1, 3)) == []


def test_a_record_of_pictures_alone_has_no_line(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(Record(1, 0.0, 0.0, {}, texts={"sample": "a"}))
    logger.log(Record(2, 0.0, 0.0, {}))
    logger.close()
    assert _of_jsonl(tmp_path) == [2]


def test_each_metric_of_a_step_has_a_row_of_csv_with_its_exact_value_below_one_header(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = CsvLogger()
        logger.start(RunFacts(run_dir=tmp_path))
        logger.log(Record(step, step / 4, 1e9 + step, {"train/loss": 1 / 3, 'odd,"name"': float("nan")}))
        logger.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [(row["step"], row["metric"], row["value"]) for row in csv.DictReader(file)]
    assert rows == [(step, *row) for step in "12" for row in (("train/loss", repr(1 / 3)), ('odd,"name"', "nan"))]


def test_a_line_is_readable_as_soon_as_it_is_logged_and_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    logger = JsonlLogger(str(tmp_path / "elsewhere" / "metrics.jsonl"))
    logger.start(RunFacts(run_dir=tmp_path / "run"))
    logger.log(a_record(1))
    assert _of_jsonl(tmp_path / "elsewhere") == [1]
    logger.close()
    assert not (tmp_path / "run").exists()


@every_kind
def test_what_was_flushed_for_a_checkpoint_survives_a_power_cut_with_the_name_of_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, pattern, _ = FILES[kind]
    synced, fsync = set[int](), os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    logger = make()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(a_record(1))
    logger.flush(durable=True)
    (path,) = tmp_path.glob(pattern)
    assert {path.stat().st_ino, path.parent.stat().st_ino} <= synced
    logger.close()


# A full disk


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, with a part written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kept(logger: Logger, run_dir: Path, *, tolerant: bool = True) -> tuple[RecordKeeper, list[float]]:
    """A keeper of the logger's records, which is started, and the time of its clock."""
    now = [0.0]
    keeper = RecordKeeper("x", logger, lambda: now[0])
    keeper.tolerant = tolerant
    keeper.start(RunFacts(run_dir=run_dir), 0)
    return keeper, now


@every_kind
@pytest.mark.parametrize("from_start", [False, True])
def test_records_neither_repeat_nor_vanish_where_there_is_space_again(
    kind: str, from_start: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, pattern, read = FILES[kind]
    keeper, now = kept(make(), tmp_path)
    first = 1 if from_start else 4
    for step in range(1, first):
        keeper.log(a_record(step))
    sizes = [path.stat().st_size for path in tmp_path.glob(pattern)]
    # The limit is that of each file, and TensorBoard's logger begins another one.
    with largest_file(10 if kind == "tensorboard" else max(sizes, default=0) + 100):
        for step in range(first, 8):
            keeper.log(a_record(step))
            keeper.flush(durable=False)
            keeper.flush(durable=True)
            now[0] += 100
    for step in range(8, 10):
        keeper.log(a_record(step))
    keeper.close()
    assert read(tmp_path) == list(range(1, 10))
    assert caplog.text.count("cannot be written") == 1
    assert len(list(tmp_path.glob(pattern))) <= 2


@every_kind
def test_a_start_that_fails_again_and_again_leaves_no_file_open_and_no_second_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, pattern, read = FILES[kind]
    attempt(kind, tmp_path / "import", [1])
    failures = [OSError(errno.EIO, "no answer") for _ in range(3)]

    def sync(folder: Path) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(text_files, "sync", sync)
    monkeypatch.setattr(tensorboard, "sync", sync)
    lowest = _lowest_descriptor()
    now = [0.0]
    keeper = RecordKeeper("x", make(), lambda: now[0])
    keeper.tolerant = True
    keeper.start(RunFacts(run_dir=tmp_path, start_step=1), 0)
    for step in range(1, 6):
        now[0] += 100
        keeper.log(a_record(step))
    keeper.close()
    assert read(tmp_path) == [1, 2, 3, 4, 5]
    assert len(list(tmp_path.glob(pattern))) == 1
    assert _lowest_descriptor() == lowest


def _lowest_descriptor() -> int:
    """The lowest number that no open file has."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@every_kind
def test_without_the_policy_a_full_disk_ends_the_training_with_an_error(kind: str, tmp_path: Path) -> None:
    make, pattern, read = FILES[kind]
    keeper, _ = kept(make(), tmp_path, tolerant=False)
    keeper.log(a_record(1))
    size = max(path.stat().st_size for path in tmp_path.glob(pattern))
    with largest_file(size + 100), pytest.raises(OSError, match="File too large"):
        keeper.log(a_record(2))
    keeper.close()
    if kind != "tensorboard":
        assert read(tmp_path) == [1], "nothing of a failed record is left"


def test_a_run_that_ends_on_a_full_disk_says_how_many_records_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, _ = kept(JsonlLogger(), tmp_path)
    with largest_file(0):
        for step in (1, 2, 3):
            keeper.log(a_record(step))
        keeper.close()
    assert "x lacks 3 records" in caplog.text
