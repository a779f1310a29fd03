"""Text for language models: windows, documents, and documents packed into rows of one length.

Rows are composed once from the lengths alone, by best fit over decreasing lengths. So an epoch has a known number of
rows, their order is the usual permutation, and a resume at any row is immediate.
"""

from __future__ import annotations

import re
import sysconfig
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.core.naming import class_name
from trainer_cli.data.random_state import kept_random_state
from trainer_cli.errors import UserError

_STANDARD_LIBRARY_BYTES = 2_000_000

IGNORED = -100
"""Target of a position without a next token, which `torch.nn.functional.cross_entropy` ignores."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


class TextUnit(StrEnum):
    """The unit of a token."""

    bytes = "bytes"
    characters = "characters"


class DocumentUnit(StrEnum):
    """The unit of a document."""

    line = "line"
    paragraph = "paragraph"
    file = "file"


class Text:
    """A text in windows of `context` tokens, the last `val_fraction` of it held out.

    `path` is a file, a list of files, or a folder (all its files, sorted by path). Null takes the sources of the
    running interpreter's standard library, up to 2 MB. Tokens are bytes (`vocab_size` 256) or the characters that occur
    in the text. `train` has a window at every position; those of `val` do not overlap, and an incomplete last one is
    left out.
    """

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        unit: str = "bytes",
        context: int = 64,
        val_fraction: float = 0.1,
    ) -> None:
        _check_choice("unit", unit, TextUnit)
        if context < 1:
            raise UserError(f"data.context is {context}, but it must be at least 1", where="data.context")
        content = b"".join(_read_contents(path))
        self.context = context
        tokens, self.characters = _tokenize([content], unit)
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
        self.fingerprint = blake2b(tokens.numpy().tobytes(), digest_size=16).hexdigest()
        self._tokens = tokens
        self._context = context
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._context - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} windows")
        start = index * self._stride
        # Stored in fewer bits, but targets of cross_entropy must have 64.
        window = self._tokens[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        # One gather for the whole batch instead of a slice per window.
        starts = torch.tensor(indices) * self._stride
        windows = self._tokens[starts.unsqueeze(1) + torch.arange(self._context + 1)].long()
        return list(zip(windows[:, :-1].unbind(), windows[:, 1:].unbind(), strict=True))

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
        if self._characters is None:
            return bytes(tokens).decode(errors="replace")
        return "".join(self._characters[token] for token in tokens)


class Documents:
    """A text as documents of different lengths, the last `val_fraction` of them held out.

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
        _check_choice("unit", unit, TextUnit)
        _check_choice("document", document, DocumentUnit)
        documents = [text for content in _read_contents(path) for text in _split_documents(content, document)]
        split = len(documents) - round(len(documents) * val_fraction)
        if not 0 < split < len(documents):
            raise UserError(
                f"{len(documents)} documents, {val_fraction:g} of them held out, leave nothing to train on or to "
                "evaluate",
                where="data",
                cure="Give more text, or change val_fraction.",
            )
        tokens, self.characters = _tokenize(documents, unit)
        """The characters in the order of their tokens; None if tokens are bytes."""
        self.vocab_size = 256 if self.characters is None else len(self.characters)
        sizes = map(len, documents) if self.characters is None else (len(text.decode()) for text in documents)
        lengths = np.fromiter(sizes, dtype=np.int64, count=len(documents))
        train_tokens = int(lengths[:split].sum())
        self.train = Sequences(tokens[:train_tokens], lengths[:split])
        self.val = Sequences(tokens[train_tokens:], lengths[split:])


class Sequences:
    """Sequences of different `lengths`, which are stored one after another in `tokens`."""

    deterministic = True

    def __init__(self, tokens: Tensor, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.fingerprint = blake2b(tokens.numpy().tobytes() + lengths.tobytes(), digest_size=16).hexdigest()
        self._tokens = tokens
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} sequences")
        end = int(self._ends[index])
        return self._tokens[end - int(self.lengths[index]) : end].long()


def _check_choice(name: str, value: str, choices: type[StrEnum]) -> None:
    if value not in list(choices):
        raise UserError(f"data.{name} is {value!r}, but it must be one of {', '.join(choices)}", where=f"data.{name}")


def _read_contents(path: str | Sequence[str] | None) -> list[bytes]:
    return _read_standard_library() if path is None else [_read(file) for file in _list_files(path)]


def _split_documents(content: bytes, document: str) -> list[bytes]:
    if document == DocumentUnit.file:
        return [content] if content else []
    if document == DocumentUnit.line:
        documents = content.splitlines(keepends=True)
    else:
        documents = [paragraph + b"\n" for paragraph in re.split(rb"\n(?:[ \t\r]*\n)+", content)]
        # No newline was removed at the end of the text.
        documents[-1] = documents[-1][:-1]
    return [text for text in documents if text.strip()]


def _tokenize(documents: Sequence[bytes], unit: str) -> tuple[Tensor, str | None]:
    """The tokens of all documents, one after another, and their characters unless they are bytes."""
    content = b"".join(documents)
    if unit == TextUnit.bytes:
        # Copied, because torch warns of a tensor in memory that cannot be written.
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()), None
    codes = np.frombuffer(_decode(content).encode("utf-32-le"), dtype=np.uint32)
    characters, tokens = np.unique(codes, return_inverse=True)
    return torch.from_numpy(tokens.astype(np.int32)), characters.tobytes().decode("utf-32-le")


def _list_files(path: str | Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for entry in map(Path, [path] if isinstance(path, str) else path):
        # Sorted, because the order of a folder differs between file systems.
        matches = sorted(file for file in entry.rglob("*") if file.is_file()) if entry.is_dir() else [entry]
        if not entry.exists() or not matches:
            raise UserError(
                f"the folder {str(entry)!r} has no files" if entry.exists() else f"there is no text at {str(entry)!r}",
                where="data.path",
                cure="Give a file, a list of files or a folder; paths are relative to the current directory.",
            )
        files += matches
    if not files:
        raise UserError("data.path is an empty list", where="data.path")
    return files


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}", where="data.path") from error


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text is not UTF-8 (byte {error.start:,})", where="data.path", cure="Use data.unit=bytes."
        ) from None


def _read_standard_library() -> list[bytes]:
    """Read the top-level modules of the standard library in the order of their names, up to 2 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    contents: list[bytes] = []
    remaining = _STANDARD_LIBRARY_BYTES
    for file in sorted(folder.glob("*.py")):
        if remaining == 0:
            break
        contents.append(_read(file)[:remaining])
        remaining -= len(contents[-1])
    if not contents:
        raise UserError(
            f"this Python has no sources of its standard library in {str(folder)!r}",
            where="data.path",
            cure="Say which text to use with data.path=FILE.",
        )
    return contents


class Packing:
    """Pack the `train` and `val` of `source` into rows of `length` tokens.

    `context` is `length`. All other attributes, such as `vocab_size`, are those of the source.
    """

    def __init__(self, source: Any, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise UserError(
                f"data.length is {length!r}, but it must be a whole number of at least 1", where="data.length"
            )
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
        sequence = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = number * length
        size = np.minimum(targets[sequence] - offset, length)
        row = best_fit(size, length)
        # Stable, so that the pieces of a row keep the order of their sequences.
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
        # Before the pieces: what they do not fill is padding.
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
            span = slice(filled, filled + size)
            tokens[span], targets[span], segments[span] = window[:-1], window[1:], segment
            positions[span] = torch.arange(size)
            filled += size
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions, "count": filled}


def best_fit(sizes: Integers, capacity: int) -> Integers:
    """The row of each piece, by best fit: the largest pieces first, each into the fullest row that has space for it.

    Equal sizes are placed together, so the time depends on the number of different sizes, not on that of pieces.

    Args:
        sizes: sizes of the pieces, from 1 to `capacity`.
        capacity: size of a row.
    """
    # Stable, so that the rows do not depend on the machine.
    order = np.argsort(-sizes, kind="stable")
    row = np.empty(len(sizes), dtype=np.int64)
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
                rows = np.arange(row_count, row_count + -(-remaining // (capacity // size)))
                row_count += len(rows)
            per_row = space // size
            full_count, extra = divmod(remaining, per_row)
            full_rows = rows[:full_count]
            last_row = rows[full_count : full_count + 1] if extra else rows[:0]
            placed = np.concatenate([np.repeat(full_rows, per_row), np.repeat(last_row, extra)])
            row[order[placed_count : placed_count + len(placed)]] = placed
            placed_count += len(placed)
            remaining -= len(placed)
            add_rows(space - per_row * size, full_rows)
            add_rows(space - extra * size, last_row)
            add_rows(space, rows[len(full_rows) + len(last_row) :])
    return row


def _get_dataset(source: Any, split: str) -> Any:
    dataset = getattr(source, split, None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"the {split} part of {class_name(source)} is {class_name(dataset)}, which is no dataset with a length",
            where="data.source",
        )
    return dataset


def _lengths(dataset: Any) -> Integers:
    if (stated := getattr(dataset, "lengths", None)) is None:
        # Samples may draw random numbers.
        with kept_random_state():
            stated = [len(_sequence(dataset[index])) for index in range(len(dataset))]
    lengths = np.asarray(stated, dtype=np.int64)
    if lengths.shape != (len(dataset),):
        raise UserError(f"{class_name(dataset)} has {len(dataset)} sequences, but lengths of shape {lengths.shape}")
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
