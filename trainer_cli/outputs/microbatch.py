"""Train a batch that does not fit into memory in smaller microbatches, with the same gradient."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_cli.errors import TrainError, UserError
from trainer_cli.outputs.metrics import is_known_zero, tensors_of, weighted
from trainer_cli.outputs.model_call import ForwardState
from trainer_cli.state import capture_rng, restore_rng
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

AUTO = "auto"


class Microbatches:
    """Split batches into microbatches of a fixed size, or of a size that is halved when memory runs out.

    Args:
        setting: samples in a microbatch, or `auto`, which begins with whole batches.
    """

    def __init__(self, setting: int | str) -> None:
        self.is_auto = setting == AUTO
        self.size: int | None = None if self.is_auto else int(setting)

    def train(
        self,
        trainer: Trainer,
        batch: Any,
        size: int,
        train_one: Callable[[Any, int], Any],
        reset_weights: Callable[[], None],
    ) -> list[Any]:
        """Train a batch of `size` samples in microbatches.

        If memory runs out, the gradients of the batch are dropped, buffers (such as the statistics of norms) and
        random generators are restored, and the batch is trained again in microbatches of half the size. That size is
        kept.

        Args:
            train_one: runs forward and backward of a microbatch, given its number of samples.
            reset_weights: restores the weights of the accumulated gradients before the batch is trained again.

        Returns:
            The result of `train_one` for each microbatch.

        Raises:
            TrainError: there is not enough memory for one sample.
        """
        if not self.is_auto:
            return [train_one(microbatch, count) for microbatch, count in split_batch(batch, size, self.size or size)]
        before, rng = ForwardState(trainer.model), capture_rng()
        while True:
            try:
                return [
                    train_one(microbatch, count) for microbatch, count in split_batch(batch, size, self.size or size)
                ]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            # Outside of the handler, because a traceback would keep the tensors of the failed microbatch alive.
            self._halve(min(self.size or size, size), failure)
            for optimizer in trainer.optimizers.values():
                optimizer.zero_grad()
            before.restore()
            restore_rng(rng)
            reset_weights()

    def _halve(self, failed: int, failure: str) -> None:
        """Halve the size, after microbatches of `failed` samples ran out of memory."""
        if failed == 1:
            raise TrainError(
                f"there is no memory for one sample: {failure}",
                cure="Use a smaller model, precision=bf16, or a larger device.",
            )
        # Rounded up: 3 samples are split into 2 and 1, not into three.
        self.size = -(-failed // 2)
        log.warning(
            "out of memory with %s at once: the batch is trained in parts of %d",
            format_count(failed, "sample"),
            self.size,
        )
        # Cycles may hold tensors, and cached blocks of the old sizes would leave no room for new ones.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def split_batch(batch: Any, size: int, max_size: int) -> Iterator[tuple[Any, int]]:
    """Split a batch of `size` samples into microbatches of at most `max_size`, each with its number of samples.

    Raises:
        UserError: a tensor of the batch does not have that leading size.
    """
    if size <= max_size:
        yield batch, size
        return
    for start in range(0, size, max_size):
        stop = min(start + max_size, size)
        yield _slice_batch(batch, size, slice(start, stop)), stop - start


def _slice_batch(batch: Any, size: int, samples: slice) -> Any:
    """Slice every tensor and list of samples in a batch; containers keep their type."""
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        if batch.shape[0] != size:
            raise UserError(
                f"a batch of {format_count(size, 'sample')} has a tensor of shape {tuple(batch.shape)}, which cannot "
                "be split",
                where="loop.microbatch",
            )
        return batch[samples]
    if isinstance(batch, Mapping):
        return type(batch)({key: _slice_batch(value, size, samples) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_slice_batch(value, size, samples) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == size and _are_samples(batch, size):
            return batch[samples]
        return type(batch)(_slice_batch(value, size, samples) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            field.name: _slice_batch(getattr(batch, field.name), size, samples) for field in dataclasses.fields(batch)
        }
        return dataclasses.replace(batch, **fields)
    if batch is None or isinstance(batch, str | int | float | bool):
        return batch
    raise UserError(
        f"a batch with a {type(batch).__name__} cannot be split", where="loop.microbatch", cure="Set it to null."
    )


def _are_samples(batch: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Whether each of the `size` items of a sequence is a sample, rather than a field of all samples.

    Raises:
        UserError: it could be either.
    """
    tensors = list(tensors_of(batch))
    fit_fields = bool(tensors) and all(tensor.ndim and tensor.shape[0] == size for tensor in tensors)
    dims = {tensor.ndim for tensor in tensors}
    is_square = all(isinstance(item, list | tuple) and len(item) == size for item in batch)
    # Tensors that differ in rank are fields, and so are vectors: a sample of a vector would be as long as the batch.
    if (len(dims) == 1 and dims != {1}) if fit_fields else is_square:
        raise UserError(
            f"a batch of {format_count(size, 'sample')} is a {type(batch).__name__} of {format_count(size, 'item')}, "
            f"each of length {size}: it may hold samples, or fields of all samples",
            where="loop.microbatch",
            cure="Let the collate_fn return a mapping, or use another data.batch_size.",
        )
    return not fit_fields


def join_outputs(results: list[tuple[Tensor, Mapping[str, Any], Any]]) -> dict[str, Any]:
    """Join the (loss, outputs, weight) of microbatches: weighted means, and sums of `tokens` and `weight`."""
    weights = [weight for _, _, weight in results]
    total = sum(weights)

    def mean(values: Iterable[Any]) -> Any:
        if is_known_zero(total):
            return torch.tensor(math.nan)
        return sum(map(weighted, values, weights)) / total

    joined: dict[str, Any] = {"loss": mean(loss.detach() for loss, _, _ in results)}
    for name in results[0][1]:
        values = [outputs[name] for _, outputs, _ in results if name in outputs]
        if name in ("tokens", "weight"):
            joined[name] = sum(values)
        elif name != "loss" and all(_is_scalar(value) for value in values):
            joined[name] = mean(values)
    return joined


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype is not torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)
