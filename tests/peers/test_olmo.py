"""The claims of OLMo-core about its CheckpointerCallback: what is saved when, and what is removed."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import Net, fit, saved

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    ConfigError,
    LoadOptions,
    Trainer,
    UserError,
    latest_checkpoint,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.testing.faults import FaultyDisk


def kind_of(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["kind"])


class Saves(Callback):
    """Notes each save as (step, kind), and the steps on the disk after it."""

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self.left: list[list[int]] = []

    def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.made.append((int(path.name.removeprefix("step")), kind_of(path)))

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left.append(saved(path_of(trainer).parent))

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.made]


def path_of(trainer: Trainer) -> Path:
    assert isinstance(trainer.checkpoint, CheckpointerCallback)
    return Path(trainer.checkpoint.folder)


def train(folder: Path, duration: int = 10, *callbacks: Callback, **save: Any) -> Saves:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    saves = Saves()
    fit(folder, loop={"max_duration": duration}, save=save, callbacks=[*callbacks, saves], val=None)
    return saves


@pytest.mark.parametrize(("ephemeral", "permanent"), [(1, 2), (249, 250), (10, None)])
def test_ephemeral_intervals_are_accepted(ephemeral: Any, permanent: Any) -> None:
    settings = CheckpointerCallback(ephemeral_save_interval=ephemeral, save_interval=permanent).settings
    assert (settings.ephemeral_save_interval, settings.save_interval) == (ephemeral, permanent)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        (field, {field: value, other: limit})
        for field, value, other, limit in [
            *(("ephemeral_save_interval", value, "save_interval", 250) for value in (-1, 0, 250, 251)),
            *(("ephemeral_save_interval", value, "save_interval", "1ep") for value in ("1ep", "2ep")),
            ("ephemeral_save_interval", "60min", "save_interval", "1h"),
            *(("save_interval", value, "ephemeral_save_interval", None) for value in (-1, 0)),
        ]
    ],
)
def test_wrong_intervals_are_refused(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        CheckpointerCallback(**settings)


def test_only_ephemeral_ones_are_removed_and_none_is_saved_by_default() -> None:
    settings = CheckpointerCallback().settings
    assert (settings.remove, settings.ephemeral_save_interval, settings.ephemeral_cooldown) == (
        "ephemeral_only",
        None,
        None,
    )
    assert settings.pre_train_checkpoint is None
    assert settings.enabled


def test_nothing_is_saved_and_an_existing_checkpoint_is_loaded(folder: Path) -> None:
    train(folder, 2)
    kept = saved(folder)
    run = fit(folder, loop={"max_duration": 5}, save={"enabled": False, "save_interval": 1}, val=None)
    assert run.trained.batches[0][0] == kept[-1] == 2
    assert saved(folder) == kept


@pytest.mark.parametrize(
    ("setting", "loaded", "is_saved"),
    [(False, False, False), (None, False, True), (None, True, False), (True, False, True)],
)
def test_step_0_is_saved_if_nothing_was_loaded(
    folder: Path, setting: bool | None, loaded: bool, is_saved: bool
) -> None:
    train(folder / "before", 1)
    source = {"ckpt_path": folder / "before" / "checkpoints" / "step1", "load": LoadOptions(states=["model"])}
    save = {"pre_train_checkpoint": setting}
    fit(folder, loop={"max_duration": 1}, save=save, val=None, fit_arguments=source if loaded else None)
    assert saved(folder) == ([0, 1] if is_saved else [1])


def test_nothing_is_saved_before_the_first_step_though_it_is_switched_on(folder: Path) -> None:
    train(folder, 2, save_final=True)
    assert train(folder, 4, pre_train_checkpoint=True).steps == [4]


def test_step_0_is_permanent_and_stays_where_all_that_is_not_permanent_goes(folder: Path) -> None:
    saves = train(folder, pre_train_checkpoint=True, save_interval=4, remove="all_non_permanent", max_checkpoints=1)
    assert saves.made[0] == (0, "permanent")
    assert 0 in saved(folder)


def test_permanent_saves_stay_and_ephemeral_ones_go(folder: Path) -> None:
    saves = train(folder, save_interval=5, ephemeral_save_interval=2)
    assert saves.steps == [2, 4, 5, 6, 8, 10]
    assert [step for step, kind in saves.made if kind == "permanent"] == [5, 10]
    # Noted at the end of each batch, before a save at this step.
    assert saves.left[8] == [5, 8]
    assert saved(folder) == [5, 10]


def test_a_step_that_is_a_multiple_of_both_intervals_is_saved_once_as_permanent(folder: Path) -> None:
    assert train(folder, 5, save_interval=4, ephemeral_save_interval=2).made[:2] == [(2, "ephemeral"), (4, "permanent")]


def test_a_newer_permanent_one_removes_the_ephemeral(folder: Path) -> None:
    assert train(folder, 6, save_interval=3, ephemeral_save_interval=2).left[3] == [3]


@pytest.mark.parametrize(
    ("cooldown", "steps"),
    [(None, [0, 2, 4, 5, 6, 8, 10]), (2, [0, 2, 4, 5, 8, 10]), (3, [0, 4, 5, 8, 10]), (100, [0, 5, 10])],
)
def test_a_cooldown_leaves_out_saves(folder: Path, cooldown: int | None, steps: list[int]) -> None:
    save = {"save_interval": 5, "ephemeral_save_interval": 2, "ephemeral_cooldown": cooldown}
    assert train(folder, pre_train_checkpoint=True, **save).steps == steps


@pytest.mark.parametrize(("remove", "left"), [("ephemeral_only", [4]), ("all_non_permanent", [4]), ("never", [2, 4])])
def test_an_ephemeral_checkpoint_of_an_earlier_run_is_removed(folder: Path, remove: str, left: list[int]) -> None:
    train(folder, 3, save_final=False, ephemeral_save_interval=2, save_interval=10)
    assert saved(folder) == [2]
    assert kind_of(folder / "checkpoints" / "step2") == "ephemeral"
    train(folder, 5, save_interval=4, save_final=False, remove=remove)
    assert saved(folder) == left


def test_the_kind_of_a_checkpoint_is_in_its_manifest(folder: Path) -> None:
    train(folder, 7, save_final=False, ephemeral_save_interval=3, save_interval=10)
    assert saved(folder) == [6]
    saves = train(folder, 9, save_final=False, ephemeral_save_interval=3, save_interval=6)
    assert saves.made == [(9, "ephemeral")]
    assert saved(folder) == [9], "step 6 was saved as an ephemeral one, and goes"


def test_a_permanent_one_at_no_multiple_of_the_new_interval_goes(folder: Path) -> None:
    train(folder, 3, save_interval=3)
    assert kind_of(folder / "checkpoints" / "step3") == "permanent"
    train(folder, 8, save_interval=4, remove="all_non_permanent")
    assert saved(folder) == [4, 8]


def test_a_fixed_step_at_a_multiple_of_the_ephemeral_interval_is_permanent(folder: Path) -> None:
    saves = train(folder, 5, fixed_steps=[4], ephemeral_save_interval=2)
    assert saves.made == [(2, "ephemeral"), (4, "permanent"), (5, "permanent")]


def test_the_final_save_is_synchronous_and_made_once(folder: Path) -> None:
    saves = train(folder, 3, save_async=True)
    assert saves.made == [(3, "permanent")]
    assert json.loads((folder / "checkpoints" / "step3" / "manifest.json").read_text())["finished"]


def test_a_final_step_that_was_saved_already_is_not_saved_twice(folder: Path) -> None:
    assert train(folder, 4, save_interval=2, save_async=True).steps == [2, 4]


def test_checkpoints_of_later_steps_than_the_present_one_are_not_removed(folder: Path) -> None:
    train(folder, 6, save_interval=2)
    older = {"ckpt_path": folder / "checkpoints" / "step2"}
    with pytest.raises(UserError, match=r"step4.*step6"):
        fit(folder, loop={"max_duration": 8}, save={"save_interval": 2}, val=None, fit_arguments=older)
    assert saved(folder) == [2, 4, 6]


def test_a_removal_that_is_interrupted_leaves_nothing_that_counts_as_a_checkpoint(folder: Path) -> None:
    """Wherever a removal is interrupted, the newest checkpoint that counts is whole."""
    train(folder, 4, save_interval=2)
    newest = set()
    for at in itertools.count(1):
        copy = folder / f"copy{at}"
        shutil.copytree(folder / "checkpoints", copy)
        disk = FaultyDisk(at, persistent=True)
        with contextlib.suppress(OSError):
            LocalStorage(copy, disk=disk).remove("step4")
        path = latest_checkpoint(copy)
        make_sync_checkpointer().load(path)
        newest.add(path.name)
        if not disk.struck:
            break
    assert newest == {"step4", "step2"}


def test_a_subclass_of_the_saver_takes_its_place(folder: Path) -> None:
    class Saver(CheckpointerCallback):
        pass

    saver = Saver(folder / "checkpoints")
    assert Trainer(model=Net, checkpoint=saver).get_callbacks(CheckpointerCallback) == {"checkpoint": saver}
