"""Text for language models, as windows or as documents: of files, a folder, or Python's own standard library.

Sequences of different lengths packed into rows of one length, with little padding and an exact count of targets.

Rows are composed once, by best fit over decreasing lengths, from the lengths alone; so an epoch has a known number
of rows, their order is the usual permutation, and a resume at any row is immediate.
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
from trainer_cli.data.position import kept_random_state
from trainer_cli.errors import UserError

_STANDARD_LIBRARY_BYTES = 2_000_000


class TextUnit(StrEnum):
    """What one token is."""

    bytes = "bytes"
    characters = "characters"


class DocumentUnit(StrEnum):
    """What one document is."""

    line = "line"
    paragraph = "paragraph"
    file = "file"


class Text:
    """A text, the last `val_fraction` of it held out.

    `path` is a file, a list of files, or a folder (all its files, sorted by path); null takes the sources of
    the running interpreter's standard library, up to 2 MB. Tokens are bytes (`vocab_size` 256) or the
    characters that occur in the text. `train` has a window at every position, `val` windows side by side
    (the last tokens that fill no window are left out).
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
        content = b"".join(_contents(path))
        self.context = context
        tokens, self.characters = _tokens([content], unit)
        """The characters in the order of their tokens; None for bytes."""
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
    """Samples of (tokens, next tokens), both (context,), one every `stride` tokens. `characters` are those of the
    tokens; None: tokens are bytes."""

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
        window = self._tokens[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        starts = torch.tensor(indices) * self._stride
        windows = self._tokens[starts.unsqueeze(1) + torch.arange(self._context + 1)].long()
        return list(zip(windows[:, :-1].unbind(), windows[:, 1:].unbind(), strict=True))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            UserError: a character does not occur in the text that the tokens are of.
        """
        if self._characters is None:
            return list(text.encode())
        if unknown := [one for one in text if one not in self._characters]:
            raise UserError(f"the text has no character {unknown[0]!r}", cure="Leave it out of the prompt.")
        return [self._characters.index(one) for one in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        if self._characters is None:
            return bytes(tokens).decode(errors="replace")
        return "".join(self._characters[one] for one in tokens)


class Documents:
    """A text as separate documents of different lengths, the last `val_fraction` of them held out.

    `path` and `unit` are those of `Text`. A document is a `line`, a `paragraph` (lines up to an empty one) or a
    `file`, and ends with its newline; empty ones are left out. `train` and `val` are `Sequences`; to train on
    them, pack them with `trainer_cli.Packing`.
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
        documents = [one for content in _contents(path) for one in _documents(content, document)]
        split = len(documents) - round(len(documents) * val_fraction)
        if not 0 < split < len(documents):
            raise UserError(
                f"{len(documents)} documents, {val_fraction:g} of them held out, leave nothing to train on or to "
                "evaluate",
                where="data",
                cure="Give more text, or change val_fraction.",
            )
        tokens, self.characters = _tokens(documents, unit)
        """Where tokens are characters: these, in the order of their tokens."""
        self.vocab_size = 256 if self.characters is None else len(self.characters)
        sizes = map(len, documents) if self.characters is None else (len(one.decode()) for one in documents)
        lengths = np.fromiter(sizes, dtype=np.int64, count=len(documents))
        border = int(lengths[:split].sum())
        self.train = Sequences(tokens[:border], lengths[:split])
        self.val = Sequences(tokens[border:], lengths[split:])


class Sequences:
    """Sequences of tokens of different `lengths`, which follow one another in `tokens`."""

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


def _contents(path: str | Sequence[str] | None) -> list[bytes]:
    return _standard_library() if path is None else [_read(file) for file in _files(path)]


def _documents(content: bytes, document: str) -> list[bytes]:
    if document == DocumentUnit.file:
        return [content] if content else []
    if document == DocumentUnit.line:
        found = content.splitlines(keepends=True)
    else:
        found = [one + b"\n" for one in re.split(rb"\n(?:[ \t\r]*\n)+", content)]
        found[-1] = found[-1][:-1]  # the end of the text is not changed
    return [one for one in found if one.strip()]


def _tokens(documents: Sequence[bytes], unit: str) -> tuple[Tensor, str | None]:
    """The tokens of all documents, one after the other, and where they are characters these."""
    content = b"".join(documents)
    if unit == TextUnit.bytes:
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()), None
    codes = np.frombuffer(_decoded(content).encode("utf-32-le"), dtype=np.uint32)
    known, numbers = np.unique(codes, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int32)), known.tobytes().decode("utf-32-le")


def _files(path: str | Sequence[str]) -> list[Path]:
    given = [Path(one) for one in ([path] if isinstance(path, str) else path)]
    files: list[Path] = []
    for one in given:
        found = sorted(file for file in one.rglob("*") if file.is_file()) if one.is_dir() else [one]
        if not one.exists() or not found:
            raise UserError(
                f"the folder {str(one)!r} has no files" if one.exists() else f"there is no text at {str(one)!r}",
                where="data.path",
                cure="Give a file, a list of files or a folder; paths are relative to the current directory.",
            )
        files += found
    if not files:
        raise UserError("data.path is an empty list", where="data.path")
    return files


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}", where="data.path") from error


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text is not UTF-8 (byte {error.start:,})", where="data.path", cure="Use data.unit=bytes."
        ) from None


def _standard_library() -> list[bytes]:
    """Sources of the modules at the top of the standard library, in the order of their names, up to 2 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    contents: list[bytes] = []
    left = _STANDARD_LIBRARY_BYTES
    for file in sorted(folder.glob("*.py")):
        if left == 0:
            break
        contents.append(_read(file)[:left])
        left -= len(contents[-1])
    if not contents:
        raise UserError(
            f"this Python has no sources of its standard library in {str(folder)!r}",
            where="data.path",
            cure="Say which text to use with data.path=FILE.",
        )
    return contents


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
