"""`train diverge A B`, in the processes that it starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.usefixtures("forked_replays")

BASE = (
    "+experiment=digits_mlp", "loop.max_duration=4", "loop.log_interval=1", "loop.eval_interval=null",
    "logging.console=off", "loggers.tensorboard=null",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *BASE, "run_dir=a"]) == 0
    return Path("a")


def test_the_first_difference_is_printed_and_the_exit_code_is_1(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *BASE, "run_dir=b", "model.dropout=0.5"]) == 0
    before = sorted(run.iterdir())
    capfd.readouterr()
    assert main(["diverge", "a", "b", "--json"]) == 1
    printed = capfd.readouterr()
    outcome = json.loads(printed.out)
    assert printed.err.splitlines() == ["replays steps 1 to 1 of a", "replays steps 1 to 1 of b"]
    assert (outcome["equal"], outcome["first"]["stage"], outcome["first"]["moment"]) == (
        False, "outputs of modules", "in step 1",
    )  # fmt: skip
    assert outcome["first"]["values"][0]["name"] == "layers.3"
    assert outcome["causes"] == ["config model.dropout: 0.0 -> 0.5"]
    assert sorted(run.iterdir()) == before


MISTAKES = {
    "no run": (["a", "nowhere"], "nowhere is not a run's directory"),
    "no step": (["a", "a", "--until", "0"], "--until 0 is not a step"),
    "the number of a step": (["a", "b@4"], "Write b@step4."),
    "one run": (["a"], "train diverge needs B\n"),
    "a stray word": (["a", "b", "c"], "'c'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_message(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        (Path(name) / "config.yaml").write_text("name: x\n")
        (Path(name) / "environment.json").write_text('{"run_id": "x"}')
    words, message = MISTAKES[what]
    assert main(["diverge", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_name_that_is_not_there_is_no_checkpoint_of_the_current_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)
    assert main(["diverge", "nowhere", "."]) == 2
    assert "nowhere is not a run's directory" in capsys.readouterr().err


def test_the_same_run_is_equal_to_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diverge", "a", "a/checkpoints/step4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal up to step 4"


def test_steps_that_cannot_be_made_again_are_named(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, "b")
    for name in ("step0", "step4"):
        shutil.rmtree(f"b/checkpoints/{name}")
    summary = json.loads(Path("b/summary.json").read_text())
    summary["attempts"][0]["start_step"] = 2
    Path("b/summary.json").write_text(json.dumps(summary))
    assert main(["diverge", "a", "b"]) == 3
    error = capfd.readouterr().err
    assert "steps 1 to 4 of b cannot be replayed: " in error
    assert "no valid checkpoint at or before step 0" in error
