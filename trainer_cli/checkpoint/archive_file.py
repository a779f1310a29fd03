"""A whole checkpoint in one archive: written as a stream, read without trusting anything that is in it.

Archives of Composer, which hold one file of torch, are read too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.checkpoint.format.archive_reader import Member, read_archive
from trainer_cli.checkpoint.format.archive_writer import SUFFIX, ArchiveWriter
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.manifest import Manifest, ManifestError
from trainer_cli.checkpoint.naming import MANIFEST_FILE, is_plain
from trainer_cli.checkpoint.storage.copying import write_copy
from trainer_cli.checkpoint.storage.download import cache_of
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.replacing import replacing
from trainer_cli.config.schema import Compression
from trainer_cli.errors import CheckpointError, UserError

SUFFIXES = {suffix: compression for compression, suffix in SUFFIX.items()} | {".tgz": Compression.gz}
COMPOSER_FILE = "composer_states.pt"
"""The file of torch in an archive of Composer."""
_BLOCK = 1 << 20
_LARGEST_MANIFEST = 64 * 1024 * 1024
_MOST_FILES = 10_000


def write_archive(checkpoint: Path, output: Path, *, overwrite: bool = False) -> int:
    """Write a checkpoint as one archive, whose compression follows from its name; the bytes written.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged: every digest is verified on the way.
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
                with archive.create(name) as member, VerifiedFile(folder, entry.manifest, name) as source:
                    stream = source.stream()
                    while block := stream.read(_BLOCK):
                        member.write(block)
            archive.finish()
        return place.stat().st_size


def is_archive(path: Path) -> bool:
    """Whether the first file in a file is a checkpoint's manifest, or Composer's states, whatever its name is."""
    try:
        with path.open("rb") as file:
            first = next(read_archive(file), None)
            return first is not None and first.name.rpartition("/")[2] in (MANIFEST_FILE, COMPOSER_FILE)
    except ValueError:
        return False


def extract_archive(path: Path) -> Path:
    """The checkpoint in an archive, extracted into the user's cache, every digest verified; once for each archive.

    Nothing is written but the files that the manifest, which comes first, lists with their sizes; of an archive of
    Composer, its one file of torch.

    Raises:
        CheckpointError: it is no archive of a checkpoint, or damaged, or holds what no checkpoint has.
        OSError: the disk is full.
    """
    found = path.stat()
    # The time of the last change cannot be set as that of the content can, and another file has another number.
    state = f"{path.resolve()}\n{found.st_ino}\n{found.st_size}\n{found.st_mtime_ns}\n{found.st_ctime_ns}"
    storage = LocalStorage(cache_of(hashlib.sha256(state.encode()).hexdigest()))
    states = storage.root / COMPOSER_FILE
    if states.is_file():
        return states
    if names := storage.names():
        return storage.root / names[0]
    try:
        with path.open("rb") as file:
            archive = read_archive(file)
            first = next(archive, None)
            if first is not None and first.name.rpartition("/")[2] == COMPOSER_FILE:
                _extract_states(first, states, storage)
                return states
            return storage.root / _extract(first, archive, storage, str(path))
    except FileExistsError:
        # Another thread or process extracted it at the same time.
        return storage.root / storage.names()[0]
    except (ValueError, ManifestError) as error:
        raise CheckpointError(f"the archive cannot be read: {str(error)[:200]}", where=str(path)) from None


def _extract_states(member: Member, output: Path, storage: LocalStorage) -> None:
    """Write Composer's file of torch, which has no digest of its own."""
    _check_space(member.size_bytes, storage)
    with replacing(output, overwrite=True) as place, place.open("wb") as file:
        for block in member.blocks:
            file.write(block)


def _check_space(size_bytes: int, storage: LocalStorage) -> None:
    free = storage.free_bytes()
    if free is not None and size_bytes > free:
        raise ValueError(f"its files take {size_bytes:,} bytes, more than the disk has free")


def _extract(first: Member | None, archive: Iterator[Member], storage: LocalStorage, where: str) -> str:
    if first is None or first.name.rpartition("/")[2] != MANIFEST_FILE:
        raise ValueError(f"its first file is no {MANIFEST_FILE}")
    if first.size_bytes > _LARGEST_MANIFEST:
        raise ValueError("its manifest is too large")
    content = b"".join(first.blocks)
    manifest = Manifest.parse(content)
    if len(manifest.files) > _MOST_FILES:
        raise ValueError(f"it has more than {_MOST_FILES} files")
    _check_space(sum(entry.size_bytes for entry in manifest.files.values()), storage)
    folder_name = first.name.rpartition("/")[0] or f"step{manifest.step}"
    if not is_plain(folder_name):
        raise ValueError(f"its folder {folder_name[:80]!r} is no plain name")

    def files() -> Iterator[tuple[str, Iterator[bytes]]]:
        seen: set[str] = set()
        for member in archive:
            above, _, name = member.name.rpartition("/")
            entry = manifest.files.get(name)
            if entry is None or above not in ("", folder_name) or name in seen:
                raise ValueError(f"it holds {member.name[:80]!r}, which the manifest does not list there")
            if member.size_bytes != entry.size_bytes:
                raise ValueError(f"{name[:80]!r} has {member.size_bytes:,} bytes instead of {entry.size_bytes:,}")
            seen.add(name)
            yield name, member.blocks

    write_copy(storage, folder_name, content, files(), where)
    return folder_name
