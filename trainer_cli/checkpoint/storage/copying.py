"""Write a checkpoint that comes from elsewhere to a storage, and accept it only as what its manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest
from trainer_cli.checkpoint.naming import MANIFEST_FILE
from trainer_cli.checkpoint.storage.interfaces import Bytes, ReadableFolder, Storage
from trainer_cli.config.schema import DigestAlgorithm

_BLOCK_BYTES = 4 * 1024 * 1024


def write_copy(
    into: Storage, name: str, manifest: bytes, files: Iterable[tuple[str, Iterable[Bytes]]], where: str
) -> None:
    """Write files as they come, each compared with its entry in the manifest, and the manifest last.

    Args:
        files: names that the manifest lists, each with its content in blocks.
        where: the checkpoint is, for messages.

    Raises:
        DamagedCheckpoint: a file is not what the manifest says, or is missing.
        OSError: the disk is full. Nothing is left then, or after an error of `files`.
    """
    entries = Manifest.parse(manifest).files
    digest = DigestAlgorithm(next((entry.algorithm for entry in entries.values()), DigestAlgorithm.xxh3_128))
    with into.writing(name, digest=digest) as folder:
        for file, blocks in files:
            with folder.create(file) as writer:
                for block in blocks:
                    writer.write(block)
            if folder.files[file] != entries[file]:
                raise damaged(f"{file} is not what was written: the digest differs", where)
        if missing := entries.keys() - folder.files.keys():
            raise damaged(f"{min(missing)} is missing", where)
        with folder.create(MANIFEST_FILE) as writer:
            writer.write(manifest)
        folder.publish()


def read_blocks(folder: ReadableFolder, file: str, size_bytes: int) -> Iterator[memoryview]:
    """The first bytes of a file in blocks, each valid until the next.

    Raises:
        OSError: the file is missing or shorter.
    """
    buffer = memoryview(bytearray(min(size_bytes, _BLOCK_BYTES)))
    with folder.open(file) as source:
        for offset in range(0, size_bytes, _BLOCK_BYTES):
            block = buffer[: size_bytes - offset]
            source.read_at([block], offset)
            yield block


def damaged(why: str, where: str) -> DamagedCheckpoint:
    """The error of a copy that is not what its manifest says."""
    return DamagedCheckpoint(f"a file of the checkpoint is damaged: {why}", where=where)
