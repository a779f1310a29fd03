"""How many samples a batch holds: as its loader says, else the leading size of its first tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_cli.batches.contents import contents_of, leading_size
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)


def sample_count(batch: Any, loader_count: int | None = None) -> int:
    """The number of samples in a batch.

    Args:
        loader_count: the number that the loader states; None: it states none, so the leading size of the first tensor
            is used.

    Raises:
        UserError: the loader states no number, and the batch has no tensor with a leading dimension.
    """
    size = leading_size(batch) if loader_count is None else loader_count
    if size is None:
        raise UserError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no tensor with a "
            "leading dimension",
            cure="Give batches as tensors, or as lists, tuples, mappings or dataclasses of them.",
        )
    return size


class SampleCheck:
    """Warn once for each loader if the shape of a batch contradicts its number of samples.

    If the loader states the number, all batches are checked up to the first contradiction, because a `collate_fn` may
    drop samples now and then. Otherwise only the first batch is checked.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()
        """Names of the loaders that need no more checks."""

    def check(self, loader: Any, name: str, batch: Any, size: int, outputs: Mapping[str, Any]) -> None:
        """Check a batch that counts as `size` samples. A `weight` in the model's outputs takes precedence."""
        if name in self._done:
            return
        is_stated = loader.batch_samples is not None
        if is_stated and leading_size(batch) == size:
            return
        batch_size = getattr(loader, "stated_batch_size", None)
        reason = _contradiction(batch, size) if is_stated else _ambiguity(batch, size, batch_size)
        if not is_stated or reason is not None:
            self._done.add(name)
        if reason is not None and "weight" not in outputs:
            log.warning(
                "a batch of '%s' counts as %s in means and accumulated gradients, but %s. Return 'weight' from "
                "the model, such as the number of samples in the batch, if it should count as another number.",
                name, format_count(size, "sample"), reason,
            )  # fmt: skip


def _contradiction(batch: Any, size: int) -> str | None:
    """Why a batch may not hold as many samples as its loader states, or None."""
    values = list(_walk(batch))
    lists = (value for value in values if isinstance(value, list | tuple))
    if size in map(_rows, values) or size in map(len, lists):
        return None
    rows = next(filter(None, map(_rows, values)), None)
    return None if rows is None else f"its first tensor has {format_count(rows, 'row')}"


def _ambiguity(batch: Any, size: int, batch_size: int | None) -> str | None:
    """Why the leading size of the first tensor may not be the number of samples, or None."""
    rows = sorted({rows for value in _walk(batch) if (rows := _rows(value)) is not None})
    if len(rows) > 1:
        return f"its tensors have {', '.join(map(str, rows[:5]))} rows"
    if batch_size is not None and batch_size != size:
        return f"its loader has batch_size={batch_size}"
    if isinstance(batch, list | tuple) and len(batch) != size and _are_samples(batch):
        return f"it is a list of {format_count(len(batch), 'mapping')} with the same keys"
    return None


def _are_samples(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items of a list look like samples: at least two mappings with the same keys."""
    return len(batch) > 1 and all(isinstance(item, Mapping) and item.keys() == batch[0].keys() for item in batch)


def _walk(batch: Any) -> Iterator[Any]:
    """Yield a batch and all that it contains, each object once, in order."""
    stack, seen = [batch], set[int]()
    while stack:
        value = stack.pop()
        # Objects of a user may refer to each other.
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            if _rows(value) is None:
                stack.extend(reversed(list(contents_of(value))))


def _rows(value: Any) -> int | None:
    """The leading size of a tensor, or the number of packed sequences."""
    return leading_size(value) if isinstance(value, Tensor | PackedSequence) else None
