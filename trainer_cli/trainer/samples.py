"""How many samples a batch holds: as its loader says, else the leading size of its first tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_cli.errors import UserError
from trainer_cli.trainer.batch import leading_size, parts_of_batch

log = logging.getLogger(__name__)


def sample_count(batch: Any, known: int | None = None) -> int:
    """Samples in a batch.

    Args:
        known: what the loader says; None: it does not say, so that the leading size of the first tensor counts.

    Raises:
        UserError: the loader does not say, and the batch holds no tensor with a leading dimension.
    """
    size = leading_size(batch) if known is None else known
    if size is None:
        raise UserError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no tensor with a "
            "leading dimension",
            cure="Give batches as tensors, or as lists, tuples, mappings or dataclasses of them.",
        )
    return size


class SampleCheck:
    """Warns, once for each loader, of a batch whose form contradicts the number of samples that it counts as.

    Each batch is looked at if its loader says how many samples it has, up to the first contradiction: a `collate_fn`
    may drop samples now and then. Of another loader only the first batch is.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()

    def check(self, loader: Any, name: str, batch: Any, size: int, outputs: Mapping[str, Any]) -> None:
        """Check a batch that counts as `size` samples. The model may say otherwise by `weight`."""
        if name in self._done:
            return
        known = loader.batch_samples is not None
        if known and leading_size(batch) == size:
            return
        stated = getattr(loader, "stated_batch_size", None)
        reason = _contradiction(batch, size) if known else _ambiguity(batch, size, stated)
        if not known or reason is not None:
            self._done.add(name)
        if reason is not None and "weight" not in outputs:
            log.warning(
                "a batch of '%s' counts as %d samples in means and accumulated gradients, but %s. Return 'weight' from "
                "the model, such as the number of samples in the batch, if it should count as another number.",
                name, size, reason,
            )  # fmt: skip


def _contradiction(batch: Any, size: int) -> str | None:
    """Why a batch may not hold as many samples as its loader took, or None."""
    items = list(_items(batch))
    if any(_rows(item) == size or (isinstance(item, list | tuple) and len(item) == size) for item in items):
        return None
    rows = next(filter(None, map(_rows, items)), None)
    return None if rows is None else f"its first tensor has {rows} rows"


def _ambiguity(batch: Any, size: int, batch_size: int | None) -> str | None:
    """Why the leading size of the first tensor may not be the number of samples, or None."""
    rows = sorted({rows for item in _items(batch) if (rows := _rows(item)) is not None})
    if len(rows) > 1:
        return f"its tensors have {', '.join(map(str, rows[:5]))} rows"
    if batch_size is not None and batch_size != size:
        return f"its loader has batch_size={batch_size}"
    if isinstance(batch, list | tuple) and len(batch) != size and _are_samples(batch):
        return f"it is a list of {len(batch)} mappings with the same keys"
    return None


def _are_samples(batch: list[Any] | tuple[Any, ...]) -> bool:
    return len(batch) > 1 and all(isinstance(item, Mapping) and item.keys() == batch[0].keys() for item in batch)


def _items(batch: Any) -> Iterator[Any]:
    """A batch and all that it contains, each object once, in order."""
    left, seen = [batch], set[int]()
    while left:
        item = left.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            if _rows(item) is None:
                left.extend(reversed(list(parts_of_batch(item))))


def _rows(item: Any) -> int | None:
    """The leading size of a tensor, or the number of packed sequences."""
    return leading_size(item) if isinstance(item, Tensor | PackedSequence) else None
