"""Read a tar archive as a stream, compressed or not, without trusting anything that is in it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

_BLOCK = 1 << 20
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PASSED_OVER = (tarfile.DIRTYPE, tarfile.XHDTYPE)
_LARGEST_HEADER = 1 << 20
_MOST_PASSED_OVER = 16


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive."""

    name: str
    size_bytes: int
    blocks: Iterator[bytes]
    """Its content, to be read before the next member is asked for; what is not read is skipped."""


def read_archive(file: IO[bytes]) -> Iterator[Member]:
    """The plain files of an archive, front to back; how it is compressed is seen in its first bytes.

    Folders are passed over, and of extended headers, which Python's tarfile writes, the size is used. A header and a
    block of content take 1 MiB of memory each, whatever the archive says of itself. How much is read is up to the
    caller.

    Raises:
        ValueError: it is no such archive, or it is damaged.
    """
    source = _decompressed(file)
    size_bytes: int | None = None
    passed_over = 0
    while (header := _read(source, tarfile.BLOCKSIZE)) and any(header):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ValueError(f"it is no tar archive, or damaged: {error}") from None
        if info.type not in (*_REGULAR, *_PASSED_OVER) or info.size < 0:
            raise ValueError(f"{info.name[:80]!r} is no plain file")
        passed_over = 0 if info.type in _REGULAR else passed_over + 1
        if passed_over > _MOST_PASSED_OVER:
            raise ValueError(f"it has more than {_MOST_PASSED_OVER} headers before a file")
        if info.type == tarfile.XHDTYPE:
            if info.size > _LARGEST_HEADER:
                raise ValueError("it has an extended header that is too large")
            size_bytes = _size_in(b"".join(_blocks(source, info.size)))
        else:
            size, size_bytes = info.size if size_bytes is None else size_bytes, None
            blocks = _blocks(source, size)
            if info.type in _REGULAR:
                yield Member(info.name, size, blocks)
            for _ in blocks:
                pass
            info.size = size
        _read(source, -info.size % tarfile.BLOCKSIZE)


def _size_in(records: bytes) -> int | None:
    """The size of the next file that an extended header gives: of files too large for the plain one."""
    for record in records.split(b"\n"):
        key, _, value = record.partition(b" ")[2].partition(b"=")
        if key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError("an extended header gives no size")
            return int(value)
    return None


def _blocks(source: IO[bytes], size_bytes: int) -> Iterator[bytes]:
    while size_bytes:
        block = _read(source, min(size_bytes, _BLOCK))
        if not block:
            raise ValueError("it ends in the middle of a file")
        size_bytes -= len(block)
        yield block


def _read(source: IO[bytes], count: int) -> bytes:
    """So many bytes, or fewer at the end."""
    try:
        return source.read(count)
    except (EOFError, zlib.error, lzma.LZMAError, MemoryError) as error:
        raise ValueError(f"it cannot be decompressed: {error or 'it asks for too much memory'}") from None
    except OSError as error:
        # Decompressors raise OSError without a number for content that they cannot read.
        if error.errno is not None:
            raise
        raise ValueError(f"it cannot be decompressed: {error}") from None


def _decompressed(file: IO[bytes]) -> Any:
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    begin = buffered.peek(3)[:3]
    if begin.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=buffered)
    if begin == b"BZh":
        return bz2.BZ2File(buffered)
    if begin in (b"\xfd7z", b"\x5d\x00\x00"):
        return lzma.LZMAFile(buffered)
    return buffered
