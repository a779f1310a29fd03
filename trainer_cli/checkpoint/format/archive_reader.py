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


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive."""

    name: str
    size_bytes: int
    blocks: Iterator[bytes]
    """Its content, to be read before the next member is asked for; what is not read is skipped."""


def read_archive(file: IO[bytes]) -> Iterator[Member]:
    """The files of an archive, front to back; how it is compressed is seen in its first bytes.

    Only what `ArchiveWriter` writes is read: headers of plain files, one for each. A header takes 512 bytes of memory
    and a block of content 1 MiB, whatever the archive says of itself. How much is read is up to the caller.

    Raises:
        ValueError: it is no such archive, or it is damaged.
    """
    source = _decompressed(file)
    while (header := _read(source, tarfile.BLOCKSIZE)) and any(header):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ValueError(f"it is no tar archive, or damaged: {error}") from None
        if info.type not in _REGULAR or info.size < 0:
            raise ValueError(f"{info.name[:80]!r} is no plain file")
        blocks = _blocks(source, info.size)
        yield Member(info.name, info.size, blocks)
        for _ in blocks:
            pass
        _read(source, -info.size % tarfile.BLOCKSIZE)


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
