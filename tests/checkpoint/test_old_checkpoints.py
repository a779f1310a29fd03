"""Checkpoints that an older commit wrote are verified, evaluated and resumed as if this code had written them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from old_runs import ALONE, COMPONENTS, ONE_PROCESS, TWO_PROCESSES, fit_alone, fit_on_two_ranks, unpack

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.commands.command_line import main

ALL = [*ONE_PROCESS, *TWO_PROCESSES, *COMPONENTS]
SAVED, END = "checkpoints/step4", "checkpoints/step8"
STRAIGHT = {"straight": ALONE}
STRAIGHT_ON_TWO = {f"straight_{name}": TWO_PROCESSES[name] for name in ("ddp", "fsdp")}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The old runs, stopped at step 4, and a run of this code that goes straight to step 8."""
    folder = tmp_path_factory.mktemp("old")
    unpack(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit_alone("straight", *ALONE)
        for name, overrides in COMPONENTS.items():
            fit_alone(f"straight_{name}", *overrides)
        yield folder


def state(checkpoint: Path) -> dict[str, Any]:
    """The whole state, that of each rank too, but for what old checkpoints lack: the seconds that training took, where
    logs ended, and changes of `requires_grad`."""
    tree = dict(make_sync_checkpointer().read(checkpoint))
    tree.pop("log_marks", None)
    tree.pop("requires_grad", None)
    del tree["progress"]["seconds"], tree["progress"]["last_seconds"]
    return tree


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: leaf for part, value in items for key, leaf in leaves(value, f"{name}/{part}").items()}
    return {name: torch.as_tensor(tree) if isinstance(tree, np.ndarray) else tree}


def is_equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def is_close(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor | float):
        return bool(first == second)
    one, other = (torch.as_tensor(value).double() for value in (first, second))
    return torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def differing(first: Any, second: Any, same: Callable[[Any, Any], bool] = is_equal) -> list[str]:
    """The names of what two states do not share."""
    one, other = leaves(first), leaves(second)
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not same(value, other[name])]


def computes_as_the_writer(old: Path, straight: str, name: str) -> bool:
    """Whether this machine makes the steps up to the save bit for bit as the machine that wrote the checkpoint."""
    return not differing(state(old / straight / SAVED), state(old / name / SAVED))


def assert_resumed(old: Path, name: str, straight: str) -> None:
    log = (old / name / "train.log").read_text()
    assert "resuming at step 4 from step4" in log
    assert "step4 is not" not in log
    same = is_equal if computes_as_the_writer(old, straight, name) else is_close
    found, wanted = state(old / name / END), state(old / straight / END)
    assert len(leaves(wanted)) > 30
    assert differing(found, wanted, same) == []


@pytest.mark.parametrize("name", ALL)
def test_an_old_checkpoint_is_verified_loaded_and_evaluated(
    old: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", name]) == 0
    assert "1 of 1 valid" in capsys.readouterr().out
    assert make_sync_checkpointer().read(old / name / SAVED)["progress"]["step"] == 4
    assert main(["validate", f"ckpt={name}@step4", f"validate.folder=of_{name}"]) == 0
    row = json.loads((old / f"of_{name}/validation.jsonl").read_text())
    logged = [json.loads(line) for line in (old / name / "metrics.jsonl").read_text().splitlines()]
    for metric in {"val/loss", "val/accuracy"} & logged[3].keys():
        assert row[metric] == pytest.approx(logged[3][metric], rel=1e-6)
    assert "val/loss" in logged[3]


@pytest.mark.parametrize("name", [*ONE_PROCESS, *COMPONENTS])
def test_an_old_run_resumes_as_if_it_had_never_stopped(old: Path, name: str) -> None:
    fit_alone(name, *{**ONE_PROCESS, **COMPONENTS}[name])
    assert_resumed(old, name, f"straight_{name}" if name in COMPONENTS else "straight")


def test_an_old_run_of_two_ranks_resumes_as_if_it_had_never_stopped(old: Path) -> None:
    fit_on_two_ranks({**STRAIGHT_ON_TWO, **TWO_PROCESSES})
    for name in TWO_PROCESSES:
        assert_resumed(old, name, f"straight_{name.partition('_')[0]}")


def test_this_machine_computes_as_the_one_that_wrote(old: Path) -> None:
    if not computes_as_the_writer(old, "straight", "tensors"):
        pytest.skip("other arithmetic here: old runs were compared to 1e-6, not bit for bit")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the code that Python 3.11 compiles enters the old digests")
@pytest.mark.parametrize("name", ["tensors", *COMPONENTS])
def test_the_settings_of_an_old_schedule_are_still_the_same(old: Path, name: str) -> None:
    straight = f"straight_{name}" if name in COMPONENTS else "straight"
    saved, now = (state(old / run / SAVED)["schedulers"]["scheduler"]["settings"] for run in (name, straight))
    assert now == saved
