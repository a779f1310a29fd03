"""Read text into one array of bytes, find the documents in it, and make it tokens, without a copy of the whole."""

from __future__ import annotations

import codecs
import re
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.errors import UserError

_STANDARD_LIBRARY_BYTES = 2_000_000
_CHUNK_BYTES = 1 << 18
_CODE_POINTS = 0x110000

_SEPARATOR = re.compile(rb"\n(?:[ \t\r]*\n)+")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_NOT_BLANK = re.compile(rb"\S")

Integers = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class TextUnit(StrEnum):
    """The unit of a token."""

    bytes = "bytes"
    characters = "characters"


class DocumentUnit(StrEnum):
    """The unit of a document."""

    line = "line"
    paragraph = "paragraph"
    file = "file"


def read_text(path: str | Sequence[str] | None) -> tuple[Bytes, list[int]]:
    """The bytes of all files, one file after another, and the end of each. Null reads the standard library."""
    if path is None:
        modules = _read_standard_library()
        # A copy that can be written, because `tokenize` and `keep_documents` work in place.
        return np.frombuffer(b"".join(modules), dtype=np.uint8).copy(), np.cumsum(list(map(len, modules))).tolist()
    files = _list_files(path)
    sizes = []
    for file in files:
        try:
            sizes.append(file.stat().st_size)
        except OSError as error:
            raise _unreadable(file, error) from error
    # One array for all files: joined contents would take the memory of the text twice.
    content, ends = np.empty(sum(sizes), dtype=np.uint8), []
    end = 0
    for file in files:
        try:
            with file.open("rb", buffering=0) as stream:
                while count := stream.readinto(content[end:].data):
                    end += count
                has_more = bool(stream.read(1))
        except OSError as error:
            raise _unreadable(file, error) from error
        if has_more:
            raise UserError(
                f"{str(file)!r} became longer while it was read, or is not a regular file",
                where="data.path",
                cure="Start again when it is complete.",
            )
        ends.append(end)
    return content[:end], ends


def find_documents(content: Bytes, ends: Sequence[int], document: str) -> tuple[Integers, Integers]:
    """The start and the end of each document that is not blank. None crosses the end of a file."""
    starts, stops = array("q"), array("q")
    buffer, begin = content.data, 0
    for end in ends:
        for start, stop in _split(buffer, begin, end, document):
            if start < stop if document == DocumentUnit.file else _NOT_BLANK.search(buffer, start, stop):
                starts.append(start)
                stops.append(stop)
        begin = end
    return np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)


def _split(buffer: memoryview, start: int, end: int, document: str) -> Iterator[tuple[int, int]]:
    """The start and the end of each document between two positions, also of blank ones."""
    if document == DocumentUnit.line:
        for line in _LINE.finditer(buffer, start, end):
            yield line.span()
        return
    if document == DocumentUnit.paragraph:
        for separator in _SEPARATOR.finditer(buffer, start, end):
            # A paragraph keeps its own newline, the first of the separator.
            yield start, separator.start() + 1
            start = separator.end()
    yield start, end


def keep_documents(content: Bytes, starts: Integers, stops: Integers) -> Bytes:
    """Move the documents together, in place, and return their part of `content`."""
    if len(starts) == 0:
        return content[:0]
    # Neighbours are moved together: lines are many, and only blank ones lie between them.
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]]))
    last = np.concatenate([begins[1:] - 1, [len(starts) - 1]])
    size = 0
    for start, stop in zip(starts[begins].tolist(), stops[last].tolist(), strict=True):
        if size != start:
            # To the left, so nothing is overwritten that is still to be moved.
            content[size : size + stop - start] = content[start:stop]
        size += stop - start
    return content[:size]


def count_characters(content: Bytes, ends: Integers) -> Integers:
    """The number of characters of each piece of UTF-8 text, by the ends of the pieces."""
    # For each piece the characters from the begin of the text to its end.
    until_end, characters = np.empty(len(ends), dtype=np.int64), 0
    for start in range(0, len(content), _CHUNK_BYTES):
        # The bytes of a character after its first are 10xxxxxx.
        counts = np.cumsum(content[start : start + _CHUNK_BYTES] & 0xC0 != 0x80)
        # The pieces that end in this chunk.
        first, stop = np.searchsorted(ends, [start, start + len(counts)], side="right")
        until_end[first:stop] = characters + counts[ends[first:stop] - start - 1]
        characters += int(counts[-1])
    return np.diff(until_end, prepend=0)


def tokenize(content: Bytes, unit: str) -> tuple[Tensor, str | None]:
    """Tokens in the memory of `content`, which is overwritten, and their characters unless they are bytes.

    More than 256 different characters need more than a byte for each token, and so memory of their own.
    """
    if unit == TextUnit.bytes:
        return torch.from_numpy(content), None
    occurs, count = np.zeros(_CODE_POINTS, dtype=bool), 0
    for codes in _decode(content):
        occurs[codes] = True
        count += len(codes)
    characters = np.flatnonzero(occurs).astype("<u4")
    if len(characters) <= 1 << 8:
        tokens: np.ndarray[Any, Any] = content
    else:
        tokens = np.empty(count, dtype=np.int16 if len(characters) <= 1 << 15 else np.int32)
    numbers, written = np.zeros(_CODE_POINTS, dtype=tokens.dtype), 0
    numbers[characters] = np.arange(len(characters))
    for codes in _decode(content):
        # Behind the bytes that are read next, because a character has at least one byte.
        tokens[written : written + len(codes)] = numbers[codes]
        written += len(codes)
    return torch.from_numpy(tokens[:count]), characters.tobytes().decode("utf-32-le")


def _decode(content: Bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Yield the code points of UTF-8 text, a chunk at a time. Raises UserError if it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, max(1, len(content)), _CHUNK_BYTES):
        # A character may have begun at the end of the last chunk.
        pending_bytes = len(decoder.getstate()[0])
        chunk = content[start : start + _CHUNK_BYTES].tobytes()
        try:
            text = decoder.decode(chunk, final=start + _CHUNK_BYTES >= len(content))
        except UnicodeDecodeError as error:
            raise UserError(
                f"the text is not UTF-8 (byte {start - pending_bytes + error.start:,})",
                where="data.path",
                cure="Use data.unit=bytes.",
            ) from None
        yield np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def _list_files(path: str | Sequence[str]) -> list[Path]:
    """The files at the paths, of a folder all below it. Raises UserError if a path has no files."""
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


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {str(file)!r}: {error.strerror}", where="data.path")


def _read_standard_library() -> list[bytes]:
    """Read the top-level modules of the standard library in the order of their names, up to 2 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    contents: list[bytes] = []
    remaining = _STANDARD_LIBRARY_BYTES
    for file in sorted(folder.glob("*.py")):
        if remaining == 0:
            break
        contents.append(file.read_bytes()[:remaining])
        remaining -= len(contents[-1])
    if not contents:
        raise UserError(
            f"this Python has no sources of its standard library in {str(folder)!r}",
            where="data.path",
            cure="Say which text to use with data.path=FILE.",
        )
    return contents
