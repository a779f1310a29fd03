"""Checkpoints on a local disk: written under a hidden name, fsynced, then renamed."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import call
from pathlib import Path

from trainer_cli.files import REFUSED
from trainer_cli.layout import MANIFEST_FILE, PINNED_FILE, is_plain, is_run_id
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage.base import ReadableFolder, UnsyncedError
from trainer_cli.storage.copying import copy_folder
from trainer_cli.storage.disk import READ_ONLY, Disk, delete_tree, exists, is_folder, is_same_file
from trainer_cli.storage.folder import (
    LATEST_LINK,
    LinkSource,
    LocalReadableFolder,
    StagedFolder,
    open_source,
    write_file,
)
from trainer_cli.storage.hidden_names import REPLACED_PREFIX, Hidden, HiddenName, removed_marker
from trainer_cli.storage.manifest_lock import (
    POLL_S,
    delete_superseded,
    keep_superseded,
    lock_out_readers,
    wait_for_readers,
)

logger = logging.getLogger(__name__)

_LARGEST_PEEK = 64 * 1024 * 1024
_REMOVAL_S = 2.0
"""Maximum time that a reader waits for a removal or a replacement, which take a few operations of the disk."""


class LocalStorage:
    """Folders in one directory, which is created with the first of them.

    `run_id` and `attempt` are part of hidden names, so that a later attempt of the same run removes what an earlier
    one left.

    - A save: write and fsync each file, fsync the folder, rename it, fsync its parent.
    - A removal: rename the manifest, fsync the folder, rename the folder, fsync its parent, unlink the files.

    A kill between any two of these steps leaves every other checkpoint as it was.

    Args:
        disk: does all access to files.
        later: runs the function that unlinks files, possibly in another thread.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        disk: Disk | None = None,
        run_id: str = "local",
        attempt: int = 0,
        later: Callable[[Callable[[], object]], object] = call,
    ) -> None:
        if not is_run_id(run_id):
            raise ValueError(f"run id {run_id!r} cannot be part of a folder's name")
        self.root = Path(root)
        self.run_id = run_id
        self.attempt = attempt
        self.disk = disk or Disk()
        self._later = later
        self._staged: set[str] = set()
        self._undeleted: set[Path] = set()
        self._reported_links: set[str] = set()
        self._root_synced = False
        self._link_sources: dict[str, LinkSource] = {}

    def names(self, earlier: Collection[str] = ()) -> list[str]:
        """The folders with a plain name. Those of `earlier` that are still there are not examined again."""
        found: list[str] = []
        names: list[str] = []
        # Where nothing of a listing is found, a run that saves at each step may have removed all of it meanwhile: the
        # newer ones are in the next listing.
        while not found and (latest_names := self._list_root()) != names:
            names = latest_names
            found = self._find_listed(names, earlier)
        return found

    def _list_root(self) -> list[str]:
        """All names in the root, sorted."""
        try:
            return self.disk.listdir(self.root)
        except FileNotFoundError:
            return []

    def _find_listed(self, names: Sequence[str], earlier: Collection[str]) -> list[str]:
        """Those of the names in the root that are plain and of a folder, or in `earlier`."""
        # The names are sorted, and there may be thousands.
        hidden = names[: bisect_left(names, "0")]
        replaced = [name.removeprefix(REPLACED_PREFIX) for name in hidden if name.startswith(REPLACED_PREFIX)]
        # A replacement that was cut short may give a checkpoint its name back.
        given_back = [name for name in replaced if is_plain(name) and self._finish_replacement(name)]
        names = [*names, *(name for name in given_back if name not in names)]
        return [name for name in names if name in earlier or self._is_listed(name)]

    def location(self, name: str) -> str:
        """The path of a folder."""
        return str(self._path(name))

    @contextmanager
    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> Iterator[StagedFolder]:
        """A hidden folder beside the checkpoints, which is deleted on exit unless it was published.

        Args:
            replace: whether it replaces a checkpoint of that name; else such a checkpoint is refused, at once.
        """
        final = self._path(name)
        self._create_root()
        self._finish_replacement(name)
        if not replace:
            self._refuse_existing(final)
        # In the same folder as the checkpoint: a rename across file systems is not atomic.
        staging = self._hidden_path(Hidden.tmp, name)
        # Before the folder exists, so that an error right after its creation removes it too.
        self._staged.add(staging.name)
        try:
            self.disk.mkdir(staging)
            publish = partial(self._publish, staging, name)
            folder = StagedFolder(staging, self.disk, digest, publish, final=final, link_sources=self._link_sources)
            if replace:
                folder.publishes_by(partial(self._replace, folder, name))
            yield folder
        finally:
            if staging.name in self._staged:
                self._try_to_delete(staging)
                self._staged.discard(staging.name)

    def receive(self, name: str, manifest: bytes, source: ReadableFolder) -> None:
        copy_folder(self, name, manifest, source)

    def joining(self, hidden_name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> StagedFolder:
        """The hidden folder that rank 0 has made, for the files of this rank."""
        hidden = HiddenName.parse(hidden_name)
        if hidden is None or hidden.kind is not Hidden.tmp:
            raise ValueError(f"{hidden_name!r} is not the name of a folder that is being written")
        final = self.root / hidden.name
        return StagedFolder(self.root / hidden_name, self.disk, digest, final=final, link_sources=self._link_sources)

    def separate(self, rank: int) -> None:
        """Nothing: all machines must see the root."""

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        """The folder, under a shared lock on its manifest. Waits for a removal or a replacement that is under way."""
        path = self._path(name)
        deadline = time.monotonic() + _REMOVAL_S
        while True:
            try:
                fd = self.disk.open(path / MANIFEST_FILE)
            except FileNotFoundError:
                if not self._finish_replacement(name) or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
                continue
            try:
                locked = self.disk.lock(fd, exclusive=False)
                # Compared after the lock was taken: a lock on an old file protects nothing.
                if not is_same_file(self.disk, fd, path / MANIFEST_FILE):
                    continue  # The manifest was amended, replaced or removed since it was opened.
                if locked:
                    yield LocalReadableFolder(path, self.disk, self._link_sources)
                    return
                if time.monotonic() > deadline:
                    raise FileNotFoundError(errno.ENOENT, "The checkpoint is just being removed", str(path))
                time.sleep(POLL_S)
            finally:
                self.disk.close(fd)

    def peek(self, name: str, file: str) -> bytes | None:
        """The content of a small file; None if it does not exist. No lock is taken."""
        # Names come from manifests, which are not verified: one with a slash could lead elsewhere.
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        return self._read(f"{self._path_text(name)}/{file}")

    def _read(self, path: str) -> bytes | None:
        """The content of a small file, or None if it does not exist."""
        try:
            source = open_source(self.disk, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            # A damaged folder may hold anything under this name; the file is read into memory whole.
            if source.size_bytes > _LARGEST_PEEK:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            content = bytearray(source.size_bytes)
            source.read_at([memoryview(content)], 0)
            return bytes(content)
        finally:
            source.close()

    def manifest_id(self, name: str) -> tuple[int, ...] | None:
        """The inode, size and times of the manifest; None if it cannot be examined."""
        try:
            status = self.disk.stat(f"{self._path_text(name)}/{MANIFEST_FILE}")
        except OSError:
            # The read that follows raises the reason.
            return None
        # The time of the last change of the inode too, which no program can set back.
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def sizes(self, name: str) -> dict[str, int]:
        """File -> its size in bytes, of regular files and links to them; empty if there is no such folder."""
        path = self._path_text(name)
        sizes: dict[str, int] = {}
        try:
            for file in self.disk.listdir(path):
                # Most entries are regular files: one call without following links decides.
                status = self.disk.stat(f"{path}/{file}", follow=False)
                if stat.S_ISLNK(status.st_mode):
                    status = self.disk.stat(f"{path}/{file}")
                if stat.S_ISREG(status.st_mode):
                    sizes[file] = status.st_size
        except (FileNotFoundError, NotADirectoryError):
            pass
        return sizes

    def is_pinned(self, name: str) -> bool:
        """Whether the folder holds the file that pins it."""
        return exists(self.disk, f"{self._path_text(name)}/{PINNED_FILE}")

    def fetch(self, name: str, marks: Collection[str]) -> Path | None:
        return self.root / name

    def remove(self, name: str) -> bool:
        """Remove a checkpoint: its files are deleted by `later`. False if it is read, is gone, or is a link."""
        path = self._path(name)
        try:
            if stat.S_ISLNK(self.disk.stat(path, follow=False).st_mode):
                if name not in self._reported_links:
                    self._reported_links.add(name)
                    logger.warning("%s is a symbolic link, so it is not removed", path)
                return False
            self._finish_replacement(name)
            with ExitStack() as stack:
                if not lock_out_readers(self.disk, path, stack):
                    return False
                # Manifest first: a crash from here on leaves a folder that no reader takes for a checkpoint.
                self.disk.rename(path / MANIFEST_FILE, path / removed_marker(self.run_id))
                self.disk.fsync_dir(path)
                trash = self._move_to_trash(name)
        except FileNotFoundError:
            return False
        # Also those whose deletion failed before: the disk may answer by now.
        for path in (*self._undeleted, trash):
            self._later(partial(self._delete_or_retry_later, path))
        return True

    def clear(self, name: str) -> bool:
        """Remove a folder without a manifest. False, and nothing is changed, if it has one or does not exist."""
        path = self._path(name)
        if not is_folder(self.disk, path) or exists(self.disk, path / MANIFEST_FILE):
            return False
        self._later(partial(self._delete_or_retry_later, self._move_to_trash(name)))
        return True

    def amend(self, name: str, manifest: bytes) -> None:
        """Replace the manifest of a checkpoint by a rename, while a shared lock keeps a removal out."""
        path = self._path(name)
        new = path / f".amended.{self.run_id}"
        # The shared lock keeps a removal out until the new manifest has its name.
        with self.reading(name):
            if exists(self.disk, new):
                self.disk.unlink(new)
            write_file(self.disk, new, manifest)
            keep_superseded(self.disk, path)
            self.disk.rename(new, path / MANIFEST_FILE)
            self.disk.fsync_dir(path)
        delete_superseded(self.disk, path)

    def pin(self, name: str, *, pinned: bool) -> None:
        """Write the file that pins a folder, or delete it, unless that is so already."""
        path = self._path(name)
        if self.is_pinned(name) is pinned:
            return
        if pinned:
            # A file beside the manifest, which stays as it is: readers compare its bytes before and after.
            write_file(self.disk, path / PINNED_FILE, b"")
        else:
            self.disk.unlink(path / PINNED_FILE)
        self.disk.fsync_dir(path)

    def quarantine(self, name: str, why: str) -> str:
        """Give a damaged folder a hidden name, and return that."""
        path = self._path(name)
        self._finish_replacement(name)
        hidden = self._hidden_path(Hidden.quarantined, name)
        # A rename keeps all bytes for an inspection, and frees the name at once.
        self.disk.rename(path, hidden)
        self.disk.fsync_dir(self.root)
        logger.warning("%s is quarantined as %s: %s", path, hidden.name, why)
        return hidden.name

    def fsync_names(self) -> None:
        """Make the names in the root durable. UnsyncedError if that fails."""
        try:
            self.disk.fsync_dir(self.root)
        except OSError as error:
            raise UnsyncedError(error.errno, error.strerror, str(self.root)) from error

    def check_writable(self) -> None:
        """Nothing: the first write says so."""

    def leftovers(self) -> list[str]:
        """The folders that `sweep` would remove."""
        with suppress(FileNotFoundError):
            return [name for name in self.disk.listdir(self.root) if self._is_leftover(name)]
        return []

    def sweep(self) -> list[str]:
        """Delete what earlier attempts of this run left. Returns the names; what cannot be deleted is a warning."""
        try:
            names = self.disk.listdir(self.root)
        except FileNotFoundError:
            return []
        swept: list[str] = []
        for name in names:
            try:
                if not self._is_leftover(name):
                    continue
                delete_tree(self.disk, self._move_to_trash(name) if is_plain(name) else self.root / name)
            except OSError as error:
                logger.warning("cannot remove what an earlier attempt left: %s: %s", self.root / name, error)
            else:
                swept.append(name)
        return swept

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        """Nothing waits: a published folder is in its final storage."""
        return []

    def abandon_uploads(self) -> None:
        """Nothing is sent."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None if unknown."""
        return self._free(self.disk.free_bytes)

    def free_files(self) -> int | None:
        """Files that can still be created; None if unknown or unlimited."""
        return self._free(self.disk.free_files)

    def removed_bytes(self) -> int:
        """Size of the files in removed folders that are still to be deleted, and are in no other folder."""
        size_bytes = 0
        # Another thread may be deleting them.
        with suppress(OSError):
            for name in self.disk.listdir(self.root):
                if (hidden := HiddenName.parse(name)) is None or hidden.kind is not Hidden.trash:
                    continue
                for file in self.disk.listdir(self.root / name):
                    with suppress(FileNotFoundError):
                        status = self.disk.stat(self.root / name / file, follow=False)
                        size_bytes += status.st_size if status.st_nlink <= 1 else 0
        return size_bytes

    def has_links(self) -> bool:
        """Whether a file can have two names here, which is tried."""
        folder = self._hidden_path(Hidden.tmp, "link")
        try:
            self._create_root()
            self.disk.mkdir(folder)
            write_file(self.disk, folder / "one", b"")
            self.disk.link(folder / "one", folder / "two")
            return exists(self.disk, folder / "two")
        except OSError:
            return False
        finally:
            self._try_to_delete(folder)

    def _free(self, query: Callable[[Path], int | None]) -> int | None:
        """The answer of the file system for the root, or for its first parent that exists."""
        for path in (self.root, *self.root.absolute().parents):
            try:
                return query(path)
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return None

    def _create_root(self) -> None:
        """Create the root where it is missing, so that its own name survives a power cut too."""
        if self._root_synced:
            return
        root = self.root.absolute()
        # Each new folder is fsynced into its parent: a name that only the cache has is lost in a power cut.
        missing = [path for path in (root, *root.parents) if not exists(self.disk, path)]
        for path in reversed(missing):
            try:
                self.disk.mkdir(path)
            # Another rank or process was faster.
            except FileExistsError:
                continue
            self.disk.fsync_dir(path.parent)
        if not missing:
            # Another process may have created it, and not have fsynced it yet.
            self.disk.fsync_dir(root.parent)
        self._root_synced = True

    def _publish(self, staging: Path, name: str) -> None:
        """Give a staged folder its final name, durably. FileExistsError if a checkpoint has it."""
        # fsync before rename: a rename may reach the disk before the data does.
        self.disk.fsync_dir(staging)
        self._clear_final_name(name)
        self.disk.rename(staging, self._path(name))
        self._staged.discard(staging.name)
        self.fsync_names()

    def _clear_final_name(self, name: str) -> None:
        """Move a partial folder of this name out of the way; refuse a checkpoint."""
        final = self.root / name
        self._refuse_existing(final)
        # What a removal of this run left is deleted; anything else without a manifest may be of use to its owner.
        if self._is_half_removed(name):
            self._try_to_delete(self._move_to_trash(name))
        elif exists(self.disk, final):
            self.quarantine(name, "it has no manifest")

    def _refuse_existing(self, final: Path) -> None:
        """Raise FileExistsError if there is a checkpoint."""
        if exists(self.disk, final / MANIFEST_FILE):
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", str(final))

    def _replace(self, folder: StagedFolder, name: str) -> None:
        """Publish a folder; a checkpoint of that name is deleted afterwards."""
        staging, final = folder.path, self._path(name)
        if not exists(self.disk, final / MANIFEST_FILE):
            self._publish(staging, name)
            return
        self.disk.fsync_dir(staging)
        with ExitStack() as stack:
            wait_for_readers(self.disk, final, stack)
            old = self._swap(staging, name)
            try:
                # Of what was really replaced: another process may have saved since the save began.
                folder.check_replaced(self._read(f"{old}/{MANIFEST_FILE}") or b"")
            except BaseException:
                self._swap_back(staging, old, final)
                raise
            self._staged.discard(staging.name)
            # Before the old one is deleted: a power cut may undo the swap.
            self.fsync_names()
            self._later(partial(self._delete_or_retry_later, old))

    def _swap(self, staging: Path, name: str) -> Path:
        """Give a staged folder the name of a checkpoint; returns the new path of the old one.

        If names cannot be swapped, the old one has a hidden name for a moment. `_finish_replacement` gives it its name
        back if the process dies then.
        """
        final = self._path(name)
        try:
            self.disk.exchange(staging, final)
            return staging
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        old = self.root / f"{REPLACED_PREFIX}{name}"
        delete_tree(self.disk, old)
        self.disk.rename(final, old)
        try:
            self.disk.rename(staging, final)
        except OSError:
            self.disk.rename(old, final)
            raise
        return old

    def _swap_back(self, staging: Path, old: Path, final: Path) -> None:
        """Undo `_swap`."""
        if old == staging:
            self.disk.exchange(staging, final)
        else:
            self.disk.rename(final, staging)
            self.disk.rename(old, final)

    def _finish_replacement(self, name: str) -> bool:
        """Finish a replacement by two renames that was cut short; returns whether the checkpoint is there, or will be.

        The old checkpoint gets its name back, or is deleted if the new one has the name already. A reader that may
        not write leaves both as they are.
        """
        old, final = self.root / f"{REPLACED_PREFIX}{name}", self._path(name)
        if not exists(self.disk, old):
            return False
        with ExitStack() as stack:
            is_complete = exists(self.disk, old / MANIFEST_FILE)
            if is_complete and not lock_out_readers(self.disk, old, stack):
                return True  # A living process holds the lock, and will finish it.
            if is_complete and not exists(self.disk, final):
                try:
                    self.disk.rename(old, final)
                except OSError as error:
                    if error.errno not in READ_ONLY:
                        raise
                    return False
                self.disk.fsync_dir(self.root)
            else:
                self._try_to_delete(old)
        return exists(self.disk, final / MANIFEST_FILE)

    def _path(self, name: str) -> Path:
        return Path(self._path_text(name))

    def _path_text(self, name: str) -> str:
        """The path of a folder as text. ValueError if the name could lead out of the root."""
        if not is_plain(name):
            raise ValueError(f"{name!r} is not a plain name of a checkpoint")
        return f"{self.root}/{name}"

    def _hidden_path(self, kind: Hidden, name: str) -> Path:
        """A hidden path that does not exist."""
        serial = 0
        while True:
            path = self.root / str(HiddenName(kind, name, self.run_id, self.attempt, serial))
            if not exists(self.disk, path):
                return path
            serial += 1

    def _is_listed(self, name: str) -> bool:
        """Whether a name in the root is plain, and of a folder that is not the link to the newest."""
        return is_plain(name) and is_folder(self.disk, f"{self.root}/{name}") and not self._is_latest_link(name)

    def _is_latest_link(self, name: str) -> bool:
        """Whether it is the link to the newest checkpoint, which is not a checkpoint itself."""
        return name == LATEST_LINK and stat.S_ISLNK(self.disk.stat(self.root / name, follow=False).st_mode)

    def _is_leftover(self, name: str) -> bool:
        """Whether it is a staged or removed folder that an earlier attempt of this run left, or half removed."""
        if (hidden := HiddenName.parse(name)) is None:
            return self._is_half_removed(name)
        kinds = (Hidden.tmp, Hidden.trash)
        return hidden.kind in kinds and hidden.run_id == self.run_id and name not in self._staged

    def _is_half_removed(self, name: str) -> bool:
        """Whether a removal by this run died after it renamed the manifest and before it renamed the folder."""
        # Text: there may be thousands of names, and paths take most of the time.
        path = f"{self.root}/{name}"
        return (
            is_plain(name)
            and not exists(self.disk, f"{path}/{MANIFEST_FILE}")
            and exists(self.disk, f"{path}/{removed_marker(self.run_id)}")
        )

    def _move_to_trash(self, name: str) -> Path:
        """Give a folder the hidden name of a removed one, durably. Returns its new path."""
        trash = self._hidden_path(Hidden.trash, name)
        self.disk.rename(self.root / name, trash)
        # Deleted with the next removal if the fsync fails.
        self._undeleted.add(trash)
        self.disk.fsync_dir(self.root)
        self._undeleted.discard(trash)
        return trash

    def _delete_or_retry_later(self, path: Path) -> None:
        """Delete a removed folder. A failure is logged once, and the deletion is repeated with the next removal."""
        try:
            delete_tree(self.disk, path)
        except OSError as error:
            if path not in self._undeleted:
                logger.warning("cannot delete %s: %s; it will be tried again", path, error)
            self._undeleted.add(path)
        else:
            self._undeleted.discard(path)

    def _try_to_delete(self, path: Path) -> None:
        """Delete a hidden folder. After a failure the sweep of a later attempt deletes it, or warns."""
        try:
            delete_tree(self.disk, path)
        except OSError as error:
            logger.debug("cannot remove %s: %s", path, error)
