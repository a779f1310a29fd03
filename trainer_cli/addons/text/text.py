"""Text for language models: windows, documents, and documents packed into rows of one length.

Rows are composed once from the lengths alone, by best fit over decreasing lengths. So an epoch has a known number of
rows, their order is the usual permutation, and a resume at any row is immediate.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.addons.text.read_text import (
    DocumentUnit,
    Integers,
    TextUnit,
    count_characters,
    find_documents,
    keep_documents,
    read_text,
    tokenize,
)
from trainer_cli.data import kept_random_state
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name
from trainer_cli.terminal import format_count
from trainer_cli.values import check_choice, check_whole

IGNORED = -100
"""Target of a position without a next token, which `torch.nn.functional.cross_entropy` ignores."""

_CHARACTER_DTYPE = torch.int32
"""Type of the tokens in a fingerprint. It does not depend on how they are stored, so checkpoints stay valid."""
_CHUNK_TOKENS = 1 << 20


class Text:
    """A text in windows of `context` tokens, the last `val_fraction` of it held out. From about 1 GB use `TokenFiles`.

    `path` is a file, a list of files, or a folder (all its files, sorted by path). Null takes the sources of the
    running interpreter's standard library, up to 2 MB. Tokens are bytes (`vocab_size` 256) or the characters that occur
    in the text. `train` has a window at every position; those of `val` do not overlap, and an incomplete last one is
    left out.
    """

    def __init__(
        self, path: str | Sequence[str] | None = None, unit: str = "bytes", context: int = 64, val_fraction: float = 0.1
    ) -> None:
        check_choice("data.unit", unit, TextUnit)
        check_whole("data.context", context, 1)
        content, _ = read_text(path)
        self.context = context
        tokens, self.characters = tokenize(content, unit)
        """The characters in the order of their tokens; None if tokens are bytes."""
        self.vocab_size = 256 if self.characters is None else len(self.characters)
        split = len(tokens) - round(len(tokens) * val_fraction)
        if min(split, len(tokens) - split) <= context:
            raise UserError(
                f"a text of {len(tokens):,} {unit}, {val_fraction:g} of it held out, is too short for "
                f"windows of {context}",
                where="data",
                cure="Give more text, or change data.context or data.val_fraction.",
            )
        self.train = Windows(tokens[:split], context, stride=1, characters=self.characters)
        self.val = Windows(tokens[split:], context, stride=context, characters=self.characters)


class Windows:
    """Samples of (tokens, next tokens), both (context,), one every `stride` tokens.

    Args:
        characters: the characters in the order of their tokens; None: tokens are bytes.
    """

    deterministic = True

    def __init__(self, tokens: Tensor, context: int, *, stride: int, characters: str | None = None) -> None:
        self._characters = characters
        self.fingerprint = _digest(tokens, None if characters is None else _CHARACTER_DTYPE)
        self._tokens = tokens
        self._context = context
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._context - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {format_count(len(self), 'window')}")
        start = index * self._stride
        # Stored in fewer bits, but targets of cross_entropy must have 64.
        window = self._tokens[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        # One gather for the whole batch instead of a slice per window.
        starts = torch.tensor(indices) * self._stride
        windows = self._tokens[starts.unsqueeze(1) + torch.arange(self._context + 1)].long()
        return list(zip(windows[:, :-1].unbind(), windows[:, 1:].unbind(), strict=True))

    def describe(self, index: int) -> str:
        """The text of a sample."""
        return self.decode(self[index][0].tolist())

    def encode(self, text: str) -> list[int]:
        """Encode a text as tokens.

        Raises:
            UserError: a character has no token.
        """
        if self._characters is None:
            return list(text.encode())
        if unknown := [character for character in text if character not in self._characters]:
            raise UserError(f"the text has no character {unknown[0]!r}", cure="Leave it out of the prompt.")
        return [self._characters.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text."""
        return _decode(tokens, self._characters)


def _decode(tokens: Sequence[int], characters: str | None) -> str:
    """The text of tokens that are numbers of `characters`, or bytes if that is None."""
    if characters is None:
        return bytes(tokens).decode(errors="replace")
    return "".join(characters[token] for token in tokens)


class Documents:
    """A text as documents of different lengths, the last `val_fraction` of them held out. From 1 GB use `TokenFiles`.

    `path` and `unit` are those of `Text`. A document is a `line`, a `paragraph` (lines up to an empty one) or a `file`,
    and ends with its newline. Empty documents are left out. `train` and `val` are `Sequences`; pack them with
    `trainer_cli.Packing` to train on them.
    """

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        unit: str = "bytes",
        document: str = "paragraph",
        val_fraction: float = 0.1,
    ) -> None:
        check_choice("data.unit", unit, TextUnit)
        check_choice("data.document", document, DocumentUnit)
        content, ends = read_text(path)
        starts, stops = find_documents(content, ends, document)
        split = len(starts) - round(len(starts) * val_fraction)
        if not 0 < split < len(starts):
            raise UserError(
                f"{format_count(len(starts), 'document')}, {val_fraction:g} of them held out, leave nothing to "
                "train on or to evaluate",
                where="data",
                cure="Give more text, or change val_fraction.",
            )
        content, lengths = keep_documents(content, starts, stops), stops - starts
        if unit == TextUnit.characters:
            lengths = count_characters(content, np.cumsum(lengths))
        tokens, self.characters = tokenize(content, unit)
        """The characters in the order of their tokens; None if tokens are bytes."""
        self.vocab_size = 256 if self.characters is None else len(self.characters)
        digest_dtype = None if self.characters is None else _CHARACTER_DTYPE
        train_tokens = int(lengths[:split].sum())
        self.train = Sequences(tokens[:train_tokens], lengths[:split], digest_dtype, self.characters)
        self.val = Sequences(tokens[train_tokens:], lengths[split:], digest_dtype, self.characters)


class Sequences:
    """Sequences of different `lengths`, which are stored one after another in `tokens`.

    Args:
        digest_dtype: type to which tokens are converted for the fingerprint; None: they are not.
        characters: as in `Windows`.
    """

    deterministic = True

    def __init__(
        self, tokens: Tensor, lengths: Integers, digest_dtype: torch.dtype | None = None, characters: str | None = None
    ) -> None:
        self.lengths = lengths
        self._characters = characters
        self.fingerprint = _digest(tokens, digest_dtype, lengths.tobytes())
        self._tokens = tokens
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {format_count(len(self), 'sequence')}")
        end = int(self._ends[index])
        return self._tokens[end - int(self.lengths[index]) : end].long()

    def describe(self, index: int) -> str:
        """The text of a sequence."""
        return _decode(self[index].tolist(), self._characters)


def _digest(tokens: Tensor, dtype: torch.dtype | None, more: bytes = b"") -> str:
    """The digest of the tokens as `dtype`, or as they are, and of `more` after them."""
    digest = blake2b(digest_size=16)
    # By chunks, because a conversion to a wider type takes memory.
    for chunk in torch.split(tokens, _CHUNK_TOKENS):
        digest.update(chunk.to(dtype or tokens.dtype).numpy().data)
    digest.update(more)
    return digest.hexdigest()


class Packing:
    """Pack the `train` and `val` of `source` into rows of `length` tokens.

    `context` is `length`. All other attributes, such as `vocab_size`, are those of the source.
    """

    def __init__(self, source: Any, length: int) -> None:
        check_whole("data.length", length, 1)
        self.source = source
        self.context = length
        self.train = PackedRows(_get_dataset(source, "train"), length)
        val = getattr(source, "val", None)
        self.val: Any = None
        if isinstance(val, Mapping):
            self.val = {name: PackedRows(dataset, length) for name, dataset in val.items()}
        elif val is not None:
            self.val = PackedRows(val, length)

    def __getattr__(self, name: str) -> Any:
        # Without this, a copy or unpickling, which has no `source` yet, would recurse without end.
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


def collate_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows to (rows, length) tensors, and `count`, the number of their targets."""
    batch: dict[str, Any] = {
        name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets", "segments", "positions")
    }
    # An int, which is read without a wait for a GPU.
    batch["count"] = sum(row["count"] for row in rows)
    return batch


class PackedRows:
    """A dataset of rows, each with pieces of sequences. A row is a mapping of these tensors of (length,), and `count`:

    - `tokens`: the tokens; 0 for padding.
    - `targets`: the next token of the same sequence; `IGNORED` for padding.
    - `segments`: number of the piece in the row, from 1; 0 for padding.
    - `positions`: position in the piece, from 0.
    - `count`: the number of targets, an int.

    A sequence of n tokens has n - 1 targets and takes n - 1 positions; with fewer than two tokens it has none. A longer
    sequence than `length` is cut into pieces, in which each target occurs once.

    `dataset` holds sequences of whole numbers. Without an attribute `lengths` it is read once to find them.
    """

    collate = staticmethod(collate_rows)

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        lengths = _lengths(dataset)
        targets = np.maximum(lengths - 1, 0)
        self.targets = int(targets.sum())
        """Number of targets in an epoch."""
        if self.targets == 0:
            raise UserError(
                f"{class_name(dataset)} has no sequence of two tokens or more, so there is nothing to predict",
                where="data",
            )
        pieces = -(-targets // length)
        # In 32 bits where they suffice: of short documents these arrays are as large as the text.
        dtype = np.int32 if max(int(pieces.sum()), int(lengths.max()) + length) < 1 << 31 else np.int64
        sequence = np.repeat(np.arange(len(lengths), dtype=dtype), pieces)
        offset: np.ndarray[Any, Any] = np.arange(len(sequence), dtype=dtype)
        offset -= np.repeat((np.cumsum(pieces) - pieces).astype(dtype), pieces)
        offset *= length
        size = np.minimum(np.repeat(targets.astype(dtype), pieces) - offset, length)
        del targets, pieces
        row = best_fit(size, length)
        # Stable, so that the pieces of a row keep the order of their sequences.
        order = np.argsort(row, kind="stable")
        self._sequence, self._offset, self._size = sequence[order], offset[order], size[order]
        self._start = np.concatenate([[0], np.cumsum(np.bincount(row))])
        self._lengths = lengths
        digest = blake2b(f"{length} {getattr(dataset, 'fingerprint', None)} ".encode(), digest_size=16)
        digest.update(lengths.tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._start) - 1

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """The (index of the sequence, first token, number of targets) of each piece in a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {format_count(len(self), 'row')}")
        span = slice(self._start[index], self._start[index + 1])
        columns = (self._sequence[span], self._offset[span], self._size[span])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def describe(self, index: int) -> str:
        """The descriptions of the sequences in a row, if their dataset has any."""
        describe = getattr(self.dataset, "describe", None)
        if not callable(describe):
            return ""
        return "\n".join(f"{number}: {describe(number)}" for number, _, _ in self.pieces(index))

    def __getitem__(self, index: int) -> dict[str, Any]:
        pieces = self.pieces(index)
        tokens, targets, segments, positions = (torch.zeros(self.length, dtype=torch.int64) for _ in range(4))
        # Before the pieces: what they do not fill is padding.
        targets.fill_(IGNORED)
        filled = 0
        for segment, (number, offset, size) in enumerate(pieces, start=1):
            sequence = _sequence(self.dataset[number])
            if len(sequence) != self._lengths[number]:
                raise ValueError(
                    f"sequence {number} has {format_count(len(sequence), 'token')}, but rows were composed for "
                    f"{self._lengths[number]}"
                )
            window = sequence[offset : offset + size + 1]
            span = slice(filled, filled + size)
            tokens[span], targets[span], segments[span] = window[:-1], window[1:], segment
            positions[span] = torch.arange(size)
            filled += size
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "count": filled}


def best_fit(sizes: np.ndarray[Any, Any], capacity: int) -> np.ndarray[Any, Any]:
    """The row of each piece, by best fit: the largest pieces first, each into the fullest row that has space for it.

    Equal sizes are placed together, so the time depends on the number of different sizes, not on that of pieces.

    Args:
        sizes: sizes of the pieces, from 1 to `capacity`.
        capacity: size of a row.
    """
    # Stable, so that the rows do not depend on the machine.
    order = np.argsort(-sizes, kind="stable")
    # In the type of the sizes, which the caller chooses for the number of pieces too.
    row = np.empty(len(sizes), dtype=sizes.dtype)
    rows_by_space: dict[int, list[Integers]] = {}
    spaces: list[int] = []  # the keys of rows_by_space, ascending
    row_count = placed_count = 0

    def add_rows(space: int, rows: Integers) -> None:
        if space > 0 and len(rows):
            if space not in rows_by_space:
                rows_by_space[space] = []
                insort(spaces, space)
            rows_by_space[space].append(rows)

    values, counts = np.unique(sizes, return_counts=True)
    for size, remaining in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while remaining:
            fullest = bisect_left(spaces, size)
            if fullest < len(spaces):
                space = spaces.pop(fullest)
                rows = np.concatenate(rows_by_space.pop(space))
            else:
                space = capacity
                rows = np.arange(row_count, row_count + -(-remaining // (capacity // size)), dtype=row.dtype)
                row_count += len(rows)
            per_row = space // size
            full_count, extra = divmod(remaining, per_row)
            full_rows = rows[:full_count]
            last_row = rows[full_count : full_count + 1] if extra else rows[:0]
            for placed in (np.repeat(full_rows, per_row), np.repeat(last_row, extra)):
                row[order[placed_count : placed_count + len(placed)]] = placed
                placed_count += len(placed)
                remaining -= len(placed)
            add_rows(space - per_row * size, full_rows)
            add_rows(space - extra * size, last_row)
            add_rows(space, rows[len(full_rows) + len(last_row) :])
    return row


def _get_dataset(source: Any, split: str) -> Any:
    """The `train` or `val` of a source. Raises UserError if it is not a dataset with a length."""
    dataset = getattr(source, split, None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"the {split} part of {class_name(source)} is {class_name(dataset)}, which is not a dataset with a length",
            where="data.source",
        )
    return dataset


def _lengths(dataset: Any) -> Integers:
    """The length of each sequence: as the dataset states them, else of the sequences, which are all read."""
    if (stated := getattr(dataset, "lengths", None)) is None:
        # Samples may draw random numbers.
        with kept_random_state():
            stated = [len(_sequence(dataset[index])) for index in range(len(dataset))]
    lengths = np.asarray(stated, dtype=np.int64)
    if lengths.shape != (len(dataset),):
        raise UserError(
            f"{class_name(dataset)} has {format_count(len(dataset), 'sequence')}, but lengths of shape {lengths.shape}"
        )
    return lengths


def _sequence(sample: Any) -> Tensor:
    """A sample as a tensor. Raises UserError if it is not a sequence of whole numbers."""
    sequence = torch.as_tensor(sample)
    if sequence.ndim != 1 or (sequence.is_floating_point() and len(sequence)):
        raise UserError(
            f"a sample to pack is {tuple(sequence.shape)} of {sequence.dtype}, expected a sequence of whole numbers",
            where="data.source",
        )
    return sequence
