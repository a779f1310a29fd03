"""Write a tar archive as a stream, compressed or not."""

from __future__ import annotations

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol

from trainer_cli.checkpoint.manifest import FileEntry
from trainer_cli.config.schema import Compression

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import Bytes, FileWriter

SUFFIX = {
    Compression.none: ".tar",
    Compression.gz: ".tar.gz",
    Compression.bz2: ".tar.bz2",
    Compression.xz: ".tar.xz",
    Compression.lzma: ".tar.lzma",
}
_BLOCK = 1 << 20


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


class _Member:
    """One file of the archive being written."""

    def __init__(self, write: Callable[[Bytes], None]) -> None:
        self._write = write

    def write(self, data: Bytes) -> None:
        """Append bytes, which are taken before this returns."""
        self._write(data)


class ArchiveWriter:
    """Takes files as members of one archive, and writes them at once.

    Args:
        sizes: of every file that will be created.
        prefix: put before their names in the archive.
    """

    files: Mapping[str, FileEntry] = {}

    def __init__(
        self, file: FileWriter | IO[bytes], compression: Compression, sizes: Mapping[str, int], prefix: str = ""
    ) -> None:
        self._file, self._sizes, self._prefix = file, sizes, prefix
        self._compressor = _COMPRESSORS[compression]()

    @contextmanager
    def create(self, file: str) -> Iterator[_Member]:
        info = tarfile.TarInfo(self._prefix + file)
        info.size = self._sizes[file]
        self._write(info.tobuf(tarfile.USTAR_FORMAT if info.size < 1 << 33 else tarfile.GNU_FORMAT))
        yield _Member(self._write)
        self._write(bytes(-info.size % tarfile.BLOCKSIZE))

    def finish(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._file.write(self._compressor.flush())

    def publish(self) -> None:
        """The folder around it is published."""

    def _write(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):
            self._file.write(self._compressor.compress(view[start : start + _BLOCK]))  # type: ignore[arg-type]
