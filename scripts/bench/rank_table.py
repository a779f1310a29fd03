"""Milliseconds a step on two ranks: what the trainer costs over DDP loops written by hand."""

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
_BASES = {"by hand, 109 MB": "by hand, 109 MB", "trainer, 109 MB": "by hand, 109 MB"}
"""The row that a row is compared with, where that is not the small model by hand."""


def measure(settings: Settings) -> list[Table]:
    """One table: loops by hand and the trainer in turn, on one start of the ranks; as rank 0 sees it."""
    steps = settings.pick(smoke=5, quick=100, whole=400)
    large_steps = settings.pick(smoke=2, quick=5, whole=10)
    # All layers, but in the smoke form: 9 MB, in two buckets.
    layers = settings.pick(smoke=4, quick=28, whole=28)
    samples = _on_ranks([str(number) for number in (steps, large_steps, layers, settings.rounds_or(3, 8))])
    rows = [Row(name, columns, base=_BASES.get(name, "by hand")) for name, columns in samples.items()]
    for row in rows:
        base = samples[row.base or row.name]
        row.samples["over base"] = [
            length - base_length for length, base_length in zip(row.samples["step"], base["step"], strict=True)
        ]
    return [
        Table(
            "ranks", f"A step of DDP on {RANKS} gloo ranks, one thread each", "by hand",
            [
                Column("step", "ms", 3, resolution=0.05),
                Column("over base", "ms", 3, resolution=0.1, ratio=False),
                Column("mean", "ms", 3, resolution=0.1),
                Column("processor", "ms", 3, resolution=0.05),
            ],
            rows, {"steps": steps, "large steps": large_steps, "large layers": layers}, {},
            [
                "All have torch's DistributedDataParallel and a fused AdamW; the trainer logs every 50 steps, which "
                "the mean and the processor time (all threads of rank 0) show. Rows without a size in their name have "
                "1.3 MB of gradients.",
                "Token weights: the loss is the mean over the tokens of all ranks, whose number differs between "
                "batches, so that a sum over the ranks is needed before each optimizer step. By hand it is "
                "torch.distributed.all_reduce after backward.",
                "109 MB: gradients fill five buckets; by hand with torch's own buckets.",
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
    samples: dict[str, dict[str, list[float]]] = json.loads(outputs[0].strip().splitlines()[-1])
    return samples
