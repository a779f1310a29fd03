"""Split a batch whose forward and backward do not fit into memory, with the gradient of the whole batch."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_cli.checkpoint import model_state
from trainer_cli.errors import TrainError, UserError
from trainer_cli.trainer.metrics import is_known_zero, tensors_of, weighted
from trainer_cli.trainer.model_call import ForwardState

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

AUTO = "auto"


class Microbatches:
    """The size of the parts that a batch is trained in: fixed, or halved each time that memory runs out.

    Args:
        setting: samples of a part, or `auto`, which begins with whole batches.
    """

    def __init__(self, setting: int | str) -> None:
        self.is_auto = setting == AUTO
        self.size: int | None = None if self.is_auto else int(setting)

    def train(
        self,
        trainer: Trainer,
        batch: Any,
        size: int,
        train_part: Callable[[Any, int], Any],
        begin: Callable[[], None],
    ) -> list[Any]:
        """Train each part of a batch of `size` samples, and return what was returned for each. `begin` is called before
        the batch is trained anew.

        If memory runs out, the gradients of the batch are dropped, buffers (such as the statistics of norms) and
        random generators are as before it, and it is trained anew in parts of half the size. That size is kept.

        Raises:
            TrainError: there is no memory even for one sample.
        """
        if not self.is_auto:
            return [train_part(part, count) for part, count in parts_of(batch, size, self.size or size)]
        before, rng = ForwardState(trainer.model), model_state.capture_rng()
        while True:
            try:
                return [train_part(part, count) for part, count in parts_of(batch, size, self.size or size)]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            # Outside of the handler, so that no traceback holds the tensors of the failed part.
            self._halve(min(self.size or size, size), failure)
            for optimizer in trainer.optimizers.values():
                optimizer.zero_grad()
            before.restore()
            model_state.restore_rng(rng)
            begin()

    def _halve(self, failed: int, failure: str) -> None:
        if failed == 1:
            raise TrainError(
                f"there is no memory for one sample: {failure}",
                cure="Use a smaller model, precision=bf16, or a larger device.",
            )
        self.size = -(-failed // 2)
        log.warning("out of memory with %d samples at once: the batch is trained in parts of %d", failed, self.size)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def parts_of(batch: Any, size: int, most: int) -> Iterator[tuple[Any, int]]:
    """A batch of `size` samples in parts of at most `most`, each with its number of samples.

    Raises:
        UserError: a part of the batch does not have that leading size.
    """
    if size <= most:
        yield batch, size
        return
    for start in range(0, size, most):
        stop = min(start + most, size)
        yield _sliced(batch, size, slice(start, stop)), stop - start


def _sliced(batch: Any, size: int, part: slice) -> Any:
    """The part of every tensor and list of samples; containers keep their type."""
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        if batch.shape[0] != size:
            raise UserError(
                f"a batch of {size} samples has a tensor of shape {tuple(batch.shape)}, which cannot be split",
                where="loop.microbatch",
            )
        return batch[part]
    if isinstance(batch, Mapping):
        return type(batch)({key: _sliced(value, size, part) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_sliced(value, size, part) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == size and _are_samples(batch, size):
            return batch[part]
        return type(batch)(_sliced(value, size, part) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {one.name: _sliced(getattr(batch, one.name), size, part) for one in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    if batch is None or isinstance(batch, str | int | float | bool):
        return batch
    raise UserError(
        f"a batch with a {type(batch).__name__} cannot be split", where="loop.microbatch", cure="Set it to null."
    )


def _are_samples(batch: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Whether each of the `size` items of a sequence is a sample; else each is a field of all samples.

    Raises:
        UserError: it may be either.
    """
    tensors = list(tensors_of(batch))
    fit_fields = bool(tensors) and all(tensor.ndim and tensor.shape[0] == size for tensor in tensors)
    dims = {tensor.ndim for tensor in tensors}
    square = all(isinstance(item, list | tuple) and len(item) == size for item in batch)
    if (len(dims) == 1 and dims != {1}) if fit_fields else square:
        raise UserError(
            f"a batch of {size} samples is a {type(batch).__name__} of {size} items, each of length {size}: it may "
            "hold samples, or fields of all samples",
            where="loop.microbatch",
            cure="Let the collate_fn return a mapping, or use another data.batch_size.",
        )
    return not fit_fields


def joined(outputs: list[tuple[Tensor, Mapping[str, Any], Any]]) -> dict[str, Any]:
    """The outputs of a whole batch, of (loss, outputs, weight) of its parts: means by weight, and sums of tokens."""
    weights = [weight for _, _, weight in outputs]
    total = sum(weights)

    def mean(values: Iterable[Any]) -> Any:
        if is_known_zero(total):
            return torch.tensor(math.nan)
        return sum(map(weighted, values, weights)) / total

    found: dict[str, Any] = {"loss": mean(loss.detach() for loss, _, _ in outputs)}
    for name in outputs[0][1]:
        values = [own[name] for _, own, _ in outputs if name in own]
        if name in ("tokens", "weight"):
            found[name] = sum(values)
        elif name != "loss" and all(_is_scalar(value) for value in values):
            found[name] = mean(values)
    return found


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype is not torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)
