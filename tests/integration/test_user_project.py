"""A user's own directory: configs of its own, model and data of its own, nothing of it installed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command import hold, make_project, names, records, running, train, trained, weights


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's directory, with one run in it."""
    root = make_project(tmp_path_factory.mktemp("project"))
    trained("experiment=mine", "name=straight", cwd=root)
    return root


def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_bits(project: Path) -> None:
    fit = ("fit", "experiment=mine", "name=killed")
    held = hold(project, "train")
    with running(*fit, "checkpoint.ephemeral_save_interval=3", cwd=project) as run:
        run.reach("train")
        run.signal(signal.SIGKILL)
        assert run.end().code == -signal.SIGKILL
    held.unlink()
    killed, straight = project / "runs/killed", project / "runs/straight"
    newest = names(killed / "checkpoints")[-1]
    assert newest in ("step3", "step6"), "the second may have been in flight"
    result = trained(*fit[1:], cwd=project)
    assert f"from {newest} (" in result.err
    assert weights(killed / "checkpoints/step40") == weights(straight / "checkpoints/step40")
    assert records(killed / "metrics.jsonl") == records(straight / "metrics.jsonl")
    assert names(killed / "checkpoints") == names(straight / "checkpoints") == ["step0", "step16", "step32", "step40"]


def test_its_checkpoints_are_validated_by_themselves(project: Path) -> None:
    result = train("validate", "ckpt=runs/straight/checkpoints/step*", cwd=project)
    assert result.code == 0, result
    run = project / "runs/straight"
    rows = records(run / "validation/validation.jsonl")
    assert [row["step"] for row in rows] == [0, 16, 32, 40]
    logged = {one["step"]: one for one in records(run / "metrics.jsonl") if "val/loss" in one}
    assert [(row["val/loss"], row["val/far"]) for row in rows[1:]] == [
        (logged[step]["val/loss"], logged[step]["val/far"]) for step in (16, 32, 40)
    ]


def test_the_directory_may_lie_elsewhere(project: Path, tmp_path: Path) -> None:
    fit = ["fit", "--config-dir", str(project / "configs"), "experiment=mine", "loop.max_duration=2st"]
    result = train(*fit, "loggers=jsonl", cwd=tmp_path)
    assert result.code == 0, result
    assert names(tmp_path / "runs/mine/checkpoints") == ["step0", "step2"]
    result = train("validate", "--config-dir", str(project / "configs"), "ckpt=runs/mine@latest", cwd=tmp_path)
    assert result.code == 0, result
