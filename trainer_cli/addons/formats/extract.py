"""Extract archives that hold a whole checkpoint.

Nothing in an archive is trusted. Archives of Composer, which hold one file of torch, are read too.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.addons.formats.archive_file import Member, read_archive
from trainer_cli.errors import CheckpointError
from trainer_cli.layout import MANIFEST_FILE, is_plain
from trainer_cli.manifest import Manifest, ManifestError
from trainer_cli.storage import LocalStorage, replacing, write_copy
from trainer_cli.terminal import format_count
from trainer_cli.user_cache import cache_of

COMPOSER_FILE = "composer_states.pt"
"""The file of torch in an archive of Composer."""
_LARGEST_MANIFEST = 64 * 1024 * 1024
_MOST_FILES = 10_000


def is_archive(path: Path) -> bool:
    """Whether a file is an archive whose first file is a manifest, or Composer's states. Its name does not matter."""
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
        CheckpointError: it is not an archive of a checkpoint, or damaged, or holds what no checkpoint has.
        OSError: the disk is full.
    """
    stat = path.stat()
    # The time of the last change cannot be set as that of the content can, and another file has another number.
    state = f"{path.resolve()}\n{stat.st_ino}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ctime_ns}"
    # A name of its own: two processes that extract one archive at the same time must not stage it in one folder.
    storage = LocalStorage(cache_of(hashlib.sha256(state.encode()).hexdigest()), run_id=secrets.token_hex(8))
    states = storage.root / COMPOSER_FILE
    if states.is_file():
        return states
    # A plain name is that of a complete one: it is renamed after its last byte.
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
    with replacing(output, overwrite=True) as temporary, temporary.open("wb") as file:
        for block in member.blocks:
            file.write(block)


def _check_space(size_bytes: int, storage: LocalStorage) -> None:
    """Raise ValueError if the disk has less free."""
    free = storage.free_bytes()
    # Before the first byte: a small archive may claim files of any size.
    if free is not None and size_bytes > free:
        raise ValueError(f"its files take {format_count(size_bytes, 'byte')}, more than the disk has free")


def _extract(first: Member | None, archive: Iterator[Member], storage: LocalStorage, where: str) -> str:
    """Extract the checkpoint of an archive into the storage, and return its name.

    Args:
        first: the first member, which is the manifest; None if the archive is empty.
        archive: the members after it.
        where: the archive, for messages.

    Raises:
        ValueError, ManifestError: it is not an archive of a checkpoint, or holds what no checkpoint has.
    """
    if first is None or first.name.rpartition("/")[2] != MANIFEST_FILE:
        raise ValueError(f"its first file is not {MANIFEST_FILE}")
    # Before it is read into memory: an archive may claim any size.
    if first.size_bytes > _LARGEST_MANIFEST:
        raise ValueError("its manifest is too large")
    content = b"".join(first.blocks)
    manifest = Manifest.parse(content)
    # The manifest is not trusted yet: each entry would create a file.
    if len(manifest.files) > _MOST_FILES:
        raise ValueError(f"it has more than {_MOST_FILES} files")
    _check_space(sum(entry.size_bytes for entry in manifest.files.values()), storage)
    folder_name = first.name.rpartition("/")[0] or f"step{manifest.step}"
    # It becomes a path: a name with a slash could lead out of the cache.
    if not is_plain(folder_name):
        raise ValueError(f"its folder {folder_name[:80]!r} is not a plain name")

    def files() -> Iterator[tuple[str, Iterator[bytes]]]:
        """The members after the manifest, each checked against it before a byte is written."""
        seen: set[str] = set()
        for member in archive:
            above, _, name = member.name.rpartition("/")
            entry = manifest.files.get(name)
            if entry is None or above not in ("", folder_name) or name in seen:
                raise ValueError(f"it holds {member.name[:80]!r}, which the manifest does not list there")
            # Before its first block is written, so that a member cannot fill the disk.
            if member.size_bytes != entry.size_bytes:
                raise ValueError(
                    f"{name[:80]!r} has {format_count(member.size_bytes, 'byte')} instead of {entry.size_bytes:,}"
                )
            seen.add(name)
            yield name, member.blocks

    write_copy(storage, folder_name, content, files(), where)
    return folder_name
