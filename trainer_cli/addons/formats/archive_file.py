"""Read and write tar archives as streams, compressed or not. What is read is not trusted."""

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

from trainer_cli.schema import Compression

if TYPE_CHECKING:
    from trainer_cli.storage import Bytes, FileWriter

_BLOCK = 1 << 20
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_SKIPPED = (tarfile.DIRTYPE, tarfile.XHDTYPE)
_LARGEST_HEADER = 1 << 20
_MOST_SKIPPED = 16


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive."""

    name: str
    size_bytes: int
    blocks: Iterator[bytes]
    """Its content, to be read before the next member is requested; bytes that are not read are skipped."""


def read_archive(file: IO[bytes]) -> Iterator[Member]:
    """The regular files of an archive, front to back; the compression is recognised by the first bytes.

    Folders are skipped. Of extended headers, which Python's tarfile writes, only the size is used. A header and a block
    of content take at most 1 MiB of memory each. The caller limits how much is read.

    Raises:
        ValueError: it is not a tar archive of regular files, or it is damaged.
    """
    source = _decompress(file)
    size_bytes: int | None = None
    skipped = 0
    while (header := _read(source, tarfile.BLOCKSIZE)) and any(header):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ValueError(f"it is not a tar archive, or damaged: {error}") from None
        if info.type not in (*_REGULAR, *_SKIPPED) or info.size < 0:
            raise ValueError(f"{info.name[:80]!r} is not a plain file")
        # A small compressed archive could otherwise hold millions of headers.
        skipped = 0 if info.type in _REGULAR else skipped + 1
        if skipped > _MOST_SKIPPED:
            raise ValueError(f"it has more than {_MOST_SKIPPED} headers before a file")
        if info.type == tarfile.XHDTYPE:
            if info.size > _LARGEST_HEADER:
                raise ValueError("it has an extended header that is too large")
            size_bytes = _parse_size(b"".join(_blocks(source, info.size)))
        else:
            size, size_bytes = info.size if size_bytes is None else size_bytes, None
            blocks = _blocks(source, size)
            if info.type in _REGULAR:
                yield Member(info.name, size, blocks)
            for _ in blocks:  # Skip the bytes that the caller has not read.
                pass
            info.size = size
        _read(source, -info.size % tarfile.BLOCKSIZE)


def _parse_size(records: bytes) -> int | None:
    """The size of the next file, if an extended header gives it: for files too large for the plain header."""
    for record in records.split(b"\n"):
        key, _, value = record.partition(b" ")[2].partition(b"=")
        if key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError("an extended header gives no size")
            return int(value)
    return None


def _blocks(source: IO[bytes], size_bytes: int) -> Iterator[bytes]:
    """Yield the content of a member in blocks. ValueError if the archive ends before."""
    while size_bytes:
        block = _read(source, min(size_bytes, _BLOCK))
        if not block:
            raise ValueError("it ends in the middle of a file")
        size_bytes -= len(block)
        yield block


def _read(source: IO[bytes], count: int) -> bytes:
    """`count` bytes, or fewer at the end of the archive."""
    try:
        return source.read(count)
    except (EOFError, zlib.error, lzma.LZMAError, MemoryError) as error:
        raise ValueError(f"it cannot be decompressed: {error or 'it asks for too much memory'}") from None
    except OSError as error:
        # A decompressor raises OSError without a number for damaged content; an error of the disk has one.
        if error.errno is not None:
            raise
        raise ValueError(f"it cannot be decompressed: {error}") from None


def _decompress(file: IO[bytes]) -> Any:
    """The file, decompressed if it begins as gzip, bzip2 or xz does."""
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
    """The size in bytes of an uncompressed archive with files of these sizes."""
    return 2 * tarfile.BLOCKSIZE + sum(tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE for size in sizes)


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _NoCompression:
    """Returns the data as it is."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


_COMPRESSORS: Mapping[Compression, Callable[[], _Compressor]] = {
    Compression.none: _NoCompression,
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
        # USTAR has 11 octal digits for a size: 8 GiB.
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
        # In blocks, so that the compressed copy of a large tensor is never in memory as a whole.
        for start in range(0, len(view), _BLOCK):
            self._file.write(self._compressor.compress(view[start : start + _BLOCK]))  # type: ignore[arg-type]
