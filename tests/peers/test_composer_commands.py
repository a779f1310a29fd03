"""The claims of Composer's own tests that are about a whole run, started again or beside another: by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from composer_training import names, run_train
from peer_claims import Claim, claims, each, try_claim

import trainer_cli as tc

SHORT = ("loop.max_duration=2", "checkpoint.save_interval=1")


def model_of(path: Path | str) -> dict[str, Any]:
    model: dict[str, Any] = tc.make_sync_checkpointer().read(Path(path), ["model"])["model"]
    return model


def are_same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def check_started_again(folder: Path, form: str, has_slash: bool) -> None:
    """The same command again keeps the weights; a checkpoint to start from, and what to load of it, do not count."""
    overrides = (
        "name=first",
        f"checkpoint.folder={'saved/here/' if has_slash else 'saved'}",
        *(f"checkpoint.{option}" for option in form.split()),
        "loop.max_duration=2",
    )
    assert run_train(*overrides) == 0
    (before,) = Path().rglob("step2")
    assert before == Path("saved/here/step2" if has_slash else "saved/step2")
    saved = model_of(before)
    assert run_train(*overrides, "ckpt=ignore_me.pt", "load.ignore_keys=[*]") == 0
    assert are_same(model_of(before), saved)
    assert run_train("name=other", "loop.max_duration=2", "seed=9", "ckpt=ignore_me.pt") != 0


def check_run_name_in_folder(folder: Path) -> None:
    assert run_train("name=first", "checkpoint.folder='{run_name}/mine'", *SHORT) == 0
    assert names("first/mine") == ["step0", "step1", "step2"]
    assert not Path("{run_name}").exists()
    with pytest.raises(tc.UserError, match="run_name"):
        tc.CheckpointerCallback("{run_name}/mine")


def check_loaded_from_named_folder(folder: Path) -> None:
    assert run_train("name=first", "checkpoint.folder='{run_name}/mine'", *SHORT) == 0
    overrides = ("ckpt=first/mine/step2", "checkpoint.pre_train_checkpoint=true", *SHORT)
    assert run_train("name=second", "seed=9", *overrides) == 0
    assert are_same(model_of("runs/second/checkpoints/step0"), model_of("first/mine/step2"))


def check_runs_in_one_folder(folder: Path) -> None:
    short = ("loop.max_duration=1", "checkpoint.pre_train_checkpoint=false")
    assert run_train("name=first", "checkpoint.folder=saved", *short) == 0
    saved = model_of("saved/step1")
    assert run_train("name=second", "seed=9", "checkpoint.folder=saved", *short) == 4
    assert names("saved") == ["step1"]
    assert are_same(model_of("saved/step1"), saved)
    filled = ("checkpoint.folder='{run_name}/saved'", *short)
    assert [run_train(f"name={name}", *filled) for name in ("one", "two")] == [0, 0]
    assert names("one/saved") == names("two/saved") == ["step1"]


def check_chosen_states(folder: Path, states: str) -> None:
    """A run that begins with these states of step 2 of another run; with the weights, it begins with those."""
    assert run_train("name=first", *SHORT) == 0
    overrides = ("ckpt=runs/first/checkpoints/step2", f"load.states=[{states}]", "checkpoint.pre_train_checkpoint=true")
    assert run_train("name=second", *overrides, "loop.max_duration=3") == 0
    # With `progress`, it goes on from step 2.
    assert names("runs/second/checkpoints") == ["step2", "step3"]
    first, second = model_of("runs/first/checkpoints/step2"), model_of("runs/second/checkpoints/step2")
    assert are_same(first, second) is (states == "all" or "model" in states)


CLAIMS: list[Claim] = [
    *claims(
        "save_folder='{run_name}/…' for two runs",
        check_runs_in_one_folder,
        {"Checkpoints of two runs that name the same folder do not mix": ()},
    ),
    *claims(
        "test_checkpoint: TestCheckpointLoading.test_autoresume",
        check_started_again,
        {
            f"The same command again resumes ({form.split()[0]}{', in a folder with a slash' if has_slash else ''}), "
            "whatever else is named to load": (form, has_slash)
            for form in ("format=archive compression=gz", "format=huggingface", "format=tensors", "format=torch_file")
            for has_slash in (False, True)
        },
    ),
    *claims(
        "test_checkpoint: test_checkpoint_saver_folder_filename_path, run name",
        check_run_name_in_folder,
        {"The run's name is filled into the folder": ()},
    ),
    *claims(
        "test_checkpoint: test_format_load_path",
        check_loaded_from_named_folder,
        {"A checkpoint in a folder with the run's name starts another run": ()},
    ),
    *claims(
        "test_checkpoint: test_load_ignore_keys, by the command",
        check_chosen_states,
        {
            f"A run begins with {states} of another": (states,)
            for states in (
                "all",
                "model,optimizer,schedulers,progress,callbacks",
                "model,optimizer,schedulers,progress,rng",
                "optimizer,schedulers,progress,callbacks,rng",
            )
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
