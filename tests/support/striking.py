"""Trains on ranks of which one is killed, stopped or raises at some moment."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ranks import HERE

JOB = [
    "experiment=digits", "parallel=ddp", "model.channels=[8,32,1024,8]", "data.batch_size=16",
    "loop.max_duration=40", "loop.log_interval=1", "loggers.tensorboard=null", "loop.eval_interval=20",
    "checkpoint.save_interval=10", "checkpoint.ephemeral_save_interval=null", "run_dir=run",
    "+callbacks.ask._target_=fits.Striking",
]  # fmt: skip
RANKS = int(os.environ.get("RANKS", "2"))
RESTARTS = [f"parallel.processes_per_node={RANKS}", "restarts.max=1", "restarts.backoff=null"]
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--max-restarts=1", "--standalone"]
KILLED, STOPPED, RAISED = "SIGKILL", "SIGSTOP", "raise"
OTHERS = {
    "load": ["while a checkpoint was read"],
    "start": ["while the run was started"],
    "step": ["while step 14 was trained"],
    "evaluation": ["while evaluating val at step 20"],
    # Files are written while the training goes on.
    "save": ["while saving at step 20", "while step 21 was trained"],
}
"""What the other ranks waited in."""


def fit(folder: Path, *overrides: str, torchrun: bool = False) -> str:
    """Fit in a new folder, check that it ends with 0, and return what it wrote to stderr."""
    start = [*(TORCHRUN if torchrun else []), "-m", "trainer_cli", "fit", *JOB, *([] if torchrun else RESTARTS)]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *start, *overrides], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def strike(folder: Path, rank: int, at: str, number: str, *, torchrun: bool = False) -> None:
    """Train on ranks of which one is struck, once, and check that the others name it and the restart ends with 0."""
    striking = [f"+callbacks.ask.rank={rank}", f"+callbacks.ask.at={at}", f"+callbacks.ask.number={number}"]
    if at == "load":
        folder.mkdir(exist_ok=True)
        (folder / "struck").touch()
        fit(folder, *striking, "parallel.timeout=20s", "loop.hard_stop=20")
        (folder / "struck").unlink()
    errors = fit(folder, *striking, "parallel.timeout=20s", torchrun=torchrun)
    assert (folder / "struck").exists()
    if number == RAISED:
        assert f"RuntimeError: rank {rank} was struck" in errors, errors
        return
    named = re.escape(f"rank {rank} ({socket.gethostname()})")
    # Of more than two, one that only waits for another may not answer in time.
    lost = f"{named} has ended or hangs" + (f"|.*{named}.* do not answer.*" if RANKS > 2 else "")
    assert any(re.search(f"error: ({lost}); the others waited {doing}", errors) for doing in OTHERS[at]), errors
