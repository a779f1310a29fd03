"""Milliseconds a step on two ranks: what the trainer costs over a DDP loop written by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from settings import Settings
from table import Column, Row, Table

RANKS = 2
LIMIT_S = 900.0


def measure(settings: Settings) -> list[Table]:
    """One table: the loop by hand and the trainer in turn, on one start of the ranks; as rank 0 sees it."""
    steps = settings.pick(smoke=5, quick=100, whole=400)
    found = _on_ranks([str(steps), str(settings.rounds_or(3, 8))])
    rows = [Row(name, samples, base="by hand") for name, samples in found.items()]
    for row in rows:
        row.samples["over base"] = [
            own - base for own, base in zip(row.samples["step"], found["by hand"]["step"], strict=True)
        ]
    return [
        Table(
            "ranks", f"A step of DDP on {RANKS} gloo ranks, one thread each", "by hand",
            [
                Column("step", "ms", 3, resolution=0.05),
                Column("over base", "ms", 3, resolution=0.1, ratio=False),
                Column("processor", "ms", 3, resolution=0.05),
            ],
            rows, {"steps": steps}, {},
            [
                "All have torch's DistributedDataParallel and a fused AdamW; the trainer logs every 50 steps.",
                "Sums: six numbers are summed over the ranks in each step, as the trainer does to count samples and "
                "to agree on stops and saves.",
            ],
        )
    ]  # fmt: skip


def _on_ranks(arguments: list[str]) -> dict[str, dict[str, list[float]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("rank_steps.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    found: dict[str, dict[str, list[float]]] = json.loads(outputs[0].strip().splitlines()[-1])
    return found
