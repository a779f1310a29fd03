"""The formats of checkpoints that can be written here: that of the core, and those of the add-ons that are there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.addon import find_part
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.format.base import Format
from trainer_cli.format.open import new_format
from trainer_cli.schema.checkpoint_config import CheckpointFormat, Compression

KNOWN = [name for name in CheckpointFormat if name is CheckpointFormat.tensors or find_part(f"format.{name}")]
FORMATS: dict[str, Format] = {str(name): new_format(name) for name in KNOWN if name is not CheckpointFormat.archive}
if CheckpointFormat.archive in KNOWN:
    FORMATS |= {f"archive {how.value}": new_format(CheckpointFormat.archive, how) for how in Compression}
OF_RANKS = [str(name) for name in KNOWN if not name.one_process]
"""Those that save the parts of several ranks."""


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    tied = torch.randn(5, 3, generator=generator)
    return {
        "model": {
            "emb.weight": tied,
            "head.weight": tied,
            "half": torch.randn(7, generator=generator).bfloat16(),
            "turned": torch.randn(3, 4, generator=generator).t(),
            "count": torch.tensor(3),
            "none": torch.zeros(0, 2),
            "mask": torch.tensor([True, False]),
        },
        "optimizer": {"state": {"emb.weight": {"step": torch.tensor(2.0), "exp_avg": torch.ones(5, 3)}}},
        "rng": {"keys": np.arange(6, dtype=np.uint32), "number": np.float64(0.5)},
        "progress": {"step": 3, "loss": math.nan, "seen": {1: ("a", b"\x00\xff"), None: 2**70}},
    }


METADATA = CheckpointMetadata(run_id="r", step=3)


def save(path: Path, name: str, tree: Any = None) -> Path:
    SyncCheckpointer(format=FORMATS[name]).save(state() if tree is None else tree, path, metadata=METADATA)
    return path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def of_torch_alone() -> dict[str, Any]:
    """A tensor of each type that safetensors has no name for, and an array."""
    raw = torch.arange(96, dtype=torch.uint8).reshape(2, 48)
    types = (torch.complex128, torch.complex32, torch.float8_e8m0fnu)
    tensors = {str(dtype): raw.view(dtype) for dtype in types}
    return {"model": {**tensors, "turned": tensors["torch.complex128"].t().conj(), "array": np.arange(3) * 1j}}
