"""How a fit ends: by Ctrl-C, by a request of any rank, and how each logger is told."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import Line, ListLogger, StopAt, loader, on, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.loggers.base import Logger, Record
from trainer_cli.policy.stopping import Stop
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.trainer.ctrl_c import CTRL_C
from trainer_cli.trainer.requests import Requests
from trainer_cli.trainer.trainer import Trainer


class Told(ListLogger):
    """Notes each end, and that it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def note_end(self, status: RunStatus) -> None:
        self.told.append(status)

    def close(self) -> None:
        super().close()
        self.told.append("closed")


class Service(Told):
    is_remote = True


def fail(error: BaseException) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        raise error

    return hook


ENDS: dict[str, tuple[Any, str]] = {
    "at its end": (on(), "finished"),
    "by a callback": (StopAt(2, finished=True), "finished"),
    "to be resumed": (StopAt(2), "stopped"),
    "by an error": (on(on_train_batch_end=fail(RuntimeError("broken"))), "failed"),
    "by an error at its end": (on(on_fit_end=fail(RuntimeError("broken"))), "failed"),
    "by an error after its end": (on(finalize=fail(RuntimeError("broken"))), "failed"),
    "by a second Ctrl-C": (on(on_train_batch_end=fail(KeyboardInterrupt())), "interrupted"),
    "by a full disk": (on(on_train_batch_end=fail(OSError(errno.ENOSPC, "full"))), "failed"),
    "by a full disk after a save": (on(on_fit_end=fail(OSError(errno.ENOSPC, "full"))), "stopped"),
    "by a full disk after its end": (on(finalize=fail(OSError(errno.ENOSPC, "full"))), "stopped"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_logger_is_told_how_the_fit_ended(end: str, tmp_path: Path) -> None:
    callback, status = ENDS[end]
    loggers = {"file": Told(), "service": Service()}
    checkpoint = CheckpointerCallback(tmp_path / "checkpoints", save_interval=2, pre_train_checkpoint=False)
    made = trainer(Line, callbacks=[callback], loggers=loggers, checkpoint=checkpoint, settings={"max_duration": 4})
    try:
        made.fit(loader())
    except (RuntimeError, KeyboardInterrupt, OSError):
        assert status != "finished"
    assert [logger.told for logger in loggers.values()] == [[status, "closed"]] * 2
    # Records after a fit do not change how it ended.
    made.log_metrics({"late": 1.0})
    assert loggers["service"].told == [status, "closed"] * 2


def test_a_service_is_told_of_an_error_in_closing_a_file() -> None:
    class Full(Told):
        def close(self) -> None:
            raise OSError(errno.EIO, "lost")

    service = Service()
    with pytest.raises(OSError, match="lost"):
        trainer(Line, loggers={"service": service, "file": Full()}, settings={"max_duration": 1}).fit(loader())
    assert service.told == ["failed", "closed"]


def test_an_evaluation_without_a_fit_ends_by_itself() -> None:
    told = Told()
    made = trainer(Line, loggers={"told": told})
    made.validate(loader())
    broken = trainer(Line, callbacks=[on(on_validate_batch_end=fail(RuntimeError("broken")))], loggers={"told": told})
    with pytest.raises(RuntimeError, match="broken"):
        broken.validate(loader())
    assert told.told == ["finished", "closed", "failed", "closed"]


def test_a_logger_that_does_not_ask_for_the_end_needs_no_change() -> None:
    class Old(Logger):
        closed = False

        def log(self, record: Record) -> None:
            assert not self.closed

        def close(self) -> None:
            self.closed = True

    old = Old()
    trainer(Line, loggers={"old": old}, settings={"max_duration": 2}).fit(loader())
    assert old.closed


def test_a_logger_that_was_not_started_is_told_no_end() -> None:
    told = Told()
    made = trainer(Line, callbacks=[on(on_fit_start=fail(RuntimeError("broken")))], loggers={"told": told})
    with pytest.raises(RuntimeError, match="broken"):
        made.fit(loader())
    assert told.told == ["closed"]


def test_a_service_is_told_of_a_rollback_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def go_back(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == 3:
            trainer.ask_to_roll_back()

    service = Service()
    checkpoint = CheckpointerCallback(tmp_path / "checkpoints", save_interval=2)
    made = trainer(Line, callbacks=[on(on_train_batch_end=go_back)], loggers=[service], checkpoint=checkpoint)
    monkeypatch.setattr(made, "load_checkpoint", fail(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        made.fit(loader())
    assert service.told == ["closed", "failed", "closed"]


# The first Ctrl-C in Python ends a fit after its step, with a save; the second one at once.


def _fit_with_ctrl_c(folder: Path | None, times: int, at: int = 3) -> Any:
    def press(made: Any, *_event: Any) -> None:
        if made.progress.step == at - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return trainer(
        callbacks=[on(on_train_step_start=press)],
        settings={"max_duration": 8},
        checkpoint=None if folder is None else CheckpointerCallback(folder),
    )


@pytest.mark.parametrize(
    ("saves", "times", "step", "saved"),
    [(True, 1, 3, ["step0", "step3"]), (True, 2, 2, ["step0"]), (False, 1, 2, [])],
    ids=["first", "second", "without checkpoints"],
)
def test_a_fit_is_interrupted_after_its_step_was_saved(
    saves: bool, times: int, step: int, saved: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = _fit_with_ctrl_c(tmp_path if saves else None, times)
    with pytest.raises(KeyboardInterrupt):
        made.fit(loader())
    assert made.progress.step == step
    assert sorted(path.name for path in tmp_path.glob("step*")) == saved
    assert capfd.readouterr().err.count("Ctrl-C again stops at once") == saves
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if saved[1:]:
        assert _fit_with_ctrl_c(tmp_path, 0).fit(loader()).step == 8


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        assert _fit_with_ctrl_c(tmp_path, 1).fit(loader()).step == 8
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_fit_in_a_thread_installs_no_handler(tmp_path: Path) -> None:
    handlers: list[Any] = []
    watched = on(on_train_step_start=lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    made = trainer(callbacks=[watched], settings={"max_duration": 2}, checkpoint=CheckpointerCallback(tmp_path))
    thread = threading.Thread(target=made.fit, args=(loader(),))
    thread.start()
    thread.join(60)
    assert handlers == [signal.default_int_handler] * 2


def test_a_rank_whose_peer_was_interrupted_is_interrupted_too(tmp_path: Path) -> None:
    # As the ranks agree on it: the reason alone reaches a rank without a signal of its own.
    stops = on(on_train_step_start=lambda made, *_: made.stop(CTRL_C, finished=False))
    made = trainer(callbacks=[stops], settings={"max_duration": 8}, checkpoint=CheckpointerCallback(tmp_path))
    with pytest.raises(KeyboardInterrupt, match="stopped at step 1"):
        made.fit(loader())


# A request of any rank is one of all, handled after the same step.


FINISH, OTHER_FINISH = Stop("enough", True, None, ()), Stop("also enough", True, None, ())
SIGTERM, SIGUSR1 = Stop("SIGTERM", False, None, ()), Stop("SIGUSR1", False, None, ())


class Ranks:
    """The group of one rank; the numbers of the other are known."""

    def __init__(self, rank: int, other: Any = 0, stops: Any = (FINISH,)) -> None:
        self.is_main, self.other, self.stops = rank == 0, other, stops
        self.sent: Any = None

    def sum(self, numbers: Any) -> Any:
        self.sent = numbers
        return numbers + self.other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.stops]


REQUESTS = {
    "save": lambda requests: requests.save(),
    "evaluate": lambda requests: requests.evaluate(),
    "roll back": lambda requests: requests.roll_back(),
    "stop": lambda requests: requests.stop(Stop("enough", True, None, ())),
}


def seen(requests: Requests, saver: Any) -> dict[str, bool]:
    return {
        "save": saver.save_requested,
        "evaluate": requests.evaluation_requested,
        "roll back": requests.roll_back_requested,
        "stop": requests.stop_request is not None,
    }


@pytest.mark.parametrize("request_of_rank_1", REQUESTS)
def test_a_request_of_rank_1_reaches_rank_0_and_only_once(request_of_rank_1: str) -> None:
    asked: list[str] = []
    agreement: Any = SimpleNamespace(request=lambda: asked.append("interrupt"))
    savers: list[Any] = [SimpleNamespace(save_requested=False) for _ in range(2)]
    group = Ranks(1)
    first: Any = Requests(cast("Any", group), agreement, savers[1], may_hold=False)
    REQUESTS[request_of_rank_1](first)
    assert asked == ["interrupt"]
    assert not any(seen(first, savers[1]).values()), "no rank acts before all know"
    first.share(0.0)
    main = Requests(cast("Any", Ranks(0, group.sent)), agreement, savers[0], may_hold=False)
    main.share(0.0)
    assert [name for name, value in seen(main, savers[0]).items() if value] == [request_of_rank_1]
    first.share(0.0)
    assert not group.sent.any()


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["alone", "both of rank 0", "one of each rank"])
@pytest.mark.parametrize(
    ("stops", "open_now", "held", "released"),
    [
        ([FINISH, SIGTERM], FINISH, SIGTERM, FINISH),
        ([SIGTERM, FINISH], FINISH, SIGTERM, FINISH),
        ([FINISH, OTHER_FINISH], FINISH, None, FINISH),
        ([SIGTERM, SIGUSR1], SIGTERM, SIGTERM, SIGTERM),
    ],
    ids=lambda value: "+".join(stop.reason for stop in value) if isinstance(value, list) else None,
)
def test_a_request_to_finish_and_a_signal_of_one_step_both_count_in_any_order(
    stops: list[Stop], open_now: Stop, held: Stop | None, released: Stop, rank: int | None
) -> None:
    def make(*, may_hold: bool) -> Requests:
        group = Ranks(0, stops=stops[1:] if rank == 1 else ())
        agreement: Any = None if rank is None else SimpleNamespace(request=lambda: None)
        requests = Requests(cast("Any", group), agreement, None, may_hold=may_hold)
        for stop in stops[:1] if rank == 1 else stops:
            requests.stop(stop)
        requests.share(0.0)
        return requests

    assert make(may_hold=False).stop_request == open_now, "the run is over, as without the signal"
    requests = make(may_hold=True)
    requests.hold_stop(holds=True)
    assert requests.stop_request == held, "before the least duration the signal alone ends the process"
    requests.hold_stop(holds=False)
    assert (requests.stop_request, requests.held_stop) == (released, None)
