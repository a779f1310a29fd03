"""How a fit ended is told to each logger once, after its last record and before it is closed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Line, ListLogger, StopAt, loader, on, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.loggers.base import Logger, Record
from trainer_cli.steps.run_status import RunStatus
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
