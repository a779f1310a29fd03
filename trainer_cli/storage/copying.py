"""Copy a checkpoint into a storage: each file is compared with its digest, and the manifest is written last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage.base import ReadableFolder, Storage

if TYPE_CHECKING:
    from trainer_cli.storage.disk import Bytes

_BLOCK_BYTES = 4 * 1024 * 1024


def write_copy(
    into: Storage, name: str, manifest: bytes, files: Iterable[tuple[str, Iterable[Bytes]]], where: str
) -> None:
    """Write the files of a checkpoint, compare each with its entry in the manifest, and write the manifest last.

    An error, also one of the iterator `files`, leaves no copy.

    Args:
        files: file names of the manifest, each with its content in blocks.
        where: location of the original, for messages.

    Raises:
        DamagedCheckpoint: a file differs from its entry in the manifest, or is missing.
        OSError: the disk is full.
    """
    entries = Manifest.parse(manifest).files
    digest = DigestAlgorithm(next((entry.algorithm for entry in entries.values()), DigestAlgorithm.xxh3_128))
    with into.writing(name, digest=digest) as folder:
        for file, blocks in files:
            # A file that an earlier copy has too is neither read nor written again.
            if folder.link(file, entries[file]):
                continue
            with folder.create(file) as writer:
                for block in blocks:
                    writer.write(block)
            # Before the next file: a damaged copy ends early, and never gets a manifest.
            if folder.files[file] != entries[file]:
                raise _damaged(f"{file} is not what was written: the digest differs", where)
        if missing := entries.keys() - folder.files.keys():
            raise _damaged(f"{min(missing)} is missing", where)
        with folder.create(MANIFEST_FILE) as writer:
            writer.write(manifest)
        folder.publish()


def copy_folder(into: Storage, name: str, manifest: bytes, source: ReadableFolder) -> None:
    """`write_copy` of a folder that is locked against removal."""
    files = ((file, _blocks(source, file, entry.size_bytes)) for file, entry in Manifest.parse(manifest).files.items())
    write_copy(into, name, manifest, files, str(source.path))


def _blocks(folder: ReadableFolder, file: str, size_bytes: int) -> Iterator[memoryview]:
    """The first `size_bytes` of a file in blocks, each valid until the next.

    Raises:
        OSError: the file is missing or shorter.
    """
    buffer = memoryview(bytearray(min(size_bytes, _BLOCK_BYTES)))
    with folder.open(file) as source:
        for offset in range(0, size_bytes, _BLOCK_BYTES):
            block = buffer[: size_bytes - offset]
            source.read_at([block], offset)
            yield block


def _damaged(why: str, where: str) -> DamagedCheckpoint:
    """The error of a copy that differs from its manifest."""
    return DamagedCheckpoint(f"a file of the checkpoint is damaged: {why}", where=where)
