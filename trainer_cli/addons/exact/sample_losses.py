"""The samples of a batch to blame for a loss that is not finite or for an exception: rows with NaN, and what the model
makes of each sample alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer_cli.batches import sample_count, split_batch
from trainer_cli.dtensor import is_dtensor
from trainer_cli.errors import UserError, one_line
from trainer_cli.outputs import ForwardState, OutputKind, make_arguments, modes_kept, read_outputs
from trainer_cli.state import rng_kept, unwrap

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer


def count_samples(batch: Any, loader_count: int | None) -> int:
    """The number of samples in a batch, see `sample_count`; 1 if it cannot be told."""
    try:
        return sample_count(batch, loader_count)
    except UserError:
        return 1


class AloneOutcomes(NamedTuple):
    """What the model makes of each sample of a batch alone."""

    losses: list[float] | str
    """The losses, or why they are not known."""
    raised: dict[int, str]
    """The row of each sample that alone raises an exception, and the exception."""


def compute_alone(trainer: Trainer, batch: Any, size: int, before: ForwardState | None = None) -> AloneOutcomes:
    """What the model makes of each sample of a batch alone, at the present weights in evaluation mode. Nothing is
    changed.

    Args:
        size: the number of samples in the batch.
        before: the buffers to use instead of the present ones, such as those of before a batch with NaN, which its
            forward puts into the statistics of batch norm.
    """
    if trainer.strategy.world_size > 1 and any(is_dtensor(parameter) for parameter in trainer.model.parameters()):
        return AloneOutcomes("--per-sample needs the whole model in each process", {})
    model = unwrap(trainer.model)
    state = ForwardState(model, parameters=True)
    losses: list[float] = []
    raised: dict[int, str] = {}
    with rng_kept():
        try:
            if before is not None:
                before.restore()
            with modes_kept(model), torch.no_grad():
                model.eval()
                for row, (sample, _) in enumerate(split_batch(batch, size, 1)):
                    args, kwargs = make_arguments(trainer.model_call, sample)
                    try:
                        with trainer.precision.autocast(trainer.device) or nullcontext():
                            losses.append(float(read_outputs(model(*args, **kwargs))[0]))
                    except Exception as error:
                        raised[row] = one_line(f"{type(error).__name__}: {error}")
        except UserError as error:
            return AloneOutcomes(error.what, {})
        finally:
            state.restore()
    if raised:
        # The user's model may take whole batches alone.
        return AloneOutcomes(f"a sample alone is no batch for the model: {next(iter(raised.values()))}", raised)
    return AloneOutcomes(losses, raised)


def read_losses(outputs: Mapping[str, Any], size: int) -> list[float] | None:
    """The loss of each sample that the model returns: an output with `loss` in its name and a value for each."""
    for name, value in outputs.items():
        if "loss" in str(name) and isinstance(value, Tensor) and value.shape == (size,) and size > 1:
            return [float(loss) for loss in value.detach()]
    return None


def read_numbers(outputs: Mapping[str, Any]) -> dict[str, float]:
    """The outputs besides the loss that are single numbers."""
    numbers: dict[str, float] = {}
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        # Its kind by the value alone: a weight is a number too, unless it is None.
        if name != "loss" and OutputKind.of("", value) is OutputKind.mean:
            numbers[str(name)] = float(value)
    return numbers
