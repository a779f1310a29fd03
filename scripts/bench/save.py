"""Seconds to save a training state so that it survives a power cut, beside the bare write of as many bytes."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import disk
import own_checkpointers
from savers import torch_checkpointing
from settings import Settings
from state import Tree, flat, gpt_state, size_bytes
from table import Column, Row, Table
from timing import Measure, interleaved, say, seconds

DIRECT, BUFFERED = "raw, O_DIRECT + fsync", "raw, buffered + fsync"
Save = Callable[[Path], None]


def savers(tree: Tree) -> dict[str, Save]:
    """By name: what writes the tree to a path and has made it durable when it returns."""
    import safetensors.torch
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    tensors = flat(tree)
    image = disk.Image(size_bytes(tree))
    keeper = own_checkpointers.sync_checkpointer()

    def torch_save(path: Path) -> None:
        torch.save(tree, path)
        disk.sync(path)

    def safe_tensors(path: Path) -> None:
        safetensors.torch.save_file(tensors, path)
        disk.sync(path)

    meta = cache(partial(torch_checkpointing, "sync"))

    def metas(path: Path) -> None:
        meta()(tree, path)
        disk.sync(path)

    found: dict[str, Save] = {
        DIRECT: partial(image.write, direct=True),
        BUFFERED: partial(image.write, direct=False),
        "torch.save + fsync": torch_save,
        "safetensors + fsync": safe_tensors,
        "torch_checkpointing + fsync": metas,
        "DCP, sync": lambda path: dcp_save(tree, checkpoint_id=path, no_dist=True),
        "train, sync": partial(keeper.save, tree),
    }
    behind = own_checkpointers.async_checkpointer()

    def awaited(path: Path) -> None:
        behind.save(tree, path).written.result()

    found["train, async, awaited"] = awaited
    return found


def durations(tree: Tree, folder: Path, names: list[str] | None = None) -> dict[str, Measure]:
    """Measures of the savers: each writes to a new path, which is removed again."""
    numbers = count(1)
    warnings.filterwarnings("ignore", module="torch")

    def timed(save: Save) -> dict[str, float]:
        # A name that the manifest takes for a step, in a folder of its own kind.
        path = folder / f"step{next(numbers)}"
        gc.collect()
        began = time.process_time()
        taken = {"time": seconds(lambda: save(path))}
        taken["processor"] = time.process_time() - began
        disk.remove(path)
        return taken

    found = savers(tree)
    if not disk.takes_direct_writes(folder):
        del found[DIRECT]
    return {name: partial(timed, save) for name, save in found.items() if names is None or name in names}


def measure(settings: Settings) -> list[Table]:
    """One table, in this process: the state is made once."""
    tree = gpt_state(settings)
    size = size_bytes(tree)
    say(f"a state of {size / 1e9:.2f} GB")
    measures = durations(tree, settings.scratch)
    needed = [BUFFERED, "train, sync"]
    samples, skipped = interleaved(measures, settings.rounds_or(3, 4), warm=settings.warm, needed=needed)
    base = DIRECT if DIRECT in samples else BUFFERED
    if DIRECT not in measures:
        skipped[DIRECT] = "the file system refuses direct writes"
    rows = [Row(name, found) for name, found in samples.items()]
    columns = [
        Column("time", "s", 3, resolution=0.01 if settings.small else 0.05),
        Column("processor", "s", 3, resolution=0.01 if settings.small else 0.05, ratio=False),
    ]
    notes = [
        "Each ends when the state survives a power cut. torch_checkpointing is used without direct I/O, with which it "
        "fails on ext4 (0.1.1)."
    ]
    return [Table("save", f"Durable save of {size / 1e9:.2f} GB", base, columns, rows, _sizes(tree), skipped, notes)]


def _sizes(tree: Tree) -> dict[str, Any]:
    return {"bytes": size_bytes(tree), "tensors": len(flat(tree))}
