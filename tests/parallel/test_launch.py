"""Ranks started by the command itself, which ends as they do, and by scripts/slurm.sbatch, with srun and scontrol in
place of Slurm's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from command import fork_jobs
from ranks import HERE, IMPORTED

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

ASKING = [
    "experiment=digits_mlp", "parallel=ddp", "parallel.processes_per_node=2", "loop.max_duration=400", "loggers=none",
    "loop.log_interval=10", "loop.eval_interval=null", "checkpoint.save_interval=null", "logging.rank_files=true",
    "run_dir=run", "+callbacks.ask._target_=fits.Stopping", "+callbacks.ask.rank=1", "+callbacks.ask.step=7",
]  # fmt: skip
SBATCH = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
SRUN = """#!/bin/bash
# As srun: two tasks that know their place. Returns the largest exit code. By default one that fails ends the other.
option=$1; shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_NODEID=0 OMP_NUM_THREADS=1
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?
[ "$code" = 0 ] || [ "$option$SLURM_KILL_BAD_EXIT" = --wait=3000 ] || kill -KILL "$other"
wait "$other"; second=$?
exit $((code > second ? code : second))
"""
JOB = (
    "experiment=digits_mlp", "parallel=ddp", "loop.max_duration=20", "loop.eval_interval=null", "loggers=none",
    "checkpoint.save_interval=null", "run_dir=run",
)  # fmt: skip
TRAIN = f'#!/bin/sh\nexec {sys.executable} -P -m trainer_cli "$@"\n'


def fit(folder: Path, ask: str) -> tuple[int, str]:
    """The exit code and stderr of a fit whose rank 1 does something at step 7."""
    command = [sys.executable, "-m", "trainer_cli", "fit", *ASKING, f"+callbacks.ask.ask={ask}"]
    # The shell hands its process id on, and becomes the command.
    shell = ["bash", "-c", 'LAUNCHER=$$ exec "$@"', "bash", *command]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stderr


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """As `fit`, with this process as the launcher, and ranks that are forks of one that has imported torch."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"PYTHONPATH": str(HERE), "LAUNCHER": str(os.getpid())}.items():
        monkeypatch.setenv(name, value)
    fork_jobs(monkeypatch, imports=IMPORTED)

    def fit(ask: str) -> tuple[int, str]:
        code = main(["fit", *ASKING, f"+callbacks.ask.ask={ask}"])
        return code, capfd.readouterr().err

    return fit


def test_a_signal_to_the_launcher_stops_all_with_one_checkpoint(
    launched: Callable[[str], tuple[int, str]], tmp_path: Path
) -> None:
    code, errors = launched("signal")
    assert code == 75, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")
    assert {one["name"] for one in summary["checkpoints"]} == {"step0", f"step{summary['step']}"}
    assert errors.count("SIGTERM: stopping after this step") == 1


def test_ranks_save_and_no_process_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    # It returns when no process has its stderr open any more.
    code, errors = fit(tmp_path, "kill")
    assert code == -signal.SIGKILL, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")
    assert {one["name"] for one in summary["checkpoints"]} == {"step0", f"step{summary['step']}"}
    until = time.monotonic() + 500
    while processes_in(tmp_path):
        assert time.monotonic() < until, processes_in(tmp_path)
        time.sleep(0.05)


def processes_in(folder: Path) -> list[str]:
    """The command lines of processes with this working folder."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        # Of another user, or it has just ended.
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                lines.append((process / "cmdline").read_text().replace("\0", " "))
    return lines


def test_the_rank_that_fails_says_why_and_no_other(launched: Callable[[str], tuple[int, str]], tmp_path: Path) -> None:
    code, errors = launched("fail")
    assert code == 1, errors
    assert errors.count("ZeroDivisionError: the callback's own") == 1
    assert "on rank 1 of 2" in errors
    assert errors.count("Traceback") == 1
    assert "the run failed" in (tmp_path / "run" / "train.rank1.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["reason"] == "PeerError: rank 1 failed: ZeroDivisionError: the callback's own"


def submitted(folder: Path, *, train: str = "train") -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm would, with its job's variables."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    scripts = {"srun": SRUN, "scontrol": '#!/bin/sh\necho "$@" >> scontrol.log\n', "train": TRAIN}
    scripts |= {f"ends-with-{code}": f"#!/bin/sh\nexit {code}\n" for code in (2, 75)}
    scripts["ends-later"] = '#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || sleep 0.5\nexit 75\n'
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(SBATCH.parents[1]),
        "TRAIN": train,
        "SLURM_JOB_ID": str(os.getpid()),
    }
    return subprocess.run(["bash", str(SBATCH), *JOB], cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def test_a_job_that_was_stopped_is_queued_again_and_no_other(tmp_path: Path) -> None:
    log = tmp_path / "scontrol.log"
    assert submitted(tmp_path, train="ends-with-2").returncode == 2
    assert not log.exists()
    assert submitted(tmp_path, train="ends-with-75").returncode == 75
    assert log.read_text() == f"requeue {os.getpid()}\n"
    assert submitted(tmp_path, train="ends-later").returncode == 75
    assert log.read_text().count("requeue") == 2
    done = submitted(tmp_path)
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("requeue") == 2
    manifest = json.loads((tmp_path / "run/checkpoints/step20/manifest.json").read_text())
    assert manifest["world_size"] == 2, "the tasks of srun are ranks of one training"
