"""Read a tar archive as a stream, compressed or not, without trusting anything that is in it.

Write a tar archive as a stream, compressed or not.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from trainer_cli.core.checkpoint_config import Compression

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import FileWriter
    from trainer_cli.checkpoint.storage.disk import Bytes

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


SUFFIX = {
    Compression.none: ".tar",
    Compression.gz: ".tar.gz",
    Compression.bz2: ".tar.bz2",
    Compression.xz: ".tar.xz",
    Compression.lzma: ".tar.lzma",
}


def archive_bytes(sizes: Iterable[int]) -> int:
    """The size of an archive of files of these sizes, in bytes, before it is compressed."""
    return 2 * tarfile.BLOCKSIZE + sum(tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE for size in sizes)


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Plain:
    """Compresses nothing."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


_COMPRESSORS: Mapping[Compression, Callable[[], _Compressor]] = {
    Compression.none: _Plain,
    Compression.gz: lambda: zlib.compressobj(wbits=31),
    Compression.bz2: bz2.BZ2Compressor,
    Compression.xz: lzma.LZMACompressor,
    Compression.lzma: lambda: lzma.LZMACompressor(format=lzma.FORMAT_ALONE),
}


class ArchiveWriter:
    """Writes files as members of one archive, one after another.

    Args:
        sizes: the size of every file that will be created: a tar header stands before the content.
        prefix: put before their names in the archive.
    """

    def __init__(
        self, file: FileWriter | IO[bytes], compression: Compression, sizes: Mapping[str, int], prefix: str = ""
    ) -> None:
        self._file, self._sizes, self._prefix = file, sizes, prefix
        self._compressor = _COMPRESSORS[compression]()

    @contextmanager
    def create(self, file: str) -> Iterator[ArchiveWriter]:
        """A new member, to which `write` appends until the exit."""
        info = tarfile.TarInfo(self._prefix + file)
        info.size = self._sizes[file]
        self.write(info.tobuf(tarfile.USTAR_FORMAT if info.size < 1 << 33 else tarfile.GNU_FORMAT))
        yield self
        self.write(bytes(-info.size % tarfile.BLOCKSIZE))

    def finish(self) -> None:
        """Write the end of the archive."""
        self.write(bytes(2 * tarfile.BLOCKSIZE))
        self._file.write(self._compressor.flush())

    def write(self, data: Bytes) -> None:
        """Append bytes; the caller may reuse their memory afterwards."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):
            self._file.write(self._compressor.compress(view[start : start + _BLOCK]))  # type: ignore[arg-type]
