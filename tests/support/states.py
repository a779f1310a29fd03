"""A small state with every kind of value, and ways to compare such states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.errors import UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.loads.report import LoadReport, list_by_owner
from trainer_cli.manifest import FileEntry, Manifest, new_digest
from trainer_cli.state.model_state import Fitting, fit_model
from trainer_cli.state.optimizer_state import fit_optimizer


def same(one: Any, other: Any) -> bool:
    """True where two states are equal in types, values, bits and structure; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and repr(one) == repr(other))
    return bool(one == other)


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """True where two states of a model have the same names, types and values."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


def small_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.randn(4, generator=generator).bfloat16()},
        "optimizer": {"state": {"weight": {"step": torch.tensor(float(seed)), "betas": (0.9, 0.99)}}},
        "progress": {"step": seed, "loss": math.nan, "seen": {1: "a", (2, None): b"\x00\xff"}},
        "rng": np.arange(seed, seed + 10, dtype=np.uint32),
    }


def restore_model(model: torch.nn.Module, state: Mapping[str, Any], **settings: Any) -> LoadReport:
    """Copy a captured state into a model, or raise a table of all that does not fit."""
    fitting, report = fit_model(model, state, LoadOptions(**settings))
    _take(fitting)
    return report


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], **settings: Any
) -> None:
    """Give an optimizer a captured state, or raise a table of all that does not fit."""
    _take(fit_optimizer(model, optimizer, state, **settings))


def _take(fitting: Fitting) -> None:
    if fitting.faults:
        raise UserError(
            list_by_owner("it does not fit the checkpoint", {"": fitting.faults}), cure="Nothing was loaded."
        )
    fitting.load()


def reseal(checkpoint: Path, file: str, content: bytes) -> None:
    """Give a file other content and its entry in the manifest the right digest, as a hostile writer would."""
    path = checkpoint / "manifest.json"
    manifest = Manifest.parse(path.read_bytes())
    digest = new_digest("xxh3_128")
    digest.update(content)
    entry = FileEntry(len(content), f"xxh3_128:{digest.hexdigest()}")
    (checkpoint / file).write_bytes(content)
    path.write_bytes(replace(manifest, files={**manifest.files, file: entry}).to_bytes())
