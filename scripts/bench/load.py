"""Seconds to load a training state into tensors that are there already, cold and warm, and the memory it takes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import disk
import own_checkpointers
from settings import Settings
from state import Tree, flat, gpt_state, size_bytes
from table import Column, Row, Table
from timing import Measure, interleaved, say, seconds

RAW, MODEL_ONLY = "raw read", "train, weights alone"
CACHES = ("cold", "warm")
Load = Callable[[], object]


def loaders(tree: Tree, folder: Path) -> dict[str, tuple[Path, Load]]:
    """By name: what is read, and what fills the tree from it. Everything is written here first."""
    import safetensors.torch
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors = flat(tree)
    pickled, safe, shards, own = (folder / name for name in ("torch.pt", "safe", "shards", "step1"))
    keeper = own_checkpointers.sync_checkpointer()
    torch.save(tensors, pickled)
    safetensors.torch.save_file(tensors, safe)
    dcp_save(tree, checkpoint_id=shards, no_dist=True)
    keeper.save(tree, own)
    buffer = mmap.mmap(-1, 16 << 20)

    def fill(found: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(found[name])

    return {
        RAW: (safe, lambda: disk.read(safe, buffer)),
        "raw read, new memory": (safe, lambda: disk.read(safe, mmap.mmap(-1, safe.stat().st_size))),
        "torch.load": (pickled, lambda: fill(torch.load(pickled, weights_only=True))),
        "torch.load, mmap": (pickled, lambda: fill(torch.load(pickled, weights_only=True, mmap=True))),
        "safetensors": (safe, lambda: fill(safetensors.torch.load_file(safe))),
        "DCP": (shards, lambda: dcp_load(tree, checkpoint_id=shards, no_dist=True)),
        "train": (own, lambda: keeper.load(own, tree)),
        MODEL_ONLY: (own, lambda: keeper.load(own, {"model": tree["model"]})),
    }


def measure(settings: Settings) -> list[Table]:
    """One table, in this process; each contender takes its turn with an empty page cache and with a full one."""
    warnings.filterwarnings("ignore", module="torch")
    tree = gpt_state(settings)
    size = size_bytes(tree)
    say(f"a state of {size / 1e9:.2f} GB")
    measures: dict[str, Measure] = {}
    buffer = mmap.mmap(-1, 16 << 20)
    for name, (path, load) in loaders(tree, settings.scratch).items():
        for cache in CACHES:
            measures[f"{name}, {cache}"] = partial(_timed, path, load, cache, buffer)
    needed = [f"{RAW}, cold", "train, cold"]
    samples, skipped = interleaved(measures, settings.rounds_or(3, 7), warm=settings.warm, needed=needed)
    rows = []
    for name, found in samples.items():
        cache = name.rpartition(", ")[2]
        rows.append(Row(name, found, base=f"{RAW}, {cache}"))
    columns = [
        Column("time", "s", 3, resolution=0.01 if settings.small else 0.05),
        Column("memory", "MB", 0, resolution=size / 1e6 / 20, ratio=False),
    ]
    notes = [
        "Loaded into existing tensors; `memory` is the growth of the peak, mapped files included. `train` reads every "
        "byte to verify it, and again into the tensors; "
        f"`{MODEL_ONLY}` is a third of the state."
    ]
    title = f"Load of {size / 1e9:.2f} GB"
    return [Table("load", title, f"{RAW}, cold", columns, rows, {"bytes": size}, skipped, notes)]


def _timed(path: Path, load: Load, cache: str, buffer: mmap.mmap) -> dict[str, float]:
    gc.collect()
    if cache == "cold":
        disk.forget(path)
    else:
        disk.read(path, buffer)
    before = _reset_peak()
    found = {"time": seconds(load)}
    if before is not None:
        found["memory"] = _memory("VmHWM") - before
    return found


def _reset_peak() -> float | None:
    """Begin a new peak of this process's memory, and what it is now in MB; None where the system keeps none."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except (OSError, AttributeError):
        return None


def _memory(field: str) -> float:
    """A line of the process's status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1e3
    raise OSError(f"no {field}")
