"""A whole checkpoint in one archive: written as a stream, read without trusting anything that is in it."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trainer_cli.checkpoint.format.archive_writer import ArchiveWriter
from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.manifest import Manifest, ManifestError
from trainer_cli.checkpoint.naming import MANIFEST_FILE, is_plain
from trainer_cli.checkpoint.storage.download import cache_of
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.replacing import replacing
from trainer_cli.config.schema import Compression, DigestAlgorithm
from trainer_cli.errors import CheckpointError, UserError

SUFFIXES = {
    ".tar": Compression.none,
    ".tar.gz": Compression.gz,
    ".tgz": Compression.gz,
    ".tar.bz2": Compression.bz2,
    ".tar.xz": Compression.xz,
    ".tar.lzma": Compression.lzma,
}
_BLOCK = 1 << 20
_LARGEST_MANIFEST = 64 * 1024 * 1024
_MOST_FILES = 10_000
_HEADERS_BYTES = 1 << 20
"""What the headers of an archive may take beside its files, and 2 KiB for each of them."""
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)


def write_archive(checkpoint: Path, output: Path, *, overwrite: bool = False) -> int:
    """Write a checkpoint as one archive, whose compression follows from its name; the bytes written.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        UserError: the name has none of the endings, or exists.
    """
    ending = next((one for one in sorted(SUFFIXES, key=len, reverse=True) if output.name.endswith(one)), None)
    if ending is None:
        raise UserError(f"{output} has none of the endings {', '.join(SUFFIXES)}", cure="Give such an --output.")
    catalog = catalog_of(checkpoint.parent)
    entry = catalog.entry(checkpoint.name)
    if entry.manifest is None or entry.problem is not None:
        raise CheckpointError(f"the checkpoint is not valid: {entry.problem}", where=str(checkpoint))
    with catalog.storage.reading(checkpoint.name) as folder, replacing(output, overwrite=overwrite) as place:
        content = (folder.path / MANIFEST_FILE).read_bytes()
        sizes = {MANIFEST_FILE: len(content)} | {name: one.size_bytes for name, one in entry.manifest.files.items()}
        with place.open("wb") as file:
            archive = ArchiveWriter(file, SUFFIXES[ending], sizes, prefix=f"{checkpoint.name}/")
            with archive.create(MANIFEST_FILE) as member:
                member.write(content)
            for name in entry.manifest.files:
                with archive.create(name) as member, (folder.path / name).open("rb") as source:
                    while block := source.read(_BLOCK):
                        member.write(block)
            archive.finish()
        return place.stat().st_size


def is_archive(path: Path) -> bool:
    """Whether a file is an archive of a checkpoint, told by its content: its first file is a manifest."""
    try:
        with _opened(path) as (archive, _):
            first = archive.next()
            return first is not None and first.name.rpartition("/")[2] == MANIFEST_FILE
    except CheckpointError:
        return False


def extract_archive(path: Path) -> Path:
    """The checkpoint in an archive, extracted into the user's cache, every digest verified; once for each archive.

    Nothing is written but the files that the manifest, which comes first, lists with their sizes.

    Raises:
        CheckpointError: it is no archive of a checkpoint, or damaged, or holds what no checkpoint has.
        OSError: the disk is full.
    """
    found = path.stat()
    state = f"{path.resolve()}\n{found.st_size}\n{found.st_mtime_ns}"
    storage = LocalStorage(cache_of(hashlib.sha256(state.encode()).hexdigest()))
    if names := storage.names():
        return storage.root / names[0]
    with _opened(path) as (archive, source):
        first = archive.next()
        manifest_bytes = _content(archive, first) if first is not None else None
        if first is None or manifest_bytes is None or first.name.rpartition("/")[2] != MANIFEST_FILE:
            raise ValueError(f"its first file is no {MANIFEST_FILE}")
        manifest = Manifest.parse(manifest_bytes)
        total = sum(entry.size_bytes for entry in manifest.files.values())
        if len(manifest.files) > _MOST_FILES:
            raise ValueError(f"it has more than {_MOST_FILES} files")
        if total > (storage.free_bytes() or total):
            raise ValueError(f"its files take {total:,} bytes, more than the disk has free")
        source.left += total + _HEADERS_BYTES + 2048 * len(manifest.files)
        folder_name = first.name.rpartition("/")[0] or f"step{manifest.step}"
        if not is_plain(folder_name):
            raise ValueError(f"its folder {folder_name[:80]!r} is no plain name")
        _extract(archive, manifest, manifest_bytes, storage, folder_name)
    return storage.root / folder_name


def _extract(
    archive: tarfile.TarFile, manifest: Manifest, manifest_bytes: bytes, storage: LocalStorage, folder_name: str
) -> None:
    digest = DigestAlgorithm(next((one.algorithm for one in manifest.files.values()), DigestAlgorithm.xxh3_128))
    with storage.writing(folder_name, digest=digest) as folder:
        while (member := archive.next()) is not None:
            above, _, name = member.name.rpartition("/")
            entry = manifest.files.get(name)
            if entry is None or above not in ("", folder_name) or name in folder.files:
                raise ValueError(f"it holds {member.name[:80]!r}, which the manifest does not list there")
            if member.size != entry.size_bytes:
                raise ValueError(f"{name[:80]!r} has {member.size:,} bytes instead of {entry.size_bytes:,}")
            source = _file(archive, member)
            with folder.create(name) as writer:
                while block := source.read(_BLOCK):
                    writer.write(block)
            if folder.files[name] != entry:
                raise ValueError(f"{name[:80]!r} is not what was written: the digest differs")
        if missing := manifest.files.keys() - folder.files.keys():
            raise ValueError(f"{min(missing)[:80]!r} is missing")
        with folder.create(MANIFEST_FILE) as writer:
            writer.write(manifest_bytes)
        folder.publish()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _LARGEST_MANIFEST:
        raise ValueError("its manifest is too large")
    return _file(archive, member).read()


def _file(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    if member.type not in _REGULAR or member.sparse is not None:
        raise ValueError(f"{member.name[:80]!r} is no plain file")
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name[:80]!r} is no plain file")
    return file


class _Limited:
    """Decompressed bytes, no more of them than what the manifest allows."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.left = 2 * _LARGEST_MANIFEST

    def read(self, count: int) -> bytes:
        """The next bytes."""
        content = self._source.read(min(count, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise ValueError("it decompresses to more than its files take")
        return content


@contextmanager
def _opened(path: Path) -> Iterator[tuple[tarfile.TarFile, _Limited]]:
    """The archive, to be read once from front to back; every error of its content names it."""
    import bz2
    import gzip
    import lzma

    with path.open("rb") as file:
        begin = file.read(6)
        file.seek(0)
        source: Any = file
        if begin.startswith(b"\x1f\x8b"):
            source = gzip.GzipFile(fileobj=file)
        elif begin.startswith(b"BZh"):
            source = bz2.BZ2File(file)
        elif begin.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
            source = lzma.LZMAFile(file)  # noqa: SIM115
        limited = _Limited(source)
        try:
            with tarfile.open(fileobj=limited, mode="r|") as archive:  # type: ignore[call-overload]
                yield archive, limited
        except (CheckpointError, UserError) as error:
            if not isinstance(error, ManifestError):
                raise
            raise CheckpointError(f"the archive cannot be read: {error}", where=str(path)) from None
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OverflowError, UnicodeError) as error:
            raise CheckpointError(f"the archive cannot be read: {str(error)[:200]}", where=str(path)) from None
        except OSError as error:
            # Decompressors raise OSError without a number for content that they cannot read.
            if error.errno is not None:
                raise
            raise CheckpointError(f"the archive cannot be read: {error}", where=str(path)) from None
