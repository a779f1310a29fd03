"""What a fit without an experiment trains: the shipped default only where the project has nothing of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import EXPERIMENTS
from printed import message

from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError
from trainer_cli.processes.fit import compose_fit

TRAINS_OURS = "# @package _global_\ndefaults:\n  - override /model: line\n  - override /data: points\n"


def project(root: Path, **files: str) -> Path:
    """A project with the experiments `mine` and `other`, a model and data, and these files in its configs."""
    texts = {
        "experiment/mine": TRAINS_OURS,
        "experiment/other": TRAINS_OURS,
        "model/line": "_target_: ours.Thing\n",
        "data/points": "_target_: ours.Thing\n",
        **files,
    }
    for name, text in texts.items():
        file = root / "configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "ours.py").write_text("class Thing:\n    def __init__(self, **settings): ...\n")
    return root


@pytest.mark.parametrize(
    "words", [["fit"], ["fit", "optimizer.lr=0.1"], ["fit", "-m", "seed=1,2"], ["plan"], ["check", "resume"]]
)
def test_a_command_that_would_train_the_shipped_default_in_a_project_asks_which(
    empty_folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    project(empty_folder)
    before = sorted(empty_folder.rglob("*"))
    assert main(words) == 2
    assert message(capsys.readouterr().err) == (
        "no experiment is chosen, and without one the model and data are the shipped ones, not this "
        "project's (configs/experiment). Choose one: mine, other; or a model or data: model=NAME, data=NAME."
    )
    assert sorted(empty_folder.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("verb", ["fit", "plan"])
@pytest.mark.parametrize("place", ["runs/x", "runs/x@step5", "runs/x@best", "runs/x/checkpoints/step5"])
def test_a_run_to_resume_that_does_not_exist_is_named_before_an_experiment_is_asked_for(
    empty_folder: Path, verb: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project(empty_folder)
    assert main([verb, f"resume={place}"]) == 2
    assert message(capsys.readouterr().err).startswith(f"resume={place}: there is no such directory")


@pytest.mark.parametrize("place", ["runs/y", ".", "configs/../"])
def test_a_folder_to_resume_that_holds_no_run_is_named(
    empty_folder: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project(empty_folder)
    Path("runs/y/notes").mkdir(parents=True)
    assert main(["fit", f"resume={place}"]) == 2
    refused = f"resume={place}: {place} holds no run, and is not a checkpoint"
    assert message(capsys.readouterr().err).startswith(refused)


DEFAULTS = "defaults:\n  - train_schema\n  - model: {}\n  - data: {}\n  - optimizer: adam\n  - _self_\n"
SHIPPED = DEFAULTS.format("mlp", "digits")
CHOSEN: dict[str, tuple[list[str], dict[str, str]]] = {
    "an experiment": (["experiment=mine"], {}),
    "a shipped experiment": (["+experiment=digits"], {}),
    "a model": (["model=line"], {}),
    "data": (["data._target_=ours.Thing"], {}),
    "the shipped model and data by name": (["model=mlp", "data=digits"], {}),
    "a target and data": (["model._target_=ours.Thing", "data=points"], {}),
    "by the project's config": ([], {"config": DEFAULTS.format("line", "points")}),
    "an experiment by the project's config": ([], {"config": f"{SHIPPED}  - experiment: mine\n"}),
    "files that take the place of the shipped ones": (
        [],
        {"model/mlp": "_target_: ours.Thing\n", "data/digits": "_target_: ours.Thing\n"},
    ),
}


@pytest.mark.parametrize(("words", "files"), CHOSEN.values(), ids=CHOSEN)
def test_what_is_named_is_trained(empty_folder: Path, words: list[str], files: dict[str, str]) -> None:
    project(empty_folder, **files)
    assert compose_fit(words).config.model


def test_the_name_of_an_experiments_file_means_the_same_run(empty_folder: Path) -> None:
    project(
        empty_folder,
        **{"experiment/mine": "# @package _global_\nmodel: {_target_: ours.Thing}\ndata: {_target_: ours.Thing}\n"},
    )
    config = compose_fit(["+experiment=mine.yaml"]).config
    assert config == compose_fit(["+experiment=mine"]).config
    assert config.name == "mine"


def test_the_folder_of_configs_may_be_named(empty_folder: Path) -> None:
    project(empty_folder / "elsewhere")
    with pytest.raises(UserError, match="Choose a shipped one"):
        compose_fit([])
    with pytest.raises(UserError, match="no experiment is chosen"):
        compose_fit([], config_dir=Path("elsewhere/configs"))


def test_of_many_experiments_some_are_listed(empty_folder: Path) -> None:
    project(empty_folder, **{f"experiment/e{number:02}": TRAINS_OURS for number in range(20)})
    with pytest.raises(UserError, match=r"e00, .*e07, … \(see train list experiment\)"):
        compose_fit([])


SHIPPED_ONES = f"Choose a shipped one: {', '.join(EXPERIMENTS)} (train fit digits)"
COMMANDS = ["fit", "fit optimizer.lr=0.1", "fit -m seed=1,2", "plan", "check resume", "validate ckpt=none"]


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("where", ["an empty folder", "configs without experiments", "a folder of a project"])
def test_outside_of_a_project_the_shipped_default_is_not_trained_but_experiments_are_listed(
    empty_folder: Path, where: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if where != "an empty folder":
        project(empty_folder)
    if where == "configs without experiments":
        shutil.rmtree(empty_folder / "configs/experiment")
    if where == "a folder of a project":
        (empty_folder / "notebooks/old").mkdir(parents=True)
        monkeypatch.chdir(empty_folder / "notebooks/old")
    before = sorted(empty_folder.rglob("*"))
    assert main(words.split()) == 2
    above = "The project above (cd ../..) has mine, other. " if where == "a folder of a project" else ""
    assert message(capsys.readouterr().err) == (
        f"no experiment is chosen. {above}{SHIPPED_ONES}; or make a project of your own: train new mine."
    )
    assert sorted(empty_folder.rglob("*")) == before, "nothing is written"


def test_in_a_folder_of_a_project_its_experiments_are_named_and_shipped_ones_work(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project(empty_folder)
    (empty_folder / "src").mkdir()
    monkeypatch.chdir(empty_folder / "src")
    assert main(["fit", "mine"]) == 2
    assert "The project above (cd ..) has mine, other." in message(capsys.readouterr().err)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.endswith("\n\nThe project above (cd ..) has mine, other.\n")
    assert compose_fit(["experiment=digits"]).config.name == "digits"
    assert compose_fit(["model=mlp", "data=digits"]).config.name == "default", "they are chosen"
