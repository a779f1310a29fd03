"""Records that a logger cannot write are kept, and written once in their order; a failing service ends no training."""

from __future__ import annotations

import csv
import json
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from trainer_cli.errors import TrainError, UserError
from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.loggers.record_keeper import RecordKeeper
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger


class Service(Logger):
    """Takes records, unless a failure is set."""

    is_remote = True

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.failure: Exception | None = None
        self.refused: set[int] = set()
        self.starts = 0

    def start(self, facts: RunFacts) -> None:
        self.starts += 1
        if self.failure is not None:
            raise self.failure

    def log(self, record: Record) -> None:
        if self.failure is not None:
            raise self.failure
        if record.step in self.refused:
            raise ValueError(f"{record.step} is refused")
        self.steps.append(record.step)

    def close(self) -> None:
        if self.failure is not None:
            raise self.failure


class LocalLogger(Service):
    is_remote = False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def a_record(step: int, size: int = 1) -> Record:
    return Record(step, step / 10, 1e9 + step, {f"train/loss{number}": step / 7 for number in range(size)})


def started(logger: Logger, *, tolerant: bool = True, step: int = 0, run_dir: Path | None = None) -> RecordKeeper:
    keeper = RecordKeeper("x", logger, Clock())
    keeper.tolerant = tolerant
    keeper.start(RunFacts(run_dir=run_dir, start_step=step), step)
    return keeper


def wait(keeper: RecordKeeper) -> None:
    assert isinstance(keeper._clock, Clock)
    keeper._clock.now += 100


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, with a part written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _of_jsonl(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _of_csv(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["metric"] == "train/loss0"]


def _of_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars("train/loss0")]


FILES: dict[str, tuple[Callable[[], Logger], str, Callable[[Path], list[int]]]] = {
    "jsonl": (JsonlLogger, "metrics.jsonl", _of_jsonl),
    "csv": (CsvLogger, "metrics.csv", _of_csv),
    "tensorboard": (TensorBoardLogger, "tensorboard/*", _of_tensorboard),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("from_start", [False, True])
def test_records_neither_repeat_nor_vanish_where_there_is_space_again(
    kind: str, from_start: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, place, read = FILES[kind]
    keeper = started(make(), run_dir=tmp_path)
    first = 1 if from_start else 4
    for step in range(1, first):
        keeper.log(a_record(step, 8))
    sizes = [path.stat().st_size for path in tmp_path.glob(place)]
    # The limit is that of each file, and TensorBoard's logger begins another one.
    with largest_file(10 if kind == "tensorboard" else max(sizes, default=0) + 100):
        for step in range(first, 8):
            keeper.log(a_record(step, 8))
            keeper.flush(durable=False)
            keeper.flush(durable=True)
            wait(keeper)
    for step in range(8, 10):
        keeper.log(a_record(step, 8))
    keeper.close()
    assert read(tmp_path) == list(range(1, 10))
    assert caplog.text.count("cannot be written") == 1
    assert len(list(tmp_path.glob(place))) <= 2


@pytest.mark.parametrize("kind", FILES)
def test_without_the_policy_a_full_disk_ends_the_training_with_an_error(kind: str, tmp_path: Path) -> None:
    make, place, read = FILES[kind]
    keeper = started(make(), tolerant=False, run_dir=tmp_path)
    keeper.log(a_record(1, 8))
    size = max(path.stat().st_size for path in tmp_path.glob(place))
    with largest_file(size + 100), pytest.raises(OSError, match="File too large"):
        keeper.log(a_record(2, 8))
    keeper.close()
    if kind != "tensorboard":
        assert read(tmp_path) == [1], "nothing of a failed record is left"


def test_a_run_that_ends_on_a_full_disk_says_how_many_records_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = started(JsonlLogger(), run_dir=tmp_path)
    with largest_file(0):
        for step in (1, 2, 3):
            keeper.log(a_record(step))
        keeper.close()
    assert "x lacks 3 records" in caplog.text


def test_what_is_kept_is_rewound_too(tmp_path: Path) -> None:
    logger = Service()
    keeper = started(logger)
    logger.failure = OSError("away")
    for step in (1, 2, 3):
        keeper.log(a_record(step))
    keeper.close()
    logger.failure = None
    keeper.start(RunFacts(start_step=2), 2)
    wait(keeper)
    keeper.log(a_record(3))
    assert logger.steps == [1, 2, 3]


@pytest.mark.parametrize("failure", [OSError("away"), RuntimeError("refused"), ConnectionError()])
@pytest.mark.parametrize("moment", ["start", "log", "flush", "close"])
def test_a_service_that_fails_at_any_moment_ends_no_training(failure: Exception, moment: str) -> None:
    logger = Service()
    if moment == "start":
        logger.failure = failure
    keeper = started(logger, tolerant=False, step=5)
    logger.failure = failure if moment in ("start", "log") else None
    keeper.log(a_record(6))
    logger.failure = failure if moment == "flush" else None
    keeper.flush(durable=False)
    wait(keeper)
    logger.failure = None
    keeper.log(a_record(7))
    logger.failure = failure if moment == "close" else None
    keeper.close()
    assert logger.steps == [6, 7]


def test_a_service_is_asked_again_only_after_a_pause() -> None:
    logger = Service()
    keeper = started(logger)
    logger.failure = OSError("away")
    asked: list[int] = []
    usual = logger.log
    logger.log = lambda record: (asked.append(record.step), usual(record))[1]  # type: ignore[method-assign]
    for step in range(100):
        keeper.log(a_record(step))
    assert len(asked) == 1


def test_a_record_that_a_service_never_takes_keeps_no_others_back(caplog: pytest.LogCaptureFixture) -> None:
    logger = Service()
    logger.refused = {2}
    keeper = started(logger)
    for step in range(1, 9):
        keeper.log(a_record(step))
        wait(keeper)
    keeper.close()
    assert logger.steps == [1, 3, 4, 5, 6, 7, 8]
    assert "x lacks 1 records" in caplog.text


def test_a_service_that_cannot_be_reached_at_the_beginning_of_a_run_is_one_message() -> None:
    logger = Service()
    logger.failure = RuntimeError("no such server\nat all")
    with pytest.raises(TrainError, match=r"x cannot be started: no such server\. .*loggers\.x=null"):
        started(logger)
    logger.failure = UserError("not installed")
    with pytest.raises(UserError, match="not installed"):
        started(logger, step=5)


def test_another_exception_of_a_local_logger_is_raised() -> None:
    logger = LocalLogger()
    keeper = started(logger)
    logger.failure = ValueError("a fault of its own")
    with pytest.raises(ValueError, match="a fault of its own"):
        keeper.log(a_record(1))


def test_the_memory_of_kept_records_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    logger = Service()
    keeper = started(logger)
    logger.failure = OSError("away")
    image = np.zeros((1000, 1000, 3), dtype=np.uint8)
    with caplog.at_level(logging.WARNING):
        for step in range(60):
            keeper.log(Record(step, 0.0, 0.0, {}, images={"picture": image}))
    logger.failure = None
    keeper.close()
    assert 10 < len(logger.steps) < 23
    assert logger.steps[-1] == 59
    assert caplog.text.count("the oldest records") == 1
