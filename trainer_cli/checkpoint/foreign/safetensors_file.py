"""Files of safetensors, and the folders that Hugging Face's libraries save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer_cli.checkpoint.foreign.kind import INDEXES, WHOLE_FILES
from trainer_cli.checkpoint.foreign.state_dict import find_weights
from trainer_cli.checkpoint.format.header import read_entries, unique_keys
from trainer_cli.checkpoint.format.torch_pickle import load_torch_file
from trainer_cli.checkpoint.naming import is_plain
from trainer_cli.errors import CheckpointError

_LARGEST_INDEX = 64 * 1024 * 1024


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file; its header is checked first.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    try:
        names, opened = open_safetensors(path)
        return {name: opened.get_tensor(name) for name in names}
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"the safetensors file is damaged: {str(error)[:200]}", where=str(path)) from None


def open_safetensors(path: Path) -> tuple[list[str], Any]:
    """The names of the tensors in a file, and an object whose `get_tensor(name)` reads one.

    Raises:
        ValueError, SafetensorError: it is no such file, or damaged.
    """
    with path.open("rb") as file:
        entries = read_entries(file.read, path.stat().st_size)
    return [one.name for one in entries], safe_open(path, framework="pt")


def load_huggingface(folder: Path, *, allow_pickle: bool = False) -> dict[str, torch.Tensor]:
    """The weights in a folder of `save_pretrained`: one file, or several with an index.

    Raises:
        CheckpointError: a file is missing or damaged, or can be loaded only by running what is in it.
    """
    index = next((name for name in INDEXES if (folder / name).is_file()), None)
    if index is None:
        return _load(next(folder / name for name in WHOLE_FILES if (folder / name).is_file()), allow_pickle)
    names_of: dict[str, list[str]] = {}
    for name, file in _weight_map(folder / index).items():
        names_of.setdefault(file, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for file, names in sorted(names_of.items()):
        if not is_plain(file):
            raise CheckpointError(f"the index names {file[:80]!r}, which is no plain name", where=str(folder / index))
        if not (folder / file).is_file():
            raise CheckpointError(f"{file} is missing, which the index names", where=str(folder / index))
        tensors = _load(folder / file, allow_pickle)
        for name in names:
            if name not in tensors:
                raise CheckpointError(f"{file} lacks {name[:80]!r}, which the index names", where=str(folder / index))
            found[name] = tensors[name]
    return found


def _load(path: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_safetensors(path)
    try:
        return find_weights(load_torch_file(path, allow_pickle=allow_pickle)).weights
    except ValueError as error:
        raise CheckpointError(str(error), where=str(path)) from None


def _weight_map(index: Path) -> dict[str, str]:
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
