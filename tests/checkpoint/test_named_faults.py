"""Faults that checkpointing in training loops is known for, each by name: none of them is here."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, StopAt, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.core.manifest import Manifest
from trainer_cli.errors import CheckpointError, SaveError, UserError
from trainer_cli.testing.faults import FaultyDisk
from trainer_cli.trainer.hooks import Callback


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
        made.checkpoint.storage.disk = disk
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


def test_a_partial_save_does_not_turn_into_a_crash_loop(tmp_path: Path) -> None:
    """Elsewhere: the restart dies with 'folder exists' the moment it reaches that step again, until a person comes."""
    run(tmp_path, stop=4, save_interval=2)
    partial = tmp_path / "step6"
    partial.mkdir()
    (partial / "rank0.safetensors").write_bytes(b"half")
    assert run(tmp_path, save_interval=2).loaded_step == 4
    assert manifest(tmp_path, 6).step == 6
    assert [(path / "rank0.safetensors").read_bytes() for path in tmp_path.glob(".aside.*")] == [b"half"]


def test_a_finished_run_that_is_started_again_is_not_written_again(tmp_path: Path) -> None:
    """Elsewhere: it fails since the last folder exists, or clears the good last checkpoint and writes it anew."""
    run(tmp_path, save_interval=4)
    before = written(tmp_path)
    for _ in range(2):
        assert run(tmp_path, save_interval=4).loaded_step == 10
    assert written(tmp_path) == before


@pytest.mark.parametrize("operation", ["mkdir", "open_new", "write", "fsync", "fsync_dir", "rename"])
def test_a_failed_save_gets_no_marker(tmp_path: Path, operation: str) -> None:
    """Elsewhere: the writer's exception is not looked at, and the marker is written all the same."""
    counting = FaultyDisk()
    run(tmp_path / "counted", 2, disk=counting, pre_train_checkpoint=False)
    in_save = next(n for n, one in enumerate(counting.operations) if one.startswith("mkdir .tmp."))
    at = next(n for n, one in enumerate(counting.operations) if n >= in_save and one.split()[0] == operation)
    with pytest.raises(SaveError):
        run(tmp_path / "failed", 2, disk=FaultyDisk(at + 1, number=errno.ENOSPC), pre_train_checkpoint=False)
    assert list((tmp_path / "failed").iterdir()) == []


def test_a_failed_save_need_not_end_the_training_and_is_made_up_for(tmp_path: Path, caplog: Any) -> None:
    """Elsewhere: it ends the training at the next step, without another try."""
    made = run(tmp_path, 8, save_interval=2, on_save_error="warn", disk=Full(3))
    assert (made.progress.step, steps(tmp_path)) == (8, [0, 2, 6, 8])
    assert "No space left" in caplog.text


def test_retention_does_not_begin_from_zero_in_each_process(tmp_path: Path) -> None:
    """Elsewhere: keep two, resume twice, and nine are there."""
    for stop in (4, 7, None):
        run(tmp_path, stop=stop, save_interval=1, max_checkpoints=2)
        assert len(steps(tmp_path)) == 2
    assert steps(tmp_path) == [9, 10]


def test_remove_never_stops_max_checkpoints_too(tmp_path: Path) -> None:
    """Elsewhere: it is heeded at the start alone."""
    run(tmp_path, stop=5, save_interval=1, max_checkpoints=1, ephemeral_save_interval=None, remove="never")
    run(tmp_path, save_interval=2, max_checkpoints=1, ephemeral_save_interval=1, remove="never")
    assert steps(tmp_path) == list(range(11))


def test_fixed_steps_are_not_deleted(tmp_path: Path) -> None:
    """Elsewhere: max_checkpoints counts and deletes them like any other."""
    rules = {"save_interval": 1, "max_checkpoints": 1, "fixed_steps": [2, 5]}
    run(tmp_path, stop=6, **rules)
    assert steps(tmp_path) == [2, 5, 6]
    run(tmp_path, **rules, remove="all_non_permanent")
    assert {2, 5, 10} <= set(steps(tmp_path))


def test_three_are_left_where_three_are_to_be_kept(tmp_path: Path) -> None:
    """Elsewhere: an interval of 5, 27 steps, and five are left, since nothing is removed at the end."""
    run(tmp_path, 27, save_interval=5, max_checkpoints=3)
    assert steps(tmp_path) == [20, 25, 27]


@pytest.mark.parametrize(("save_async", "between_steps"), [(False, 3), (True, 4)])
def test_no_more_than_one_too_many_is_ever_on_the_disk(tmp_path: Path, save_async: bool, between_steps: int) -> None:
    """Elsewhere: removal waits for a later step. Here it follows the commit, so a full disk needs one more at most.

    With a writer thread the training may see the moment between the commit and the removal.
    """
    seen: list[int] = []

    class Counts(Callback):
        def on_after_save_checkpoint(self, trainer: Any, path: Path) -> None:
            seen.append(len(steps(tmp_path)))

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            assert len(steps(tmp_path)) <= between_steps

    run(tmp_path, 12, save_interval=1, max_checkpoints=3, callbacks={"counts": Counts()}, save_async=save_async)
    # The hook is called after the removal.
    assert max(seen) == 3
    assert len(steps(tmp_path)) == 3


def test_a_final_checkpoint_is_not_taken_for_an_ephemeral_one_by_arithmetic(tmp_path: Path) -> None:
    """Elsewhere: the end of a run at step 9 was deleted by the next, because 9 is a multiple of 3."""
    run(tmp_path, 9, save_interval=5, ephemeral_save_interval=3)
    assert manifest(tmp_path, 9).kind == "permanent"
    run(tmp_path, 14, save_interval=7, ephemeral_save_interval=3)
    assert steps(tmp_path) == [0, 5, 9, 14]


def test_another_interval_orphans_no_ephemeral_checkpoint(tmp_path: Path) -> None:
    """Elsewhere: once the interval changes, old ephemerals are taken for permanent ones and stay for ever."""
    run(tmp_path, stop=7, save_interval=100, ephemeral_save_interval=7, remove="never")
    assert (steps(tmp_path), manifest(tmp_path, 7).kind) == ([0, 7], "ephemeral")
    run(tmp_path, stop=8, save_interval=100, ephemeral_save_interval=4)
    assert steps(tmp_path) == [0, 8]


def test_the_last_ephemeral_goes_when_a_permanent_one_follows_it(tmp_path: Path) -> None:
    """Elsewhere: only the next ephemeral removes it, so one is left beside the final checkpoint."""
    run(tmp_path, 10, save_interval=100, ephemeral_save_interval=3)
    assert steps(tmp_path) == [0, 10]


@pytest.mark.parametrize("file", ["manifest.json", "rank0.safetensors", "rank0.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "flipped"])
def test_where_the_newest_will_not_load_the_next_older_one_is_taken(
    tmp_path: Path, file: str, damage: str, caplog: Any
) -> None:
    """Elsewhere: the run cannot be started any more; or a file that is missing is replaced by another rank's."""
    run(tmp_path, stop=6, save_interval=2)
    path = tmp_path / "step6" / file
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        bad = {"empty": b"", "cut": data[: len(data) // 2], "flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]}
        path.write_bytes(bad[damage])
    made = run(tmp_path, save_interval=2)
    assert (made.loaded_step, steps(tmp_path)) == (4, [0, 2, 4, 6, 8, 10])
    assert manifest(tmp_path, 6).finite
    assert (file, damage) == ("manifest.json", "gone") or "step6" in caplog.text, "it is said aloud"


def test_a_checkpoint_that_was_named_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    run(tmp_path, stop=4, save_interval=2)
    os.truncate(tmp_path / "step4" / "rank0.safetensors", 10)
    with pytest.raises(CheckpointError, match="not valid"):
        run(tmp_path, save_interval=2, ckpt_path=tmp_path / "step4")


def test_a_stale_later_step_of_an_abandoned_branch_does_not_win(tmp_path: Path) -> None:
    """Elsewhere: after going back to step 4 and training on to 6, the next start takes the old step 10."""
    run(tmp_path, save_interval=2)
    with pytest.raises(UserError, match="newer checkpoints"):
        run(tmp_path, save_interval=2, ckpt_path=tmp_path / "step4")
    run(tmp_path, stop=6, save_interval=2, newer="trash", ckpt_path=tmp_path / "step4")
    assert steps(tmp_path) == [0, 2, 4, 6]
    assert run(tmp_path, save_interval=2).loaded_step == 6


def test_no_folder_of_a_save_that_died_stays_for_ever(tmp_path: Path) -> None:
    """Elsewhere: it is cleared only where the same step is saved once more."""
    run(tmp_path, stop=4, save_interval=2, identity=RunIdentity(run_id="ours"))
    for name in (".tmp.step6.ours.1", ".trash.step1.ours.1", ".tmp.step6.theirs.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.safetensors").write_bytes(b"half")
    run(tmp_path, stop=5, identity=RunIdentity(run_id="ours", attempt=2))
    assert [path.name for path in tmp_path.glob(".*")] == [".tmp.step6.theirs.1"]


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


def test_a_valid_checkpoint_is_never_cleared_to_be_written_anew(tmp_path: Path) -> None:
    """Elsewhere: overwriting clears whatever is there before the new bytes exist."""
    run(tmp_path, 4, save_interval=2, identity=RunIdentity(run_id="theirs"))
    before = written(tmp_path)
    with pytest.raises(SaveError, match="another checkpoint is in the way"):
        run(tmp_path, 4, save_interval=2, identity=RunIdentity(run_id="ours"))
    assert written(tmp_path) == before


def test_every_byte_is_at_rest_before_the_checkpoint_has_its_name(tmp_path: Path) -> None:
    """Elsewhere: nothing is fsynced, so a power cut leaves empty files under a valid marker."""
    disk = FaultyDisk()
    run(
        tmp_path, 1, disk=disk, pre_train_checkpoint=False, identity=RunIdentity(extra_files={"config.yaml": b"a: 1\n"})
    )
    began = next(n for n, one in enumerate(disk.operations) if one.startswith("mkdir .tmp."))
    named = next(n for n, one in enumerate(disk.operations) if one.startswith("rename .tmp."))
    save = [one.split()[0] for one in disk.operations[began:named]]
    # Each file is written and brought to rest before the next is begun, the manifest last; then the folder.
    files = [one.split()[1] for one in disk.operations[began:named] if one.startswith("open_new")]
    assert save.count("fsync") == len(files) == 4
    assert files[-1] == "manifest.json"
    assert len(save) - 1 - save[::-1].index("fsync_dir") > len(save) - 1 - save[::-1].index("fsync")
    assert disk.operations[named + 1] == f"fsync_dir {tmp_path.name}"


def test_no_file_comes_after_the_marker(tmp_path: Path) -> None:
    """Elsewhere: the config is put beside a checkpoint that says it is complete already."""
    run(tmp_path, 1, identity=RunIdentity(extra_files={"config.yaml": b"a: 1\n"}))
    there = {path.name for path in (tmp_path / "step1").iterdir()}
    assert there == {"manifest.json", *manifest(tmp_path, 1).files}
    assert "config.yaml" in there


@pytest.mark.parametrize("behind", [False, True])
def test_callbacks_hear_of_a_save_on_the_main_thread_once_it_is_committed(tmp_path: Path, behind: bool) -> None:
    """Elsewhere: a writer's thread tells them, whether or not the files are there."""
    heard: list[tuple[str, int, bool]] = []

    class Hears(Callback):
        def on_after_save_checkpoint(self, trainer: Any, path: Path) -> None:
            main = threading.current_thread() is threading.main_thread()
            assert (path / "manifest.json").exists()
            heard.append((path.name, trainer.progress.step, main))

    run(tmp_path, 4, save_interval=2, save_async=behind, callbacks={"hears": Hears()})
    assert [(name, main) for name, _, main in heard] == [(f"step{step}", True) for step in (0, 2, 4)]
    assert behind or [step for _, step, _ in heard] == [0, 2, 4]


def test_a_step_that_saves_is_logged_once(tmp_path: Path) -> None:
    """Elsewhere: the save sends the metrics of its step early, and they are sent again."""
    logger = ListLogger()
    run(tmp_path, 6, save_interval=1, loop={"eval_interval": 2}, logger=logger)
    assert [record.step for record in logger.records] == [1, 2, 3, 4, 5, 6]


def test_a_stop_is_saved_at_its_own_step(tmp_path: Path) -> None:
    """Elsewhere: a stop waits for the next multiple of 25 steps."""
    made = run(tmp_path, 100, stop=3, save_interval=50)
    assert (made.progress.step, steps(tmp_path)) == (3, [0, 3])


def test_weights_with_nan_are_not_gone_on_from(tmp_path: Path) -> None:
    """Elsewhere: such a checkpoint is committed like any other, and is the newest."""

    class Spoils(Callback):
        def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            if trainer.progress.step == 5:
                with torch.no_grad():
                    model.linear.bias.fill_(float("inf"))

    run(tmp_path, stop=6, save_interval=2, callbacks={"spoils": Spoils()})
    assert manifest(tmp_path, 6).finite is False
    assert run(tmp_path, save_interval=2).loaded_step == 4


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
        assert same(straight.checkpoint_state()[name], stopped.checkpoint_state()[name], name) == []


def test_a_removal_that_fails_is_said(tmp_path: Path, caplog: Any) -> None:
    """Elsewhere: errors of deleting are ignored, and the disk fills up in silence."""
    disk = FaultyDisk()
    rename, failures = disk.rename, [0]

    def refuse(old: Path, new: Path) -> None:
        if old.name == "manifest.json" and failures[0] < 3:
            failures[0] += 1
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        rename(old, new)

    disk.rename = refuse  # type: ignore[method-assign]
    caplog.set_level(logging.WARNING)
    run(tmp_path, 4, save_interval=1, max_checkpoints=1, disk=disk)
    assert caplog.text.count("could not remove checkpoint step0") == 1, "once, however often it fails"
    assert steps(tmp_path) == [4], "and it is tried again"


def test_a_full_disk_fails_the_completion_of_a_checkpoint_as_it_fails_a_save(tmp_path: Path, caplog: Any) -> None:
    """A stop before the evaluation is made up for by the next attempt, whose manifest may not be written."""
    rules = {"loop": {"eval_interval": 2}, "save_interval": 2}
    run(tmp_path, 6, stop=4, **rules)
    before = manifest(tmp_path, 4)
    with pytest.raises(SaveError, match="could not be completed: No space left"):
        run(tmp_path, 6, disk=Full(0), **rules)
    assert manifest(tmp_path, 4) == before
    run(tmp_path, 6, disk=Full(0), on_save_error="warn", **rules)
    assert "The training goes on" in caplog.text
    assert steps(tmp_path) == [0, 2, 4, 6]
