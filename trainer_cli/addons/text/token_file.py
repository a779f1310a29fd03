"""Files of token ids: which format a file has, how many tokens it holds, and reads of any of them.

Read by `os.pread` and not by a memory map. The pages of a map that were read count as memory of the process, so it
would grow with each window to the size of the file. And a map of a file that becomes shorter ends the process by
SIGBUS, but a read returns an error.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count

Tokens = np.ndarray[Any, np.dtype[Any]]

SUFFIXES = (".bin", ".npy")
DTYPES = ("uint16", "uint32")

_HEADER_BYTES = 1024
_HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic number of a header of llm.c -> (version, type of a token). A header is 256 int32: magic, version, count, 0…"""
_NPY_MAGIC = b"\x93NUMPY"

_SAMPLED_PARTS, _SAMPLED_BYTES = 64, 4096
_MAX_OPEN = 64


@dataclass(frozen=True)
class TokenFile:
    """A file with `count` tokens of type `dtype` after `offset` bytes. `digest` is that of a few parts of it."""

    path: Path
    size: int
    offset: int
    dtype: np.dtype[Any]
    count: int
    digest: str = ""


def list_files(entries: str | Sequence[str], where: str) -> list[Path]:
    """The files that a path, a pattern, a folder, or a list of these names, each sorted by path."""
    files: list[Path] = []
    for entry in [entries] if isinstance(entries, str) else entries:
        path = Path(entry)
        if path.is_dir():
            # Sorted, because the order of a folder differs between file systems.
            matches = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        else:
            # A name that exists is no pattern, whatever characters it has.
            matches = [path] if path.exists() else sorted(map(Path, glob.glob(str(entry), recursive=True)))
        if not matches:
            raise UserError(
                f"there is no token file at {str(entry)!r}",
                where=where,
                cure="Give a .bin or .npy file, a pattern such as 'tokens/train_*.bin', a folder, or a list of these; "
                "paths are relative to the current directory.",
            )
        files += matches
    if not files:
        raise UserError(f"{where} is an empty list", where=where)
    return files


def inspect(path: Path, dtype: str, where: str) -> TokenFile:
    """Read the format of a file from its first bytes.

    Args:
        dtype: type of the tokens of a file that does not say it.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{str(path)!r} is not a file of tokens: its name ends neither in .bin nor in .npy",
            where=where,
            cure="Use data=text for text; docs/text.md shows how to write its tokens to a file.",
        )
    try:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(_HEADER_BYTES)
            if head.startswith(_NPY_MAGIC):
                return _inspect_npy(path, size, where)
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror}", where=where) from error
    header = _read_header(path, head, size, where) if path.suffix == ".bin" else None
    offset, token_dtype = (0, np.dtype(dtype).newbyteorder("<")) if header is None else (_HEADER_BYTES, header)
    count, excess = divmod(size - offset, token_dtype.itemsize)
    if excess:
        raise UserError(
            f"{str(path)!r} has {format_count(size, 'byte')}, which is not a whole number of {token_dtype.name} tokens",
            where=where,
            cure="Its download is incomplete, or data.dtype is not the type that it was written with.",
        )
    return TokenFile(path, size, offset, token_dtype, count)


def _read_header(path: Path, head: bytes, size: int, where: str) -> np.dtype[Any] | None:
    """The type of the tokens after a header of llm.c; None if the file has no header."""
    if len(head) < _HEADER_BYTES:
        return None
    header = np.frombuffer(head, dtype="<i4")
    magic, version, count = map(int, header[:3])
    if magic not in _HEADERS:
        # Tokens that look like a header, and count themselves, do not occur: 253 zeros follow.
        if not header[3:].any() and count > 0 and size - _HEADER_BYTES in (2 * count, 4 * count):
            raise UserError(
                f"{str(path)!r} has a header with the unknown magic number {magic}",
                where=where,
                cure=f"Known are those of llm.c: {', '.join(map(str, _HEADERS))}. Write the tokens without a header.",
            )
        return None
    expected_version, dtype = _HEADERS[magic]
    token_dtype = np.dtype(dtype)
    if version != expected_version:
        raise UserError(
            f"{str(path)!r} has version {version} of the header {magic}, expected {expected_version}", where=where
        )
    if size != _HEADER_BYTES + count * token_dtype.itemsize:
        raise UserError(
            f"the header of {str(path)!r} counts {format_count(count, 'token')}, but "
            f"{format_count(size - _HEADER_BYTES, 'byte')} follow it, "
            f"expected {count * token_dtype.itemsize:,}",
            where=where,
            cure="Its download is incomplete: get the file again.",
        )
    return token_dtype


def _inspect_npy(path: Path, size: int, where: str) -> TokenFile:
    """Read the format of an array that numpy has saved. Raises UserError if it is not one of tokens."""
    try:
        # A map reads the header alone.
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        dtype, shape, offset = array.dtype, array.shape, array.offset
    except ValueError as error:
        raise UserError(
            f"{str(path)!r} is not a complete .npy file: {error}", where=where, cure="Get or write it again."
        ) from None
    if dtype.kind not in "iu" or len(shape) != 1:
        raise UserError(
            f"{str(path)!r} holds {shape} of {dtype}, expected one dimension of whole numbers",
            where=where,
            cure="Save the tokens of all documents as one array: np.save(path, np.concatenate(documents)).",
        )
    return TokenFile(path, size, offset, dtype, shape[0])


def sample_parts(file: TokenFile, reader: TokenReader, files: int) -> tuple[list[tuple[int, Tokens]], str]:
    """Parts spread evenly over a file, each with the position of its first token, and their digest.

    Args:
        files: number of files of the data. Each has fewer parts if they are many.
    """
    per_part = _SAMPLED_BYTES // file.dtype.itemsize
    parts = max(1, _SAMPLED_PARTS // files)
    last = max(0, file.count - per_part)
    digest = blake2b(f"{file.size} {file.offset} {file.dtype.str}".encode(), digest_size=16)
    sampled = []
    for start in sorted({number * last // max(1, parts - 1) for number in range(parts)}):
        tokens = reader.read(file, start, min(per_part, file.count - start))
        digest.update(tokens.tobytes())
        sampled.append((start, tokens))
    return sampled, digest.hexdigest()


class TokenReader:
    """Reads tokens of files, of which at most 64 stay open. A copy in another process opens them again."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __reduce__(self) -> tuple[type[TokenReader], tuple[()]]:
        # Numbers of open files mean nothing in a process that was not forked.
        return TokenReader, ()

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, file: TokenFile, start: int, count: int) -> Tokens:
        """Read `count` tokens from position `start`.

        Raises:
            UserError: the file cannot be read, or its size has changed.
        """
        try:
            descriptor = self._descriptors.get(file.path)
            if descriptor is not None:
                return _read(descriptor, file, start, count)
            descriptor = _open(file)
            # None is closed to keep another one: a thread that reads it would get the tokens of that one.
            if len(self._descriptors) < _MAX_OPEN:
                self._descriptors[file.path] = descriptor
                return _read(descriptor, file, start, count)
            try:
                return _read(descriptor, file, start, count)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"cannot read {str(file.path)!r}: {error.strerror}", where="data.path") from error


def _open(file: TokenFile) -> int:
    """Open a file, and return the descriptor. Raises UserError if its size has changed."""
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size != file.size:
        os.close(descriptor)
        raise _changed(file, size)
    return descriptor


def _read(descriptor: int, file: TokenFile, start: int, count: int) -> Tokens:
    """Read `count` tokens from position `start`. Raises UserError if the file has become shorter."""
    offset, size = file.offset + start * file.dtype.itemsize, count * file.dtype.itemsize
    content = os.pread(descriptor, size, offset)
    # A file system in user space may return less than it was asked for.
    while len(content) < size:
        if not (more := os.pread(descriptor, size - len(content), offset + len(content))):
            raise _changed(file, os.fstat(descriptor).st_size)
        content += more
    return np.frombuffer(content, dtype=file.dtype)


def _changed(file: TokenFile, size: int) -> UserError:
    """The error of a file whose size is another than at the start."""
    return UserError(
        f"{str(file.path)!r} was changed while it is used: it has {format_count(size, 'byte')}, and had "
        f"{file.size:,} at the start",
        where="data.path",
        cure="Start again when it is complete; write changed tokens to another file.",
    )
