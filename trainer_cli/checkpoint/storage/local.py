"""Checkpoints on a local disk: written under a hidden name, fsynced, then renamed into place."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from operator import call
from pathlib import Path

from trainer_cli.checkpoint.storage.base import UnsyncedError
from trainer_cli.checkpoint.storage.disk import REFUSED, Disk, StrPath
from trainer_cli.checkpoint.storage.folder import LocalReadableFolder, LocalWritableFolder, open_source, write_file
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.naming import (
    LATEST_LINK,
    MANIFEST_FILE,
    PINNED_FILE,
    REPLACED_PREFIX,
    SUPERSEDED_PREFIX,
    Hidden,
    HiddenName,
    is_plain,
    is_run_id,
    parse_hidden,
    removed_marker,
)

logger = logging.getLogger(__name__)

_LARGEST_PEEK = 64 * 1024 * 1024
_LOOK_AGAIN_S = 0.005
_REMOVAL_S = 2.0
"""How long a reader waits for a removal or a replacement, which are a few operations of the disk."""
_READERS_S = 60.0
"""How long a replacement waits for those who read what it replaces."""


class LocalStorage:
    """Folders in one directory, which is made when the first of them is written.

    `run_id` and `attempt` are part of hidden names, so that a later attempt of the same run removes what an earlier
    one left. A save's order is: each file written and fsynced, the folder fsynced, renamed, its
    parent fsynced. A removal's: manifest renamed away, folder fsynced, folder renamed, its parent fsynced,
    files unlinked. A kill between any two of these leaves every other checkpoint as it was.

    Files are unlinked by `later`, which may use another thread.
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
        self._later = later
        self.disk = disk or Disk()
        """All access to files goes through it."""
        self._staged: set[str] = set()
        self._undeleted: set[Path] = set()
        self._told_links: set[str] = set()
        self._root_synced = False

    def names(self) -> list[str]:
        try:
            found = self.disk.listdir(self.root)
        except FileNotFoundError:
            return []
        replaced = [name.removeprefix(REPLACED_PREFIX) for name in found if name.startswith(REPLACED_PREFIX)]
        found += [name for name in replaced if is_plain(name) and self._finish_replacement(name) and name not in found]
        folders = [name for name in found if is_plain(name) and self._is_folder(f"{self.root}/{name}")]
        return [name for name in folders if not self._is_latest(name)]

    def location(self, name: str) -> str:
        return str(self._path(name))

    @contextmanager
    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> Iterator[LocalWritableFolder]:
        final = self._path(name)
        self._fsync_root()
        self._finish_replacement(name)
        if not replace:
            self._refuse_existing(final)
        staging = self._hidden(Hidden.tmp, name)
        self._staged.add(staging.name)
        try:
            self.disk.mkdir(staging)
            publish = partial(self._replace if replace else self._publish, staging, name)
            yield LocalWritableFolder(staging, self.disk, digest, publish)
        finally:
            if staging.name in self._staged:
                self._discard_quietly(staging)
                self._staged.discard(staging.name)

    def joining(self, place: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> LocalWritableFolder:
        hidden = parse_hidden(place)
        if hidden is None or hidden.kind is not Hidden.tmp:
            raise ValueError(f"{place!r} is not the name of a folder that is being written")
        return LocalWritableFolder(self.root / place, self.disk, digest)

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        path = self._path(name)
        until = time.monotonic() + _REMOVAL_S
        while True:
            try:
                fd = self.disk.open(path / MANIFEST_FILE)
            except FileNotFoundError:
                if not self._finish_replacement(name):
                    raise
                time.sleep(_LOOK_AGAIN_S)
                continue
            try:
                locked = self.disk.lock(fd, exclusive=False)
                if not self._is_same(fd, path / MANIFEST_FILE):
                    continue  # It was amended, replaced or removed since it was opened.
                if locked:
                    yield LocalReadableFolder(path, self.disk)
                    return
                if time.monotonic() > until:
                    raise FileNotFoundError(errno.ENOENT, "The checkpoint is just being removed", str(path))
                time.sleep(_LOOK_AGAIN_S)
            finally:
                self.disk.close(fd)

    def peek(self, name: str, file: str) -> bytes | None:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        path = f"{self._text(name)}/{file}"
        try:
            source = open_source(self.disk, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if source.size_bytes > _LARGEST_PEEK:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            content = bytearray(source.size_bytes)
            source.read_at([memoryview(content)], 0)
            return bytes(content)
        finally:
            source.close()

    def sizes(self, name: str) -> dict[str, int]:
        path = self._text(name)
        sizes: dict[str, int] = {}
        try:
            for file in self.disk.listdir(path):
                found = self.disk.stat(f"{path}/{file}", follow=False)
                if stat.S_ISLNK(found.st_mode):
                    found = self.disk.stat(f"{path}/{file}")
                if stat.S_ISREG(found.st_mode):
                    sizes[file] = found.st_size
        except (FileNotFoundError, NotADirectoryError):
            pass
        return sizes

    def is_pinned(self, name: str) -> bool:
        return self._is_there(f"{self._text(name)}/{PINNED_FILE}")

    def remove(self, name: str) -> bool:
        path = self._path(name)
        try:
            if stat.S_ISLNK(self.disk.stat(path, follow=False).st_mode):
                if name not in self._told_links:
                    self._told_links.add(name)
                    logger.warning("%s is a symbolic link, so it is not removed", path)
                return False
            self._finish_replacement(name)
            with ExitStack() as stack:
                if not self._keep_readers_out(path, stack):
                    return False
                self.disk.rename(path / MANIFEST_FILE, path / removed_marker(self.run_id))
                self.disk.fsync_dir(path)
                trash = self._to_trash(name)
        except FileNotFoundError:
            return False
        for path in tuple(self._undeleted):
            self._later(partial(self._discard_in_time, path))
        self._later(partial(self._discard_in_time, trash))
        return True

    def clear(self, name: str) -> bool:
        path = self._path(name)
        if not self._is_folder(path) or self._is_there(path / MANIFEST_FILE):
            return False
        self._later(partial(self._discard_in_time, self._to_trash(name)))
        return True

    def amend(self, name: str, manifest: bytes) -> None:
        path = self._path(name)
        new = path / f".amended.{self.run_id}"
        with self.reading(name):
            if self._is_there(new):
                self.disk.unlink(new)
            write_file(self.disk, new, manifest)
            # Readers hold a lock on the manifest that they opened; under this name a removal still finds it.
            self.disk.link(path / MANIFEST_FILE, self._free_name(path / SUPERSEDED_PREFIX))
            self.disk.rename(new, path / MANIFEST_FILE)
            self.disk.fsync_dir(path)
        self._drop_superseded(path)

    def pin(self, name: str, *, pinned: bool) -> None:
        path = self._path(name)
        if self.is_pinned(name) is pinned:
            return
        if pinned:
            write_file(self.disk, path / PINNED_FILE, b"")
        else:
            self.disk.unlink(path / PINNED_FILE)
        self.disk.fsync_dir(path)

    def quarantine(self, name: str, why: str) -> str:
        path = self._path(name)
        self._finish_replacement(name)
        hidden = self._hidden(Hidden.quarantined, name)
        self.disk.rename(path, hidden)
        self.disk.fsync_dir(self.root)
        logger.warning("%s is quarantined as %s: %s", path, hidden.name, why)
        return hidden.name

    def fsync_names(self) -> None:
        try:
            self.disk.fsync_dir(self.root)
        except OSError as error:
            raise UnsyncedError(error.errno, error.strerror, str(self.root)) from error

    def sweep(self) -> list[str]:
        try:
            found = self.disk.listdir(self.root)
        except FileNotFoundError:
            return []
        swept: list[str] = []
        for name in found:
            try:
                if self._is_remains(name):
                    self._discard(self.root / name)
                elif self._is_half_removed(name):
                    self._discard(self._to_trash(name))
                else:
                    continue
            except OSError as error:
                logger.warning("cannot remove what an earlier attempt left: %s: %s", self.root / name, error)
            else:
                swept.append(name)
        return swept

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        return []

    def free_bytes(self) -> int | None:
        return self._free(self.disk.free_bytes)

    def free_files(self) -> int | None:
        return self._free(self.disk.free_files)

    def _free(self, ask: Callable[[Path], int | None]) -> int | None:
        """What the file system says of the folder, or of the first folder above it that is there."""
        for path in (self.root, *self.root.absolute().parents):
            try:
                return ask(path)
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return None

    def _publish(self, staging: Path, name: str) -> None:
        self.disk.fsync_dir(staging)
        self._clear_the_way(name)
        self.disk.rename(staging, self._path(name))
        self._staged.discard(staging.name)
        self.fsync_names()

    def _replace(self, staging: Path, name: str) -> None:
        """Publish a folder in the place of the checkpoint of that name, if there is one, which is deleted then."""
        final = self._path(name)
        if not self._is_there(final / MANIFEST_FILE):
            self._publish(staging, name)
            return
        self.disk.fsync_dir(staging)
        with ExitStack() as stack:
            self._wait_for_readers(final, stack)
            old = self._swap(staging, name)
            self._staged.discard(staging.name)
            # Before the old one is deleted: a power cut may take the swap back.
            self.fsync_names()
            self._later(partial(self._discard_in_time, old))

    def _wait_for_readers(self, path: Path, stack: ExitStack) -> None:
        """Lock a checkpoint against readers until the end of `stack`.

        Raises:
            OSError: EBUSY, it is read for too long.
        """
        until = time.monotonic() + _READERS_S
        while True:
            with ExitStack() as locks:
                if self._keep_readers_out(path, locks):
                    stack.enter_context(locks.pop_all())
                    return
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "The checkpoint that is there is being read", str(path))
            time.sleep(_LOOK_AGAIN_S)

    def _swap(self, staging: Path, name: str) -> Path:
        """Give a staged folder the name of a checkpoint; the path of the old one then.

        Where names cannot be swapped, the old one has a hidden name for a moment, from which
        `_finish_replacement` gives it its name back if the process dies then.
        """
        final = self._path(name)
        try:
            self.disk.exchange(staging, final)
            return staging
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        old = self.root / f"{REPLACED_PREFIX}{name}"
        self._discard(old)
        self.disk.rename(final, old)
        try:
            self.disk.rename(staging, final)
        except OSError:
            self.disk.rename(old, final)
            raise
        return old

    def _finish_replacement(self, name: str) -> bool:
        """Finish the replacement of a checkpoint that a process began by two renames; whether there was one.

        The old one gets its name back, or is deleted if the new one has the name already.
        """
        old, final = self.root / f"{REPLACED_PREFIX}{name}", self._path(name)
        if not self._is_there(old):
            return False
        with ExitStack() as stack:
            complete = self._is_there(old / MANIFEST_FILE)
            if complete and not self._keep_readers_out(old, stack):
                return True  # A living process holds the lock.
            if complete and not self._is_there(final):
                self.disk.rename(old, final)
                self.disk.fsync_dir(self.root)
            else:
                self._discard_quietly(old)
        return True

    def _path(self, name: str) -> Path:
        return Path(self._text(name))

    def _text(self, name: str) -> str:
        if not is_plain(name):
            raise ValueError(f"{name!r} is not a plain name of a checkpoint")
        return f"{self.root}/{name}"

    def _hidden(self, kind: Hidden, name: str) -> Path:
        """A hidden name that is free."""
        serial = 0
        while True:
            path = self.root / str(HiddenName(kind, name, self.run_id, self.attempt, serial))
            if not self._is_there(path):
                return path
            serial += 1

    def _free_name(self, prefix: Path) -> Path:
        """The first of `prefix0`, `prefix1` and so on that is not in use."""
        return next(path for serial in count() if not self._is_there(path := Path(f"{prefix}{serial}")))

    def _superseded(self, path: Path) -> list[Path]:
        """The manifests of a checkpoint that were replaced while they were read."""
        return [path / file for file in self.disk.listdir(path) if file.startswith(SUPERSEDED_PREFIX)]

    def _drop_superseded(self, path: Path) -> None:
        """Delete replaced manifests that are not read; what cannot be deleted goes with the checkpoint."""
        try:
            for old in self._superseded(path):
                fd = self.disk.open_to_lock(old)
                try:
                    if self.disk.lock(fd, exclusive=True):
                        self.disk.unlink(old)
                finally:
                    self.disk.close(fd)
        except OSError as error:
            logger.warning("cannot delete a replaced manifest of %s: %s", path, error)

    def _keep_readers_out(self, path: Path, stack: ExitStack) -> bool:
        """Lock a checkpoint against readers until the end of `stack`; False if it is being read."""
        fd = self.disk.open_to_lock(path / MANIFEST_FILE)
        stack.callback(self.disk.close, fd)
        if not self.disk.lock(fd, exclusive=True):
            return False
        for old in self._superseded(path):
            # A crash in `amend` leaves a second name of the manifest itself.
            if not self._is_same(fd, old):
                old_fd = self.disk.open_to_lock(old)
                stack.callback(self.disk.close, old_fd)
                if not self.disk.lock(old_fd, exclusive=True):
                    return False
        return True

    def _fsync_root(self) -> None:
        """Make the directory where it is missing, so that its own name survives a power cut too."""
        if self._root_synced:
            return
        root = self.root.absolute()
        missing = [path for path in (root, *root.parents) if not self._is_there(path)]
        for path in reversed(missing):
            try:
                self.disk.mkdir(path)
            except FileExistsError:
                continue
            self.disk.fsync_dir(path.parent)
        if not missing:
            self.disk.fsync_dir(root.parent)
        self._root_synced = True

    def _refuse_existing(self, final: Path) -> None:
        if self._is_there(final / MANIFEST_FILE):
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", str(final))

    def _clear_the_way(self, name: str) -> None:
        final = self.root / name
        self._refuse_existing(final)
        if self._is_half_removed(name):
            self._discard_quietly(self._to_trash(name))
        elif self._is_there(final):
            self.quarantine(name, "it has no manifest")

    def _is_there(self, path: StrPath) -> bool:
        try:
            self.disk.stat(path, follow=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _is_latest(self, name: str) -> bool:
        """Whether it is the link to the newest checkpoint, which is no checkpoint of its own."""
        return name == LATEST_LINK and stat.S_ISLNK(self.disk.stat(self.root / name, follow=False).st_mode)

    def _is_folder(self, path: StrPath) -> bool:
        try:
            return stat.S_ISDIR(self.disk.stat(path).st_mode)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise

    def _is_same(self, fd: int, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.disk.stat(path))
        except FileNotFoundError:
            return False

    def _is_remains(self, name: str) -> bool:
        hidden = parse_hidden(name)
        return (
            hidden is not None
            and hidden.kind in (Hidden.tmp, Hidden.trash)
            and hidden.run_id == self.run_id
            and name not in self._staged
        )

    def _is_half_removed(self, name: str) -> bool:
        """Whether a removal of ours died between taking the manifest away and renaming the folder."""
        path = self.root / name
        return (
            is_plain(name)
            and not self._is_there(path / MANIFEST_FILE)
            and self._is_there(path / removed_marker(self.run_id))
        )

    def _to_trash(self, name: str) -> Path:
        trash = self._hidden(Hidden.trash, name)
        self.disk.rename(self.root / name, trash)
        self.disk.fsync_dir(self.root)
        return trash

    def _discard(self, path: Path) -> None:
        """Remove a hidden folder with all in it; links are removed, not followed."""
        try:
            mode = self.disk.stat(path, follow=False).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            self.disk.unlink(path)
            return
        for name in self.disk.listdir(path):
            self._discard(path / name)
        self.disk.rmdir(path)

    def _discard_in_time(self, path: Path) -> None:
        """Delete what was removed. A failure is logged once, and tried again with the next removal."""
        try:
            self._discard(path)
        except OSError as error:
            if path not in self._undeleted:
                logger.warning("cannot delete %s: %s; it will be tried again", path, error)
            self._undeleted.add(path)
        else:
            self._undeleted.discard(path)

    def _discard_quietly(self, path: Path) -> None:
        """Remove a hidden folder; where that fails, the sweep of a later attempt removes it or warns."""
        try:
            self._discard(path)
        except OSError as error:
            logger.debug("cannot remove %s: %s", path, error)
