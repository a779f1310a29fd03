"""Read the weights of a checkpoint with which a model is evaluated, exported or used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from trainer_cli.catalog import ForeignKind
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.layout import STEP_MODULES
from trainer_cli.loads import VERSIONS
from trainer_cli.parts import READ_FOREIGN
from trainer_cli.state import select_weights

_TRAINED = "none"
"""The name that stands for the trained weights."""


def read_evaluated_weights(
    path: Path, average: str | None = None
) -> tuple[dict[str, torch.Tensor], str | None, Mapping[str, int] | None]:
    """Read the weights of a checkpoint, the name of the callback whose average they are, and the versions of the
    modules that have saved them; None: the checkpoint has none.

    Args:
        average: name of a callback whose average is read; `none`: the trained weights; None: those that evaluations of
            the run used.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or has no such weights.
    """
    if ForeignKind.of(path) is not None:
        if average not in (None, _TRAINED):
            raise UserError(f"{path} is of another program, which has no averages of --ema")
        foreign = READ_FOREIGN.need(str(path))(path)
        return foreign.model, None, foreign.versions
    checkpointer = make_sync_checkpointer()
    callback = checkpointer.manifest(path).average if average is None else average
    callback = None if callback == _TRAINED else callback
    state = checkpointer.read(path, ["model", VERSIONS, *([] if callback is None else ["callbacks"])])
    weights = select_weights(state, str(path), callback)
    # Without those that the training step of the run held.
    of_model = {name: value for name, value in weights.items() if not name.startswith(f"{STEP_MODULES}.")}
    return of_model, callback, state.get(VERSIONS)
