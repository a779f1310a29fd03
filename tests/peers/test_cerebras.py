"""The claims of the Trainer of Cerebras' ModelZoo about checkpoints, and about when a loop evaluates and saves."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import fit, make_trainer, saved
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("save_interval", -1),
        ("save_interval", 1.5),
        *[("max_checkpoints", value) for value in ("2", -1, 0, 1.5)],
        *[("name", name) for name in ("checkpoint.mdl", "checkpoint_{epoch}", "checkpoint_{stp}")],
    ],
)
def test_a_wrong_field_of_the_saver_is_refused(folder: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        CheckpointerCallback(folder / "checkpoints", **{field: value})


def test_a_string_needs_its_unit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="save_interval"):
        CheckpointerCallback(folder / "checkpoints", save_interval="3")
    fit(folder, loop={"max_duration": 7}, save={"save_interval": "3st"}, val=None)
    assert saved(folder) == [3, 6, 7]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize("state", ["model", "optimizer"])
def test_one_state_of_another_run_is_loaded_alone(folder: Path, state: str) -> None:
    """Of another run's checkpoint only the chosen state is loaded, and the training starts at step 0."""
    first = fit(folder, loop={"max_duration": 2}, save={}, val=None, optimizer=adam).trainer
    second = make_trainer(optimizer=adam, seed=7)
    before = weights(second.model)
    second.load_checkpoint(folder / "checkpoints" / "step2", LoadOptions(states=[state]))
    (optimizer,) = second.optimizers.values()
    assert weights(second.model) == (weights(first.model) if state == "model" else before)
    assert bool(optimizer.state) == (state == "optimizer")
    assert second.progress.step == 0


def test_a_state_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        LoadOptions(states=["nonsense"])


@pytest.mark.parametrize(("every", "copies"), [(2, [2, 4, 6]), (4, [4, 6])])
def test_states_are_copied_into_a_folder_of_their_own(folder: Path, every: int, copies: list[int]) -> None:
    saver = SaveCheckpointState(every=every)
    fit(folder, loop={"max_duration": 6}, save={"save_interval": 2}, callbacks=[saver], val=None, run_dir=folder)
    assert saved(folder, "states") == copies
    assert "optimizer" not in make_sync_checkpointer().load(folder / "states" / f"step{copies[0]}")


@pytest.mark.parametrize(("field", "value"), [("every", 0), ("states", []), ("states", ["nonsense"])])
def test_wrong_copies_of_states_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        SaveCheckpointState(**{field: value})


def test_a_training_starts_at_step_0_and_not_over_what_is_there(folder: Path) -> None:
    """A new start does not write over the checkpoints that are there; in a folder of its own it begins at step 0."""
    fit(folder, loop={"max_duration": 2}, save={}, val=None)
    with pytest.raises(UserError, match="does not go on from them"):
        fit(folder, loop={"max_duration": 3}, save={}, val=None, fit_arguments={"ckpt_path": None})
    assert saved(folder) == [2]
    new = {"folder": folder / "new"}
    run = fit(folder, loop={"max_duration": 3}, save=new, val=None, fit_arguments={"ckpt_path": None})
    assert run.trained.batches[0][0] == 0


def test_the_name_checkpoint_step_mdl_is_used(folder: Path) -> None:
    fit(folder, loop={"max_duration": 2}, save={"name": "checkpoint_{step}.mdl", "save_interval": 1}, val=None)
    assert latest_checkpoint(folder / "checkpoints").name == "checkpoint_2.mdl"


def test_a_newer_version_of_the_format_is_refused(folder: Path) -> None:
    fit(folder, loop={"max_duration": 1}, save={}, val=None)
    path = folder / "checkpoints" / "step1"
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99"):
        make_trainer().load_checkpoint(path)


@pytest.mark.parametrize(
    ("interval", "duration", "steps"),
    [
        (1, 3, [1, 2, 3]),
        (20, 10, [10]),
        (3, 10, [3, 6, 9, 10]),
        (5, 10, [5, 10]),
        ("0.2ep", 10, list(range(1, 11))),
        ("0.5ep", 10, [3, 5, 8, 10]),
        ("1ep", 10, [5, 10]),
        (None, 10, [10]),
    ],
)
def test_steps_of_evaluations(interval: int | str | None, duration: int, steps: list[int]) -> None:
    run = fit(loop={"max_duration": duration, "eval_interval": interval}, batches=5)
    assert run.evaluated.steps == steps


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("eval_interval", value) for value in (-1, 0, "0ep", 1.5, "x")],
        ("eval_steps", 0),
        ("grad_accum_steps", 0),
        ("max_duration", -1),
        ("max_duration", 0),
        ("steps_per_epoch", 0),
    ],
)
def test_a_wrong_field_of_the_loop_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainingLoop(**{field: value})


class StopAt(Callback):
    """Stops the training after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == self.step:
            trainer.stop("a signal", finished=False)


def test_a_resumed_run_evaluates_at_the_same_steps(folder: Path) -> None:
    straight = fit(loop={"max_duration": 10, "eval_interval": 3}).evaluated.steps
    for stop in (4, 5, 6, 7):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        attempts = [
            fit(folder, loop={"max_duration": 10, "eval_interval": 3}, save={}, callbacks=callbacks).evaluated.steps
            for callbacks in ([StopAt(stop)], [])
        ]
        assert [*itertools.chain(*attempts)] == straight == [3, 6, 9, 10]
