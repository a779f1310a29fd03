"""Accuracy of sparse trainings beside the dense one, on an experiment that ships.

    python tests/addons/sparsity/accuracy.py

Prints a Markdown table: the validation accuracy at the end of each run, its mean over the seeds, and the mean's
difference from the dense one in percent points.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

WAYS = {
    "dense": (),
    "static, random, ERK": ("sparsity=static",),
    "GMP": ("sparsity=gmp",),
    "SET": ("sparsity=set",),
    "RigL": ("sparsity=rigl",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("overrides", nargs="*", help="more overrides for every run")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for way, own in WAYS.items():
                more = (*own, *([f"sparsity.sparsity={args.sparsity}"] if own else []), *args.overrides)
                run = Path(folder, f"{list(WAYS).index(way)}-{seed}")
                accuracy, share = _trained(args.experiment, run, (f"seed={seed}", *more))
                rows.setdefault(way, []).append(accuracy)
                print(f"{way} seed {seed}: {accuracy:.4f} (sparsity {share:.4f})", file=sys.stderr, flush=True)
    dense = mean(rows["dense"])
    print("| training | accuracies | mean | less than dense, points |\n|---|---|---|---|")
    for way, found in rows.items():
        each = ", ".join(f"{100 * one:.2f}" for one in found)
        print(f"| {way} | {each} | {100 * mean(found):.2f} | {100 * (dense - mean(found)):.2f} |")
    return 0


def _trained(experiment: str, run: Path, overrides: tuple[str, ...]) -> tuple[float, float]:
    """The accuracy at the end of one run, and the share of weights that are zero then."""
    command = [sys.executable, "-m", "trainer_cli", "fit", experiment, f"run_dir={run}", *overrides]
    command += ["checkpoint.enabled=false", "logging.console=off"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shares = [record["train/sparsity"] for record in records if "train/sparsity" in record]
    return [record["val/accuracy"] for record in records if "val/accuracy" in record][-1], shares[-1] if shares else 0.0


if __name__ == "__main__":
    sys.exit(main())
