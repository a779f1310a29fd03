"""Read a folder of torch.distributed.checkpoint's experimental Checkpointer: a file of torch.save for each rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.foreign.files import Found, find_weights
from trainer_cli.checkpoint.foreign.kind import Kind, kind_of
from trainer_cli.checkpoint.format.torch_file import load_torch_file
from trainer_cli.errors import CheckpointError, NoCheckpointError

_NAME = re.compile(r"checkpoint_\d+\.pt")


def file_of_rank(path: Path, rank: int) -> Path | None:
    """The file that this rank reads: of a folder its own, or the file that is named; None for anything else."""
    kind = kind_of(path)
    if kind is Kind.torch_checkpointer:
        return path / f"checkpoint_{rank}.pt"
    return path if kind is Kind.torch_file and _NAME.fullmatch(path.name) else None


def read_rank(file: Path, only: Collection[str] | None = None) -> dict[str, Any]:
    """The state in the file of one rank; with `only`, these top-level keys of it.

    Raises:
        NoCheckpointError: the file does not exist: fewer ranks saved.
        CheckpointError: it is damaged, or holds no mapping.
    """
    if not file.is_file():
        raise NoCheckpointError(
            f"there is no {file.name}: fewer ranks saved",
            where=str(file.parent),
            cure="Load it with as many ranks, or name the file of one.",
        )
    state = load_torch_file(file)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a state by names", where=str(file))
    return {key: value for key, value in state.items() if only is None or key in only}


def read_replicated(folder: Path, *, allow_pickle: bool = False) -> Found:
    """The weights of rank 0, which every rank has saved.

    Raises:
        CheckpointError: another rank's have other names or shapes, as those of a sharded model.
        ValueError: there are no weights.
    """
    first, *others = sorted(
        (file for file in folder.iterdir() if _NAME.fullmatch(file.name)), key=lambda file: (len(file.name), file.name)
    )
    found = find_weights(load_torch_file(first, allow_pickle=allow_pickle))
    for file in others:
        weights = find_weights(load_torch_file(file, allow_pickle=allow_pickle)).weights
        for name in sorted(found.weights.keys() | weights.keys()):
            shapes = [tuple(own[name].shape) if name in own else None for own in (found.weights, weights)]
            if shapes[0] != shapes[1]:
                texts = ["lacks it" if shape is None else f"has {shape}" for shape in shapes]
                raise CheckpointError(
                    f"the ranks saved other weights: {name[:80]!r}: {first.name} {texts[0]} and {file.name} {texts[1]}",
                    where=str(folder),
                    cure="These are parts of a sharded model: name the file of one rank, or save the whole model.",
                )
    return found
