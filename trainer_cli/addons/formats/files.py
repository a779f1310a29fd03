"""Read the weights in files of safetensors, in folders of Hugging Face's libraries, and in objects of torch.load."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer_cli.addons.formats.torch_file import load_torch_file
from trainer_cli.catalog import ForeignKind
from trainer_cli.errors import CheckpointError
from trainer_cli.layout import is_plain
from trainer_cli.strict_json import unique_keys
from trainer_cli.tensor_files import read_entries

log = logging.getLogger(__name__)

_LARGEST_INDEX = 64 * 1024 * 1024
_MARKS = ForeignKind.huggingface.marks
_INDEXES, _WHOLE_FILES = _MARKS[:2], _MARKS[2:]


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file; its header is checked first.

    Raises:
        CheckpointError: it is not a safetensors file, or damaged.
    """
    try:
        names, opened = open_safetensors(path)
        return {name: opened.get_tensor(name) for name in names}
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"the safetensors file is damaged: {str(error)[:200]}", where=str(path)) from None


def open_safetensors(path: Path) -> tuple[list[str], Any]:
    """The names of the tensors in a file, and an object whose `get_tensor(name)` reads one.

    Raises:
        ValueError, SafetensorError: it is not a safetensors file, or damaged.
    """
    with path.open("rb") as file:
        entries = read_entries(file.read, path.stat().st_size)
    return [entry.name for entry in entries], safe_open(path, framework="pt")


def load_huggingface(folder: Path, *, allow_pickle: bool = False) -> dict[str, torch.Tensor]:
    """The weights in a folder of `save_pretrained`: one file, or several with an index.

    Raises:
        CheckpointError: a file is missing or damaged, or can be loaded only by running code in it.
    """
    # In the order of transformers: of each format the whole file before the index, which may be of an earlier save.
    files = [name for pair in zip(_WHOLE_FILES, _INDEXES, strict=True) for name in pair if (folder / name).is_file()]
    index, *ignored = files
    if ignored:
        log.warning("%s has several sets of weights: %s is loaded, and not %s", folder, index, ", ".join(ignored))
    if index in _WHOLE_FILES:
        return _load(folder / index, allow_pickle)
    names_of: dict[str, list[str]] = {}
    for name, file in _weight_map(folder / index).items():
        # By file, so that each is loaded once.
        names_of.setdefault(file, []).append(name)
    weights: dict[str, torch.Tensor] = {}
    for file, names in sorted(names_of.items()):
        # The index comes from elsewhere: a path in it must not lead out of the folder.
        if not is_plain(file):
            raise CheckpointError(
                f"the index names {file[:80]!r}, which is not a plain name", where=str(folder / index)
            )
        if not (folder / file).is_file():
            raise CheckpointError(f"{file} is missing, which the index names", where=str(folder / index))
        tensors = _load(folder / file, allow_pickle)
        for name in names:
            if name not in tensors:
                raise CheckpointError(f"{file} lacks {name[:80]!r}, which the index names", where=str(folder / index))
            weights[name] = tensors[name]
    return weights


def _load(path: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """The weights in a file of safetensors or of torch."""
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    try:
        return find_weights(load_torch_file(path, allow_pickle=allow_pickle)).weights
    except ValueError as error:
        raise CheckpointError(str(error), where=str(path)) from None


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says it. Raises CheckpointError if it is damaged."""
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise ValueError("it is too large")
        fields: Any = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        table = fields["weight_map"] if isinstance(fields, dict) else None
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise ValueError("it has no weight_map of names to files")
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"the index cannot be read: {str(error)[:200]}", where=str(index)) from None
    return table


_LIGHTNING = "pytorch-lightning_version"
_NAMES = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
"""Keys under which programs save the weights, beside optimizers and counters."""
_STEPS = ("global_step", "step", "iteration")


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The weights of a saved object, by name."""

    program: str
    """What kind of object it is: "Lightning checkpoint", "Composer checkpoint" or "torch file"."""
    weights: dict[str, torch.Tensor]
    step: int | None
    """The optimizer step of the save; None if unknown."""
    versions: Mapping[str, int] | None = None
    """The versions of the saved modules by path, which torch gives a state dict; None without any."""


def find_weights(saved: Any) -> SavedWeights:
    """The weights in an object that torch loaded from a file.

    Raises:
        ValueError: it contains no weights, or several sets of them.
    """
    if isinstance(saved, torch.nn.Module):
        return _saved_weights("torch file", saved.state_dict(), None)
    if not isinstance(saved, Mapping):
        raise ValueError(f"it holds a {type(saved).__name__}, not weights by name")
    whole, saved = saved, _fields(saved)
    if _LIGHTNING in saved and is_state_dict(saved.get("state_dict")):
        return _saved_weights("Lightning checkpoint", saved["state_dict"], _step(saved))
    state = _fields(saved.get("state"))
    if is_state_dict(state.get("model")):
        timestamp = _fields(state.get("timestamp"))
        batch = _fields(timestamp.get("Timestamp", timestamp)).get("batch")
        step = _fields(batch).get("value") if isinstance(batch, Mapping) else batch
        return _saved_weights("Composer checkpoint", state["model"], _count(step))
    if is_state_dict(saved):
        return _saved_weights("torch file", whole, None)
    # Usual names first: an averaged model or a teacher may be saved beside the weights.
    names = [name for name in _NAMES if name in saved] or [name for name in saved if isinstance(name, str)]
    candidates = {name: _state_dict_of(saved[name]) for name in names}
    state_dicts = {name: state_dict for name, state_dict in candidates.items() if state_dict is not None}
    keys = ", ".join(name if isinstance(name, str) else f"a {type(name).__name__}" for name in list(saved)[:12])
    keys += ", …" if len(saved) > 12 else ""
    if not state_dicts:
        raise ValueError(f"it holds no weights by name, but {keys or 'nothing'}")
    if len(state_dicts) > 1:
        raise ValueError(f"it holds several sets of weights: {', '.join(state_dicts)}")
    (weights,) = state_dicts.values()
    return _saved_weights("torch file", weights, _step(saved))


def _saved_weights(program: str, state: Mapping[str, Any], step: int | None) -> SavedWeights:
    """The weights and versions in a state dict."""
    return SavedWeights(program, _tensors(state), step, _versions(state))


def _versions(state: Mapping[str, Any]) -> dict[str, int] | None:
    """The version of each saved module by its path; None if the state dict has none."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    versions = {path: _count(_fields(facts).get("version")) for path, facts in _fields(metadata).items()}
    return {path: version for path, version in versions.items() if isinstance(path, str) and version is not None}


def is_state_dict(value: Any) -> bool:
    """Whether a value maps names to tensors; a module's extra state may be among them."""
    fields = _fields(value)
    if not fields or not all(isinstance(name, str) for name in fields):
        return False
    non_tensors = [name for name, field in fields.items() if not isinstance(field, torch.Tensor)]
    return len(non_tensors) < len(fields) and all(name.endswith("_extra_state") for name in non_tensors)


def _state_dict_of(value: Any) -> Mapping[str, Any] | None:
    """The state dict that a value is, or that of a module; None for another value."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    return value if is_state_dict(value) else None


def _fields(value: Any) -> dict[Any, Any]:
    """The items of a mapping; empty for another value."""
    # By dict's own method: a pickle can give an object attributes that hide the methods of its class.
    if isinstance(value, dict):
        return dict(dict.items(value))
    return dict(value) if isinstance(value, Mapping) else {}


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, without attributes that a pickle may have given them."""
    tensors = {name: value for name, value in _fields(state).items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.is_quantized or value.is_meta or value.is_nested:
            raise ValueError(f"{name[:80]!r} is not a dense tensor with values")
    return {name: torch.Tensor.detach(value) for name, value in tensors.items()}


def _step(saved: Mapping[str, Any]) -> int | None:
    return next((count for name in _STEPS if (count := _count(saved.get(name))) is not None), None)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
