"""The start of a run whose checkpoints are copied: which checkpoint it resumes, and which folders are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.jobs.sweep import plan_jobs
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import Composed, compose
from trainer_cli.errors import ConfigError, RunDirectoryError
from trainer_cli.running.fitting import fit
from trainer_cli.running.plan_view import as_dict, shown
from trainer_cli.running.planning import plan
from trainer_cli.running.start import start_existing, start_new
from trainer_cli.runs.run_dir import RunDir

RUN = [
    "+experiment=digits_mlp", "name=mine", "loop.max_duration=6", "loop.eval_interval=null",
    "checkpoint.save_interval=1", "checkpoint.copy_to.folder='copies/{run_name}'",
    "loggers=none", "logging.console=off",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run was trained and stopped, with copies of steps 2, 4 and 6."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        # In parts, each of which ends after its copy: a copy that has not begun gives way to the next.
        stops: tuple[list[str], ...] = (["loop.hard_stop=2"], ["loop.hard_stop=4"], [])
        assert [fit(composed("checkpoint.copy_to.every=2", *stop)) for stop in stops] == [0, 0, 0]
        assert [entry.step for entry in Catalog.of(place / "copies/mine").entries()] == [2, 4, 6]
    return place


def composed(*more: str) -> Composed:
    return compose([*RUN, *more])


def start(*more: str) -> tuple[str, int, str]:
    """The folder and the step that a fit would resume, and the reason."""
    longer = composed("checkpoint.copy_to.every=2", "loop.max_duration=9", *more)
    run = RunDir("runs/mine")
    found: Any = (start_existing if run.exists_as_run() else start_new)(run, longer, read_only=True)
    return (str(found.folder), found.entry.step, found.reason)


@pytest.mark.parametrize(
    ("lost", "more", "folder", "step", "reason"),
    [
        ([], (), "runs/mine/checkpoints", 6, "the newest valid checkpoint of runs/mine"),
        (["runs/mine/checkpoints/step6"], (), "copies/mine", 6, "the newest valid checkpoint of copies/mine"),
        (["runs/mine/checkpoints"], (), "copies/mine", 6, "the newest valid checkpoint of copies/mine"),
        (["runs/mine/checkpoints"], ("resume=must",), "copies/mine", 6, "the newest valid checkpoint of copies/mine"),
        (["runs/mine"], (), "copies/mine", 6, "runs/mine is gone, but copies/mine holds its checkpoints"),
        (["runs/mine", "copies/mine/step6"], (), "copies/mine", 4, "runs/mine is gone, but copies/mine holds"),
        (["copies"], (), "runs/mine/checkpoints", 6, "the newest valid checkpoint of runs/mine"),
        ([], ("resume=copies/mine/step4", "checkpoint.newer=trash"), "copies/mine", 4, "it was named"),
    ],
)
def test_a_start_takes_the_newest_of_both_folders(
    trained: Path, here: Path, lost: list[str], more: tuple[str, ...], folder: str, step: int, reason: str
) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    for path in lost:
        shutil.rmtree(here / path)
    found = start(*more)
    assert (*found[:2], found[2].startswith(reason)) == (folder, step, True), found
    assert not list((here / "copies").glob("*/.tmp*"))


def test_a_start_names_the_folder_that_has_the_checkpoints(here: Path) -> None:
    elsewhere = ("checkpoint.folder=elsewhere/mine", "checkpoint.copy_to.folder=null", "checkpoint.copy_to.every=1")
    assert fit(compose([*RUN, *elsewhere])) == 0
    reason = start(*elsewhere)[2]
    assert reason == "the newest valid checkpoint of elsewhere/mine"


def test_a_config_may_not_change_while_only_the_copies_are_left(trained: Path, here: Path) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    shutil.rmtree(here / "runs/mine/checkpoints")
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        start("optimizer.lr=0.5")
    assert start("checkpoint.copy_to.every=5")[1] == 6


def test_a_run_trains_on_from_its_copies_and_they_are_checkpoints_like_others(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    shutil.rmtree(here / "runs/mine")
    assert fit(composed("checkpoint.copy_to.every=2", "loop.max_duration=9")) == 0
    assert [entry.step for entry in Catalog.of(here / "runs/mine/checkpoints").entries()] == [7, 8, 9]
    copied = [entry.step for entry in Catalog.of(here / "copies/mine").entries()]
    # Step 9 takes the place of step 8 if it comes before that copy has begun.
    assert copied in ([2, 4, 6, 8, 9], [2, 4, 6, 9])
    assert main(["ckpt", "verify", "copies/mine"]) == 0
    assert "step9" in capsys.readouterr().out
    assert main(["fit", *RUN, "name=fork", "ckpt=copies/mine/step9", "loop.max_duration=1"]) == 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (["copy_to.folder=runs/mine/checkpoints"], ConfigError, "in the folder of the checkpoints"),
        (["copy_to.folder=runs/mine/checkpoints/all"], ConfigError, "in the folder of the checkpoints"),
        (["folder=x", "copy_to.folder=x/y"], ConfigError, "in the folder of the checkpoints, x"),
        (["folder=s3://b/x", "copy_to.folder=s3://b/x"], ConfigError, "in the folder of the checkpoints, s3://b/x"),
        (["copy_to.folder=copies/mine"], RunDirectoryError, "holds checkpoints of another run, such as step6"),
    ],
)
def test_a_folder_that_copies_cannot_have_is_refused_at_the_start_and_by_the_plan(
    trained: Path, here: Path, settings: list[str], error: type[Exception], message: str
) -> None:
    shutil.copytree(trained / "copies", here / "copies")
    made = compose([*RUN[:1], "name=mine", *(f"checkpoint.{one}" for one in settings), "run_dir=runs/mine", "seed=9"])
    if error is RunDirectoryError:
        made = compose([*RUN[:1], "name=other", "checkpoint.copy_to.folder=copies/mine"])
    for begin in (plan, fit):
        with pytest.raises(error, match=message):
            begin(made)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "copied to      copies/mine: each checkpoint"),
        (("checkpoint.copy_to.every=3",), "copied to      copies/mine: one checkpoint of 3, and the last"),
        (("checkpoint.enabled=false",), None),
        (("checkpoint.copy_to.folder=null",), None),
    ],
)
def test_the_plan_says_what_is_copied(here: Path, more: tuple[str, ...], line: str | None) -> None:
    planned = plan(composed(*more))
    assert ("copied to" in shown(planned)) is (line is not None)
    assert line is None or line in shown(planned)
    assert (as_dict(planned)["copies"] is None) is (line is None)


def test_jobs_of_a_sweep_with_one_folder_of_copies_are_refused_and_so_is_any_other_variable(here: Path) -> None:
    arguments = ["+experiment=digits_mlp", "seed=1,2"]
    with pytest.raises(ConfigError, match=r"seed=1 and seed=2 both save in one") as caught:
        plan_jobs([*arguments, "checkpoint.copy_to.folder=one"])
    assert "checkpoint.copy_to.folder" in str(caught.value.location) + str(caught.value)
    assert len(plan_jobs([*arguments, "checkpoint.copy_to.folder=of-${seed}"])) == 2
    with pytest.raises(ConfigError, match=r"copy_to\.folder is .*may have \{run_name\} alone"):
        compose([*RUN[:1], "checkpoint.copy_to.folder='all/{step}'"])
