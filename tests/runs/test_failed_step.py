"""An error of a failed step ends with the commands that look at it, if they can work."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reported import outcome, save, write_metrics

from trainer_cli.addons.exact.replay_plan import describe_commands
from trainer_cli.errors import NotFiniteError, SaveError, UserError
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.running.failed_step import describe_resume, suggest_replay
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.steps.run_status import RunStatus


def make_run(
    path: Path, *, start: int = 0, saves: tuple[int, ...] = (), losses: dict[int, Any] | None = None
) -> RunDir:
    """A run that began at a step, with checkpoints and records of the training loss."""
    run = RunDir(path)
    run.create("name: run\n", [], {"run_id": "run"}, places={}).release()
    run.begin_attempt(name="run", start_step=start, now=0.0, environment={})
    for step in saves:
        save(run, step, CheckpointKind.regular)
    write_metrics(run, ({"step": step, "train/loss": loss} for step, loss in (losses or {}).items()))
    run.end_attempt(outcome(RunStatus.failed, 20, "an error"), now=1.0)
    return run


@pytest.mark.parametrize(
    ("start", "saves", "steps", "shown"),
    [
        pytest.param(0, (), (1, 1), "1", id="the first step of a run"),
        pytest.param(0, (), (17, 20), "17..20", id="steps without a checkpoint"),
        pytest.param(10, (10,), (11, 11), "11", id="after the only checkpoint"),
        pytest.param(10, (10, 15), (8, 20), "11..20", id="begun before the first checkpoint"),
        pytest.param(10, (15,), (14, 14), None, id="before the first checkpoint"),
        pytest.param(10, (), (14, 14), None, id="no checkpoint, and not begun at 0"),
    ],
)
def test_commands_are_named_where_a_replay_can_begin(
    start: int, saves: tuple[int, ...], steps: tuple[int, int], shown: str | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "a run", start=start, saves=saves)
    text = describe_commands(run.path, *steps)
    if shown is None:
        assert text is None
    else:
        assert text is not None
        assert f"`train replay '{run.path}' {shown}`" in text
        assert (f"`train data '{run.path}' {shown} --show`" in text) == (".." not in shown)
        assert text.startswith("`train bisect ") == (".." in shown)


def trainer_at(step: int, failed_step: int | None, machines: int = 1) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(group=SimpleNamespace(machines=machines)),
        progress=SimpleNamespace(step=step),
        loop=SimpleNamespace(failed_step=failed_step),
    )


NAN = NotFiniteError("the loss is not finite", cure="Lower it.")
LOSSES = {4: 1.0, 8: 0.5, 12: "NaN", 16: "NaN"}


@pytest.mark.parametrize(
    ("error", "step", "failed_step", "losses", "shown"),
    [
        pytest.param(ValueError("x"), 6, 7, {}, "7", id="an exception in a step"),
        pytest.param(ValueError("x"), 7, 7, {}, "7", id="an exception of a hook after a step"),
        pytest.param(ValueError("x"), 7, None, {}, None, id="an exception between two steps"),
        pytest.param(UserError("x"), 0, 1, {}, None, id="a mistake that the first step shows"),
        pytest.param(SaveError("x"), 6, 7, {}, None, id="a save that failed"),
        pytest.param(NAN, 16, None, LOSSES, "9..12", id="a loss that is not finite in two records"),
        pytest.param(NAN, 10, 10, {4: 1.0, 8: 0.5}, "9..10", id="found before it was recorded"),
        pytest.param(NAN, 9, 9, {8: 0.5}, "9", id="found in the step after a record"),
        pytest.param(NAN, 16, None, {4: "NaN", 8: 1.0, 12: "NaN", 16: "NaN"}, "9..12", id="finite in between"),
        pytest.param(NAN, 20, None, {}, "1..20", id="never recorded"),
    ],
)
def test_an_error_of_a_step_ends_with_its_commands(
    error: Exception, step: int, failed_step: int | None, losses: dict[int, Any], shown: str | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", losses=losses)
    error = type(error)(*error.args[:1])
    suggest_replay(error, run.path, trainer_at(step, failed_step))
    end = str(error) if isinstance(error, NotFiniteError) else "\n".join(getattr(error, "__notes__", []))
    assert end.count("train replay") == (shown is not None)
    if shown is not None and ".." in shown:
        assert f"`train bisect {run.path} 'train/loss is not finite'` finds the step and its samples, and" in end
        assert end.endswith(f"`train replay {run.path} {shown}` computes these steps again.")
    elif shown is not None:
        assert end.endswith(f"`train data {run.path} {shown} --show` shows the samples.")


def test_the_cure_of_the_error_stays(tmp_path: Path) -> None:
    error = NotFiniteError("the loss is not finite", cure="Lower it.")
    suggest_replay(error, make_run(tmp_path / "run").path, trainer_at(1, 1))
    assert str(error.cure).startswith("`train replay ")
    assert str(error.cure).endswith(" Lower it.")


@pytest.mark.parametrize("machines", [1, 2])
def test_commands_are_not_named_for_processes_of_several_machines(machines: int, tmp_path: Path) -> None:
    error = ValueError("x")
    suggest_replay(error, make_run(tmp_path / "run").path, trainer_at(6, 7, machines))
    assert hasattr(error, "__notes__") == (machines == 1)


RISEN = {10: 2e10, 20: 8e19, 30: 2e29, 40: "NaN"}
ANEW = "begin the run anew with optimizer.lr=… resume=anew"


@pytest.mark.parametrize(
    ("run", "steps", "losses", "text"),
    [
        (
            "x",
            [0, 10, 20, 30],
            RISEN,
            f"But train/loss at step 30 is 2e.29, above the 2e.10 at step 10, so .*: {ANEW}\\.$",
        ),
        ("x", [5, 10], {5: 2.0, 7: 1.0, 10: 9.0, 15: "NaN"}, f"But .* is 9, above the 2 at step 5, .*{ANEW}\\.$"),
        (
            "x",
            [5, 8, 10],
            {5: 2.0, 7: 1.0, 10: 9.0, 15: "NaN"},
            f"{ANEW}, or .* resume=.*@step8 checkpoint.newer=trash ",
        ),
        (
            "x",
            [10, 20],
            {10: 2.0, 20: 1.0, 30: "NaN"},
            "The same command resumes it: .*a sample .*=.data.*optimizer.lr=…",
        ),
        ("x", [10], {10: 2.0, 20: "NaN"}, "The same command resumes it: "),
        ("x", [20], {10: 2.324, 20: 2.347, 30: "NaN"}, "The same command resumes it: "),
        ("x", [20], {10: 2.0, 20: 4.0, 30: "NaN"}, "The same command resumes it: "),
        ("x", [20], {10: -1.0, 20: -0.5, 30: "NaN"}, "The same command resumes it: "),
        ("x", [20], {10: -1.0, 20: 0.5, 30: "NaN"}, f"But .* is 0.5, above the -1 at step 10, .*{ANEW}\\.$"),
        ("x", [20], {10: 0.0, 20: 0.5, 30: "NaN"}, f"But .* is 0.5, above the 0 at step 10, .*{ANEW}\\.$"),
        ("x", [4], {10: 2.0, 20: "NaN"}, "The same command resumes it: "),
        ("x", [10, 20], {10: -1.0, 20: -2.0, 30: "Infinity"}, "The same command resumes it: "),
        ("x", [], RISEN, "Start another run .name=OTHER., with a smaller optimizer.lr."),
        ("sweep/seed=1", [10], {10: 2.0}, "The same command resumes it: "),
        ("optimizer.lr=9", [10], {10: 2.0}, "The same command resumes it: "),
        ("sweep/optimizer.lr=9", [10], {10: 2.0}, "optimizer.lr is swept: replace this value by a smaller one"),
        ("sweep/model=cnn,optimizer.lr=9", [], {}, "optimizer.lr is swept: "),
    ],
)
def test_a_resume_is_advised_from_where_the_loss_had_not_risen(
    run: str, steps: list[int], losses: dict[int, Any], text: str, tmp_path: Path
) -> None:
    path = tmp_path / run
    path.parent.mkdir(exist_ok=True)
    advice = describe_resume(make_run(path, losses=losses).path, steps)
    assert re.search(text, advice), advice
    assert describe_resume(path, steps, is_in_data=True).startswith(
        "Mend the sample; the same command then resumes the"
    )
