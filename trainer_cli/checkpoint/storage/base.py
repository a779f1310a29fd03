"""The interface of a place for checkpoints: whole folders are written, read and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import FileEntry

Bytes = bytes | bytearray | memoryview


class UnsyncedError(OSError):
    """A folder has its name and all its bytes, but the fsync of its parent failed."""


class FileWriter(Protocol):
    """One file being written, from its first byte to its last."""

    def write(self, data: Bytes) -> None:
        """Append bytes, which are taken before this returns."""
        ...


class WritableFolder(Protocol):
    """A folder being written, not yet visible under its name."""

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """The files finished so far."""
        ...

    def create(self, file: str) -> AbstractContextManager[FileWriter]:
        """A new file; among `files`, and fsynced, on clean exit."""
        ...

    def publish(self) -> None:
        """Give the folder its name, durably. UnsyncedError where it has the name, but may lose it in a power cut."""
        ...


class StagedFolder(WritableFolder, Protocol):
    """A folder being written, in which other ranks can write too."""

    @property
    def place(self) -> str:
        """What `Storage.joining` of another rank takes."""
        ...


class Source(Protocol):
    """One file being read, from several threads at once if need be."""

    @property
    def size_bytes(self) -> int:
        """The size when it was opened."""
        ...

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers, one after another, with the bytes from a place on. OSError where there are fewer."""
        ...


class ReadableFolder(Protocol):
    """A folder that stays while it is read."""

    @property
    def path(self) -> Path:
        """Where it is on this machine."""
        ...

    def open(self, file: str) -> AbstractContextManager[Source]:
        """One of its files. FileNotFoundError where it is missing, OSError where it is no plain file."""
        ...


class Storage(Protocol):
    """Moves whole folders between this machine and where checkpoints live."""

    def names(self) -> list[str]:
        """The folders that are there under a plain name, valid or not."""
        ...

    def location(self, name: str) -> str:
        """Where a folder is, for messages."""
        ...

    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> AbstractContextManager[StagedFolder]:
        """A new hidden folder, which is removed on exit unless it was published.

        A folder of that name with a manifest is in the way (FileExistsError), or is replaced if `replace`: it stays,
        whole, until the new one has its name. One without a manifest is partial, and quarantined.
        """
        ...

    def joining(self, place: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> WritableFolder:
        """The folder that rank 0 is writing, for this rank's files. Rank 0 publishes it, or removes it."""
        ...

    def reading(self, name: str) -> AbstractContextManager[ReadableFolder]:
        """A folder with a manifest, held against removal. FileNotFoundError where there is none."""
        ...

    def peek(self, name: str, file: str) -> bytes | None:
        """The content of a small file, or None if it is not there."""
        ...

    def sizes(self, name: str) -> dict[str, int]:
        """The plain files in a folder and their sizes in bytes; empty if there is no such folder."""
        ...

    def is_pinned(self, name: str) -> bool:
        """Whether a user pinned it."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a folder, manifest first, so that a crash midway leaves it partial, not broken.

        False, and nothing done, where it is being read, has no manifest, or is not a folder of its own. Its
        bytes may be freed later.
        """
        ...

    def clear(self, name: str) -> bool:
        """Remove a folder that has no manifest. False, and nothing done, where it has one or is not there."""
        ...

    def amend(self, name: str, manifest: bytes) -> None:
        """Replace a checkpoint's manifest, atomically and durably; its files stay, also for concurrent readers.

        FileNotFoundError where there is none, or it is being removed.
        """
        ...

    def pin(self, name: str, *, pinned: bool) -> None:
        """Pin a folder, so that no rule removes it, or unpin it. Doing it twice changes nothing."""
        ...

    def quarantine(self, name: str, why: str) -> str:
        """Give a partial or damaged folder a hidden name, so that a save can take its place. The new name."""
        ...

    def fsync_names(self) -> None:
        """Return once the names of all that exists survive a power cut. UnsyncedError where they may not."""
        ...

    def sweep(self) -> list[str]:
        """Remove what dead attempts of this run left half-written or half-removed; the names removed.

        Only for the holder of the run's lock. Folders of other runs are not touched.
        """
        ...

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        """Wait until all that was committed is in its final place; the names that are not, after so many seconds or
        because it cannot be reached."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be written, or None if unknown."""
        ...

    def free_files(self) -> int | None:
        """Files that can still be made, or None if unknown or not limited."""
        ...
