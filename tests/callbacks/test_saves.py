"""Saves of a training: behind it, within a budget, of chosen states, and what a failure of one does."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_parts import present
from tiny import Line, ListLogger, Noisy, StopAt, assert_resumes_exactly, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.callbacks.save_budget import SaveBudget
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer
from trainer_cli.checkpoint.snapshot import SnapshotBuffer
from trainer_cli.checkpoint.writer_thread import WriterThread
from trainer_cli.errors import ConfigError, NotDurableError, NotFiniteError, SaveError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.steps.progress import Progress
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
UNREADABLE = OSError(errno.EIO, os.strerror(errno.EIO))


def fit(folder: Path, *callbacks: Callback, disk: Disk | None = None, logger: Any = None, **settings: Any) -> Any:
    identity, rules = RunIdentity(run_id="ours"), {"save_interval": 2, "pre_train_checkpoint": False, **settings}
    checkpoint = CheckpointerCallback(folder, identity=identity, **rules)
    if disk is not None:
        cast("Any", checkpoint.storage).disk = disk
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


# Saves behind the training leave what saves in its way leave, and every error reaches the training.


def fit_noisy(folder: Path, *callbacks: Callback, length: int = 9, disk: Disk | None = None, **settings: Any) -> Any:
    """A training with all that makes a resume hard: batch norm, dropout, an average of the weights, accumulation."""
    rules = {"identity": RunIdentity(run_id="ours"), "save_interval": 1, "save_async": True, **settings}
    callback = CheckpointerCallback(folder, **rules)
    if disk is not None:
        cast("Any", callback.storage).disk = disk
    made = trainer(
        Noisy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=[EMA(decay=0.5), *callbacks],
        settings={"max_duration": length, "grad_accum_steps": 2, "eval_interval": 4, "log_interval": 2},
        checkpoint=callback,
    )
    made.fit(loader(22, 4), loader(3))
    return made


def on_disk(folder: Path) -> dict[str, Any]:
    """Every checkpoint without what depends on the clock."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("step*")):
        manifest = json.loads((path / "manifest.json").read_text())
        # The small states hold the seconds of training; all else in them is in the states that are compared.
        kept = {key: manifest[key] for key in ("step", "kind", "reason", "finite", "finished", "aliases")}
        found[path.name] = (kept, (path / "rank0.safetensors").read_bytes())
    return found


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"save_interval": 3, "max_checkpoints": 2, "ephemeral_save_interval": 1},
        {"save_interval": None, "ephemeral_save_interval": 1, "save_final": False,
         "keep_best": {"metric": "val/loss", "count": 1}},
    ],
)  # fmt: skip
def test_the_disk_is_byte_for_byte_as_if_every_save_had_been_waited_for(tmp_path: Path, rules: dict[str, Any]) -> None:
    for save_async in (True, False):
        fit_noisy(tmp_path / str(save_async), **rules, save_async=save_async)
    background, waited_for = on_disk(tmp_path / "True"), on_disk(tmp_path / "False")
    assert list(background) == list(waited_for)
    assert background == waited_for


def test_what_may_go_is_removed_by_the_writer_and_not_in_the_way_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[tuple[str, str]] = []

    def remove(storage: LocalStorage, name: str) -> bool:
        removed.append((name, threading.current_thread().name))
        return taken(storage, name)

    taken = LocalStorage.remove
    monkeypatch.setattr(LocalStorage, "remove", remove)
    fit_noisy(tmp_path, length=4, save_interval=None, ephemeral_save_interval=1, pre_train_checkpoint=False)
    # The last save is synchronous, and so is the removal that follows it.
    assert removed == [("step1", "checkpoint-writer"), ("step2", "checkpoint-writer"), ("step3", "MainThread")]
    assert [path.name for path in tmp_path.glob("step*")] == ["step4"]


class Aside(Noisy):
    """Has a parameter that no optimizer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = torch.nn.Parameter(torch.tensor(torch.inf))


def test_what_counts_as_finite_is_the_same_behind_the_training_and_in_its_way(tmp_path: Path) -> None:
    found = {}
    for save_async in (True, False):
        folder = tmp_path / str(save_async)
        made = trainer(
            Aside,
            optimizer=lambda model: torch.optim.SGD(model.body.parameters(), lr=0.01),
            settings={"max_duration": 3},
            checkpoint=CheckpointerCallback(folder, save_interval=1, save_async=save_async, remove="never"),
        )
        with pytest.raises(NotFiniteError, match="at the end of the run, step 3"):
            made.fit(loader(10, 4))
        found[save_async] = {name: facts["finite"] for name, (facts, _) in on_disk(folder).items()}
    assert found[True] == found[False] == dict.fromkeys(["step0", "step1", "step2"], False)


def test_a_resume_from_what_was_saved_behind_is_as_if_there_had_been_no_stop(tmp_path: Path) -> None:
    straight = everything(fit_noisy(tmp_path / "straight", save_async=False))
    for step in (2, 5):
        folder = tmp_path / str(step)
        fit_noisy(folder, StopAt(step + 1), save_on_stop=False)
        again = fit_noisy(folder)
        assert again.loaded_step in (step, step + 1)
        assert same(everything(again), straight) == []


class Notes(Callback):
    """Writes down what is reported of commits, in which thread, and how far the training was."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []

    def on_after_save_checkpoint(self, trainer: Any, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.seen.append((path.name, trainer.progress.step, threading.current_thread() is threading.main_thread()))


def test_each_commit_is_reported_once_in_order_by_the_main_thread_at_a_steps_end(tmp_path: Path) -> None:
    notes = Notes()
    fit_noisy(tmp_path, notes)
    assert [name for name, _, _ in notes.seen] == [f"step{step}" for step in range(10)]
    assert all(main and int(name.removeprefix("step")) <= step for name, step, main in notes.seen)


class Blocks(Disk):
    """Comes to rest only once it is allowed to."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.full = False

    def fsync(self, fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            assert self.go_on.wait(500)
        if self.full:
            raise OSError(28, os.strerror(28))
        super().fsync(fd)


class Raises(Callback):
    """Raises an error in step 4, while the save of step 3 is in flight."""

    def __init__(self, error: BaseException, disk: Blocks, do: Callable[[], object]) -> None:
        self.error, self.disk, self.do = error, disk, do

    def on_after_backward(self, trainer: Any, model: Any, loss: Any) -> None:
        if trainer.progress.step == 3:
            assert self.disk.began.wait(500)
            self.do()
            raise self.error


def test_a_callback_sees_whether_a_save_is_pending(tmp_path: Path) -> None:
    disk, seen = Blocks(), dict[int, Any]()

    class Looks(Callback):
        def on_after_backward(self, trainer: Any, model: Any, loss: Any) -> None:
            if trainer.progress.step in (2, 3):
                seen.setdefault(trainer.progress.step, trainer.checkpoint.checkpoint_pending)
            if trainer.progress.step == 3:
                disk.go_on.set()

    made = fit_noisy(tmp_path, Looks(), disk=disk, save_interval=3, pre_train_checkpoint=False)
    assert seen == {2: False, 3: True}
    assert not made.checkpoint.checkpoint_pending


@pytest.mark.parametrize("full", [False, True])
def test_a_training_that_fails_ends_the_save_in_flight_and_keeps_its_own_error(tmp_path: Path, full: bool) -> None:
    disk = Blocks()
    disk.full = full
    fails = Raises(ArithmeticError("out of luck"), disk, disk.go_on.set)
    with pytest.raises(ArithmeticError, match="out of luck"):
        fit_noisy(tmp_path, fails, disk=disk, save_interval=3, pre_train_checkpoint=False)
    assert [path.name for path in tmp_path.glob("step*")] == ([] if full else ["step3"])


def test_an_end_that_is_wanted_at_once_waits_for_no_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.checkpointer._INTERRUPTED_TIMEOUT_S", 0.1)
    disk, writer = Blocks(), WriterThread("writer")
    interrupted = Raises(KeyboardInterrupt(), disk, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        fit_noisy(tmp_path, interrupted, disk=disk, thread=writer, save_interval=3, pre_train_checkpoint=False)
    assert "the save of step 3 has not ended after" in caplog.text
    assert [path.name for path in tmp_path.glob("step*")] == []
    disk.go_on.set()
    assert writer.drain(60)


def test_where_a_save_comes_to_no_end_and_errors_are_passed_over_the_next_is_left_out_and_the_first_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.checkpointer._TIMEOUT_S", 0.1)
    monkeypatch.setattr("trainer_cli.checkpoint.checkpointer._REPORTED_WAIT_S", 0.01)
    caplog.set_level(logging.INFO, "trainer_cli")
    disk, notes = Blocks(), Notes()

    class Mends(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.progress.step == 7 and not disk.go_on.is_set():
                disk.go_on.set()
                trainer.checkpoint.drain()

    fit_noisy(tmp_path, Mends(), notes, disk=disk, save_interval=3, pre_train_checkpoint=False, on_save_error="warn")
    assert [name for name, _, _ in notes.seen] == ["step3", "step9"]
    assert caplog.text.count("the save of step 3 has not ended after") == 1
    assert "waiting for the save of step 3 to be written" in caplog.text


@pytest.mark.parametrize(("size_bytes", "patience_s"), [(0, 600.0), (10**9, 600.0), (84 * 10**9, 42_000.0)])
def test_a_large_state_has_the_time_that_a_slow_disk_takes(size_bytes: int, patience_s: float) -> None:
    checkpointer = AsyncCheckpointer()
    cast("Any", checkpointer).stager = SimpleNamespace(held_bytes=size_bytes)
    assert checkpointer.timeout_s == patience_s
    checkpointer.interrupt()
    assert checkpointer.timeout_s == 10.0


def test_after_an_interrupted_wait_the_end_does_not_wait_long_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a second Ctrl-C while an error of the model's is being handled."""
    monkeypatch.setattr("trainer_cli.checkpoint.checkpointer._INTERRUPTED_TIMEOUT_S", 0.1)
    disk, writer = Blocks(), WriterThread("writer")
    saver = CheckpointerCallback(tmp_path, save_interval=3, pre_train_checkpoint=False, save_async=True, thread=writer)
    cast("Any", saver.storage).disk = disk
    checkpointer, patience = saver.saver.checkpointer, []

    def drain(timeout_s: float | None = None) -> bool:
        patience.append(checkpointer.timeout_s)
        raise KeyboardInterrupt

    fails = Raises(ArithmeticError(), disk, lambda: setattr(checkpointer, "drain", drain))
    made = trainer(callbacks=[fails], settings={"max_duration": 9}, checkpoint=saver)
    with pytest.raises((ArithmeticError, KeyboardInterrupt)):
        made.fit(loader(22, 4))
    assert patience == [600.0]
    assert checkpointer.timeout_s == 0.1
    disk.go_on.set()
    assert writer.drain(60)


def test_training_goes_on_while_a_save_is_written_and_the_next_one_waits(tmp_path: Path) -> None:
    disk, notes = Blocks(), Notes()

    class Frees(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.progress.step == 5 and not disk.go_on.is_set():
                assert disk.began.wait(500)
                assert not (tmp_path / "step3").exists()
                disk.go_on.set()

    fit_noisy(tmp_path, Frees(), notes, disk=disk, save_interval=3, pre_train_checkpoint=False)
    assert [name for name, _, _ in notes.seen] == ["step3", "step6", "step9"]
    assert notes.seen[0][1] >= 5


def test_training_goes_on_while_the_save_before_its_first_step_is_written(tmp_path: Path) -> None:
    later = threading.Event()

    class Slow(Disk):
        def fsync(self, fd: int) -> None:
            assert later.wait(500), "the training stands still until the save before its first step is written"
            super().fsync(fd)

    class GoesOn(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.progress.step == 4:
                later.set()

    made = fit_noisy(tmp_path, GoesOn(), disk=Slow(), length=9, save_interval=8, pre_train_checkpoint=True)
    assert made.progress.step == 9
    assert sorted(on_disk(tmp_path)) == ["step0", "step8", "step9"]


@pytest.mark.parametrize(("usable", "behind"), [({0, 1}, True), ({3}, False)])
def test_left_open_saves_go_behind_where_there_is_a_processor_for_them(
    tmp_path: Path, usable: set[int], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable, raising=False)
    threads = set()

    class Watched(Disk):
        def fsync(self, fd: int) -> None:
            threads.add(threading.current_thread())
            super().fsync(fd)

    fit_noisy(tmp_path, length=2, save_async=None, disk=Watched())
    assert (threads != {threading.main_thread()}) is behind


# Saves that follow one another within a budget: the real callback in a real training.


STEP_S = 0.005


class SlowLine(Line):
    def forward(self, batch: Any) -> Any:
        time.sleep(STEP_S)
        return super().forward(batch)


def fit_within_budget(folder: Path, *callbacks: Any, model: Any = Line, steps: int = 12, **settings: Any) -> Any:
    identity = RunIdentity(run_id="x", history_file=folder.parent / f"{folder.name}.jsonl")
    fields = {"save_interval": None, "ephemeral_save_interval": "auto", **settings}
    checkpoint = CheckpointerCallback(folder, identity=identity, **fields)
    trained = trainer(model, checkpoint=checkpoint, callbacks=callbacks, settings={"max_duration": steps})
    trained.fit(loader(40, 2))
    return trained


def saves(folder: Path) -> list[dict[str, Any]]:
    lines = (folder.parent / f"{folder.name}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "saved"]


@pytest.mark.parametrize("save_async", [False, True])
def test_saves_follow_one_another_and_take_their_share_of_the_time(save_async: bool, tmp_path: Path) -> None:
    trained = fit_within_budget(
        tmp_path / "x", model=SlowLine, steps=60, budget=0.5, save_async=save_async, save_final=False
    )
    automatic = [save for save in saves(tmp_path / "x") if save["reason"].startswith("auto")]
    assert len(automatic) >= 3
    assert {save["kind"] for save in automatic} == {"ephemeral"}
    seconds = trained.metric_logger.time.seconds()
    # The last save may not be paid for yet.
    last_s = seconds["saving"] - automatic[-1]["time_s"]["saving"]
    assert seconds["saving"] - last_s <= 0.5 * (seconds["training"] + seconds["data"] + seconds["saving"]) + 0.1
    assert len(list((tmp_path / "x").glob("step*"))) == 2, "that before the first step, and the newest"


def test_a_small_budget_saves_seldom(tmp_path: Path) -> None:
    fit_within_budget(tmp_path / "x", model=SlowLine, steps=30, budget=0.0001, save_async=False)
    # A save of a millisecond is paid for after ten seconds.
    assert [save["step"] for save in saves(tmp_path / "x")] == [0, 30]


def test_a_resume_is_exact_whenever_the_saves_come(tmp_path: Path) -> None:
    def fit_there(folder: Path, *callbacks: Any) -> Any:
        return fit_within_budget(folder, *callbacks, budget=1.0)

    assert_resumes_exactly(fit_there, tmp_path, 3, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.1, "ephemeral_save_interval": None}, "checkpoint.budget is 0.1, but checkpoint.ephemeral_save"),
        ({"budget": 0.0}, "above 0 and at most 1"),
        ({"budget": 1.5}, "above 0 and at most 1"),
        ({"budget": float("nan")}, "above 0 and at most 1"),
        ({"remove": "never"}, "would keep all of them"),
        ({"ephemeral_save_interval": "aut"}, "30min, 1h30m, or auto"),
        ({"keep_by_age": {"1h": 24}}, "checkpoint.max_checkpoints is null"),
        ({"keep_by_age": {"1h": 0}, "max_checkpoints": 1}, "finite number of at least 1"),
        ({"keep_by_age": {"3ep": 1}, "max_checkpoints": 1}, "counted in seconds"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointerCallback(tmp_path, **{"ephemeral_save_interval": "auto", **settings})


def test_a_failed_save_counts_as_a_second_until_the_next_one() -> None:
    budget, progress = SaveBudget(), Progress()
    with budget.measure():
        budget.begin_save(progress)
    budget.fail_save()
    cost = budget.cost()
    assert cost is not None
    assert 45 < cost.wait_s(0.02) <= 50
    with budget.measure():
        budget.begin_save(progress)
    cost = budget.cost()
    assert cost is not None
    assert cost.wait_s(0.02) < 5


# SaveCheckpointState: chosen states of some checkpoints, in files that stay and that others start from.


def _fit(folder: Path, saver: SaveCheckpointState, *callbacks: Any, **more: Any) -> Any:
    made = trainer(
        Noisy, callbacks=[saver, *callbacks], run_dir=folder, settings={"max_duration": 11},
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01),
        checkpoint=CheckpointerCallback(
            folder / "ckpt", save_interval=2, ephemeral_save_interval=1, max_checkpoints=1, remove="all_without_rule",
        ),
        **more,
    )  # fmt: skip
    made.fit(loader())
    return made


def _names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name[4:]))


def test_weights_of_every_kth_checkpoint_and_of_the_last_stay(tmp_path: Path) -> None:
    made = _fit(tmp_path, SaveCheckpointState(every=4))
    assert _names(tmp_path / "states") == ["step4", "step8", "step11"]
    state = made.checkpointer.read(tmp_path / "states/step11")
    assert set(state) == {"model", "model_versions", "progress"}
    assert same(state["model"], made.model.state_dict()) == []
    rows = trainer(Noisy).validate_all(loader(6, shuffle=False), sorted((tmp_path / "states").iterdir()))
    assert sorted({row.step for row in rows}) == [4, 8, 11]


def test_a_stop_is_no_end_and_a_resume_goes_on(tmp_path: Path) -> None:
    _fit(tmp_path, SaveCheckpointState(every=4), StopAt(7))
    assert _names(tmp_path / "states") == ["step4"]
    _fit(tmp_path, SaveCheckpointState(every=4))
    assert _names(tmp_path / "states") == ["step4", "step8", "step11"]


def test_a_run_starts_from_the_states_that_were_saved(tmp_path: Path) -> None:
    first = _fit(tmp_path, SaveCheckpointState(["model", "optimizer"], folder="parts"))
    assert _names(tmp_path / "parts") == ["step0", "step2", "step4", "step6", "step8", "step10", "step11"]
    other = trainer(Noisy, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    other.load_checkpoint(tmp_path / "parts/step11", LoadOptions(states=["model", "optimizer"]))
    assert same(other.model.state_dict(), first.model.state_dict()) == []
    assert same(*(list(present(made.optimizer).state.values()) for made in (other, first))) == []
