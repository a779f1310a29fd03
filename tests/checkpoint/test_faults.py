"""Every primitive operation of a save and of a removal fails once, fails for good, or is the process's last.

Whichever it is: older checkpoints stay valid, no partial one is accepted, the next attempt clears away what
is left, and the next save of the same step succeeds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from acts import (
    ACTS,
    CUT,
    assert_survives_error,
    assert_survives_power_cut,
    check_all_is_well,
    checkpointer_on,
    faulty,
    killed,
    operations,
    prepared,
    save,
    save_into_new_folder,
    save_second,
)
from faulty_disk import Fault, FaultyDisk
from forgetful import ForgetfulDisk
from states import same, small_state
from tiny import ListLogger, StopAt, loader, same as differences, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import SaveError
from trainer_cli.manifest import Manifest
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback

_CHANGES_NOTHING = {"stat", "open", "read", "listdir", "bypass_cache", "fsync", "fsync_dir"}
"""Operations after which a process that is killed leaves the same files as before them. Power cuts are other tests."""


def kills(planned: list[str]) -> list[int]:
    """The operations, counted from 1, before which a kill leaves other files than before the operation before it."""
    return [at for at in range(1, len(planned) + 1) if at == 1 or planned[at - 2].split()[0] not in _CHANGES_NOTHING]


@pytest.mark.parametrize(
    ("number", "persistent"),
    [
        pytest.param(errno.EIO, False, id="EIO-once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC-for good"),
        pytest.param(errno.EIO, True, id="EIO-for good", marks=pytest.mark.campaign),
        pytest.param(errno.ENOSPC, False, id="ENOSPC-once", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("act", ACTS)
def test_an_error_at_any_operation_loses_nothing(
    memory_path: Path, act: Callable[..., Any], number: int, persistent: bool
) -> None:
    planned = operations(act, memory_path / "planned")
    assert len(planned) > 10
    for at, operation in enumerate(planned, start=1):
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: operation {at}, {operation}"
        assert_survives_error(act, root, faulty(at, number=number, persistent=persistent), message)


@pytest.mark.parametrize("fault", [Fault.kill, Fault.tear])
@pytest.mark.parametrize("act", ACTS)
def test_a_kill_at_any_operation_loses_nothing(memory_path: Path, act: Callable[..., Any], fault: Fault) -> None:
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate(planned, start=1):
        if fault is Fault.tear and not operation.startswith("write"):
            continue  # the same as a kill at the next one
        if fault is Fault.kill and at not in kills(planned):
            continue  # the same as a kill at the one before
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: {fault} at operation {at}, {operation}"
        assert killed(act, root, faulty(at, fault)), message
        check_all_is_well(root, message)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what an open file holds is not reported")
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("act", CUT)
def test_a_power_cut_at_any_operation_loses_nothing(memory_path: Path, act: Callable[..., Any], seed: int) -> None:
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate([*planned, "the end"], start=1):
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: the power cut before operation {at}, {operation}, {seed=}"
        assert_survives_power_cut(act, root, ForgetfulDisk(at, seed * 1000 + at), message)


def test_a_save_goes_past_the_page_cache(tmp_path: Path) -> None:
    """The faults of this file would meet nothing of it otherwise."""
    names = {operation.split()[0] for operation in operations(save_second, tmp_path / "planned")}
    assert {"bypass_cache", "truncate"} <= names


def test_a_kill_while_the_first_checkpoint_of_a_run_is_saved_leaves_a_run_that_can_start(memory_path: Path) -> None:
    for at in kills(operations(save_into_new_folder, memory_path / "planned")):
        root = prepared(memory_path / f"at{at}")
        assert killed(save_into_new_folder, root, faulty(at, Fault.kill))
        LocalStorage(root / "deep" / "down", run_id="run", attempt=2).sweep()
        save(root / "deep" / "down", 2, Disk(), attempt=2)
        assert same(dict(checkpointer_on(Disk()).load(root / "deep" / "down" / "step2")), small_state(2))


def test_a_save_whose_fsync_failed_begins_anew_instead_of_trusting_a_second_fsync(memory_path: Path) -> None:
    planned = operations(save_second, memory_path / "planned")
    for at, operation in enumerate(planned, start=1):
        if not operation.startswith("fsync "):
            continue
        root = prepared(memory_path / f"at{at}")
        disk = faulty(at)
        with pytest.raises(SaveError):
            save_second(root, disk)
        assert not any(later.startswith("fsync ") for later in disk.operations[at:])
        assert os.listdir(root) == ["step1"]


def test_a_slow_disk_changes_nothing(memory_path: Path) -> None:
    root = prepared(memory_path / "root")
    save(root, 2, faulty(1, Fault.delay, persistent=True, delay_s=0.001))
    assert same(dict(checkpointer_on(Disk()).load(root / "step2")), small_state(2))


def test_a_full_disk_keeps_what_is_there_and_reports_what_is_needed(memory_path: Path) -> None:
    planned = operations(save_second, memory_path / "planned")
    root = prepared(memory_path / "root")
    disk = faulty(1 + planned.index("write file"), number=errno.ENOSPC, persistent=True)
    needed = checkpointer_on(disk).format.plan(small_state(2)).total_bytes + len(b"seed: 1\n")
    with pytest.raises(
        SaveError, match=f"No space left on device; it needs {needed:,} bytes, and [0-9,]+ bytes are free"
    ):
        save(root, 2, disk)


# Faults that checkpointing in training loops is known for, each by name: none of them is here.


def run(
    folder: Path, length: Any = 10, *, stop: int | None = None, callbacks: Any = (), ckpt_path: Any = ..., **rules: Any
) -> Any:
    """One attempt at a training, on ten samples in batches of four: three steps an epoch."""
    disk = rules.pop("disk", None)
    made = trainer(
        callbacks={**dict(callbacks), **({"stop": StopAt(stop)} if stop is not None else {})},
        loggers=[rules.pop("logger", ListLogger())],
        settings={"max_duration": length, "log_interval": 1, **rules.pop("loop", {})},
        checkpoint=CheckpointerCallback(folder, **{"save_interval": None, **rules}),
    )
    if disk is not None:
        cast("Any", made.checkpoint).storage.disk = disk
    made.fit(loader(10, 4), loader(3), **({} if ckpt_path is ... else {"ckpt_path": ckpt_path}))
    return made


def steps(folder: Path) -> list[int]:
    """The steps on the disk, whole or not."""
    return sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))


def manifest(folder: Path, step: int) -> Manifest:
    return Manifest.parse((folder / f"step{step}" / "manifest.json").read_bytes())


def written(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


class Full(FaultyDisk):
    """Takes no byte of the saves of these numbers, counted from 1."""

    def __init__(self, *saves: int) -> None:
        super().__init__()
        self.saves = saves

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        count = sum(operation.startswith("mkdir .tmp.") for operation in self.operations)
        if count in self.saves:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


def test_a_finished_run_that_is_started_again_is_not_written_again(tmp_path: Path) -> None:
    """Elsewhere: it fails since the last folder exists, or clears the good last checkpoint and writes it anew."""
    run(tmp_path, save_interval=4)
    before = written(tmp_path)
    for _ in range(2):
        assert run(tmp_path, save_interval=4).loaded_step == 10
    assert written(tmp_path) == before


class CountsEvaluations(Callback):
    """A callback whose state changes in the evaluation of a step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        self.seen.append(trainer.progress.step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_callbacks_state_is_not_one_step_stale(tmp_path: Path) -> None:
    """Elsewhere: the save comes before what follows a step, so the evaluation of that very step is forgotten."""
    made = run(tmp_path, 4, save_interval=2, loop={"eval_interval": 2}, callbacks={"counts": CountsEvaluations()})
    for step, seen in ((0, []), (2, [2]), (4, [2, 4])):
        state = made.checkpointer.load(tmp_path / f"step{step}")
        assert state["callbacks"]["counts"]["seen"] == seen
    again = CountsEvaluations()
    run(tmp_path, 6, save_interval=2, loop={"eval_interval": 2}, callbacks={"counts": again})
    assert again.seen == [2, 4, 6]


def test_the_state_of_a_callback_that_is_no_longer_here_is_not_dropped_without_a_word(
    tmp_path: Path, caplog: Any
) -> None:
    run(tmp_path, 2, loop={"eval_interval": 2}, callbacks={"counts": CountsEvaluations()})
    run(tmp_path, 4)
    assert "state of callback 'counts'" in caplog.text


def test_a_step_that_saves_is_logged_once(tmp_path: Path) -> None:
    """Elsewhere: the save sends the metrics of its step early, and they are sent again."""
    logger = ListLogger()
    run(tmp_path, 6, save_interval=1, loop={"eval_interval": 2}, logger=logger)
    assert [record.step for record in logger.records] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_of_the_last_batch_of_an_epoch_is_gone_on_from_in_the_next(tmp_path: Path) -> None:
    """Elsewhere: the resume finds an empty rest of the epoch, and begins and ends it once more."""
    run(tmp_path, stop=3, save_interval=3)
    made = run(tmp_path, 3, save_interval=3)
    assert (made.progress.epoch, made.progress.batch) == (1, 0)
    assert manifest(tmp_path, 3).progress["epoch"] == 1


def test_stopping_at_every_step_gives_what_going_straight_through_gives(tmp_path: Path) -> None:
    """Elsewhere: random numbers are drawn after they were restored, so every loss after a resume differs."""
    straight = run(tmp_path / "straight", 6, save_interval=1)
    for step in range(1, 6):
        run(tmp_path / "stopped", 6, stop=step, save_interval=1)
    stopped = run(tmp_path / "stopped", 6, save_interval=1)
    for name in ("model", "optimizer", "rng", "data"):
        assert differences(straight.checkpoint_state()[name], stopped.checkpoint_state()[name], path=name) == []


def test_a_full_disk_fails_the_completion_of_a_checkpoint_as_it_fails_a_save(tmp_path: Path, caplog: Any) -> None:
    """A stop before the evaluation is made up for by the next attempt, whose manifest may not be written."""
    rules: dict[str, Any] = {"loop": {"eval_interval": 2}, "save_interval": 2}
    run(tmp_path, 6, stop=4, **rules)
    before = manifest(tmp_path, 4)
    with pytest.raises(SaveError, match="could not be completed: No space left"):
        run(tmp_path, 6, disk=Full(0), **rules)
    assert manifest(tmp_path, 4) == before
    run(tmp_path, 6, disk=Full(0), on_save_error="warn", **rules)
    assert "Training continues" in caplog.text
    assert steps(tmp_path) == [0, 2, 4, 6]
