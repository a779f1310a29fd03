"""The CheckpointerCallback: what is on the disk after runs under each rule, and which one a resume takes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from faulty_disk import FaultyDisk
from tiny import Line, ListLogger, StopAt, StopInEvaluation, Unsized, loader, recorder, trainer
from undecodable import make_undecodable

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.catalog.history import Life
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.files.json_lines import read_rows
from trainer_cli.loads.options import LoadOptions
from trainer_cli.storage.disk import Disk
from trainer_cli.trainer.hooks import Callback


def make(folder: Path, length: Any = 10, *callbacks: Callback, model: Any = Line, **rules: Any) -> Any:
    """A trainer that saves into the folder; without rules before the first step and at the end alone."""
    settings = {"max_duration": length, "log_interval": 2, **rules.pop("settings", {})}
    checkpoint = CheckpointerCallback(folder, **{"save_interval": None, **rules})
    return trainer(model, callbacks=list(callbacks), settings=settings, checkpoint=checkpoint)


def attempt(folder: Path, length: Any = 10, *callbacks: Callback, stop: int | None = None, **rules: Any) -> Any:
    """One attempt at a training of `length`, on ten samples in batches of four: three steps an epoch."""
    made = make(folder, length, *callbacks, *([] if stop is None else [StopAt(stop)]), **rules)
    made.fit(loader(10, 4), loader(6))
    return made


def steps(folder: Path) -> list[int]:
    """The steps on the disk; nothing half-made may lie beside them."""
    assert [path.name for path in folder.iterdir() if not path.name.startswith("step")] == []
    return sorted(int(path.name.removeprefix("step")) for path in folder.iterdir())


def manifest(folder: Path, step: int) -> Any:
    return json.loads((folder / f"step{step}" / "manifest.json").read_text())


def flip(path: Path, offset: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_every_file_of_tensors_is_laid_out_alike_whenever_metrics_were_reported_last(tmp_path: Path) -> None:
    """Else weights that live where saves are written from would have to move."""
    attempt(tmp_path, 7, save_interval=1, pre_train_checkpoint=False)
    headers = set()
    for step in steps(tmp_path):
        content = (tmp_path / f"step{step}" / "rank0.safetensors").read_bytes()
        headers.add(content[: 8 + int.from_bytes(content[:8], "little")])
    assert len(headers) == 1


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({}, [0, 10]),
        ({"save_interval": 4}, [0, 4, 8, 10]),
        ({"save_interval": "1ep"}, [0, 3, 6, 9, 10]),
        ({"save_interval": "0.5ep"}, [0, 2, 3, 5, 6, 8, 9, 10]),
        ({"save_interval": "12sp"}, [0, 4, 7, 10]),
        ({"save_interval": "45tok"}, [0, 5, 9, 10]),
        ({"pre_train_checkpoint": False, "save_final": False}, None),
        ({"fixed_steps": [0, 4, 10], "save_interval": 4, "pre_train_checkpoint": False}, [0, 4, 8, 10]),
        ({"ephemeral_save_interval": 3, "save_final": False}, [0, 9]),
        (
            {"ephemeral_save_interval": 1, "save_interval": 5, "ephemeral_cooldown": 3, "remove": "never"},
            [0, 3, 5, 8, 10],
        ),
        ({"save_interval": 2, "max_checkpoints": 2, "fixed_steps": [4]}, [4, 8, 10]),
        ({"remove": "all_without_rule", "fixed_steps": [7], "ephemeral_save_interval": 3}, [0, 7, 10]),
        ({"enabled": False, "save_interval": 2}, None),
    ],
)
def test_each_rule_leaves_its_checkpoints(tmp_path: Path, rules: dict[str, Any], left: list[int] | None) -> None:
    folder = tmp_path / "checkpoints"
    attempt(folder, **rules)
    assert (steps(folder) if folder.exists() else None) == left


def test_a_stop_is_saved_as_ephemeral_unless_a_permanent_rule_names_the_step(tmp_path: Path) -> None:
    attempt(tmp_path, stop=3, save_interval=2, fixed_steps=[5])
    entries = {step: (manifest(tmp_path, step)["kind"], manifest(tmp_path, step)["reason"]) for step in steps(tmp_path)}
    assert entries == {
        0: ("permanent", "before the first step"),
        2: ("permanent", "every 2 steps"),
        3: ("ephemeral", "training was stopped"),
    }
    attempt(tmp_path, stop=4, save_interval=2, fixed_steps=[5])
    attempt(tmp_path, stop=5, save_interval=2, fixed_steps=[5])
    assert [manifest(tmp_path, step)["reason"] for step in (4, 5)] == ["every 2 steps", "fixed step 5"]
    assert steps(tmp_path) == [0, 2, 4, 5]


@pytest.mark.parametrize("save_async", [False, True])
def test_each_save_and_removal_is_recorded_with_its_reason(tmp_path: Path, save_async: bool) -> None:
    file = tmp_path / "checkpoints.jsonl"
    identity = RunIdentity(run_id="abc", history_file=file)
    rules: dict[str, Any] = {
        "identity": identity,
        "save_async": save_async,
        "save_interval": 4,
        "ephemeral_save_interval": 3,
    }
    attempt(tmp_path / "checkpoints", 9, **rules)
    rows = [(life.name, life.kind, life.reason, life.removed_reason) for life in Life.read_all(read_rows(file))]
    assert rows == [
        ("step0", "regular", "before the first step", None),
        ("step3", "ephemeral", "every 3 steps, ephemeral", "ephemeral, and step4 is newer"),
        ("step4", "regular", "every 4 steps", None),
        ("step6", "ephemeral", "every 3 steps, ephemeral", "ephemeral, and step8 is newer"),
        ("step8", "regular", "every 4 steps", None),
        ("step9", "regular", "end of training", None),
    ]


def test_only_the_final_checkpoint_says_that_the_run_is_finished(tmp_path: Path) -> None:
    attempt(tmp_path, save_interval=5)
    ends = [manifest(tmp_path, step)["finished"] for step in (0, 5, 10)]
    assert ends == [None, None, "max_duration of 10 steps reached"]
    attempt(tmp_path, 12, save_interval=5)
    assert manifest(tmp_path, 12)["finished"] == "max_duration of 12 steps reached"
    # Step 10 was the end then, and is one of the interval's.
    assert steps(tmp_path) == [0, 5, 10, 12]


def test_a_checkpoint_holds_the_metrics_measured_at_its_step_and_what_travels_with_it(tmp_path: Path) -> None:
    identity = RunIdentity(run_id="r1", attempt=3, extra_files={"config.yaml": b"a: 1\n"}, target_packages=("torch",))
    attempt(tmp_path, save_interval=5, identity=identity)
    assert (tmp_path / "step10" / "config.yaml").read_bytes() == b"a: 1\n"
    last, middle = manifest(tmp_path, 10), manifest(tmp_path, 5)
    assert {"train/loss", "val/loss"} <= set(last["metrics"])
    assert middle["metrics"] == {}
    assert (last["run_id"], last["attempt"], last["epoch"], last["finite"]) == ("r1", 3, 3, True)


@pytest.mark.parametrize("save_async", [True, False])
def test_metrics_are_at_rest_before_the_checkpoint_that_promises_them(tmp_path: Path, save_async: bool) -> None:
    book: list[str] = []

    class Watched(ListLogger):
        def flush(self, durable: bool = False) -> None:
            if durable:
                book.append(f"{len(self.records)} at rest")

    class Renames(Disk):
        def rename(self, old: Path, new: Path) -> None:
            book.append(new.name)
            super().rename(old, new)

    callback = CheckpointerCallback(tmp_path, save_interval=2, save_async=save_async)
    cast("Any", callback.storage).disk = Renames()
    trainer(loggers=[Watched()], settings={"max_duration": 4, "log_interval": 2}, checkpoint=callback).fit(loader())
    assert [entry for entry in book if entry.startswith("step")] == ["step0", "step2", "step4"]
    for step, records in (("step0", 0), ("step2", 1), ("step4", 2)):
        before = [int(entry.split()[0]) for entry in book[: book.index(step)] if entry.endswith("at rest")]
        assert max(before) >= records
    assert sum(entry.endswith("at rest") for entry in book) == 3


@pytest.mark.parametrize(
    "damage", [flip, Path.unlink, lambda file: os.truncate(file, 100), lambda file: make_undecodable(file.parent)]
)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_next_older_one_taken(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attempt(tmp_path, stop=6, save_interval=2)
    damage(tmp_path / "step6" / "rank0.safetensors")
    assert attempt(tmp_path, save_interval=2).loaded_step == 4
    assert "step6 is quarantined as .aside." in caplog.text
    assert len(list(tmp_path.glob(".aside.*"))) == 1
    shutil.rmtree(next(tmp_path.glob(".aside.*")))
    assert steps(tmp_path) == [0, 2, 4, 6, 8, 10]
    assert manifest(tmp_path, 6)["finite"] is True


def test_a_damaged_manifest_is_passed_over_loudly_and_a_partial_folder_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt(tmp_path, stop=6, save_interval=2)
    flip(tmp_path / "step6" / "manifest.json", 30)
    (tmp_path / "step8").mkdir()
    assert attempt(tmp_path, save_interval=2).loaded_step == 4
    assert "checkpoint step6 is not used" in caplog.text
    assert "checkpoint step8" not in caplog.text
    assert manifest(tmp_path, 8)["step"] == 8


def test_weights_that_are_not_finite_are_saved_but_never_chosen_nor_counted(tmp_path: Path) -> None:
    class Explodes(Callback):
        def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            if trainer.progress.step == 4:
                with torch.no_grad():
                    model.linear.bias.fill_(float("nan"))

    attempt(tmp_path, 8, Explodes(), stop=6, save_interval=2, max_checkpoints=2)
    # Step 6 is not finite: the two newest good ones stay.
    assert steps(tmp_path) == [2, 4, 6]
    assert (manifest(tmp_path, 6)["finite"], manifest(tmp_path, 4)["finite"]) == (False, True)
    assert attempt(tmp_path, 6, save_interval=2).loaded_step == 4
    assert manifest(tmp_path, 6)["finite"] is True


def test_a_mask_of_minus_infinity_is_no_reason_against_a_checkpoint(tmp_path: Path) -> None:
    class Masked(Line):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    for length in (4, 6):
        made = attempt(tmp_path, length, model=Masked, ephemeral_save_interval=2)
    assert (made.loaded_step, steps(tmp_path)) == (4, [0, 4, 6])


def test_one_that_cannot_be_read_does_not_cost_the_one_that_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {"ephemeral_save_interval": 2, "pre_train_checkpoint": False, "save_final": False}
    attempt(tmp_path, stop=6, remove="never", **rules)
    assert steps(tmp_path) == [2, 4, 6]
    unreadable = (tmp_path / "step6" / "rank0.safetensors").stat().st_ino
    read = Disk.read

    def reading(disk: Disk, fd: int, *how: Any) -> int:
        if os.fstat(fd).st_ino == unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return read(disk, fd, *how)

    monkeypatch.setattr(Disk, "read", reading)
    assert attempt(tmp_path, stop=5, **rules).loaded_step == 4
    assert steps(tmp_path) == [5, 6]


def test_a_training_that_leaves_the_checkpoints_in_its_folder_behind_is_refused(tmp_path: Path) -> None:
    attempt(tmp_path / "own", stop=4, save_interval=2)
    attempt(tmp_path / "other", stop=4, save_interval=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in (None, tmp_path / "other" / "step2"):
        with pytest.raises(UserError, match=r"own holds checkpoints of this run .* step 4"):
            make(tmp_path / "own", save_interval=2).fit(loader(10, 4), ckpt_path=path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_checkpoints_of_another_run_are_neither_taken_nor_removed(tmp_path: Path) -> None:
    attempt(tmp_path, stop=4, save_interval=2, identity=RunIdentity(run_id="theirs"))
    made = attempt(tmp_path, 3, max_checkpoints=1, pre_train_checkpoint=False, identity=RunIdentity(run_id="ours"))
    assert made.loaded_from is None
    assert steps(tmp_path) == [0, 2, 3, 4]


def test_copies_that_a_user_made_are_neither_resumed_nor_counted_nor_removed(tmp_path: Path) -> None:
    attempt(tmp_path, stop=8, save_interval=4)
    copies = ["best_so_far", "step8 copy", "step8_backup", "step9", "step99", "step12"]
    for name in copies:
        shutil.copytree(tmp_path / "step8", tmp_path / name)
    shutil.rmtree(tmp_path / "step8")
    made = attempt(tmp_path, 12, save_interval=4, max_checkpoints=1)
    assert made.loaded_from == tmp_path / "step4"
    # That of step 12 was in the way of a save, and is set aside.
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".aside.step12.")}
    assert left == {*copies, "step12"}
    assert manifest(tmp_path, 12)["step"] == 12
    assert trainer().validate(loader(3), ckpt_path=tmp_path / "best_so_far")


def test_what_cannot_be_saved_is_said_before_the_first_step(tmp_path: Path) -> None:
    class Strange(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"of": {1, 2}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    made = trainer(callbacks={"strange": Strange()}, checkpoint=CheckpointerCallback(tmp_path))
    with pytest.raises(UserError, match="callbacks/strange/of"):
        made.fit(loader())
    assert made.progress.step == 0


def test_a_removal_that_fails_is_reported_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Callback):
        """Makes one removal fail, as a full or read-only disk would."""

        def on_fit_start(self, trainer: Any, *args: Any) -> None:
            storage = trainer.checkpoint.storage
            remove, failures = storage.remove, ["first"]

            def fail_once(name: str) -> bool:
                if failures:
                    failures.pop()
                    raise OSError("read-only")
                return bool(remove(name))

            storage.remove = fail_once

    attempt(tmp_path, 4, Stubborn(), save_interval=1, max_checkpoints=1)
    assert "could not remove checkpoint step0: read-only" in caplog.text
    assert steps(tmp_path) == [4]


class FailsInRemoval(FaultyDisk):
    """Fails once, in the n-th operation after the first removal has taken the manifest away."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth = nth

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        if old.name == "manifest.json" and self.at is None:
            self.at = len(self.operations) + self.nth


@pytest.mark.parametrize("nth", range(1, 5), ids=["fsync", "stat", "rename", "fsync of the root"])
def test_a_removal_that_fails_midway_is_finished_by_the_next(tmp_path: Path, nth: int) -> None:
    made = make(tmp_path, 4, save_interval=1, max_checkpoints=1, save_async=False)
    made.checkpoint.storage.disk = disk = FailsInRemoval(nth)
    made.fit(loader(10, 4), loader(6))
    assert disk.struck
    assert steps(tmp_path) == [4]


SCORES = {2: 3.0, 3: 1.0, 5: 2.0, 6: float("nan"), 8: 1.0, 9: 9.0}


class Scores(Callback):
    """Reports a metric at some steps, as an evaluation would."""

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        if trainer.progress.step in SCORES or trainer.sanity_checking:
            trainer.log_metrics({"val/score": SCORES.get(trainer.progress.step, 0.0)})


def scored(folder: Path, length: int = 10, *callbacks: Callback, mode: str = "min", count: int = 1, **more: Any) -> Any:
    """One attempt that evaluates after every step."""
    best = {"metric": "val/score", "mode": mode, "count": count}
    return attempt(folder, length, *callbacks, Scores(), keep_best=best, settings={"eval_interval": 1}, **more)


def test_an_evaluation_that_enters_the_best_is_saved_and_kept_while_it_is_among_them(tmp_path: Path) -> None:
    # A stop comes before the evaluation that is due: the next attempt makes it, and completes the checkpoint.
    for stop, left in ((2, [0, 2]), (3, [0, 2, 3]), (5, [0, 2, 3, 5]), (6, [0, 3, 5, 6]), (8, [0, 3, 5, 8])):
        made = scored(tmp_path, stop=stop, count=2)
        assert steps(tmp_path) == left
    scored(tmp_path, count=2)
    assert steps(tmp_path) == [0, 3, 8, 10]
    assert (manifest(tmp_path, 8)["kind"], manifest(tmp_path, 8)["reason"]) == (
        "ephemeral",
        "val/score 1 is among the 2 best",
    )
    assert made.checkpoint.kept()["step3"] == "val/score 1 is among the 2 best"


def test_a_stop_before_the_evaluation_is_completed_by_the_next_attempt(tmp_path: Path) -> None:
    scored(tmp_path, 5, StopInEvaluation(3))
    stopped = manifest(tmp_path, 3)
    assert (stopped["kind"], stopped["reason"]) == ("ephemeral", "training was stopped")
    assert "val/score" not in stopped["metrics"]
    scored(tmp_path, 5)
    whole = manifest(tmp_path, 3)
    assert (whole["reason"], whole["metrics"]["val/score"]) == ("val/score 1 is the best", 1.0)
    assert steps(tmp_path) == [0, 3, 5]


def test_a_stop_in_the_last_evaluation_still_ends_with_a_finished_checkpoint(tmp_path: Path) -> None:
    attempt(tmp_path, 4, StopInEvaluation(4), settings={"eval_interval": 2})
    assert manifest(tmp_path, 4)["finished"] is None
    attempt(tmp_path, 4, settings={"eval_interval": 2})
    last = manifest(tmp_path, 4)
    assert (last["finished"], last["kind"]) == ("max_duration of 4 steps reached", "permanent")
    assert {"val/loss", "val/mae"} <= set(last["metrics"])


def test_a_callback_can_hold_ephemeral_saves_back_by_name(tmp_path: Path) -> None:
    class Holds(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.progress.step == 2:
                trainer.checkpoint.hold_ephemeral("merge")
            if trainer.progress.step == 7:
                trainer.checkpoint.release_ephemeral("merge")
                trainer.checkpoint.release_ephemeral("nobody")

    attempt(tmp_path, 10, Holds(), save_interval=5, ephemeral_save_interval=1, remove="never")
    assert steps(tmp_path) == [0, 1, 5, 7, 8, 9, 10]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_save_opportunity"])
def test_a_save_that_was_asked_for_comes_once(tmp_path: Path, hook: str) -> None:
    def ask(self: Any, trainer: Any, *args: Any) -> None:
        if trainer.progress.step == 4 and not hasattr(self, "asked"):
            self.asked = trainer.checkpoint.save_requested = True

    attempt(tmp_path, 8, type("Asks", (Callback,), {hook: ask})())
    assert steps(tmp_path) == [0, 4, 8]
    assert manifest(tmp_path, 4)["reason"] == "requested"


class Fails(Callback):
    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        if trainer.progress.step == 5:
            raise ArithmeticError("out of luck")


def test_what_there_is_after_an_exception_is_kept_apart_and_never_gone_on_from(tmp_path: Path) -> None:
    for _ in range(2):
        made = make(tmp_path, 8, Fails(), save_interval=2)
        with pytest.raises(ArithmeticError):
            made.fit(loader(10, 4))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["exception", "step0", "step2", "step4"]
        assert [path.name for path in (tmp_path / "exception").iterdir()] == ["step5"]
    assert made.loaded_step == 4
    assert manifest(tmp_path / "exception", 5)["reason"] == "after ArithmeticError: out of luck"


def test_of_those_kept_after_exceptions_only_the_runs_own_unpinned_one_goes(tmp_path: Path) -> None:
    kept = tmp_path / "exception"
    for name, run_id in (("step3", "ours"), ("step4", "theirs"), ("step7", "ours")):
        metadata = CheckpointMetadata(run_id=run_id, step=int(name[4:]))
        SyncCheckpointer().save({"model": {}}, kept / name, metadata=metadata)
    (kept / "step3" / "pinned").touch()
    (kept / ".tmp.step6.ours.1").mkdir()
    (kept / ".tmp.step6.theirs.1").mkdir()
    with pytest.raises(ArithmeticError):
        attempt(tmp_path, 8, Fails(), save_interval=2, identity=RunIdentity(run_id="ours", attempt=2))
    assert sorted(path.name for path in kept.iterdir()) == [".tmp.step6.theirs.1", "step3", "step4", "step5"]


@pytest.mark.parametrize(
    ("hook", "settings", "kept"),
    [
        ("on_fit_start", {}, []),
        ("on_validate_start", {"eval_sanity_steps": 1}, []),
        ("on_validate_start", {"eval_at_start": True}, []),
        ("on_train_batch_start", {}, ["step0"]),
        ("on_validate_start", {"eval_interval": 2}, ["step2"]),
    ],
)
def test_a_state_is_kept_after_a_failure_only_once_training_has_begun(
    hook: str, settings: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=f"{hook} failed"):
        attempt(tmp_path, 6, recorder([], fail_in=(hook,)), settings=settings, pre_train_checkpoint=False)
    assert [path.name for path in sorted((tmp_path / "exception").glob("step*"))] == kept


def test_going_back_asks_what_becomes_of_newer_ones(tmp_path: Path) -> None:
    attempt(tmp_path, save_interval=2)

    def go_back(**rules: Any) -> None:
        make(tmp_path, save_interval=5, **rules).fit(loader(10, 4), ckpt_path=tmp_path / "step4")

    with pytest.raises(UserError, match=r"newer checkpoints: step6, step8, step10.*checkpoint.newer=trash"):
        go_back()
    (tmp_path / "step8" / "pinned").touch()
    with pytest.raises(UserError, match="newer checkpoints are pinned: step8"):
        go_back(newer="trash")
    assert steps(tmp_path) == [0, 2, 4, 6, 8, 10]
    (tmp_path / "step8" / "pinned").unlink()
    go_back(newer="trash")
    assert steps(tmp_path) == [0, 2, 4, 5, 10]


def test_going_back_deletes_nothing_where_nothing_is_ever_removed(tmp_path: Path) -> None:
    attempt(tmp_path, save_interval=2, remove="never")
    made = make(tmp_path, save_interval=5, newer="trash", remove="never")
    made.fit(loader(10, 4), ckpt_path=tmp_path / "step6")
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step0", "step10", "step2", "step4", "step6"]
    assert {path.name.split(".")[2] for path in tmp_path.glob(".aside.*")} == {"step8", "step10"}


def test_names_follow_the_pattern_and_a_resume_finds_them_under_any(tmp_path: Path) -> None:
    attempt(tmp_path, stop=4, save_interval=2, name="ep{epoch}-ba{batch}-{run_name}", suffix="x")
    names = ["ep0-ba0-default-x", "ep0-ba2-default-x", "ep1-ba1-default-x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert attempt(tmp_path, 6, save_interval=2).loaded_step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "step6"]


@pytest.mark.parametrize("key", ["save_interval", "ephemeral_save_interval", "keep_every"])
def test_a_part_of_an_epoch_of_unknown_length_is_the_users_mistake(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"set loop\.steps_per_epoch") as caught:
        make(tmp_path, **{key: "0.5ep"}).fit(Unsized(3))
    assert caught.value.where == f"checkpoint.{key}"


@pytest.mark.parametrize(
    "call",
    [
        lambda made, path: made.fit(loader(), ckpt_path=path),
        lambda made, path: made.fit(loader(), ckpt_path=path, load=LoadOptions(states=["model"])),
        lambda made, path: made.load_checkpoint(path),
        lambda made, path: made.validate(loader(4), path),
        lambda made, path: made.validate_all(loader(4), f"{path}/step*"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_a_file_not_found(call: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        call(trainer(), tmp_path / "none")


_TOO_RARE = r"ephemeral_save_interval \(.*\) must be shorter than .*save_interval"
_TOO_LONG = "never comes due: the run ends before, after 6 steps"
_HIDDEN = r"ephemeral_save_interval \(.*\) never comes due: each of its steps is one of .*save_interval"


# An epoch has 3 steps, each of 4 samples and 12 tokens.
@pytest.mark.parametrize(
    ("ephemeral", "permanent", "fault"),
    [
        ("50st", "1ep", _TOO_RARE), ("1ep", 3, _TOO_RARE), (2, "1ep", None), ("1ep", 50, None), ("50s", "1ep", None),
        ("13sp", "1ep", _TOO_RARE), ("16sp", 3, _TOO_RARE), ("8sp", "1ep", None), ("8sp", 3, None), ("4sp", None, None),
        ("40tok", "1ep", _TOO_RARE), ("37tok", 3, _TOO_RARE), ("20tok", "4sp", _TOO_RARE), ("24tok", "1ep", None),
        ("12sp", "1ep", _HIDDEN), ("3sp", 1, _HIDDEN), ("5tok", 1, _HIDDEN), (1, "4sp", _HIDDEN),
        (7, None, _TOO_LONG), ("3ep", None, _TOO_LONG), ("25sp", None, _TOO_LONG), ("73tok", None, _TOO_LONG),
        (6, None, None), ("24sp", None, None), ("72tok", None, None), ("1dur", None, None),
    ],
)  # fmt: skip
def test_an_ephemeral_interval_that_is_never_due_is_refused_in_whatever_units(
    ephemeral: int | str, permanent: int | str | None, fault: str | None, tmp_path: Path, caplog: Any
) -> None:
    made = make(tmp_path, 6, save_interval=permanent, ephemeral_save_interval=ephemeral)
    if fault not in (None, _TOO_LONG):
        with pytest.raises(ConfigError, match=fault):
            made.fit(loader(12, 4))
        # The tokens of a step are known once one is made.
        assert made.progress.step == int("tok" in str(ephemeral))
    else:
        assert made.fit(loader(12, 4)).step == 6
        # A trial of few steps goes on: it is only said, and once.
        assert caplog.text.count("never comes due") == caplog.text.count(_TOO_LONG) == int(fault is not None)
