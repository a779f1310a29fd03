"""Saves behind the training leave what saves in its way leave, and every error reaches the training."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Noisy, StopAt, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer
from trainer_cli.checkpoint.writer_thread import WriterThread
from trainer_cli.errors import NotFiniteError
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback


def fit(folder: Path, *callbacks: Callback, length: int = 9, disk: Disk | None = None, **settings: Any) -> Any:
    """A training with all that makes a resume hard: batch norm, dropout, an average of the weights, accumulation."""
    rules = {"identity": RunIdentity(run_id="ours"), "save_interval": 1, "save_async": True, **settings}
    callback = CheckpointerCallback(folder, **rules)
    if disk is not None:
        callback.storage.disk = disk
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
        fit(tmp_path / str(save_async), **rules, save_async=save_async)
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
    fit(tmp_path, length=4, save_interval=None, ephemeral_save_interval=1, pre_train_checkpoint=False)
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
    straight = everything(fit(tmp_path / "straight", save_async=False))
    for step in (2, 5):
        folder = tmp_path / str(step)
        fit(folder, StopAt(step + 1), save_on_stop=False)
        again = fit(folder)
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
    fit(tmp_path, notes)
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
    disk, seen = Blocks(), {}

    class Looks(Callback):
        def on_after_backward(self, trainer: Any, model: Any, loss: Any) -> None:
            if trainer.progress.step in (2, 3):
                seen.setdefault(trainer.progress.step, trainer.checkpoint.checkpoint_pending)
            if trainer.progress.step == 3:
                disk.go_on.set()

    made = fit(tmp_path, Looks(), disk=disk, save_interval=3, pre_train_checkpoint=False)
    assert seen == {2: False, 3: True}
    assert not made.checkpoint.checkpoint_pending


@pytest.mark.parametrize("full", [False, True])
def test_a_training_that_fails_ends_the_save_in_flight_and_keeps_its_own_error(tmp_path: Path, full: bool) -> None:
    disk = Blocks()
    disk.full = full
    fails = Raises(ArithmeticError("out of luck"), disk, disk.go_on.set)
    with pytest.raises(ArithmeticError, match="out of luck"):
        fit(tmp_path, fails, disk=disk, save_interval=3, pre_train_checkpoint=False)
    assert [path.name for path in tmp_path.glob("step*")] == ([] if full else ["step3"])


def test_an_end_that_is_wanted_at_once_waits_for_no_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.checkpointer._INTERRUPTED_TIMEOUT_S", 0.1)
    disk, writer = Blocks(), WriterThread("writer")
    interrupted = Raises(KeyboardInterrupt(), disk, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, interrupted, disk=disk, thread=writer, save_interval=3, pre_train_checkpoint=False)
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

    fit(tmp_path, Mends(), notes, disk=disk, save_interval=3, pre_train_checkpoint=False, on_save_error="warn")
    assert [name for name, _, _ in notes.seen] == ["step3", "step9"]
    assert caplog.text.count("the save of step 3 has not ended after") == 1
    assert "waiting for the save of step 3 to be written" in caplog.text


@pytest.mark.parametrize(("size_bytes", "patience_s"), [(0, 600.0), (10**9, 600.0), (84 * 10**9, 42_000.0)])
def test_a_large_state_has_the_time_that_a_slow_disk_takes(size_bytes: int, patience_s: float) -> None:
    checkpointer = AsyncCheckpointer()
    checkpointer.stager = SimpleNamespace(held_bytes=size_bytes)  # type: ignore[assignment]
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
    saver.storage.disk = disk
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

    fit(tmp_path, Frees(), notes, disk=disk, save_interval=3, pre_train_checkpoint=False)
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

    made = fit(tmp_path, GoesOn(), disk=Slow(), length=9, save_interval=8, pre_train_checkpoint=True)
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

    fit(tmp_path, length=2, save_async=None, disk=Watched())
    assert (threads != {threading.main_thread()}) is behind
