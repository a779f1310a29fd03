"""How the loader does: a resume deep inside a large data set, random state per sample, and batches per second.

    python scripts/bench/data.py [--json FILE] [--quick]

The order at the place of the resume is compared with one computed by other means, for every position of the epoch.
Each figure is the best of several turns, and what is compared takes turns; peak memory is of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from math import isqrt
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from batches import Numbers
from timing import peak_mb
from trainer_cli.data.loader import Loader
from trainer_cli.data.order import sample_seeds
from trainer_cli.data.random_state import kept_random_state, seed_random

LENGTH, PLACE, BATCH, SEED, EPOCH = 20_000_000, 10_000_000, 64, 7, 3


class Noise:
    """Samples of `size` floats with noise of their own."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(self.size) + random.random()


def ours_at(place: int) -> Iterable[Any]:
    return Loader(Numbers(LENGTH), BATCH, shuffle=True, seed=SEED).iterate(EPOCH, samples=place)


def torchs_at(place: int) -> Any:
    """A plain DataLoader has no place to go to: its sampler is walked there, without loading samples."""
    loader: Any = DataLoader(cast("Any", Numbers(LENGTH)), BATCH, shuffle=True)
    iterator: Any = iter(loader)
    for _ in range(place // BATCH):
        iterator._next_index()
    return iterator


def resume_in_this_process(kind: str) -> dict[str, float]:
    """Time from nothing to the first batch, and how much the peak of memory grew."""
    make = {"train": ours_at, "torch": torchs_at}[kind]
    for warm in make(0) if kind == "train" else DataLoader(cast("Any", Numbers(640)), BATCH):
        del warm
        break
    before, begun = peak_mb(), time.perf_counter()
    next(iter(make(PLACE)))
    return {"first_batch_ms": (time.perf_counter() - begun) * 1e3, "growth_mb": peak_mb() - before}


def resumes(kinds: Iterable[str], turns: int) -> dict[str, dict[str, float]]:
    """The same in processes of their own: the median time and the largest growth."""
    found: dict[str, dict[str, float]] = {}
    for kind in kinds:
        rows = []
        for _ in range(turns if kind == "train" else 1):
            done = subprocess.run([sys.executable, __file__, "--one", kind], capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout))
        found[kind] = {
            "first_batch_ms": median(row["first_batch_ms"] for row in rows),
            "growth_mb": max(row["growth_mb"] for row in rows),
        }
    return found


def whole_order(chunk: int = 1 << 20) -> np.ndarray:
    """The order of the whole epoch, computed by other means than the loader's: vectors of 64-bit numbers."""
    message = struct.pack("<QQ", SEED, EPOCH)
    keys = [
        np.frombuffer(blake2b(message, person=purpose).digest(), "<u8")[:4]
        for purpose in (b"order left", b"order right")
    ]
    rows = np.uint64(isqrt(LENGTH - 1) + 1)
    columns = np.uint64(-(-LENGTH // int(rows)))
    first, second = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

    def mixed(values: np.ndarray) -> Any:
        values = values * first
        return ((values ^ (values >> np.uint64(32))) * second) >> np.uint64(24)

    def permuted(places: np.ndarray) -> np.ndarray:
        right, left = np.divmod(places, rows)
        for left_key, right_key in zip(*keys, strict=True):
            left = (left + mixed(right + left_key)) % rows
            right = (right + mixed(left + right_key)) % columns
        return right * rows + left

    order = np.empty(LENGTH, dtype=np.uint64)
    for start in range(0, LENGTH, chunk):
        found = permuted(np.arange(start, min(start + chunk, LENGTH), dtype=np.uint64))
        while (outside := found >= LENGTH).any():
            found[outside] = permuted(found[outside])
        order[start : start + len(found)] = found
    return order


def order_is_unchanged(batches: int) -> bool:
    """The epoch holds every sample once, and a resume gives what stands at its place, near and far."""
    order = whole_order()
    seen = np.zeros(LENGTH, dtype=bool)
    seen[order] = True
    same = bool(seen.all())
    for place in (0, 1, PLACE, LENGTH - batches * BATCH):
        got = [number for batch, _ in zip(ours_at(place), range(batches), strict=False) for number in batch.tolist()]
        same = same and got == order[place : place + len(got)].tolist()
    return same


def best(work: Callable[[], None], turns: int) -> float:
    """Seconds of the fastest turn."""
    times = []
    for _ in range(turns):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def seeding(turns: int) -> dict[str, dict[str, float]]:
    """Microseconds a sample for its random state: in this process with what is put back, and in a worker."""
    found = {}
    for size in (32, 64, 128):

        def seed_all(size: int = size) -> None:
            for one in sample_seeds(SEED, EPOCH, range(size)):
                seed_random(one)

        def keep_and_seed(seed_all: Callable[[], None] = seed_all) -> None:
            with kept_random_state():
                seed_all()

        found[str(size)] = {
            "here": best(keep_and_seed, turns) / size * 1e6,
            "worker": best(seed_all, turns) / size * 1e6,
        }
    return found


def _epoch_of_ours(data: Any, workers: int) -> Iterable[Any]:
    return Loader(data, 32, shuffle=True, seed=SEED, num_workers=workers).iterate(0)


def throughput(turns: int) -> list[dict[str, Any]]:
    """Batches per second, ours and a plain DataLoader's in turn; the first batch, with the workers' start, apart."""
    rows = []
    for size in (32, 12_288):
        for workers in (0, 2):
            data = Noise(3200 if workers else 1600, size)
            makers: dict[str, Callable[..., Iterable[Any]]] = {
                "train": partial(_epoch_of_ours, data, workers),
                "torch": partial(DataLoader, cast("Any", data), 32, shuffle=True, num_workers=workers),
            }
            times: dict[str, list[float]] = {kind: [] for kind in makers}
            for turn in range(turns):
                for kind in list(makers)[:: 1 if turn % 2 else -1]:
                    iterator = iter(makers[kind]())
                    next(iterator)
                    begun = time.perf_counter()
                    count = sum(1 for _ in iterator)
                    times[kind].append((time.perf_counter() - begun) / count)
            ratio = median(a / b for a, b in zip(times["train"], times["torch"], strict=True))
            rows.append(
                {
                    "floats": size,
                    "workers": workers,
                    **{f"{kind}_ms": min(own) * 1e3 for kind, own in times.items()},
                    "ratio": ratio,
                }
            )
    return rows


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"Resume at sample {PLACE:,} of {LENGTH:,}: order unchanged: {found['order_unchanged']}",
        "",
        "| resume | first batch | growth of peak memory |",
        "|---|---|---|",
        *(
            f"| {kind} | {own['first_batch_ms']:.1f} ms | {own['growth_mb']:.1f} MB |"
            for kind, own in found["resume"].items()
        ),
        "",
        "| batch size | random state a sample, this process | in a worker |",
        "|---|---|---|",
        *(f"| {size} | {own['here']:.1f} µs | {own['worker']:.1f} µs |" for size, own in found["seeding"].items()),
        "",
        "| floats a sample | workers | train, a batch of 32 | DataLoader | train / DataLoader (median of pairs) |",
        "|---|---|---|---|---|",
        *(
            f"| {row['floats']:,} | {row['workers']} | {row['train_ms']:.2f} ms | {row['torch_ms']:.2f} ms "
            f"| {row['ratio']:.2f} |"
            for row in found["throughput"]
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="fewer turns, and no plain DataLoader's resume")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(resume_in_this_process(args.one)))
        return
    torch.set_num_threads(1)
    found = {
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__},
        "resume": resumes(["train"] if args.quick else ["train", "torch"], 1 if args.quick else 5),
        "order_unchanged": order_is_unchanged(20 if args.quick else 500),
        "seeding": seeding(50 if args.quick else 500),
        "throughput": throughput(2 if args.quick else 8),
    }
    print(markdown(found))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
