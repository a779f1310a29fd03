"""Sequences of different lengths packed into rows of one length, with little padding and an exact count of targets.

Rows are composed once, by best fit over decreasing lengths, from the lengths alone; so an epoch has a known number
of rows, their order is the usual permutation, and a resume at any row is immediate.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.checkpoint.naming import class_name
from trainer_cli.data.randomness import kept_random_state
from trainer_cli.errors import UserError

IGNORED = -100
"""The target where there is none; `torch.nn.functional.cross_entropy` leaves it out."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Packing:
    """Data whose `train` and `val` are those of `source`, packed into rows of `length` tokens.

    Any other attribute, such as `vocab_size`, is the source's; `context` is `length`.
    """

    def __init__(self, source: Any, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise UserError(
                f"data.length is {length!r}, but it must be a whole number of at least 1", where="data.length"
            )
        self.source = source
        self.context = length
        self.train = PackedRows(_dataset(source, "train"), length)
        val = getattr(source, "val", None)
        self.val: Any = None
        if isinstance(val, Mapping):
            self.val = {name: PackedRows(dataset, length) for name, dataset in val.items()}
        elif val is not None:
            self.val = PackedRows(val, length)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of rows: (rows, length) tensors, and `count`, the number of real targets in all, as an int.

    An int needs no wait for a GPU to be read.
    """
    batch: dict[str, Any] = {
        name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets", "segments", "positions")
    }
    batch["count"] = sum(row["count"] for row in rows)
    return batch


class PackedRows:
    """Rows of several sequences: a dataset of mappings with these tensors of (length,), and `count`.

    `tokens`, 0 as padding; `targets`, the token that follows in the same sequence, `IGNORED` in the padding;
    `segments`, which sequence of the row, from 1, 0 for padding; `positions` in the sequence, from 0; `count`,
    how many targets there are. A sequence of n tokens has n - 1 targets and takes n - 1 places. A longer one is
    cut into pieces; no target is lost, none counted twice. One of less than two tokens has no target.

    `dataset` gives sequences of whole numbers; it may have `lengths`, else it is read once to learn them.
    """

    collate = staticmethod(collate_rows)

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        lengths = _lengths(dataset)
        targets = np.maximum(lengths - 1, 0)
        self.targets = int(targets.sum())
        """Targets of an epoch."""
        if self.targets == 0:
            raise UserError(
                f"{class_name(dataset)} has no sequence of two tokens or more, so there is nothing to predict",
                where="data",
            )
        pieces = -(-targets // length)
        sequence = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = number * length
        size = np.minimum(targets[sequence] - offset, length)
        row = best_fit(size, length)
        order = np.argsort(row, kind="stable")
        self._sequence, self._offset, self._size = sequence[order], offset[order], size[order]
        self._start = np.concatenate([[0], np.cumsum(np.bincount(row))])
        self._lengths = lengths
        facts = f"{length} {getattr(dataset, 'fingerprint', None)} ".encode() + lengths.tobytes()
        self.fingerprint = blake2b(facts, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._start) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} rows")
        tokens, targets, segments, positions = (torch.zeros(self.length, dtype=torch.int64) for _ in range(4))
        targets.fill_(IGNORED)
        filled = 0
        for segment, piece in enumerate(range(self._start[index], self._start[index + 1]), start=1):
            size, offset, number = int(self._size[piece]), int(self._offset[piece]), int(self._sequence[piece])
            sequence = _sequence(self.dataset[number])
            if len(sequence) != self._lengths[number]:
                raise ValueError(
                    f"sequence {number} has {len(sequence)} tokens, but rows were composed for {self._lengths[number]}"
                )
            window = sequence[offset : offset + size + 1]
            here = slice(filled, filled + size)
            tokens[here], targets[here], segments[here] = window[:-1], window[1:], segment
            positions[here] = torch.arange(size)
            filled += size
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "count": filled}


def best_fit(sizes: Integers, room: int) -> Integers:
    """The row of each piece of 1 to `room` places: the largest pieces first, each into the fullest row that holds it.

    Equal sizes are placed together, so a million pieces take no longer than their different sizes make it.
    """
    order = np.argsort(-sizes, kind="stable")
    row = np.empty(len(sizes), dtype=np.int64)
    rows_with: dict[int, list[Integers]] = {}  # space left -> rows
    spaces: list[int] = []  # the keys, ascending
    rows = at = 0

    def open_with(space: int, numbers: Integers) -> None:
        if space > 0 and len(numbers):
            if space not in rows_with:
                rows_with[space] = []
                insort(spaces, space)
            rows_with[space].append(numbers)

    values, counts = np.unique(sizes, return_counts=True)
    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            fullest = bisect_left(spaces, size)
            if fullest < len(spaces):
                space = spaces.pop(fullest)
                open_rows = np.concatenate(rows_with.pop(space))
            else:
                space = room
                open_rows = np.arange(rows, rows + -(-left // (room // size)))
                rows += len(open_rows)
            each = space // size
            full, over = divmod(left, each)
            whole, partly = open_rows[:full], open_rows[full : full + 1] if over else open_rows[:0]
            placed = np.concatenate([np.repeat(whole, each), np.repeat(partly, over)])
            row[order[at : at + len(placed)]] = placed
            at += len(placed)
            left -= len(placed)
            open_with(space - each * size, whole)
            open_with(space - over * size, partly)
            open_with(space, open_rows[len(whole) + len(partly) :])
    return row


def _dataset(source: Any, part: str) -> Any:
    dataset = getattr(source, part, None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"the {part} part of {class_name(source)} is {class_name(dataset)}, which is no dataset with a length",
            where="data.source",
        )
    return dataset


def _lengths(dataset: Any) -> Integers:
    if (known := getattr(dataset, "lengths", None)) is None:
        with kept_random_state():
            known = [len(_sequence(dataset[index])) for index in range(len(dataset))]
    lengths = np.asarray(known, dtype=np.int64)
    if lengths.shape != (len(dataset),):
        raise UserError(f"{class_name(dataset)} has {len(dataset)} sequences, but lengths of shape {lengths.shape}")
    return lengths


def _sequence(sample: Any) -> Tensor:
    sequence = torch.as_tensor(sample)
    if sequence.ndim != 1 or (sequence.is_floating_point() and len(sequence)):
        raise UserError(
            f"a sample to pack is {tuple(sequence.shape)} of {sequence.dtype}, expected a sequence of whole numbers",
            where="data.source",
        )
    return sequence
