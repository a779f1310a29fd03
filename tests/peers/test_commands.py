"""Whole runs by the command: started again, or beside another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from classifier import names, run_train

import trainer_cli as tc

SHORT = ("loop.max_duration=2", "checkpoint.save_interval=1")


def model_of(path: Path | str) -> dict[str, Any]:
    model: dict[str, Any] = tc.make_sync_checkpointer().read(Path(path), ["model"])["model"]
    return model


def are_same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("form", "saved_in"),
    [
        ("format=archive compression=gz", "saved"),
        ("format=huggingface", "saved/here/"),
        ("format=tensors", "saved/here/"),
        ("format=torch_file", "saved"),
    ],
)
def test_the_same_command_resumes(folder: Path, form: str, saved_in: str) -> None:
    """The same command again keeps the weights; a checkpoint to start from, and what to load of it, do not count."""
    overrides = (
        "name=first",
        f"checkpoint.folder={saved_in}",
        *(f"checkpoint.{option}" for option in form.split()),
        "loop.max_duration=2",
    )
    assert run_train(*overrides) == 0
    (before,) = Path().rglob("step2")
    assert before == Path(saved_in, "step2")
    saved = model_of(before)
    assert run_train(*overrides, "ckpt=ignore_me.pt", "load.ignore_keys=[*]") == 0
    assert are_same(model_of(before), saved)
    assert run_train("name=other", "loop.max_duration=2", "seed=9", "ckpt=ignore_me.pt") != 0


def test_the_run_name_is_filled_into_the_folder(folder: Path) -> None:
    assert run_train("name=first", "checkpoint.folder='{run_name}/mine'", *SHORT) == 0
    assert names("first/mine") == ["step0", "step1", "step2"]
    assert not Path("{run_name}").exists()
    with pytest.raises(tc.UserError, match="run_name"):
        tc.CheckpointerCallback("{run_name}/mine")


def test_a_checkpoint_in_a_folder_with_the_run_name_starts_another_run(folder: Path) -> None:
    assert run_train("name=first", "checkpoint.folder='{run_name}/mine'", *SHORT) == 0
    overrides = ("ckpt=first/mine/step2", "checkpoint.pre_train_checkpoint=true", *SHORT)
    assert run_train("name=second", "seed=9", *overrides) == 0
    assert are_same(model_of("runs/second/checkpoints/step0"), model_of("first/mine/step2"))


def test_checkpoints_of_two_runs_that_name_the_same_folder_do_not_mix(folder: Path) -> None:
    short = ("loop.max_duration=1", "checkpoint.pre_train_checkpoint=false")
    assert run_train("name=first", "checkpoint.folder=saved", *short) == 0
    saved = model_of("saved/step1")
    assert run_train("name=second", "seed=9", "checkpoint.folder=saved", *short) == 4
    assert names("saved") == ["step1"]
    assert are_same(model_of("saved/step1"), saved)
    filled = ("checkpoint.folder='{run_name}/saved'", *short)
    assert [run_train(f"name={name}", *filled) for name in ("one", "two")] == [0, 0]
    assert names("one/saved") == names("two/saved") == ["step1"]


@pytest.mark.parametrize("states", ["all", "optimizer,schedulers,progress,callbacks,rng"])
def test_a_run_begins_with_chosen_states_of_another(states: str) -> None:
    """A run that begins with these states of step 2 of another run; with the weights, it begins with those."""
    assert run_train("name=first", *SHORT) == 0
    overrides = ("ckpt=runs/first/checkpoints/step2", f"load.states=[{states}]", "checkpoint.pre_train_checkpoint=true")
    assert run_train("name=second", *overrides, "loop.max_duration=3") == 0
    # With `progress`, it goes on from step 2.
    assert names("runs/second/checkpoints") == ["step2", "step3"]
    first, second = model_of("runs/first/checkpoints/step2"), model_of("runs/second/checkpoints/step2")
    assert are_same(first, second) is (states == "all")
