"""The claims of OLMo-core about its CheckpointerCallback: what is saved when, and what is removed."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peer_claims import Claim, claims, each, try_claim
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
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.runs.build import Builder
from trainer_cli.runs.compose_fit import compose_fit
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


def check_accepted(folder: Path, ephemeral: Any, permanent: Any) -> None:
    settings = CheckpointerCallback(ephemeral_save_interval=ephemeral, save_interval=permanent).settings
    assert (settings.ephemeral_save_interval, settings.save_interval) == (ephemeral, permanent)


def check_refused(folder: Path, field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=field):
        CheckpointerCallback(**settings)


def check_defaults(folder: Path) -> None:
    settings = CheckpointerCallback().settings
    assert (settings.remove, settings.ephemeral_save_interval, settings.ephemeral_cooldown) == (
        "ephemeral_only",
        None,
        None,
    )
    assert settings.pre_train_checkpoint is None
    assert settings.enabled


def check_switched_off(folder: Path) -> None:
    train(folder, 2)
    kept = saved(folder)
    run = fit(folder, loop={"max_duration": 5}, save={"enabled": False, "save_interval": 1}, val=None)
    assert run.trained.batches[0][0] == kept[-1] == 2
    assert saved(folder) == kept


def check_step_0(folder: Path, setting: bool | None, loaded: bool, is_saved: bool) -> None:
    train(folder / "before", 1)
    source = {"ckpt_path": folder / "before" / "checkpoints" / "step1", "load": LoadOptions(states=["model"])}
    save = {"pre_train_checkpoint": setting}
    fit(folder, loop={"max_duration": 1}, save=save, val=None, fit_arguments=source if loaded else None)
    assert saved(folder) == ([0, 1] if is_saved else [1])


def check_step_0_in_a_resumed_run(folder: Path) -> None:
    train(folder, 2, save_final=True)
    assert train(folder, 4, pre_train_checkpoint=True).steps == [4]


def check_step_0_stays(folder: Path) -> None:
    saves = train(folder, pre_train_checkpoint=True, save_interval=4, remove="all_non_permanent", max_checkpoints=1)
    assert saves.made[0] == (0, "permanent")
    assert 0 in saved(folder)


def check_interval_and_ephemerals(folder: Path) -> None:
    saves = train(folder, save_interval=5, ephemeral_save_interval=2)
    assert saves.steps == [2, 4, 5, 6, 8, 10]
    assert [step for step, kind in saves.made if kind == "permanent"] == [5, 10]
    # Noted at the end of each batch, before a save at this step.
    assert saves.left[8] == [5, 8]
    assert saved(folder) == [5, 10]


def check_multiple_of_both(folder: Path) -> None:
    assert train(folder, 5, save_interval=4, ephemeral_save_interval=2).made[:2] == [(2, "ephemeral"), (4, "permanent")]


def check_newer_permanent_removes_the_ephemeral(folder: Path) -> None:
    assert train(folder, 6, save_interval=3, ephemeral_save_interval=2).left[3] == [3]


def check_cooldown(folder: Path, cooldown: int | None, steps: list[int]) -> None:
    save = {"save_interval": 5, "ephemeral_save_interval": 2, "ephemeral_cooldown": cooldown}
    assert train(folder, pre_train_checkpoint=True, **save).steps == steps


def check_ephemeral_of_an_earlier_run(folder: Path, remove: str, left: list[int]) -> None:
    train(folder, 3, save_final=False, ephemeral_save_interval=2, save_interval=10)
    assert saved(folder) == [2]
    assert kind_of(folder / "checkpoints" / "step2") == "ephemeral"
    train(folder, 5, save_interval=4, save_final=False, remove=remove)
    assert saved(folder) == left


def check_changed_interval(folder: Path) -> None:
    train(folder, 7, save_final=False, ephemeral_save_interval=3, save_interval=10)
    assert saved(folder) == [6]
    saves = train(folder, 9, save_final=False, ephemeral_save_interval=3, save_interval=6)
    assert saves.made == [(9, "ephemeral")]
    assert saved(folder) == [9], "step 6 was saved as an ephemeral one, and goes"


def check_all_non_permanent(folder: Path) -> None:
    train(folder, 3, save_interval=3)
    assert kind_of(folder / "checkpoints" / "step3") == "permanent"
    train(folder, 8, save_interval=4, remove="all_non_permanent")
    assert saved(folder) == [4, 8]


class Holding(Callback):
    """Holds ephemeral saves back up to a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        checkpoint: Any = trainer.checkpoint
        if trainer.progress.step < self.step:
            checkpoint.hold_ephemeral("holding")
        else:
            checkpoint.release_ephemeral("holding")


def check_held_back(folder: Path) -> None:
    saves = train(folder, 8, Holding(6), save_interval=4, ephemeral_save_interval=1)
    assert saves.made == [(4, "permanent"), (6, "ephemeral"), (7, "ephemeral"), (8, "permanent")]


def check_fixed(folder: Path, fixed: list[int], remove: str) -> None:
    saves = train(folder, fixed_steps=fixed, save_interval=2, max_checkpoints=1, remove=remove)
    assert {(step, "permanent") for step in fixed} <= set(saves.made)
    assert set(fixed) <= set(saved(folder))


def check_fixed_and_ephemeral(folder: Path) -> None:
    saves = train(folder, 5, fixed_steps=[4], ephemeral_save_interval=2)
    assert saves.made == [(2, "ephemeral"), (4, "permanent"), (5, "permanent")]


def check_final(folder: Path) -> None:
    saves = train(folder, 3, save_async=True)
    assert saves.made == [(3, "permanent")]
    assert json.loads((folder / "checkpoints" / "step3" / "manifest.json").read_text())["finished"]


def check_final_is_saved_already(folder: Path) -> None:
    assert train(folder, 4, save_interval=2, save_async=True).steps == [2, 4]


class InFlight(Callback):
    """Notes how many saves are not committed yet after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        hidden = [path for path in self.folder.glob("checkpoints/.*") if path.is_dir()]
        self.most = max(self.most, len(hidden))


def check_in_the_background(folder: Path) -> None:
    flight = InFlight(folder)
    saves = train(folder, 8, flight, save_interval=1, save_async=True)
    assert flight.most <= 1
    assert saves.steps == list(range(1, 9)) == saved(folder)


def check_going_back_is_refused(folder: Path) -> None:
    train(folder, 6, save_interval=2)
    older = {"ckpt_path": folder / "checkpoints" / "step2"}
    with pytest.raises(UserError, match=r"step4.*step6"):
        fit(folder, loop={"max_duration": 8}, save={"save_interval": 2}, val=None, fit_arguments=older)
    assert saved(folder) == [2, 4, 6]


def check_interrupted_removal(folder: Path) -> None:
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


PROJECT = """
from small_runs import Net, Rows
from trainer_cli import CheckpointerCallback


class Data:
    train = Rows(4)


class Saver(CheckpointerCallback):
    pass
"""


def check_subclass(folder: Path) -> None:
    class Saver(CheckpointerCallback):
        pass

    saver = Saver(folder / "checkpoints")
    assert Trainer(model=Net, checkpoint=saver).get_callbacks(CheckpointerCallback) == {"checkpoint": saver}


def check_subclass_in_the_config(folder: Path) -> None:
    (folder / "peer_saver.py").write_text(PROJECT)
    parts = ["model=null", "model={_target_: peer_saver.Net}", "data=null", "data={_target_: peer_saver.Data}"]
    saver = ["+callbacks.checkpoint._target_=peer_saver.Saver", "checkpoint.save_interval=2"]
    composed = compose_fit([*parts, *saver, "loop.max_duration=4", "loggers=null", "device=cpu"])
    composed.check_targets()
    builder = Builder(composed.config, composed.trust)
    data = builder.data()
    trainer = builder.trainer(data, identity=RunIdentity(run_id="run"), run_dir=folder)
    assert type(trainer.checkpoint).__name__ == "Saver"
    trainer.fit(data.train)
    assert saved(folder) == [0, 2, 4]


CALLBACK = "callbacks/checkpointer.py"
CLAIMS: list[Claim] = [
    *claims(
        f"{CALLBACK}: __post_init__",
        check_accepted,
        {
            "ephemeral saves at each step beside an interval of 2": (1, 2),
            "ephemeral saves one step more often than the others": (249, 250),
            "ephemeral saves without an interval": (10, None),
        },
    ),
    *claims(
        f"{CALLBACK}: __post_init__",
        check_refused,
        {
            f"{field}={value!r} with {other}={limit!r} is refused": (field, {field: value, other: limit})
            for field, value, other, limit in [
                *(("ephemeral_save_interval", value, "save_interval", 250) for value in (-1, 0, 250, 251)),
                *(("ephemeral_save_interval", value, "save_interval", "1ep") for value in ("1ep", "2ep")),
                ("ephemeral_save_interval", "60min", "save_interval", "1h"),
                *(("save_interval", value, "ephemeral_save_interval", None) for value in (-1, 0)),
            ]
        },
    ),
    *claims(
        f"{CALLBACK}: defaults",
        check_defaults,
        {"only ephemeral ones are removed, and none is saved by default": ()},
    ),
    *claims(
        f"{CALLBACK}: enabled=False",
        check_switched_off,
        {"nothing is saved, and an existing checkpoint is loaded": ()},
    ),
    *claims(
        f"{CALLBACK}: pre_train",
        check_step_0,
        {
            "step 0 is not saved if switched off": (False, False, False),
            "step 0 is saved if nothing was loaded": (None, False, True),
            "step 0 is not saved after a load": (None, True, False),
            "step 0 is saved if switched on": (True, False, True),
        },
    ),
    *claims(
        f"{CALLBACK}: pre_train of a resumed run",
        check_step_0_in_a_resumed_run,
        {"nothing is saved before the first step, though it is switched on": ()},
    ),
    *claims(
        f"{CALLBACK}: pre_train",
        check_step_0_stays,
        {"step 0 is permanent and stays where all that is not permanent goes": ()},
    ),
    *claims(
        f"{CALLBACK}: post_train_batch",
        check_interval_and_ephemerals,
        {"permanent ones at the interval, ephemeral ones between, each removed after a newer one": ()},
    ),
    *claims(
        f"{CALLBACK}: post_train_batch",
        check_multiple_of_both,
        {"a step that is a multiple of both intervals is saved once, as permanent": ()},
    ),
    *claims(
        f"{CALLBACK}: post_train_batch",
        check_newer_permanent_removes_the_ephemeral,
        {"an ephemeral one stays until the next ephemeral one": ()},
        difference="An ephemeral checkpoint goes once any newer one is committed, as that one is as good for a resume.",
    ),
    *claims(
        f"{CALLBACK}: ephemeral_cooldown",
        check_cooldown,
        {
            "without a cooldown every interval saves": (None, [0, 2, 4, 5, 6, 8, 10]),
            "a cooldown of 2 steps leaves out the step after a permanent one": (2, [0, 2, 4, 5, 8, 10]),
            "a cooldown of 3 steps": (3, [0, 4, 5, 8, 10]),
            "a cooldown of 100 steps leaves out all ephemeral ones": (100, [0, 5, 10]),
        },
    ),
    *claims(
        f"{CALLBACK}: existing ephemeral checkpoints",
        check_ephemeral_of_an_earlier_run,
        {
            "ephemeral_only removes one of an earlier run": ("ephemeral_only", [4]),
            "all_non_permanent removes one of an earlier run": ("all_non_permanent", [4]),
        },
    ),
    *claims(
        f"{CALLBACK}: existing ephemeral checkpoints",
        check_ephemeral_of_an_earlier_run,
        {"with remove=never it is still removed when the next ephemeral one is saved": ("never", [2, 4])},
        difference="With remove=never nothing is ever removed, whatever the kind of a checkpoint and whoever saved it.",
    ),
    *claims(
        f"{CALLBACK}: existing ephemeral checkpoints",
        check_changed_interval,
        {"the kind of a checkpoint follows from its step and the present interval": ()},
        difference="The kind is saved in the manifest, so that a changed interval makes no ephemeral one permanent.",
    ),
    *claims(
        f"{CALLBACK}: remove=all_non_permanent",
        check_all_non_permanent,
        {"a permanent one at no multiple of the new interval goes": ()},
    ),
    *claims(
        f"{CALLBACK}: block_ephemeral_checkpoints",
        check_held_back,
        {"another callback holds ephemeral saves back, and permanent ones go on": ()},
    ),
    *claims(
        f"{CALLBACK}: fixed_steps",
        check_fixed,
        {
            f"steps {fixed} stay for good with remove={remove}": (fixed, remove)
            for fixed, remove in [([1, 5], "all_non_permanent"), ([1, 5], "ephemeral_only"), ([3], "all_non_permanent")]
        },
    ),
    *claims(
        f"{CALLBACK}: fixed_steps",
        check_fixed_and_ephemeral,
        {"a fixed step at a multiple of the ephemeral interval is permanent": ()},
    ),
    *claims(f"{CALLBACK}: post_train", check_final, {"the final save is synchronous, and made once": ()}),
    *claims(
        f"{CALLBACK}: post_train",
        check_final_is_saved_already,
        {"a final step that was saved already is not saved twice": ()},
    ),
    *claims(
        f"{CALLBACK}: save_async",
        check_in_the_background,
        {"at most one save is in flight, and the last is committed at the end": ()},
    ),
    *claims(
        f"{CALLBACK}: steps after the present one",
        check_going_back_is_refused,
        {"checkpoints of later steps than the present one are not removed": ()},
    ),
    *claims(
        f"{CALLBACK}: _remove_checkpoint",
        check_interrupted_removal,
        {"a removal that is interrupted leaves nothing that counts as a checkpoint": ()},
    ),
    *claims(f"{CALLBACK}: subclasses", check_subclass, {"a subclass of the saver takes its place": ()}),
    *claims(
        f"{CALLBACK}: subclasses",
        check_subclass_in_the_config,
        {"a subclass of the saver takes its place in a config": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
