"""The claims of the Trainer of Cerebras' ModelZoo about checkpoints, and about when a loop evaluates and saves."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Net, fit, make_trainer, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    CheckpointError,
    ConfigError,
    LoadOptions,
    SaveCheckpointState,
    Trainer,
    TrainingLoop,
    UserError,
    latest_checkpoint,
    make_sync_checkpointer,
)


def weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def check_refused(folder: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        CheckpointerCallback(folder / "checkpoints", **{field: value})


def check_unit_is_needed(folder: Path) -> None:
    check_refused(folder, "save_interval", "3")
    fit(folder, loop={"max_duration": 7}, save={"save_interval": "3st"}, val=None)
    assert saved(folder) == [3, 6, 7]


def check_kept(folder: Path, count: int | None, left: list[int]) -> None:
    fit(folder, loop={"max_duration": 5}, save={"save_interval": 1, "max_checkpoints": count}, val=None)
    assert saved(folder) == left


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def check_loaded_states(folder: Path, state: str) -> None:
    """Of another run's checkpoint only the chosen state is loaded, and the training starts at step 0."""
    first = fit(folder, loop={"max_duration": 2}, save={}, val=None, optimizer=adam).trainer
    second = make_trainer(optimizer=adam, seed=7)
    before = weights(second.model)
    second.load_checkpoint(folder / "checkpoints" / "step2", LoadOptions(states=[state]))
    (optimizer,) = second.optimizers.values()
    assert weights(second.model) == (weights(first.model) if state == "model" else before)
    assert bool(optimizer.state) == (state == "optimizer")
    assert second.progress.step == 0


def check_unknown_state(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        LoadOptions(states=["nonsense"])


def check_copies(folder: Path, every: int, copies: list[int]) -> None:
    saver = SaveCheckpointState(every=every)
    fit(folder, loop={"max_duration": 6}, save={"save_interval": 2}, callbacks=[saver], val=None, run_dir=folder)
    assert saved(folder, "states") == copies
    assert "optimizer" not in make_sync_checkpointer().load(folder / "states" / f"step{copies[0]}")


def check_wrong_copies(folder: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SaveCheckpointState(**{field: value})


def check_none_is_loaded(folder: Path) -> None:
    """A new start does not write over the checkpoints that are there; in a folder of its own it begins at step 0."""
    fit(folder, loop={"max_duration": 2}, save={}, val=None)
    with pytest.raises(UserError, match="does not go on from them"):
        fit(folder, loop={"max_duration": 3}, save={}, val=None, fit_arguments={"ckpt_path": None})
    assert saved(folder) == [2]
    new = {"folder": folder / "new"}
    run = fit(folder, loop={"max_duration": 3}, save=new, val=None, fit_arguments={"ckpt_path": None})
    assert run.trained.batches[0][0] == 0


def check_name(folder: Path) -> None:
    fit(folder, loop={"max_duration": 2}, save={"name": "checkpoint_{step}.mdl", "save_interval": 1}, val=None)
    assert latest_checkpoint(folder / "checkpoints").name == "checkpoint_2.mdl"


class Wide(Net):
    """A net with one more parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.full((1,), 3.0))


def check_strictness(folder: Path, strict: bool) -> None:
    first = fit(folder, loop={"max_duration": 1}, save={}, val=None).trainer
    other = make_trainer(model=Wide, seed=5)
    load = LoadOptions(states=["model"], strict=strict)
    path = folder / "checkpoints" / "step1"
    if strict:
        with pytest.raises(UserError, match="more"):
            other.load_checkpoint(path, load)
        return
    other.load_checkpoint(path, load)
    assert weights(other.model) == {**weights(first.model), "more": [3.0]}


def check_latest_is_a_number(folder: Path) -> None:
    fit(folder, loop={"max_duration": 10}, save={"save_interval": 9}, val=None)
    assert saved(folder) == [9, 10]
    assert latest_checkpoint(folder / "checkpoints").name == "step10"


def check_step_0(folder: Path, is_saved: bool) -> None:
    fit(folder, loop={"max_duration": 1}, save={"pre_train_checkpoint": is_saved}, val=None)
    assert saved(folder) == ([0, 1] if is_saved else [1])


def check_newer_version(folder: Path) -> None:
    fit(folder, loop={"max_duration": 1}, save={}, val=None)
    path = folder / "checkpoints" / "step1"
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99"):
        make_trainer().load_checkpoint(path)


# Of the loop


def check_evaluations(folder: Path, interval: int | str | None, duration: int, steps: list[int]) -> None:
    run = fit(loop={"max_duration": duration, "eval_interval": interval}, batches=5)
    assert run.evaluated.steps == steps


def check_wrong_loop(folder: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainingLoop(**{field: value})


def check_saves(folder: Path, interval: int | None, duration: int, steps: list[int]) -> None:
    fit(folder, loop={"max_duration": duration}, save={"save_interval": interval}, val=None)
    assert saved(folder) == steps


def check_accumulation(folder: Path) -> None:
    run = fit(loop={"max_duration": 3, "grad_accum_steps": 2}, batches=6, val=None)
    assert run.result.step == 3
    assert len(run.trained.batches) == 6


class StopAt(Callback):
    """Stops the training after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("a signal", finished=False)


def check_resumed_evaluations(folder: Path) -> None:
    straight = fit(loop={"max_duration": 10, "eval_interval": 3}).evaluated.steps
    for stop in (4, 5, 6, 7):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        attempts = [
            fit(folder, loop={"max_duration": 10, "eval_interval": 3}, save={}, callbacks=callbacks).evaluated.steps
            for callbacks in ([StopAt(stop)], [])
        ]
        assert [*itertools.chain(*attempts)] == straight == [3, 6, 9, 10]


CHECKPOINT = "callbacks/checkpoint.py"
SCHEDULE = "loop.py, run_schedule.py"
CLAIMS: list[Claim] = [
    *claims(
        f"{CHECKPOINT}: Checkpoint(steps=)",
        check_refused,
        {"-1 is refused": ("save_interval", -1), "1.5 is refused": ("save_interval", 1.5)},
    ),
    *claims(
        f"{CHECKPOINT}: Checkpoint(steps=)",
        check_unit_is_needed,
        {"the string '3' is refused": ()},
        difference="It is refused, too, but since a string needs its unit: '3st' is three steps.",
    ),
    *claims(
        f"{CHECKPOINT}: KeepNCheckpoints",
        check_kept,
        {
            "the newest one is kept": (1, [5]),
            "the newest three are kept": (3, [3, 4, 5]),
            "without a number all are kept": (None, [1, 2, 3, 4, 5]),
        },
    ),
    *claims(
        f"{CHECKPOINT}: KeepNCheckpoints errors",
        check_refused,
        {f"n={value!r} is refused": ("max_checkpoints", value) for value in ("2", -1, 0, 1.5)},
    ),
    *claims(
        f"{CHECKPOINT}: LoadCheckpointStates",
        check_loaded_states,
        {"the model alone is loaded": ("model",), "the optimizer alone is loaded": ("optimizer",)},
    ),
    *claims(
        f"{CHECKPOINT}: LoadCheckpointStates",
        check_unknown_state,
        {"a state that does not exist is refused": ()},
    ),
    *claims(
        f"{CHECKPOINT}: SaveCheckpointState",
        check_copies,
        {"each checkpoint is copied for k=1": (2, [2, 4, 6]), "every second one and the last for k=2": (4, [4, 6])},
    ),
    *claims(
        f"{CHECKPOINT}: SaveCheckpointState errors",
        check_wrong_copies,
        {
            "every=0 is refused": ("every", 0),
            "no states are refused": ("states", []),
            "a state that does not exist is refused": ("states", ["nonsense"]),
        },
    ),
    *claims(
        f"{CHECKPOINT}: autoload_last_checkpoint=False",
        check_none_is_loaded,
        {"a training starts at step 0, and not over what is there": ()},
    ),
    *claims(
        f"{CHECKPOINT}: checkpoint_name",
        check_refused,
        {
            f"the name {name} is refused": ("name", name)
            for name in ("checkpoint.mdl", "checkpoint_{epoch}", "checkpoint_{stp}")
        },
    ),
    *claims(f"{CHECKPOINT}: checkpoint_name", check_name, {"the name checkpoint_{step}.mdl is used": ()}),
    *claims(
        f"{CHECKPOINT}: disable_strict_checkpoint_loading",
        check_strictness,
        {
            "a parameter that the checkpoint lacks is refused": (True,),
            "without strictness it keeps its value": (False,),
        },
    ),
    *claims(f"{CHECKPOINT}: get_latest_checkpoint", check_latest_is_a_number, {"step 10 comes after step 9": ()}),
    *claims(
        f"{CHECKPOINT}: save_initial_checkpoint",
        check_step_0,
        {"step 0 is saved": (True,), "step 0 is not saved": (False,)},
    ),
    *claims(
        f"{CHECKPOINT}: strict_version",
        check_newer_version,
        {"a checkpoint of a newer version of the format is refused, with the version": ()},
    ),
    *claims(
        f"{SCHEDULE}: _build_train_schedule",
        check_evaluations,
        {
            "every step of three": (1, 3, [1, 2, 3]),
            "an interval longer than the training evaluates at its end": (20, 10, [10]),
            "an interval of 3 in 10 steps": (3, 10, [3, 6, 9, 10]),
            "an interval of 5 in 10 steps": (5, 10, [5, 10]),
            "a fifth of an epoch of 5 steps": ("0.2ep", 10, list(range(1, 11))),
            "half an epoch of 5 steps": ("0.5ep", 10, [3, 5, 8, 10]),
            "a whole epoch of 5 steps": ("1ep", 10, [5, 10]),
        },
    ),
    *claims(
        f"{SCHEDULE}: _build_train_schedule",
        check_evaluations,
        {"without an interval nothing is evaluated": (None, 10, [10])},
        difference="A training with validation data is always evaluated at its end; leave the loader out for none.",
    ),
    *claims(
        f"{SCHEDULE}: _build_train_schedule errors",
        check_wrong_loop,
        {f"eval_interval={value!r} is refused": ("eval_interval", value) for value in (-1, 0, "0ep", 1.5, "x")},
    ),
    *claims(
        f"{SCHEDULE}: _validate_num_steps",
        check_wrong_loop,
        {
            f"{field}={value} is refused": (field, value)
            for field, value in [
                ("eval_steps", 0),
                ("grad_accum_steps", 0),
                ("max_duration", -1),
                ("max_duration", 0),
                ("steps_per_epoch", 0),
            ]
        },
    ),
    *claims(
        f"{SCHEDULE}: checkpoint_schedule",
        check_saves,
        {
            "every step of three": (1, 3, [1, 2, 3]),
            "an interval of the whole training": (10, 10, [10]),
            "an interval longer than the training": (20, 10, [10]),
            "an interval of 3 in 10 steps": (3, 10, [3, 6, 9, 10]),
            "no interval saves at the end": (None, 10, [10]),
        },
    ),
    *claims(
        f"{SCHEDULE}: grad_accum",
        check_accumulation,
        {"the step counts optimizer steps, not batches": ()},
    ),
    *claims(
        f"{SCHEDULE}: resume inside an evaluation stretch",
        check_resumed_evaluations,
        {"a resumed training evaluates at the steps of one that went straight through": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
