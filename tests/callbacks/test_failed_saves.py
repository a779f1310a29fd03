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
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.snapshot import SnapshotBuffer
from trainer_cli.errors import NotDurableError, SaveError
from trainer_cli.storage.disk import Disk
from trainer_cli.trainer.hooks import Callback

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
UNREADABLE = OSError(errno.EIO, os.strerror(errno.EIO))


def fit(folder: Path, *callbacks: Callback, disk: Disk | None = None, logger: Any = None, **settings: Any) -> Any:
    identity, rules = RunIdentity(run_id="ours"), {"save_interval": 2, "pre_train_checkpoint": False, **settings}
    checkpoint = CheckpointerCallback(folder, identity=identity, **rules)
    if disk is not None:
        checkpoint.storage.disk = disk
    loggers = [] if logger is None else [logger]
    made = trainer(
        callbacks=callbacks, loggers=loggers, settings={"max_duration": 8, "log_interval": 2}, checkpoint=checkpoint
    )
    made.fit(loader(10, 4))
    return made


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that can be loaded."""
    return [entry.step for entry in Catalog.of(folder).entries() if entry.valid]


class FailsIn(Disk):
    """Writing the checkpoints of these steps raises the error."""

    def __init__(self, error: BaseException, *steps: int) -> None:
        self.error, self.steps, self.staged = error, steps, ""

    def mkdir(self, path: Path) -> None:
        self.staged = path.name
        super().mkdir(path)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if any(self.staged.startswith(f".tmp.step{step}.") for step in self.steps):
            raise self.error
        return super().write(fd, data, offset)


ENDED = "the writer thread was ended by"
"""As where the client of a store calls sys.exit."""


@pytest.mark.parametrize(
    ("error", "save_async", "words"),
    [
        (MemoryError(), True, "MemoryError"),
        (RuntimeError("can't allocate 8 bytes"), False, "RuntimeError"),
        (OUT_OF_MEMORY, True, "OutOfMemoryError"),
        (UNREADABLE, True, "Input/output error"),
        (UNREADABLE, False, "Input/output error"),
        (SystemExit(3), True, f"{ENDED} SystemExit: 3"),
        (KeyboardInterrupt(), True, f"{ENDED} KeyboardInterrupt"),
        (GeneratorExit(), True, f"{ENDED} GeneratorExit"),
    ],
)
def test_any_error_while_a_checkpoint_is_written_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException, save_async: bool, words: str
) -> None:
    with pytest.raises(SaveError, match=rf"could not be saved: {words}.*\({tmp_path}/a/step4\)") as caught:
        fit(tmp_path / "a", disk=FailsIn(error, 4), save_async=save_async)
    assert ENDED in words or caught.value.__cause__ is error
    assert steps(tmp_path / "a") == [2]
    made = fit(tmp_path / "b", disk=FailsIn(error, 4), save_async=save_async, on_save_error="warn")
    assert (made.progress.step, steps(tmp_path / "b")) == (8, [2, 6, 8])
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{tmp_path}/b/step4" in message
    assert "Training continues (failure 1" in message


@pytest.mark.parametrize(
    ("settings", "fails", "left"),
    [
        ({"max_save_errors": 2}, (2, 4), [6, 8]),
        ({"max_save_errors": 1}, (2, 6), [4, 8]),
        ({"max_save_errors": 1}, (2, 4), None),
        ({"max_save_errors": 0}, (2,), None),
        # No save follows the last one.
        ({}, (8,), None),
    ],
)
def test_failures_in_a_row_up_to_a_limit_are_passed_over(
    tmp_path: Path, settings: dict[str, Any], fails: tuple[int, ...], left: list[int] | None, caplog: Any
) -> None:
    disk = FailsIn(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), *fails)
    if left is None:
        with pytest.raises(SaveError, match="No space left"):
            fit(tmp_path, disk=disk, on_save_error="warn", **settings)
        return
    fit(tmp_path, disk=disk, on_save_error="warn", **settings)
    assert steps(tmp_path) == left
    assert caplog.text.count("Training continues") == len(fails)


@pytest.mark.parametrize("save_async", [True, False])
def test_a_save_that_would_not_fit_is_a_failed_save_and_the_next_that_fits_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_async: bool
) -> None:
    class Filled(Disk):
        """Has room for no second checkpoint but for the first and the third."""

        asked = 0

        def free_bytes(self, path: Path) -> int | None:
            names = steps(tmp_path)
            self.asked += names == [2]
            # Twice for one save: again after a look at what is being deleted.
            return 99 if names == [2] and self.asked <= 2 else None

    made = fit(tmp_path, disk=Filled(), on_save_error="warn", save_async=save_async)
    assert (made.progress.step, steps(tmp_path)) == (8, [2, 6, 8])
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"99 bytes are free ({tmp_path}/step4). Older checkpoints are intact" in message
    assert "Training continues (failure 1" in message


def test_a_save_that_was_asked_for_and_failed_is_made_at_the_next_step(tmp_path: Path) -> None:
    class Asks(Callback):
        def on_save_opportunity(self, trainer: Any, occasion: Any) -> None:
            if trainer.progress.step == 2:
                trainer.checkpoint.save_requested = True

    rules = {"save_interval": None, "on_save_error": "warn", "save_async": False}
    fit(tmp_path, Asks(), disk=FailsIn(UNREADABLE, 2), **rules)
    assert steps(tmp_path) == [3, 8]


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate 8 bytes"), OUT_OF_MEMORY], ids=lambda e: type(e).__name__
)
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
    assert "there is no memory for a copy of the state, so training waits for each save" in caplog.text


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
        "the checkpoint was written, but may not survive a power cut: its directory could not be fsynced: "
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
    fit(tmp_path, StopAt(4))

    class NoFsync(Disk):
        def fsync_dir(self, path: Path) -> None:
            if path == tmp_path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync_dir(path)

    with pytest.raises(NotDurableError, match="step4"):
        fit(tmp_path, disk=NoFsync(), max_checkpoints=1)
    assert steps(tmp_path) == [2, 4]
