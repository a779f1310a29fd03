"""Names of runs: one rule, checked before anything is written; each run is shown by `train top`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_cli.commands.main import main
from trainer_cli.commands.sweep import plan
from trainer_cli.config.compose import compose
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.runs.find_runs import RunFinder
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.start import start_new
from trainer_cli.trainer.trainer import Trainer

DIGITS = "+experiment=digits_mlp"
REFUSED = ("", " ", ".", "..", ".hidden", "a/.b", "a/..", "/a", "a/", "a//b", "-a", " a", "a /b", "a\n", "a\x1b[1m")


def start(name: str) -> None:
    """Begin a run of this name."""
    composed = compose([DIGITS, f'name="{name}"'])
    run = RunDir(composed.config.run_dir)
    start_new(run, composed)
    run.create("{}", [], {}).release()


def swept(name: str) -> None:
    plan([DIGITS, f'name="{name}"', "seed=1,2"], config_dir=None, config_name="config")


def in_python(name: str) -> None:
    Trainer(model=torch.nn.Linear(1, 1), optimizer=None, name=name)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("begin", [start, swept, in_python])
def test_a_name_that_is_no_folder_of_its_own_is_refused(
    begin: Callable[[str], None], name: str, empty_folder: Path
) -> None:
    with pytest.raises((ConfigError, UserError), match="name is") as refused:
        begin(name)
    assert refused.value.cure
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize("name", ["a", "group/a", "group/sub/a", "a b", "größe", "a.b", "a-b", "a[1]", "lr=0.1,wd=0"])
def test_any_other_name_is_a_run_that_is_found(name: str, empty_folder: Path) -> None:
    start(name)
    assert [run.path for run in RunFinder(Path("runs")).find()] == [Path("runs", name)]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("mine", "mine/child", "is inside the run runs/mine,"),
        ("mine", "mine/checkpoints/child", "is inside the run runs/mine,"),
        ("group/a", "group", "runs/group holds other runs, such as runs/group/a"),
    ],
)
@pytest.mark.parametrize("begin", [start, swept])
def test_a_run_inside_another_or_around_one_is_refused(
    begin: Callable[[str], None], first: str, second: str, message: str, empty_folder: Path
) -> None:
    start(first)
    if begin is swept and second == "group":
        return begin(second)  # The jobs are in group/sweep/, beside the other run.
    with pytest.raises(UserError, match=message) as refused:
        begin(second)
    assert "Choose " in str(refused.value)
    return None


def test_a_run_and_the_jobs_of_a_sweep_of_its_name_stand_beside_each_other(empty_folder: Path) -> None:
    start("mine")
    swept("mine")
    composed = compose([DIGITS, "name=mine", "run_dir='runs/mine/sweep/seed=1'"])
    start_new(RunDir(composed.config.run_dir), composed)


def test_a_plan_refuses_what_a_fit_would(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start("mine")
    assert main(["plan", DIGITS, "name=mine/child"]) == 2
    assert "is inside the run runs/mine" in capsys.readouterr().err
