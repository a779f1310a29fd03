"""How long `train ckpt ls` and the choice of a checkpoint to go on from take in a folder of many small checkpoints.

    python scripts/bench/ckpt.py [COUNT [RUNS]]

Prints a Markdown table. Processes are fresh ones, timed side by side with an empty interpreter.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DISCOVERY = """
import sys, time
from pathlib import Path
from trainer_cli.checkpoint.soundness import catalog_of, newest_sound
before = time.perf_counter()
found = newest_sound(catalog_of(Path(sys.argv[1])), "bench", "here")
assert found is not None and found.step == int(sys.argv[2])
print(time.perf_counter() - before)
"""


def main(count: int = 1000, runs: int = 5) -> None:
    """Make the folder, time, print."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        make(root, count)
        seconds: dict[str, list[float]] = {"python -c pass": [], "train ckpt ls": [], "choice (inside the process)": []}
        for _ in range(runs):
            seconds["python -c pass"].append(timed(["-c", "pass"]))
            seconds["train ckpt ls"].append(timed(["-m", "trainer_cli", "ckpt", "ls", str(root)]))
            done = subprocess.run(
                [sys.executable, "-c", DISCOVERY, str(root), str(count)], capture_output=True, text=True, check=True
            )
            seconds["choice (inside the process)"].append(float(done.stdout))
    print(f"| {count} checkpoints | median s | least | most |\n|---|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |")


def make(root: Path, count: int) -> None:
    """Checkpoints of steps 1 to `count`."""
    import torch

    from trainer_cli.checkpoint.checkpointer import Facts, make_sync_checkpointer

    checkpointer = make_sync_checkpointer()
    for step in range(1, count + 1):
        facts = Facts(run_id="bench", attempt=1, step=step, metrics={"val/loss": 1 / step})
        state = {"model": {"w": torch.zeros(16)}, "progress": {"step": step}}
        checkpointer.save(state, root / f"step{step}", facts=facts)


def timed(arguments: list[str]) -> float:
    """Seconds of a whole process."""
    before = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - before


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
