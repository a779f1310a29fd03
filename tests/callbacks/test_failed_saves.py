"""A save that fails, whatever was raised and in whichever thread: `on_save_error` decides, and the message names it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, StopAt, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.checkpoint.catalog import catalog_of
from trainer_cli.checkpoint.snapshot import SnapshotBuffer
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.errors import NotDurableError, SaveError
from trainer_cli.loggers.base import Logger

ERRORS = [
    MemoryError(),
    RuntimeError("can't allocate 8 bytes"),
    torch.OutOfMemoryError("CUDA out of memory"),
    OSError(errno.EIO, os.strerror(errno.EIO)),
]


def fit(
    folder: Path, *, disk: Disk | None = None, stop: int | None = None, logger: Logger | None = None, **settings: Any
) -> Any:
    callback = CheckpointerCallback(
        folder, identity=RunIdentity(run_id="ours"), **{"save_interval": 2, "pre_train_checkpoint": False, **settings}
    )
    if disk is not None:
        callback.storage.disk = disk
    made = trainer(
        callbacks=[] if stop is None else [StopAt(stop)],
        loggers={} if logger is None else {"list": logger},
        settings={"max_duration": 8},
        checkpoint=callback,
    )
    made.fit(loader(10, 4))
    return made


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that can be loaded."""
    return [entry.step for entry in catalog_of(folder).entries() if entry.valid]


class FailsIn(Disk):
    """Writing the checkpoint of one step raises this error."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error, self.staged = step, error, ""

    def mkdir(self, path: Path) -> None:
        self.staged = path.name
        super().mkdir(path)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.staged.startswith(f".tmp.step{self.step}."):
            raise self.error
        return super().write(fd, data, offset)


@pytest.mark.parametrize("save_async", [True, False])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_while_a_checkpoint_is_written_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, save_async: bool
) -> None:
    said = error.strerror if isinstance(error, OSError) else type(error).__name__
    with pytest.raises(SaveError, match=rf"could not be saved: {said}.*\({tmp_path}/a/step4\).*Older") as caught:
        fit(tmp_path / "a", disk=FailsIn(4, error), save_async=save_async)
    assert caught.value.__cause__ is error
    assert steps(tmp_path / "a") == [2]
    made = fit(tmp_path / "b", disk=FailsIn(4, error), save_async=save_async, on_save_error="warn")
    assert (made.progress.step, steps(tmp_path / "b")) == (8, [2, 6, 8])
    message = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(message) == 1
    assert f"{tmp_path}/b/step4" in message[0]
    assert "The training goes on (failure 1" in message[0]


@pytest.mark.parametrize(
    ("ending", "named"),
    [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt"), (GeneratorExit(), "GeneratorExit")],
)
def test_what_ends_the_thread_that_writes_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: BaseException, named: str
) -> None:
    """As where the client of a store calls sys.exit."""
    with pytest.raises(SaveError, match=rf"step 4 could not be saved: the thread that writes was ended by {named} "):
        fit(tmp_path / "a", disk=FailsIn(4, ending), save_async=True)
    assert steps(tmp_path / "a") == [2]
    made = fit(tmp_path / "b", disk=FailsIn(4, ending), save_async=True, on_save_error="warn")
    assert (made.progress.step, steps(tmp_path / "b")) == (8, [2, 6, 8])
    assert f"ended by {named} ({tmp_path}/b/step4)" in caplog.text


@pytest.mark.parametrize("error", ERRORS[1:3], ids=lambda error: type(error).__name__)
def test_any_error_while_the_state_is_copied_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    fail_to_copy(monkeypatch, 2, error)
    with pytest.raises(SaveError, match=rf"step 4 could not be saved: {type(error).__name__}: .*/a/step4"):
        fit(tmp_path / "a", save_async=True)
    fail_to_copy(monkeypatch, 2, error)
    made = fit(tmp_path / "b", save_async=True, on_save_error="warn")
    assert (made.progress.step, steps(tmp_path / "b")) == (8, [2, 6, 8])
    assert "step 4 could not be saved" in caplog.text


def test_without_memory_for_the_copy_the_training_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_copy(monkeypatch, 2, MemoryError())
    fit(tmp_path, save_async=True)
    assert steps(tmp_path) == [2, 4, 6, 8]
    assert "there is no memory for a copy of the state, so the training waits for each save" in caplog.text


def fail_to_copy(monkeypatch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
    """The copy of this number, counted from 1, raises."""
    capture, copies = _CAPTURE, []

    def fails(*arguments: Any) -> Any:
        copies.append(1)
        if len(copies) == number:
            raise error
        return capture(*arguments)

    monkeypatch.setattr(SnapshotBuffer, "capture", fails)


_CAPTURE = SnapshotBuffer.capture


class FailsToFlush(ListLogger):
    """Its file cannot be brought to the disk."""

    def flush(self, durable: bool = False) -> None:
        if durable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "elsewhere/metrics.jsonl")


@pytest.mark.parametrize("save_async", [True, False])
def test_metrics_that_cannot_be_made_durable_fail_the_save_that_promises_them(tmp_path: Path, save_async: bool) -> None:
    with pytest.raises(SaveError, match=r"could not be saved: Input/output error: elsewhere/metrics\.jsonl \(.*step2"):
        fit(tmp_path, save_async=save_async, logger=FailsToFlush())
    assert steps(tmp_path) == []


class Unsynced(Disk):
    """Fails to fsync the directory of the checkpoints after the rename of these steps, as often as is said."""

    def __init__(self, *names: str, times: int = 1) -> None:
        self.names, self.times, self.left = names, times, 0

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if new.name in self.names:
            self.left = self.times

    def fsync_dir(self, path: Path) -> None:
        if self.left and not path.name.startswith((".", "step")):
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync_dir(path)


@pytest.mark.parametrize("save_async", [True, False])
def test_a_checkpoint_whose_name_was_not_fsynced_is_said_to_be_there(tmp_path: Path, save_async: bool) -> None:
    with pytest.raises(NotDurableError) as caught:
        fit(tmp_path, disk=Unsynced("step4"), save_async=save_async, max_checkpoints=1)
    assert str(caught.value) == (
        "the checkpoint is there, but may not survive a power cut: its directory could not be fsynced: "
        f"Input/output error ({tmp_path}/step4). Older checkpoints are intact. Check the disk and its file system."
    )
    assert steps(tmp_path) == [2, 4], "nothing was removed for it"
    again = fit(tmp_path, save_async=save_async, max_checkpoints=1)
    assert (again.loaded_step, steps(tmp_path)) == (4, [8])


@pytest.mark.parametrize("save_async", [True, False])
def test_it_counts_as_saved_where_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_async: bool
) -> None:
    caplog.set_level(logging.INFO)
    rules = {"save_async": save_async, "on_save_error": "warn", "max_checkpoints": 2}
    made = fit(tmp_path, disk=Unsynced("step4"), **rules)
    assert steps(tmp_path) == [6, 8]
    assert set(made.checkpoint.kept()) == {"step6", "step8"}
    assert "may not survive a power cut" in caplog.text
    assert "committed step 4" not in caplog.text


def test_the_last_checkpoint_of_all_must_be_durable_whatever_on_save_error_says(tmp_path: Path) -> None:
    with pytest.raises(NotDurableError, match="step8"):
        fit(tmp_path, disk=Unsynced("step8"), on_save_error="warn", max_checkpoints=1)
    assert steps(tmp_path) == [6, 8]


def test_nothing_is_removed_at_a_start_before_the_names_of_all_are_durable(tmp_path: Path) -> None:
    """An attempt was killed between a rename and the fsync after it."""
    fit(tmp_path, stop=4)

    class NoFsync(Disk):
        def fsync_dir(self, path: Path) -> None:
            if path == tmp_path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync_dir(path)

    with pytest.raises(NotDurableError, match="step4"):
        fit(tmp_path, disk=NoFsync(), max_checkpoints=1)
    assert steps(tmp_path) == [2, 4]
