"""The archive format: one tar archive a rank, compressed or not, with the files of the default format in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.formats.archive_file import SUFFIX, ArchiveWriter, archive_bytes, read_archive
from trainer_cli.format import FileLayout, FilesOfRank, ShardedFormat, TensorsFormat
from trainer_cli.layout import PartTable
from trainer_cli.manifest import DamagedCheckpoint, FileEntry, Manifest, new_digest
from trainer_cli.memory import available_bytes
from trainer_cli.schema import Compression, DigestAlgorithm
from trainer_cli.tensor_files import VerifiedFile

if TYPE_CHECKING:
    from trainer_cli.dtensor import Targets
    from trainer_cli.storage import ReadableFolder, WritableFolder

_ARCHIVE_NAME = re.compile(r"rank(?P<rank>0|[1-9][0-9]{0,8})(?P<suffix>\..+)")


@dataclass(frozen=True, slots=True)
class ArchiveLayout(FileLayout):
    """A layout of files that are written into one archive."""

    compression: Compression = Compression.none

    @property
    def container(self) -> str:
        return f"rank{self.rank}{SUFFIX[self.compression]}"

    @property
    def total_bytes(self) -> int:
        """The size of the archive before it is compressed."""
        return archive_bytes(self._sizes().values())

    @property
    def least_bytes(self) -> int:
        return self.total_bytes if self.compression is Compression.none else 0

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write all files of the layout into one archive."""
        with folder.create(self.container) as file:
            archive = ArchiveWriter(file, self.compression, self._sizes())
            # Not `super()`: `slots=True` makes dataclass create a second class, which `super()` here does not know.
            FileLayout.write(self, archive, image)
            archive.finish()
        return {self.container: self.aliases} if self.aliases else {}

    def _sizes(self) -> dict[str, int]:
        """Name -> size in bytes of the files in the archive."""
        small_sizes = {name: len(content) for name, content in self._small_files.items()}
        return {FilesOfRank(self.rank).tensors: self.image_bytes, **small_sizes}


class ArchiveFormat:
    """One archive a rank, with the files of the default format in it.

    Args:
        compression: of archives that are written; all compressions are read.
        inner: the format of the files in this process's archive.
    """

    name = "archive"

    def __init__(
        self, compression: Compression = Compression.none, inner: TensorsFormat | ShardedFormat | None = None
    ) -> None:
        self.compression, self._inner = compression, inner or TensorsFormat()

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """Lay out the archive of a state."""
        base = self._inner.plan(tree, shapes_only=shapes_only)
        values = {field.name: getattr(base, field.name) for field in fields(base)}
        return ArchiveLayout(**values, compression=self.compression)

    def of_rank(self, sharded: ShardedFormat) -> ArchiveFormat:
        return ArchiveFormat(self.compression, sharded)

    def files_of(self, folder: ReadableFolder, manifest: Manifest) -> tuple[ReadableFolder, Manifest]:
        """The files in the archives, and the manifest that lists them. Archives are read when they are needed.

        Raises:
            DamagedCheckpoint: there is no archive.
        """
        matches = {name: match for name in manifest.files if (match := _ARCHIVE_NAME.fullmatch(name)) is not None}
        ranks = {name: int(match["rank"]) for name, match in matches.items() if match["suffix"] in SUFFIX.values()}
        if not ranks:
            raise DamagedCheckpoint("it has no archive", where=str(folder.path))
        members = _Members(folder, manifest, {ranks[name]: name for name in sorted(ranks, key=ranks.__getitem__)})
        aliases = {FilesOfRank(ranks[name]).tensors: table for name, table in manifest.aliases.items() if name in ranks}
        files = {name: FilesOfRank(rank).tensors for name, rank in ranks.items()}
        shards = PartTable.of(manifest.shards).renamed(files)
        return members, replace(manifest, files=members, aliases=aliases, shards=shards)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        """Read the state from the files in the archive."""
        return self._inner.read(*self.files_of(folder, manifest), only, targets=targets)

    def read_values(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str]) -> dict[str, Any]:
        return self._inner.read_values(*self.files_of(folder, manifest), only)


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    """A file in memory."""

    content: bytearray

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Copy bytes from an offset into the buffers, in order."""
        for buffer in buffers:
            buffer[:] = memoryview(self.content)[offset : offset + len(buffer)]
            offset += len(buffer)


class _Members(Mapping[str, FileEntry]):
    """The files in the archives of a checkpoint: a folder to read them from, and a mapping of their manifest entries.

    An archive is read and verified when one of its files is first needed. Its tensor file is kept in memory until
    another archive is read, so that only one is in memory at a time; the small files are kept.

    Args:
        archives: rank -> the name of its archive.
    """

    def __init__(self, folder: ReadableFolder, manifest: Manifest, archives: Mapping[int, str]) -> None:
        self.path, self.is_shared = folder.path, folder.is_shared
        self._folder, self._manifest = folder, manifest
        self._archive_of: dict[str, str] = {}
        for rank, archive in archives.items():
            shared = [FilesOfRank(0).state] if rank == 0 else []
            per_rank = [FilesOfRank(rank).own] if len(archives) > 1 else []
            self._archive_of |= dict.fromkeys([FilesOfRank(rank).tensors, *shared, *per_rank], archive)
        self._contents: dict[str, bytearray] = {}
        self._entries: dict[str, FileEntry] = {}

    def __getitem__(self, file: str) -> FileEntry:
        if file not in self._entries:
            self._read_archive_of(file)
        return self._entries[file]

    def __contains__(self, file: object) -> bool:
        # Mapping would ask `__getitem__`, which reads the archive.
        return file in self._archive_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._archive_of)

    def __len__(self) -> int:
        return len(self._archive_of)

    @contextmanager
    def open(self, file: str) -> Iterator[_MemoryFile]:
        """A file of the archive, which is read into memory when its first file is opened."""
        if file not in self._contents:
            self._read_archive_of(file)
        yield _MemoryFile(self._contents[file])

    def on_verified(self, file: str, entry: FileEntry) -> None:
        """Nothing: no file can link to a part of an archive."""

    def _read_archive_of(self, file: str) -> None:
        """Read the archive that contains a file. KeyError if no archive should contain it."""
        name = self._archive_of[file]
        # Tensor files are dropped before the next one is read, so that only one is in memory.
        self._contents = {name: content for name, content in self._contents.items() if name.endswith(".json")}
        members = [member for member, archive in self._archive_of.items() if archive == name]
        with VerifiedFile(self._folder, self._manifest, name) as archive:
            contents = _read_members(archive, members)
        if file not in contents:
            raise archive.damaged(f"it lacks {file}")
        self._contents |= contents
        self._entries |= {member: _entry(content) for member, content in contents.items()}


def _entry(content: bytearray) -> FileEntry:
    """Size and digest of a file in an archive."""
    # Readers of single files verify a digest; the archive was verified as a whole.
    digest = new_digest(DigestAlgorithm.xxh3_128)
    digest.update(content)
    return FileEntry(len(content), f"{DigestAlgorithm.xxh3_128.value}:{digest.hexdigest()}")


def _read_members(archive: VerifiedFile, names: Collection[str]) -> dict[str, bytearray]:
    """Read the files of an archive into memory. Only these names are accepted."""
    free_bytes = available_bytes()
    members: dict[str, bytearray] = {}
    try:
        for member in read_archive(archive.stream()):
            if member.name not in names or member.name in members:
                raise ValueError(f"it holds {member.name[:80]!r}, which does not belong there")
            # The digest is compared only at the end, so until then a size may be any number.
            if free_bytes is not None and (free_bytes := free_bytes - member.size_bytes) < 0:
                raise ValueError("its files are larger than the free memory")
            content = members[member.name] = bytearray()
            for block in member.blocks:
                content += block
    except ValueError as error:
        raise archive.damaged(f"it cannot be read: {error}") from None
    return members
