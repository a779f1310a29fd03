"""Find the model's weights in what another program saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LIGHTNING = "pytorch-lightning_version"
_NAMES = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
"""Keys under which programs keep the weights, beside optimizers and counters."""
_STEPS = ("global_step", "step", "iteration")


@dataclass(frozen=True, slots=True)
class Found:
    """The weights of a saved object, by name."""

    program: str
    """Which program saves such an object: "Lightning checkpoint", "Composer checkpoint" or "torch file"."""
    weights: dict[str, torch.Tensor]
    step: int | None
    """The optimizer step at which it was saved, if it says so."""


def find_weights(saved: Any) -> Found:
    """The weights in an object that torch loaded from a file.

    Raises:
        ValueError: it holds none, or several that may be meant.
    """
    if isinstance(saved, torch.nn.Module):
        return Found("torch file", _tensors(saved.state_dict()), None)
    if not isinstance(saved, Mapping):
        raise ValueError(f"it holds a {type(saved).__name__}, and no weights by name")
    if _LIGHTNING in saved and is_state_dict(saved.get("state_dict")):
        return Found("Lightning checkpoint", _tensors(saved["state_dict"]), _step(saved))
    state = saved.get("state")
    if isinstance(state, Mapping) and is_state_dict(state.get("model")):
        timestamp = state.get("timestamp")
        batch = timestamp.get("Timestamp", timestamp).get("batch") if isinstance(timestamp, Mapping) else None
        step = batch.get("value") if isinstance(batch, Mapping) else batch
        return Found("Composer checkpoint", _tensors(state["model"]), _count(step))
    if is_state_dict(saved):
        return Found("torch file", _tensors(saved), None)
    named = [name for name in _NAMES if name in saved]
    held = {name: _state_dict_of(saved[name]) for name in named or map(str, saved)}
    fitting = {name: own for name, own in held.items() if own is not None}
    keys = ", ".join(map(str, list(saved)[:12])) + (", …" if len(saved) > 12 else "")
    if not fitting:
        raise ValueError(f"it holds no weights by name, but {keys or 'nothing'}")
    if len(fitting) > 1:
        raise ValueError(f"it holds several sets of weights: {', '.join(fitting)}")
    (weights,) = fitting.values()
    return Found("torch file", weights, _step(saved))


def is_state_dict(value: Any) -> bool:
    """Whether a value maps names to tensors; a module's extra state may be among them."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return False
    others = [name for name, one in value.items() if not isinstance(one, torch.Tensor)]
    return len(others) < len(value) and all(name.endswith("_extra_state") for name in others)


def _state_dict_of(value: Any) -> dict[str, torch.Tensor] | None:
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    return _tensors(value) if is_state_dict(value) else None


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in found.items():
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{name[:80]!r} is no dense tensor with values")
    return found


def _step(saved: Mapping[str, Any]) -> int | None:
    return next((count for name in _STEPS if (count := _count(saved.get(name))) is not None), None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
