"""`train top` and `train tail` beside a real training: held, killed, resumed and finished."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from command import hold, make_project, running, train, trained


def top(project: Path) -> dict[str, Any]:
    result = train("top", "--json", cwd=project)
    assert (result.code, result.err) == (0, "")
    (line,) = result.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_run_is_followed_from_its_first_step_over_a_kill_and_a_resume_to_its_end(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    held = hold(project, "train")
    with running("fit", "experiment=mine", cwd=project) as fit:
        fit.reach("train")
        view = top(project)
        assert (view["run"], view["state"], view["total_steps"]) == ("runs/mine", "running", 40)
        assert 4 <= view["step"] < 16
        assert view["checkpoint"] == "step0"
        followed = train("tail", "runs/mine", cwd=project)
        assert f"METRICS step {view['step']}  train/loss" in followed.out
        fit.signal(signal.SIGKILL)
        fit.end()
    assert top(project)["state"] == "killed"
    held.unlink()
    trained("experiment=mine", cwd=project)
    view = top(project)
    assert (view["state"], view["step"], view["checkpoint"]) == ("finished", 40, "step40")
    result = train("tail", "-f", "-n", "1000", "runs/mine", cwd=project)
    assert (result.code, result.err) == (0, "")
    *lines, last = result.out.splitlines()
    steps = [int(line.split()[4]) for line in lines if " METRICS " in line]
    assert steps == list(range(4, 41, 4)), "each once, in spite of the resume"
    assert [line[:23] for line in lines] == sorted(line[:23] for line in lines)
    assert last == f"finished at step 40: {view['reason']}"
