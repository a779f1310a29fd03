"""scripts/slurm.sbatch, with commands named srun and scontrol in place of Slurm's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SBATCH = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
SRUN = """#!/bin/bash
# As srun: two tasks that know their place. Returns the largest exit code.
shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_NODEID=0 OMP_NUM_THREADS=1
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?
wait "$other"; second=$?
exit $((code > second ? code : second))
"""
JOB = (
    "experiment=digits_mlp", "parallel=ddp", "loop.max_duration=60", "loop.eval_interval=null", "loggers=none",
    "checkpoint.save_interval=null", "run_dir=run",
)  # fmt: skip
TRAIN = f'#!/bin/sh\nexec {sys.executable} -P -m trainer_cli "$@"\n'


def submitted(folder: Path, *arguments: str, train: str = "train") -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm would, with its job's variables."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    scripts = {"srun": SRUN, "scontrol": '#!/bin/sh\necho "$@" >> scontrol.log\n', "train": TRAIN}
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    root = str(SBATCH.parents[1])
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": root,
        "TRAIN": train,
        "SLURM_JOB_ID": str(os.getpid()),
    }
    return subprocess.run(
        ["bash", str(SBATCH), *JOB, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=110
    )


def test_a_job_that_was_stopped_is_queued_again_until_it_is_done(tmp_path: Path) -> None:
    stopped = submitted(tmp_path, "loop.max_time=0.01s")
    assert stopped.returncode == 75, stopped.stderr
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"
    done = submitted(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stderr
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"], len(summary["attempts"])) == ("finished", 60, 2)


def test_a_job_that_failed_is_not_queued_again(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\nexit 2\n")
    failing.chmod(0o755)
    assert submitted(tmp_path, train=str(failing)).returncode == 2
    assert not (tmp_path / "scontrol.log").exists()
