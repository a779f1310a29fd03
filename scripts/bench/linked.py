"""Bytes and seconds of a durable save of a small adapter over a frozen base, whose file checkpoints share or not."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import disk
import own_checkpointers
from settings import Settings
from state import even_state, filled
from table import Column, Row, Table
from timing import Measure, interleaved, say, seconds

WRITTEN, LINKED = "train, link_frozen=false", "train"


def measure(settings: Settings) -> list[Table]:
    """One table, in this process; each contender has a folder, in which its last two checkpoints stay."""
    base_bytes = settings.pick(smoke=1 << 21, quick=60_000_000, whole=1_000_000_000)
    base = list(even_state(base_bytes, 60)["model"].values())
    adapter = [filled((base_bytes // 100 // 60 // 4,)) for _ in range(60)]
    state = {"model": {f"base{index}": tensor for index, tensor in enumerate(base)}}
    state["adapter"] = {f"lora{index}": tensor for index, tensor in enumerate(adapter)}
    say(f"a base of {base_bytes / 1e9:.3f} GB, and an adapter of a hundredth")
    measures: dict[str, Measure] = {
        name: partial(_save, own_checkpointers.sync_checkpointer(), state, frozen, settings.scratch / folder, count(1))
        for name, frozen, folder in ((WRITTEN, [], "written"), (LINKED, base, "linked"))
    }
    # The first save of each writes the base.
    samples, skipped = interleaved(measures, settings.rounds_or(3, 4), warm=1, needed=[WRITTEN, LINKED])
    columns = [
        Column("time", "s", 3, resolution=0.01 if settings.small else 0.05),
        Column("written", "MB", 1),
    ]
    title = f"Durable save of an adapter over a frozen base of {base_bytes / 1e9:.1f} GB"
    notes = ["Not the first save of a run, which writes the base. `written` is what the checkpoint takes on the disk."]
    rows = [Row(name, found) for name, found in samples.items()]
    return [Table("linked", title, WRITTEN, columns, rows, {"bytes": base_bytes}, skipped, notes)]


def _save(
    keeper: Any,
    state: dict[str, dict[str, torch.Tensor]],
    frozen: list[torch.Tensor],
    folder: Path,
    numbers: count[int],
) -> dict[str, float]:
    """Save one more step; the one before the last is removed."""
    number = next(numbers)
    for tensor in state["adapter"].values():
        tensor.add_(1)
    path = folder / f"step{number}"
    taken = seconds(lambda: keeper.save(state, path, frozen=frozen))
    own = sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)
    if (old := folder / f"step{number - 2}").is_dir():
        disk.remove(old)
    return {"time": taken, "written": own / 1e6}
