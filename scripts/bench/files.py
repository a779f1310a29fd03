"""Seconds to verify, archive and export a checkpoint, beside torch.save, safetensors, DCP and tar."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import disk
import own_checkpointers
from settings import Settings
from state import flat, gpt_state, size_bytes
from table import Column, Row, Table
from timing import Measure, interleaved, say, seconds
from trainer_cli.addons.formats.whole_archive import write_archive

COPY = "cp and fsync"


def measure(settings: Settings) -> list[Table]:
    """One table, in this process; each contender writes a file or folder that it removes again."""
    warnings.filterwarnings("ignore", module="torch")
    tree = gpt_state(settings)
    size = size_bytes(tree)
    say(f"a state of {size / 1e9:.2f} GB")
    folder = Path(settings.scratch)
    contenders = _contenders(tree, folder)
    measures: dict[str, Measure] = {name: partial(_timed, make, folder / "out") for name, make in contenders.items()}
    samples, skipped = interleaved(measures, settings.rounds_or(2, 3), warm=settings.warm, needed=[COPY])
    columns = [Column("time", "s", 3, resolution=0.01 if settings.small else 0.05)]
    notes = ["All except verify and DCP end with an fsync. Uploads to an object store have their own table."]
    rows = [Row(name, found) for name, found in samples.items()]
    title = f"Files of a checkpoint of {size / 1e9:.2f} GB"
    return [Table("files", title, COPY, columns, rows, {"bytes": size}, skipped, notes)]


def _synced(path: Path, write: Callable[[], object]) -> None:
    write()
    disk.sync(path)


def _contenders(tree: dict[str, Any], folder: Path) -> dict[str, Callable[[Path], object]]:
    import safetensors.torch
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from trainer_cli.addons.formats.export import ExportFormat, export

    tensors = flat(tree)
    checkpoint = folder / "step1"
    keeper = own_checkpointers.sync_checkpointer()
    keeper.save(tree, checkpoint)
    file = checkpoint / "rank0.safetensors"
    return {
        COPY: lambda out: _synced(out, lambda: shutil.copyfile(file, out)),
        "torch.save": lambda out: _synced(out, lambda: torch.save(tensors, out)),
        "safetensors": lambda out: _synced(out, lambda: safetensors.torch.save_file(tensors, out)),
        "DCP": lambda out: dcp_save(tree, checkpoint_id=out, no_dist=True),
        "tar": lambda out: _synced(out, lambda: subprocess.run(["tar", "-cf", out, "-C", folder, "step1"], check=True)),
        "train, verify": lambda out: keeper.verify(checkpoint),
        "train, archive": lambda out: write_archive(checkpoint, out.with_suffix(".tar")),
        "train, export torch": lambda out: export(tensors, out, ExportFormat.torch),
        "train, export safetensors": lambda out: export(tensors, out, ExportFormat.safetensors),
    }


def _timed(make: Callable[[Path], object], out: Path) -> dict[str, float]:
    try:
        return {"time": seconds(lambda: make(out))}
    finally:
        for path in (out, out.with_suffix(".tar")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
