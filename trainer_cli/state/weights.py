"""The weights in a state, or the average of them that a callback keeps and evaluates in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trainer_cli.dtensor import local_of
from trainer_cli.errors import CheckpointError

AVERAGE = "average"
"""Key of a callback's state: name of a tensor of the model -> its average."""


def select_weights(state: Mapping[str, Any], where: str, average: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of the model in a state that was read.

    Args:
        where: the checkpoint, for messages.
        average: the name of a callback whose averages take the place of the weights that it averages.

    Raises:
        CheckpointError: there is no model, or no such callback.
    """
    weights = {name: value for name, value in state.get("model", {}).items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise CheckpointError("the checkpoint has no model", where=where)
    if average is None:
        return weights
    averages_of = {
        name: callback[AVERAGE]
        for name, callback in state.get("callbacks", {}).items()
        if isinstance(callback, Mapping) and callback.get(AVERAGE)
    }
    averages = averages_of.get(average)
    if averages is None or not averages.keys() <= weights.keys():
        raise CheckpointError(
            f"the checkpoint has no averaged weights of a callback '{average}'",
            where=where,
            cure=f"It has those of {', '.join(averages_of)}." if averages_of else "Leave --ema out.",
        )
    # Here: a training without an average never needs it.
    from trainer_cli.state.spectral_norm import find_spectral_vectors

    # By identity: a callback averages tied weights once, under one of their names.
    average_of = {id(weights[name]): value.to(weights[name].dtype) for name, value in averages.items()}
    weights = {name: average_of.get(id(value), value) for name, value in weights.items()}
    return weights | find_spectral_vectors(weights)


def find_evaluated_average(callbacks: Mapping[str, Any]) -> str | None:
    """Name of the last callback whose average of the weights evaluations see now; None: no average."""
    averaging = [
        name for name, callback in callbacks.items() if callback.evaluates and callback.state_dict().get(AVERAGE)
    ]
    return averaging[-1] if averaging else None


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no element of the tensors, or of this rank's parts of sharded ones, is NaN or infinite.

    Waits for the device once, or twice if the sum of a tensor is not finite.
    """
    parts = [local_of(tensor).detach() for tensor in tensors]
    # Torch sums no elements of 8 bits.
    values = [tensor.float() if tensor.dtype.itemsize == 1 else tensor for tensor in parts if tensor.numel()]
    # A finite sum proves that all elements are finite, in a tenth of the time. A sum of finite elements may overflow:
    # then the largest magnitude decides, which needs no memory of the tensor's size.
    if _all_finite([tensor.sum() for tensor in values]):
        return True
    return _all_finite([torch.linalg.vector_norm(tensor, ord=torch.inf) for tensor in values])


def _all_finite(numbers: Sequence[torch.Tensor]) -> bool:
    """Whether all these scalars are finite, by one wait for the device."""
    return not numbers or bool(torch.stack([torch.isfinite(number) for number in numbers]).all())
