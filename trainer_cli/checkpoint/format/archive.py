"""The files of the default format in one archive a rank: tar, compressed or not, written and read as a stream."""

from __future__ import annotations

import bz2
import io
import lzma
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.archive_writer import ArchiveWriter
from trainer_cli.checkpoint.format.file_layout import FileLayout, lay_out
from trainer_cli.checkpoint.format.header import state_file, tensor_file
from trainer_cli.checkpoint.format.tensors import TensorsFormat
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest, new_digest
from trainer_cli.config.schema import Compression, DigestAlgorithm

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder, WritableFolder

_SUFFIX = {
    Compression.none: "tar",
    Compression.gz: "tar.gz",
    Compression.bz2: "tar.bz2",
    Compression.xz: "tar.xz",
    Compression.lzma: "tar.lzma",
}


@dataclass(frozen=True, slots=True)
class ArchiveLayout(FileLayout):
    """A layout whose files are written into one archive."""

    compression: Compression = Compression.none

    def write(
        self, folder: WritableFolder, image: memoryview | None = None, rank: int = 0
    ) -> dict[str, Mapping[str, str]]:
        sizes = {tensor_file(rank): self.tensor_bytes, state_file(rank): len(self.text)}
        name = f"rank{rank}.{_SUFFIX[self.compression]}"
        with folder.create(name) as file:
            archive = ArchiveWriter(file, self.compression, sizes)
            # Not `super()`: a dataclass with slots is another class than the one that was written here.
            FileLayout.write(self, archive, image, rank)
            archive.finish()
        return {name: self.aliases} if self.aliases else {}


class ArchiveFormat:
    """One archive a rank, with the files of the default format in it.

    Args:
        compression: of the archive; what is read is recognised by the file's name.
    """

    name = "archive"

    def __init__(self, compression: Compression = Compression.none) -> None:
        self.compression = compression

    def plan(self, tree: Mapping[str, Any]) -> FileLayout:
        base = lay_out(*codec.encode(tree))
        own = {one.name: getattr(base, one.name) for one in fields(base)}
        return ArchiveLayout(**own, compression=self.compression)

    def read(
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        names = {f"rank{rank}.{suffix}": compression for compression, suffix in _SUFFIX.items()}
        name = next((file for file in manifest.files if file in names), None)
        if name is None:
            raise DamagedCheckpoint(f"it has no archive of rank {rank}", where=str(folder.path))
        with VerifiedFile(folder, manifest, name) as file:
            content = file.rest()
        members = _members(content, names[name], str(folder.path / name))
        inner = replace(
            manifest,
            files={file: _entry(own) for file, own in members.items()},
            aliases={tensor_file(rank): manifest.aliases.get(name, {})} if tensor_file(rank) in members else {},
        )
        return TensorsFormat().read(_MemoryFolder(folder.path / name, members), inner, only, rank)


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    """A file in memory."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            buffer[:] = self.content[offset : offset + len(buffer)]
            offset += len(buffer)


@dataclass(frozen=True, slots=True)
class _MemoryFolder:
    """The files of an archive."""

    path: Path
    members: Mapping[str, bytes]

    @contextmanager
    def open(self, file: str) -> Iterator[_MemoryFile]:
        if file not in self.members:
            raise FileNotFoundError(file)
        yield _MemoryFile(self.members[file])


def _entry(content: bytes) -> FileEntry:
    digest = new_digest(DigestAlgorithm.xxh3_128)
    digest.update(content)
    return FileEntry(len(content), f"{DigestAlgorithm.xxh3_128.value}:{digest.hexdigest()}")


def _members(content: bytes, compression: Compression, where: str) -> dict[str, bytes]:
    """The files of an archive whose digest was verified."""
    opened: Any = {
        Compression.none: lambda: io.BytesIO(content),
        Compression.gz: lambda: io.BytesIO(zlib.decompress(content, wbits=31)),
        Compression.bz2: lambda: io.BytesIO(bz2.decompress(content)),
        Compression.xz: lambda: io.BytesIO(lzma.decompress(content)),
        Compression.lzma: lambda: io.BytesIO(lzma.decompress(content, format=lzma.FORMAT_ALONE)),
    }[compression]
    try:
        with tarfile.open(fileobj=opened(), mode="r:") as archive:
            return {one.name: file.read() for one in archive if (file := archive.extractfile(one)) is not None}
    except (tarfile.TarError, OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DamagedCheckpoint(f"the archive cannot be read: {error}", where=where) from None
