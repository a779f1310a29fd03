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
    saved = _fields(saved)
    if _LIGHTNING in saved and is_state_dict(saved.get("state_dict")):
        return Found("Lightning checkpoint", _tensors(saved["state_dict"]), _step(saved))
    state = _fields(saved.get("state"))
    if is_state_dict(state.get("model")):
        timestamp = _fields(state.get("timestamp"))
        batch = _fields(timestamp.get("Timestamp", timestamp)).get("batch")
        step = _fields(batch).get("value") if isinstance(batch, Mapping) else batch
        return Found("Composer checkpoint", _tensors(state["model"]), _count(step))
    if is_state_dict(saved):
        return Found("torch file", _tensors(saved), None)
    named = [name for name in _NAMES if name in saved] or [name for name in saved if isinstance(name, str)]
    held = {name: _state_dict_of(saved[name]) for name in named}
    fitting = {name: own for name, own in held.items() if own is not None}
    keys = ", ".join(name if isinstance(name, str) else f"a {type(name).__name__}" for name in list(saved)[:12])
    keys += ", …" if len(saved) > 12 else ""
    if not fitting:
        raise ValueError(f"it holds no weights by name, but {keys or 'nothing'}")
    if len(fitting) > 1:
        raise ValueError(f"it holds several sets of weights: {', '.join(fitting)}")
    (weights,) = fitting.values()
    return Found("torch file", weights, _step(saved))


def is_state_dict(value: Any) -> bool:
    """Whether a value maps names to tensors; a module's extra state may be among them."""
    fields = _fields(value)
    if not fields or not all(isinstance(name, str) for name in fields):
        return False
    others = [name for name, one in fields.items() if not isinstance(one, torch.Tensor)]
    return len(others) < len(fields) and all(name.endswith("_extra_state") for name in others)


def _state_dict_of(value: Any) -> dict[str, torch.Tensor] | None:
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    return _tensors(value) if is_state_dict(value) else None


def _fields(value: Any) -> dict[Any, Any]:
    """What a mapping holds, nothing for another value. A file may have given it attributes that hide its methods."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(value) if isinstance(value, Mapping) else {}


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, without the attributes that a file may have given them."""
    found = {name: value for name, value in _fields(state).items() if isinstance(value, torch.Tensor)}
    for name, value in found.items():
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.is_quantized or value.is_meta or value.is_nested:
            raise ValueError(f"{name[:80]!r} is no dense tensor with values")
    return {name: torch.Tensor.detach(value) for name, value in found.items()}


def _step(saved: Mapping[str, Any]) -> int | None:
    return next((count for name in _STEPS if (count := _count(saved.get(name))) is not None), None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
