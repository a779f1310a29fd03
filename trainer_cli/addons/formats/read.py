"""Read the weights of a checkpoint that another program wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from trainer_cli.addons.formats.dcp import load_dcp
from trainer_cli.addons.formats.files import find_weights, load_huggingface, load_safetensors
from trainer_cli.addons.formats.torch_checkpointer import read_replicated
from trainer_cli.addons.formats.torch_file import load_torch_file
from trainer_cli.catalog import ForeignKind
from trainer_cli.errors import CheckpointError, one_line
from trainer_cli.parts import ForeignCheckpoint


def read_foreign(path: Path, *, allow_pickle: bool = False) -> ForeignCheckpoint:
    """The weights of a checkpoint of torch, Lightning, Composer, torch.distributed.checkpoint or safetensors.

    Args:
        allow_pickle: run code in the file if it cannot be loaded otherwise.

    Raises:
        CheckpointError: it is of another program, damaged, without weights, or can be loaded only by running its code.
    """
    try:
        checkpoint = _read(path, ForeignKind.of(path), allow_pickle)
        _check_sizes(path, checkpoint.model)
    except OSError as error:
        raise CheckpointError(f"the file cannot be read: {error.strerror or error}", where=str(path)) from None
    except CheckpointError as error:
        error.what = one_line(error.what)
        raise
    return checkpoint


def _check_sizes(path: Path, model: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor that is larger than all files: by strides of 0 a damaged file can name any number of elements."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size_bytes = sum(file.stat().st_size for file in files)
    for name, tensor in model.items():
        if tensor.nbytes > size_bytes:
            raise CheckpointError(f"{name[:80]!r} is larger than all of the checkpoint", where=str(path))


def _read(path: Path, kind: ForeignKind | None, allow_pickle: bool) -> ForeignCheckpoint:
    """Read a checkpoint of this kind; None is refused. Raises CheckpointError if it is damaged."""
    match kind:
        case ForeignKind.torch_file | ForeignKind.torch_checkpointer:
            try:
                saved = (
                    read_replicated(path, allow_pickle=allow_pickle)
                    if kind is ForeignKind.torch_checkpointer
                    else find_weights(load_torch_file(path, allow_pickle=allow_pickle))
                )
            except ValueError as error:
                raise CheckpointError(str(error), where=str(path)) from None
            return ForeignCheckpoint(saved.program, saved.weights, saved.step, saved.versions)
        case ForeignKind.safetensors:
            return ForeignCheckpoint(kind.value, load_safetensors(path))
        case ForeignKind.huggingface:
            return ForeignCheckpoint(kind.value, load_huggingface(path, allow_pickle=allow_pickle))
        case ForeignKind.dcp:
            return ForeignCheckpoint(kind.value, load_dcp(path))
        case None:
            raise CheckpointError("it is not a checkpoint of a known program", where=str(path))
