"""Whole processes that train the tiny network, ours and others', for the tables of the loop and of the start."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from peers import PEERS
from timing import HERE, Measure, Skipped, children_processor, require, run, seconds

FIT = (
    sys.executable, "-m", "trainer_cli", "fit", "--config-dir", str(HERE / "project" / "configs"), "loop",
)  # fmt: skip
OURS: Mapping[str, tuple[str, ...]] = {
    "train fit": (),
    "train fit, not fused": ("optimizer.fused=false",),
    "train fit, own loader": ("data._target_=loop_parts.SampleData", "+data.batch_size=32"),
}
"""`train fit` with the shipped configuration: checkpointer, console, metrics.jsonl and TensorBoard are on."""


def contenders(names: list[str], steps: int, warm: int) -> dict[str, Measure]:
    """What measures each name."""
    return {name: partial(trained, name, steps, warm) for name in names}


def trained(name: str, steps: int, warm: int) -> dict[str, float]:
    """What the network's clock saw in a process of its own."""
    if name not in OURS and (needed := PEERS[name][0]) is not None:
        require(needed, {"ignite": "pytorch-ignite"}.get(needed))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seen.json"
        command = (
            (*FIT, f"loop.max_duration={steps}", *OURS[name]) if name in OURS
            else (sys.executable, str(HERE / "peers.py"), name)
        )  # fmt: skip
        env = {
            "BENCH_STEPS": str(steps), "BENCH_WARM": str(warm), "BENCH_RESULT": str(result),
            "BENCH_BEGUN": repr(time.time()), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        run(command, env=env, cwd=folder)
        if not result.exists():
            raise Skipped("it ended without a figure")
        found: dict[str, float] = json.loads(result.read_text())
        return found


def import_of(statement: str) -> Callable[[], dict[str, float]]:
    """A process that only imports."""

    def measure() -> dict[str, float]:
        found: dict[str, float] = {}
        with children_processor(found, "first step, processor"):
            found["first step"] = seconds(lambda: run((sys.executable, "-c", statement)))
        return found

    return measure
