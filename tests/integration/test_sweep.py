"""A sweep of real runs that meets failures, kills and signals is finished by the same command again."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import CODE, LIMIT_S, PROJECT, fork_jobs, hold, make_project, names, running, train

from trainer_cli.commands.command_line import main

BREAKS = """
class Line(torch.nn.Module):
    def __init__(self, width=8, dropout=0.2):
        if os.path.exists(f"broken-{width}"):
            raise RuntimeError("the line is broken")
"""
SWEEP = (
    "fit", "-m", "experiment=mine", "model.width=4,5", "seed=range(1,3)", "loggers=jsonl",
    "loop.max_duration=20", "checkpoint.ephemeral_save_interval=3",
)  # fmt: skip
KEYS = [f"model.width={width},seed={seed}" for width in (4, 5) for seed in (1, 2)]


def summary(project: Path, key: str) -> dict[str, Any]:
    """What the job says of itself; empty before it has."""
    file = project / "runs/mine/sweep" / key / "summary.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def message(project: Path, column: str) -> dict[str, str]:
    """KEY -> what sweep.csv has in that column, in its order."""
    with (project / "runs/mine/sweep/sweep.csv").open() as file:
        return {row["KEY"]: row[column] for row in csv.DictReader(file)}


def log_of(project: Path, key: str) -> str:
    """The output of a job."""
    return (project / f"runs/mine/sweep/.jobs/{key}.log").read_text()


def wait_until_a_job_stops(project: Path, key: str, times: int) -> None:
    """Wait until a job says that it has heard its signal of that number."""
    until = time.monotonic() + LIMIT_S
    while log_of(project, key).count("SIGTERM: stopping after this step") < times:
        assert time.monotonic() < until, log_of(project, key)
        time.sleep(0.02)


def test_four_jobs_of_which_two_fail_and_one_is_killed_are_finished_by_the_same_command_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = CODE.replace("class Line(torch.nn.Module):\n    def __init__(self, width=8, dropout=0.2):\n", BREAKS[1:])
    assert broken != CODE
    project = make_project(tmp_path, **{"mine/parts.py": broken})
    (project / "broken-5").touch()
    held = hold(project, "train")
    killed = KEYS[0]
    with running(*SWEEP, "--jobs", "2", cwd=project) as sweep:
        run = project / "runs/mine/sweep" / killed
        sweep.wait_for(lambda: (run / "checkpoints/step6/manifest.json").exists(), "saving step 6")
        # What becomes of the YAML now is no matter to jobs that have not begun.
        (project / "configs/model/line.yaml").write_text("][")
        os.kill(summary(project, killed)["attempts"][0]["pid"], signal.SIGKILL)
        held.unlink()
        first = sweep.end()
    assert first.code == 1, first.err
    assert list(message(project, "status").values()) == ["killed", "finished", "failed", "failed"]
    assert (message(project, "reason")[killed], message(project, "step")[killed]) == ("signal 9", "6")
    assert "committed step 20" in log_of(project, KEYS[1])
    assert "RuntimeError: the line is broken" in log_of(project, KEYS[2])
    assert f"{KEYS[2]} failed: exit code 1 (output: runs/mine/sweep/.jobs/{KEYS[2]}.log)" in first.err
    assert "the line is broken" not in first.err, "the table at the end has the reasons"
    assert first.out.count("the line is broken") == 1, "a reason that jobs share is shown once"
    assert f"  the same: {KEYS[3]}\n" in first.out
    lines = [line.partition("] ")[2] for line in first.err.splitlines() if re.search(r"\[\d/4\] ", line)]
    assert {f"{key} started" for key in KEYS} <= {*lines}
    (ended,) = {*lines} - {f"{key} started" for key in KEYS}
    assert re.fullmatch(rf"{KEYS[1]} finished at step 20: its best val/loss \S+, \d+\.\d s", ended)
    assert "committed" not in first.err
    (project / "configs/model/line.yaml").write_text(PROJECT["configs/model/line.yaml"])
    (project / "broken-5").unlink()

    monkeypatch.chdir(project)
    fork_jobs(monkeypatch)
    assert main([*SWEEP]) == 0
    again = capsys.readouterr().out
    assert "resuming at step 6 from step6" in log_of(project, killed)
    assert list(message(project, "status")) == KEYS
    assert set(message(project, "status").values()) == {"finished"}
    assert [len(summary(project, key)["attempts"]) for key in KEYS] == [2, 1, 1, 1]
    for key in KEYS:
        ends = summary(project, key)
        assert ends["step"] == 20
        assert float(message(project, "best val/loss")[key]) == ends["best_metrics"]["val/loss"]["value"]
        assert float(message(project, "last val/far")[key]) == ends["last_metrics"]["val/far"]
        assert names(project / message(project, "run_dir")[key] / "checkpoints")[-1] == "step20"
    best = re.search(r"\* best val/loss of all jobs: \S+, of (\S+)", again)
    assert best is not None
    after = again[again.index("next: the best job, trained twice as long:") :].splitlines()
    assert after[1:] == [
        f"  train fit 'resume=\"runs/mine/sweep/{best[1]}\"' loop.max_duration=40st",
        f"  train validate ckpt='runs/mine/sweep/{best[1]}/checkpoints/step*'",
        "  train report runs/mine/sweep",
    ]
    longer = train(*shlex.split(after[1])[1:], cwd=project)
    assert longer.code == 0, longer.err
    assert "run_dir" not in longer.err
    assert "finished at step 40" in longer.out
    assert main([*SWEEP]) == 0
    later = capsys.readouterr().out
    assert f"loop.max_duration=80st\n  train validate ckpt='runs/mine/sweep/{best[1]}/" in later
    table = [line.split() for line in again[again.rindex("model.width ") :].splitlines()[1:5]]
    assert [[cell for cell in line if cell != "*"][:4] for line in table] == [
        [width, seed, "finished", "20"] for width in "45" for seed in "12"
    ]


def test_a_stopped_sweep_and_one_whose_parent_is_killed_go_on(tmp_path: Path) -> None:
    notes = CODE.replace(
        "class Data:\n",
        "with open('/proc/self/cmdline') as file, open('commands', 'a') as out:\n"
        "    out.write(file.read().replace(chr(0), ' ') + chr(10))\n\n\nclass Data:\n",
    )
    project = make_project(tmp_path, **{"mine/parts.py": notes})
    two = ("fit", "-m", "experiment=mine", "seed=1,2", "loggers=jsonl", "loop.max_duration=20")
    held = hold(project, "train")
    with running(*two, cwd=project) as sweep:
        sweep.reach("train")
        sweep.signal(signal.SIGTERM)
        wait_until_a_job_stops(project, "seed=1", 1)
        held.unlink()
        stopped = sweep.end()
    assert stopped.code == 75, stopped.err
    assert list(message(project, "status").values()) == ["stopped", "not begun"]
    at = summary(project, "seed=1")["step"]
    assert names(project / "runs/mine/sweep/seed=1/checkpoints")[-1] == f"step{at}"

    held = hold(project, "train")
    with running(*two, cwd=project) as sweep:
        sweep.reach("train")
        sweep.signal(signal.SIGKILL)
        wait_until_a_job_stops(project, "seed=1", 2)
        held.unlink()
        assert sweep.end().code == -signal.SIGKILL
    until = time.monotonic() + LIMIT_S
    while summary(project, "seed=1")["status"] == "running":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert (summary(project, "seed=1")["status"], summary(project, "seed=1")["reason"]) == ("stopped", "SIGTERM")

    (project / "commands").unlink()
    last = train(*two, cwd=project)
    assert last.code == 0, last.err
    assert list(message(project, "status").values()) == ["finished", "finished"]
    assert list(message(project, "attempts").values()) == ["3", "1"]

    # The second job is a fork, and trains what a process alone does.
    alone = (*(word for word in two if word not in ("-m", "seed=1,2")), "seed=2", "name=alone")
    assert train(*alone, cold=True, cwd=project).code == 0
    forked = [" _fork_server " in line for line in (project / "commands").read_text().splitlines()]
    # The sweep imports the parts as well, to check them.
    assert forked == [False, False, sys.platform == "linux", False]
    runs = [project / "runs/mine/sweep/seed=2", project / "runs/alone"]
    weights = [(run / "checkpoints/step20/rank0.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_the_traceback_of_a_training_that_failed_is_in_its_log(tmp_path: Path) -> None:
    broken = CODE.replace("        x, y = batch\n", "        raise RuntimeError('no line through these')\n")
    project = make_project(tmp_path, **{"mine/parts.py": broken})
    assert train("fit", "experiment=mine", cwd=project).code == 1
    log = (project / "runs/mine/train.log").read_text()
    assert "Traceback (most recent call last):" in log
    assert "RuntimeError: no line through these" in log
