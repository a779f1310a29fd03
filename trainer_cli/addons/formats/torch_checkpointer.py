"""Read a folder of torch.distributed.checkpoint's experimental Checkpointer: a file of torch.save for each rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.addons.formats.files import SavedWeights, find_weights
from trainer_cli.addons.formats.torch_file import load_torch_file
from trainer_cli.catalog import ForeignKind
from trainer_cli.errors import CheckpointError, NoCheckpointError

_NAME = re.compile(r"checkpoint_\d+\.pt")


def read_rank(path: Path, rank: int, only: Collection[str] | None = None) -> dict[str, Any] | None:
    """The state in the file of one rank, or its top-level keys in `only`; None if `path` is neither a folder of such
    files, of which that of this rank is read, nor such a file.

    Raises:
        NoCheckpointError: the file does not exist: fewer ranks saved.
        CheckpointError: the file is damaged, or does not contain a mapping.
    """
    kind = ForeignKind.of(path)
    if kind is ForeignKind.torch_checkpointer:
        file = path / f"checkpoint_{rank}.pt"
    elif kind is ForeignKind.torch_file and _NAME.fullmatch(path.name):
        file = path
    else:
        return None
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


def read_replicated(folder: Path, *, allow_pickle: bool = False) -> SavedWeights:
    """The weights that every rank saved, from the file of rank 0.

    Raises:
        CheckpointError: the weights of another rank have other names or shapes, as those of a sharded model.
        ValueError: there are no weights.
    """
    # By length first, so that rank 10 comes after rank 9.
    first, *other_files = sorted(
        (file for file in folder.iterdir() if _NAME.fullmatch(file.name)), key=lambda file: (len(file.name), file.name)
    )
    saved = find_weights(load_torch_file(first, allow_pickle=allow_pickle))
    for file in other_files:
        weights = find_weights(load_torch_file(file, allow_pickle=allow_pickle)).weights
        for name in sorted(saved.weights.keys() | weights.keys()):
            shapes = [tuple(state[name].shape) if name in state else None for state in (saved.weights, weights)]
            if shapes[0] != shapes[1]:
                texts = ["lacks it" if shape is None else f"has {shape}" for shape in shapes]
                raise CheckpointError(
                    f"the ranks saved other weights: {name[:80]!r}: {first.name} {texts[0]} and {file.name} {texts[1]}",
                    where=str(folder),
                    cure="These are parts of a sharded model: name the file of one rank, or save the whole model.",
                )
    return saved
