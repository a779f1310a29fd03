"""The interface of a storage of checkpoints: whole folders are written, read and removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer_cli.schema import DigestAlgorithm

if TYPE_CHECKING:
    from trainer_cli.manifest import FileEntry
    from trainer_cli.storage.disk import Bytes
    from trainer_cli.storage.folder import StagedFolder


class UnsyncedError(OSError):
    """A folder has its name and all its bytes, but the fsync of its parent failed."""


class FileWriter(Protocol):
    """One file being written, from its first byte to its last."""

    def write(self, data: Bytes) -> None:
        """Append bytes; the caller may reuse their memory afterwards."""
        ...


class WritableFolder(Protocol):
    """Where a format writes its files: a staged folder, or an archive in one."""

    def create(self, file: str) -> AbstractContextManager[FileWriter]:
        """A new file, which is complete on clean exit."""
        ...


class ReadableFile(Protocol):
    """One file being read, possibly from several threads at once."""

    @property
    def size_bytes(self) -> int:
        """The size when it was opened."""
        ...

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers in order with the bytes from `offset` on. OSError if the file has fewer."""
        ...


class ReadableFolder(Protocol):
    """A folder that is not removed while it is read."""

    is_shared: bool
    """False for a copy that each machine has for itself."""

    @property
    def path(self) -> Path:
        """Path on this machine."""
        ...

    def open(self, file: str) -> AbstractContextManager[ReadableFile]:
        """Open a file. FileNotFoundError if it does not exist, OSError if it is not a regular file."""
        ...

    def on_verified(self, file: str, entry: FileEntry) -> None:
        """The last file of this name that was opened has been read whole, and has this digest."""
        ...


class Storage(Protocol):
    """Moves whole folders between this machine and the storage of checkpoints."""

    root: Path
    """The folder of the checkpoints: a local path, or the URL of an object store."""

    def names(self, earlier: Collection[str] = ()) -> list[str]:
        """The folders with a plain name, valid checkpoints or not.

        Args:
            earlier: names that were folders before; they are listed, but not examined again.
        """
        ...

    def location(self, name: str) -> str:
        """Path or URL of a folder, for messages."""
        ...

    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> AbstractContextManager[StagedFolder]:
        """A new hidden folder, which is removed on exit unless it was published.

        If a folder of that name has a manifest, FileExistsError is raised; with `replace` it is replaced, and stays
        whole until the new one has its name. A folder without a manifest is partial, and is quarantined.
        """
        ...

    def receive(self, name: str, manifest: bytes, source: ReadableFolder) -> None:
        """Copy a checkpoint, each file compared with its digest, the manifest last. An error leaves none.

        FileExistsError if there is one of that name.
        """
        ...

    def joining(self, hidden_name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> StagedFolder:
        """The folder that rank 0 is writing, for this rank's files. Rank 0 publishes or removes it."""
        ...

    def separate(self, rank: int) -> None:
        """Several machines save together from now on, and this process is that rank of theirs.

        A storage that keeps saves on the local disk until they are sent has every rank send its own files.
        """
        ...

    def reading(self, name: str) -> AbstractContextManager[ReadableFolder]:
        """A folder with a manifest, locked against removal. FileNotFoundError if there is no such folder."""
        ...

    def peek(self, name: str, file: str) -> bytes | None:
        """The content of a small file, or None if it does not exist."""
        ...

    def manifest_id(self, name: str) -> tuple[int, ...] | None:
        """A value that changes when a folder's manifest is replaced or altered; None if it has none, or unknown."""
        ...

    def sizes(self, name: str) -> dict[str, int]:
        """The regular files in a folder and their sizes in bytes; empty if there is no such folder."""
        ...

    def is_pinned(self, name: str) -> bool:
        """Whether a user pinned the folder."""
        ...

    def fetch(self, name: str, marks: Collection[str]) -> Path | None:
        """A file of another program, or a folder that contains one of the files `marks`, as a local path; None if there
        is neither. In an object store it is copied into the user's cache."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a folder, manifest first, so that a crash midway leaves it partial, not broken.

        Returns False, and changes nothing, if the folder is being read, has no manifest, or is a symbolic link. Its
        bytes may be freed later.
        """
        ...

    def clear(self, name: str) -> bool:
        """Remove a folder without a manifest. Returns False, and changes nothing, if it has one or does not exist."""
        ...

    def amend(self, name: str, manifest: bytes) -> None:
        """Replace a checkpoint's manifest, atomically and durably; its files stay, also for concurrent readers.

        FileNotFoundError if the checkpoint does not exist, or is being removed.
        """
        ...

    def pin(self, name: str, *, pinned: bool) -> None:
        """Pin a folder, so that no rule removes it, or unpin it. Idempotent."""
        ...

    def quarantine(self, name: str, why: str) -> str:
        """Give a partial or damaged folder a hidden name, so that a save can use its name. Returns the new name."""
        ...

    def fsync_names(self) -> None:
        """Return once the names of all folders survive a power cut. UnsyncedError if they may not."""
        ...

    def check_writable(self) -> None:
        """Check that folders can be written, where that is not known to a user: in an object store.

        Raises:
            UserError: there is no such bucket, or the store refuses.
            StoreAwayError: it does not answer.
        """
        ...

    def sweep(self) -> list[str]:
        """Remove what earlier attempts of this run left half-written or half-removed; returns the names removed.

        Only for the holder of the run's lock. Folders of other runs are not touched.
        """
        ...

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        """Wait until every committed checkpoint is in its final storage.

        Returns the names of those that are not, after the timeout or because the storage cannot be reached.
        """
        ...

    def abandon_uploads(self) -> None:
        """Leave what is being sent unfinished, and send nothing until the next `sweep`."""
        ...

    def free_bytes(self) -> int | None:
        """Number of bytes that can still be written, or None if unknown."""
        ...

    def free_files(self) -> int | None:
        """Number of files that can still be created, or None if unknown or unlimited."""
        ...

    def removed_bytes(self) -> int:
        """Size in bytes of checkpoints that are removed, and whose files are still to be deleted."""
        ...
