"""Records that a logger cannot write are kept, and written once in their order; a failing service ends no training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from small_parts import note

from trainer_cli.errors import TrainError, UserError
from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.loggers.record_keeper import RecordKeeper
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.terminal import format_count


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


def a_record(step: int) -> Record:
    return Record(step, step / 10, 1e9 + step, {"train/loss": step / 7})


def started(logger: Logger, *, tolerant: bool = True, step: int = 0) -> RecordKeeper:
    keeper = RecordKeeper("x", logger, Clock())
    keeper.tolerant = tolerant
    keeper.start(RunFacts(start_step=step), step)
    return keeper


def wait(keeper: RecordKeeper) -> None:
    assert isinstance(keeper._clock, Clock)
    keeper._clock.now += 100


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
    cast("Any", logger).log = lambda record: (note(asked, record.step), usual(record))[1]
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
    assert "x lacks 1 record" in caplog.text


class Refusing(Service):
    """Refuses each record a number of times."""

    def __init__(self, refusals: dict[int, int], error: Exception) -> None:
        super().__init__()
        self.refusals, self.error = dict(refusals), error

    def log(self, record: Record) -> None:
        if self.refusals.get(record.step):
            self.refusals[record.step] -= 1
            raise self.error
        super().log(record)


@pytest.mark.parametrize(
    ("refusals", "error", "taken"),
    [
        ({2: 2}, ValueError("no"), [1, 2, 3, 4]),
        ({2: 3}, ValueError("no"), [1, 3, 4]),
        ({2: 2, 3: 2, 4: 2}, ValueError("no"), [1, 2, 3, 4]),
        ({2: 3, 3: 2}, ValueError("no"), [1, 3, 4]),
        ({2: 3, 3: 3}, ValueError("no"), [1, 4]),
        ({2: 9}, OSError("away"), [1, 2, 3, 4]),
    ],
)
def test_a_record_is_dropped_at_its_third_refusal_and_never_while_a_service_is_away(
    refusals: dict[int, int], error: Exception, taken: list[int]
) -> None:
    logger = Refusing(refusals, error)
    keeper = started(logger)
    for step in (1, 2, 3, 4):
        keeper.log(a_record(step))
    for _ in range(12):
        wait(keeper)
        keeper.flush(durable=False)
    assert logger.steps == taken


def test_a_start_that_is_refused_often_drops_no_record_and_is_made_once_it_succeeds() -> None:
    logger = Service()
    logger.failure = RuntimeError("no")
    keeper = started(logger, step=5)
    keeper.log(a_record(6))
    for _ in range(6):
        wait(keeper)
        keeper.flush(durable=False)
    assert logger.starts == 7
    logger.failure = None
    for step in (7, 8):
        wait(keeper)
        keeper.log(a_record(step))
    assert (logger.starts, logger.steps) == (8, [6, 7, 8])


def test_the_thread_that_makes_a_checkpoint_durable_writes_no_kept_record() -> None:
    """The kept records belong to the main thread."""
    logger = Service()
    keeper = started(logger)
    logger.failure = OSError("away")
    keeper.log(a_record(1))
    logger.failure = None
    wait(keeper)
    keeper.flush(durable=True)
    assert logger.steps == []
    keeper.flush(durable=False)
    assert logger.steps == [1]


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


@pytest.mark.parametrize("step", [0, 8])
def test_a_path_that_a_logger_cannot_write_is_an_error_that_names_the_logger(step: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file/x.jsonl", tmp_path / "file/folder/x.jsonl", tmp_path):
        with pytest.raises(TrainError, match=r"the logger x cannot be started: .*'") as raised:
            started(JsonlLogger(str(path)), tolerant=False, step=step)
        assert "loggers.x=null" in str(raised.value.cure)


def test_a_logger_whose_last_write_fails_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Closing(LocalLogger):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    logger = Closing()
    keeper = started(logger)
    logger.failure = OSError("away")
    keeper.log(a_record(1))
    logger.failure = ValueError("a fault of its own")
    with pytest.raises(ValueError, match="a fault of its own"):
        keeper.close()
    assert logger.closed == 1
    assert "x lacks 1 record" in caplog.text


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


def test_a_record_larger_than_the_memory_is_kept_until_the_next() -> None:
    logger = Service()
    keeper = started(logger)
    logger.failure = OSError("away")
    keeper.log(Record(1, 0.0, 0.0, {}, images={"picture": np.broadcast_to(np.uint8(0), (100, 1000, 1000))}))
    logger.failure = None
    keeper.close()
    assert logger.steps == [1]


def test_records_that_a_rewind_takes_back_leave_their_memory_to_others() -> None:
    logger = Service()
    keeper = started(logger)
    image = np.broadcast_to(np.uint8(0), (1000, 1000, 10))
    logger.failure = OSError("away")
    for _ in range(3):
        keeper.start(RunFacts(start_step=5), 5)
        for step in (6, 7, 8, 9):
            keeper.log(Record(step, 0.0, 0.0, {}, images={"picture": image}))
    logger.failure = None
    keeper.close()
    assert logger.steps == [6, 7, 8, 9]


class Tracker(Service):
    """One that knows which records it has."""

    def last_step(self) -> int | None:
        return max(self.steps, default=-1)


@pytest.mark.parametrize(
    ("repeats", "sent"), [(True, [1, 2, 3, 4, 5]), (False, [1, 2, 3, 4, 3, 4, 5])], ids=["exact", "changed"]
)
def test_a_tracker_gets_records_again_only_if_they_may_differ(
    caplog: pytest.LogCaptureFixture, repeats: bool, sent: list[int]
) -> None:
    logger = Tracker()
    logger.steps = [1, 2, 3, 4]
    keeper = RecordKeeper("x", logger, Clock())
    with caplog.at_level(logging.INFO):
        keeper.start(RunFacts(start_step=2, repeats=repeats), 2)
    for step in (3, 4, 5):
        keeper.log(a_record(step))
    assert logger.steps == sent
    assert ("x has the records up to step 4, which are not sent again" in caplog.text) is repeats


@pytest.mark.parametrize("repeats", [True, False])
def test_a_tracker_that_has_exactly_the_records_of_the_checkpoint_is_no_reason_for_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, repeats: bool
) -> None:
    logger = Tracker()
    logger.steps = [1, 2]
    keeper = RecordKeeper("x", logger, Clock())
    with caplog.at_level(logging.INFO):
        keeper.start(RunFacts(run_dir=tmp_path, start_step=2, repeats=repeats), 2)
    assert caplog.text == ""


def test_what_a_tracker_had_at_an_earlier_start_does_not_count_after_a_rollback() -> None:
    logger = Tracker()
    logger.steps = [1, 2, 3, 4]
    keeper = RecordKeeper("x", logger, Clock())
    keeper.start(RunFacts(start_step=2, repeats=True), 2)
    keeper.log(a_record(3))
    keeper.start(RunFacts(start_step=2, repeats=False), 2)
    for step in (3, 4, 5):
        keeper.log(a_record(step))
    assert logger.steps == [1, 2, 3, 4, 3, 4, 5]


def test_a_tracker_that_is_reached_later_is_asked_then() -> None:
    logger = Tracker()
    logger.steps, logger.failure = [1, 2, 3, 4], OSError("away")
    keeper = RecordKeeper("x", logger, Clock())
    keeper.start(RunFacts(start_step=2, repeats=True), 2)
    keeper.log(a_record(3))
    logger.failure = None
    wait(keeper)
    keeper.log(a_record(4))
    keeper.log(a_record(5))
    assert logger.steps == [1, 2, 3, 4, 5]


def write_metrics(folder: Path, steps: Iterable[int]) -> RunFacts:
    """The metrics.jsonl of earlier processes, with a truncated last line; the training is at step 4."""
    lines = [json.dumps({"step": step, "epoch": 1, "time": 1.0, "train/loss": "nan"}) + "\n" for step in steps]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "ep')
    return RunFacts(run_dir=folder, start_step=4, repeats=True)


@pytest.mark.parametrize("received", [0, 2, 4], ids=["none", "some", "all"])
def test_what_an_earlier_process_could_not_send_is_sent_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, received: int
) -> None:
    logger = Tracker()
    logger.steps = list(range(1, received + 1))
    keeper = RecordKeeper("x", logger, Clock())
    with caplog.at_level(logging.INFO):
        keeper.start(write_metrics(tmp_path, range(1, 7)), 4)
    keeper.log(a_record(5))
    assert logger.steps == [1, 2, 3, 4, 5]
    assert (f"x lacks {format_count(4 - received, 'record')} up to step 4" in caplog.text) is (received < 4)


def test_a_service_that_fails_while_it_gets_missing_records_gets_the_rest_later(tmp_path: Path) -> None:
    logger = Tracker()
    logger.steps, logger.refused = [1], {3}
    keeper = RecordKeeper("x", logger, Clock())
    keeper.start(write_metrics(tmp_path, range(1, 5)), 4)
    keeper.log(a_record(5))
    assert logger.steps == [1, 2]
    logger.refused = set()
    wait(keeper)
    keeper.log(a_record(6))
    assert logger.steps == [1, 2, 3, 4, 5, 6]


def test_missing_records_that_are_still_kept_in_memory_are_sent_once(tmp_path: Path) -> None:
    logger = Tracker()
    keeper = started(logger)
    keeper.log(a_record(1))
    logger.failure = OSError("away")
    for step in (2, 3, 4):
        keeper.log(a_record(step))
    logger.failure = None
    # A rollback to step 4.
    keeper.start(write_metrics(tmp_path, range(1, 5)), 4)
    wait(keeper)
    keeper.log(a_record(5))
    assert logger.steps == [1, 2, 3, 4, 5]


def test_a_service_that_does_not_say_what_it_has_gets_nothing_of_earlier_processes(tmp_path: Path) -> None:
    logger = Service()
    keeper = RecordKeeper("x", logger, Clock())
    keeper.start(write_metrics(tmp_path, range(1, 5)), 4)
    keeper.log(a_record(5))
    assert logger.steps == [5]


def test_a_service_that_fails_slowly_takes_a_small_share_of_the_time() -> None:
    clock, waits = Clock(), 0.0

    class SlowService(Service):
        def log(self, record: Record) -> None:
            nonlocal waits
            clock.now, waits = clock.now + 90, waits + 90
            raise OSError("no answer")

    keeper = RecordKeeper("x", SlowService(), clock)
    keeper.start(RunFacts(), 0)
    for step in range(2_000):
        keeper.log(a_record(step))
        clock.now += 1
    # The first attempt, and then at most a twentieth of the time.
    assert 90 < waits <= 90 + 2_000 / 20


def test_missing_records_hold_no_step_up_for_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    class SlowTracker(Tracker):
        def log(self, record: Record) -> None:
            clock.now += 0.1
            super().log(record)

    logger = SlowTracker()
    keeper = RecordKeeper("x", logger, clock)
    keeper.start(write_metrics(tmp_path, range(1, 1_001)), 1_000)
    assert clock.now < 1.2
    longest = 0.0
    for step in range(1_001, 1_041):
        clock.now, began = clock.now + 1.5, clock.now + 1.5
        keeper.log(a_record(step))
        longest = max(longest, clock.now - began)
    assert longest < 1.2
    assert 300 < len(logger.steps) < 600
    began = clock.now
    keeper.close()
    assert clock.now - began < 60.2
    lacking = 1_040 - len(logger.steps)
    assert logger.steps == list(range(1, len(logger.steps) + 1))
    assert 0 < lacking < 100
    assert f"x lacks {format_count(lacking, 'record')}" in caplog.text


def test_the_memory_is_bounded_with_missing_records_too(tmp_path: Path) -> None:
    logger = Tracker()
    keeper = started(logger)
    logger.failure = OSError("away")
    image = np.broadcast_to(np.uint8(0), (30, 1000, 1000))
    facts = write_metrics(tmp_path, range(1, 3))
    for step in (3, 4):
        keeper.log(Record(step, 0.0, 0.0, {}, images={"picture": image}))
    log = logger.log
    cast("Any", logger).log = lambda record: (_ for _ in ()).throw(OSError("away"))
    logger.failure = None
    keeper.start(facts, 4)
    keeper.log(Record(5, 0.0, 0.0, {}, images={"picture": image}))
    cast("Any", logger).log = log
    keeper.close()
    assert logger.steps == [4, 5]


def test_a_slow_service_with_many_kept_records_takes_half_of_the_time_at_most(tmp_path: Path) -> None:
    clock, waits = Clock(), 0.0

    class SlowTracker(Tracker):
        def log(self, record: Record) -> None:
            nonlocal waits
            clock.now, waits = clock.now + 0.1, waits + 0.1
            super().log(record)

    keeper = RecordKeeper("x", SlowTracker(), clock)
    keeper.start(write_metrics(tmp_path, range(1, 1_001)), 1_000)
    for step in range(1_001, 2_001):
        clock.now += 0.01
        keeper.log(a_record(step))
    assert waits <= clock.now / 2 + 1.2


@pytest.mark.parametrize("exists", [True, False])
def test_a_warning_names_missing_records_that_no_file_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exists: bool
) -> None:
    logger = Tracker()
    logger.steps = [1]
    # The step of a checkpoint has no record of its own in general.
    facts = write_metrics(tmp_path, [1])
    if not exists:
        (tmp_path / "metrics.jsonl").unlink()
    RecordKeeper("x", logger, Clock()).start(facts, 4)
    assert ("x may lack records up to step 4" in caplog.text) is not exists


def test_a_record_outside_of_a_training_is_always_sent() -> None:
    logger = Tracker()
    logger.steps = [1, 2, 3, 4]
    keeper = RecordKeeper("x", logger, Clock())
    keeper.start(RunFacts(start_step=2, repeats=True), None)
    keeper.log(a_record(3))
    assert logger.steps == [1, 2, 3, 4, 3]
