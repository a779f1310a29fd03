"""The files of the default format in one archive a rank: tar, compressed or not, written and read as a stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.archive_reader import read_archive
from trainer_cli.checkpoint.format.archive_writer import SUFFIX, ArchiveWriter, archive_bytes
from trainer_cli.checkpoint.format.file_layout import FileLayout, lay_out
from trainer_cli.checkpoint.format.header import state_file, tensor_file
from trainer_cli.checkpoint.format.tensors import TensorsFormat
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.host_memory import available_bytes
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest, new_digest
from trainer_cli.config.schema import Compression, DigestAlgorithm

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder, WritableFolder


@dataclass(frozen=True, slots=True)
class ArchiveLayout(FileLayout):
    """A layout whose files are written into one archive."""

    compression: Compression = Compression.none

    @property
    def total_bytes(self) -> int:
        """The size of the archive before it is compressed."""
        return archive_bytes([self.tensor_bytes, len(self.text)])

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        sizes = {tensor_file(self.rank): self.tensor_bytes, state_file(self.rank): len(self.text)}
        name = f"rank{self.rank}{SUFFIX[self.compression]}"
        with folder.create(name) as file:
            archive = ArchiveWriter(file, self.compression, sizes)
            # Not `super()`: a dataclass with slots is another class than the one that was written here.
            FileLayout.write(self, archive, image)
            archive.finish()
        return {name: self.aliases} if self.aliases else {}


class ArchiveFormat:
    """One archive a rank, with the files of the default format in it.

    Args:
        compression: of what is written; any of them is read.
    """

    name = "archive"

    def __init__(self, compression: Compression = Compression.none) -> None:
        self.compression = compression

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        base = lay_out(*codec.encode(tree), shapes_only=shapes_only)
        own = {one.name: getattr(base, one.name) for one in fields(base)}
        return ArchiveLayout(**own, compression=self.compression)

    def read(
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        name = next((one for end in SUFFIX.values() if (one := f"rank{rank}{end}") in manifest.files), None)
        if name is None:
            raise DamagedCheckpoint(f"it has no archive of rank {rank}", where=str(folder.path))
        with VerifiedFile(folder, manifest, name) as file:
            members = _members(file, {tensor_file(rank), state_file(rank)})
        inner = replace(
            manifest,
            files={file: _entry(own) for file, own in members.items()},
            aliases={tensor_file(rank): manifest.aliases.get(name, {})} if tensor_file(rank) in members else {},
        )
        return TensorsFormat().read(_MemoryFolder(folder.path / name, members), inner, only, rank)


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    """A file in memory."""

    content: bytearray

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            buffer[:] = memoryview(self.content)[offset : offset + len(buffer)]
            offset += len(buffer)


@dataclass(frozen=True, slots=True)
class _MemoryFolder:
    """The files of an archive."""

    path: Path
    members: Mapping[str, bytearray]

    @contextmanager
    def open(self, file: str) -> Iterator[_MemoryFile]:
        if file not in self.members:
            raise FileNotFoundError(file)
        yield _MemoryFile(self.members[file])


def _entry(content: bytearray) -> FileEntry:
    digest = new_digest(DigestAlgorithm.xxh3_128)
    digest.update(content)
    return FileEntry(len(content), f"{DigestAlgorithm.xxh3_128.value}:{digest.hexdigest()}")


def _members(archive: VerifiedFile, known: Collection[str]) -> dict[str, bytearray]:
    """The files of an archive, which are held in memory: no more than is free."""
    left = available_bytes()
    members: dict[str, bytearray] = {}
    try:
        for member in read_archive(archive.stream()):
            if member.name not in known or member.name in members:
                raise ValueError(f"it holds {member.name[:80]!r}, which does not belong there")
            if left is not None and (left := left - member.size_bytes) < 0:
                raise ValueError("its files are larger than the free memory")
            content = members[member.name] = bytearray()
            for block in member.blocks:
                content += block
    except ValueError as error:
        raise archive.damaged(f"it cannot be read: {error}") from None
    return members
