"""`parallel.processes_per_node`: the command starts the ranks, and ends as they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import HERE

pytestmark = pytest.mark.slow

JOB = [
    "experiment=digits_mlp", "parallel=ddp", "parallel.processes_per_node=2", "loop.max_duration=400", "loggers=none",
    "loop.log_interval=10", "loop.eval_interval=null", "checkpoint.save_interval=null", "logging.rank_files=true",
    "run_dir=run", "+callbacks.ask._target_=fits.Stopping", "+callbacks.ask.rank=1", "+callbacks.ask.step=7",
]  # fmt: skip


def fit(folder: Path, ask: str) -> tuple[int, str]:
    """The exit code and stderr of a fit whose rank 1 does something at step 7."""
    command = [sys.executable, "-m", "trainer_cli", "fit", *JOB, f"+callbacks.ask.ask={ask}"]
    # The shell hands its process id on, and becomes the command.
    shell = ["bash", "-c", 'LAUNCHER=$$ exec "$@"', "bash", *command]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stderr


def test_a_signal_to_the_launcher_stops_all_with_one_checkpoint(tmp_path: Path) -> None:
    code, errors = fit(tmp_path, "signal")
    assert code == 75, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")
    assert {one["name"] for one in summary["checkpoints"]} == {"step0", f"step{summary['step']}"}
    assert errors.count("SIGTERM: stopping after this step") == 1


def test_the_rank_that_fails_says_why_and_no_other(tmp_path: Path) -> None:
    code, errors = fit(tmp_path, "fail")
    assert code == 1, errors
    assert errors.count("ZeroDivisionError: the callback's own") == 1
    assert "on rank 1 of 2" in errors
    assert errors.count("Traceback") == 1
    assert "the training failed" in (tmp_path / "run" / "train.rank1.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["reason"] == "PeerError: rank 1 failed: ZeroDivisionError: the callback's own"
