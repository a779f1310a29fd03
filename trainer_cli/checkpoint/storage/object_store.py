"""Checkpoints in an object store: committed on the local disk first, then sent, the manifest last.

    save:  hidden folder -> fsync -> renamed in `cache` (committed) ─ a thread ─> files -> manifest, if none is there
    load:  manifest -> local copy with the same manifest, or download into `cache` -> digests as for any folder

In the store a checkpoint exists if its manifest does. A checkpoint that is not sent yet counts as one of the storage,
so that everything else, retention included, sees one place. While the store is away, training and saving go on.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import call
from pathlib import Path
from typing import NamedTuple

from trainer_cli.checkpoint.storage.download import cache_of, download
from trainer_cli.checkpoint.storage.folder import LocalReadableFolder, LocalWritableFolder
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.object_client import ObjectClient
from trainer_cli.checkpoint.storage.uploader import Uploader, in_parallel
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import Manifest, ManifestError
from trainer_cli.core.naming import MANIFEST_FILE, PINNED_FILE, Hidden, HiddenName, is_plain, removed_marker
from trainer_cli.errors import StoreAwayError, UserError

logger = logging.getLogger(__name__)

_SENT_FILE = "sent"
"""Empty side file of a local copy whose checkpoint is in the store."""
_WRITING_FILE = ".writing"
"""Object that holds the id of the run that sends a checkpoint, until it is committed. No other run sends there then."""
_FILES_AT_ONCE = 4
_TRIES = 5
"""How often a local copy is fetched that another process removes before it is held."""


class _Remote(NamedTuple):
    """What is known of one folder in the store."""

    sizes: dict[str, int]
    manifest: bytes | None
    tag: str
    """The manifest's."""


class ObjectStorage:
    """Checkpoints under a URL such as `s3://bucket/run`, with copies in a local folder.

    Args:
        url: the folder of the checkpoints in the store.
        cache: the local folder for copies; by default one in the user's cache for this URL.
        run_id, attempt, later: as of LocalStorage.
        client: sends the requests.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        cache: Path | None = None,
        run_id: str = "local",
        attempt: int = 0,
        later: Callable[[Callable[[], object]], object] = call,
        client: ObjectClient | None = None,
    ) -> None:
        self.url = str(url).rstrip("/")
        self.cache = cache or cache_of(self.url)
        self.run_id, self.attempt = run_id, attempt
        self.client = client or ObjectClient(self.url)
        self.local = LocalStorage(self.cache, run_id=run_id, attempt=attempt, later=later)
        self.uploader = Uploader(self._send, self.location)
        self._remote: dict[str, _Remote] | None = None
        self._trains = False
        self._away = False
        self._held: set[str] = set()
        """Checkpoints that are just being sent, removed or changed."""
        self._released = threading.Condition()

    def names(self) -> list[str]:
        self._refresh()
        return sorted({*self._unsent(), *(self._remote or {})})

    def location(self, name: str) -> str:
        return f"{self.url}/{_plain(name)}"

    @contextmanager
    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> Iterator[LocalWritableFolder]:
        if self.client.read_only:
            raise UserError(f"{self.url} can only be read", cure="Save to a local folder, or to an object store.")
        there = self._is_unsent(name) or ((found := self._folder(name)) is not None and found.manifest is not None)
        if there and replace:
            # A store cannot replace several objects at once, so that the old one would be lost before the new one is.
            raise UserError(
                f"{self.location(name)} exists, and a checkpoint in an object store cannot be replaced at once",
                cure="Save under another name.",
            )
        if there:
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", self.location(name))
        if name in self.local.names() and not self._is_unsent(name):
            self.local.remove(name)  # The copy of one that is no longer in the store.
        with self.local.writing(name, digest=digest) as folder:
            publish = folder._publish

            def publish_and_send() -> None:
                publish()
                self.uploader.add(name)

            folder._publish = publish_and_send
            yield folder

    def joining(self, place: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> LocalWritableFolder:
        return self.local.joining(place, digest=digest)

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        with ExitStack() as stack:
            yield self._hold_copy(name, stack)

    def _hold_copy(self, name: str, stack: ExitStack) -> LocalReadableFolder:
        """A local copy of a checkpoint, held against removal until the end of `stack`.

        Raises:
            FileNotFoundError: the checkpoint is not in the store. A missing copy is downloaded.
            OSError: the store does not answer, or the copy cannot be written.
        """
        for _ in range(_TRIES):
            with self._copying(_plain(name)):
                if not self._is_unsent(name):
                    self._refresh_copy(name)
                try:
                    folder = stack.enter_context(self.local.reading(name))
                except FileNotFoundError:
                    # It was sent and then trimmed since, or a removal began. Only the store says whether it is gone.
                    continue
            self._trim(name)
            return folder
        raise OSError(errno.EBUSY, "its local copy is being removed", str(self.cache / name))

    def peek(self, name: str, file: str) -> bytes | None:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        if self._is_unsent(name):
            return self.local.peek(name, file)
        if file == MANIFEST_FILE:
            found = self._folder(name)
            return None if found is None else found.manifest
        return self.client.get(f"{_plain(name)}/{file}")

    def sizes(self, name: str) -> dict[str, int]:
        if self._is_unsent(name):
            return {file: size for file, size in self.local.sizes(name).items() if file != _SENT_FILE}
        found = self._folder(name)
        sizes = {} if found is None else found.sizes
        return {file: size for file, size in sizes.items() if file != _WRITING_FILE}

    def is_pinned(self, name: str) -> bool:
        return PINNED_FILE in self.sizes(name)

    def remove(self, name: str) -> bool:
        with self._holding(name, wait=False) as held:
            if not held:
                return False
            local = name in self.local.names()
            if self._away and not self._is_unsent(name):
                return False  # Its objects cannot be deleted now.
            if local and not self.local.remove(name):
                return False
            self.uploader.drop(name)
            found = self._folder(name)
            if found is None or found.manifest is None:
                return local
            self.client.put(f"{name}/{removed_marker(self.run_id)}", b"")
            self.client.delete(f"{name}/{MANIFEST_FILE}")
            self._forget(name)
            self._delete_objects(name)
            return True

    def clear(self, name: str) -> bool:
        with self._holding(name):
            if self._is_unsent(name):
                return False
            found = self._folder(name)
            if found is None or found.manifest is not None:
                return False
            self._delete_objects(name)
            self._forget(name)
            return True

    def amend(self, name: str, manifest: bytes) -> None:
        with self._holding(name):
            unsent = self._is_unsent(name)
            if name in self.local.names():
                self.local.amend(name, manifest)
            if unsent:
                return
            if self.client.get(f"{_plain(name)}/{MANIFEST_FILE}") is None:
                raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
            self.client.put(f"{name}/{MANIFEST_FILE}", manifest)
            self._remember(name, {MANIFEST_FILE: len(manifest)}, manifest)

    def pin(self, name: str, *, pinned: bool) -> None:
        with self._holding(name):
            if name in self.local.names():
                self.local.pin(name, pinned=pinned)
            if not self._is_unsent(name):
                if pinned:
                    self.client.put(f"{_plain(name)}/{PINNED_FILE}", b"")
                else:
                    self.client.delete(f"{_plain(name)}/{PINNED_FILE}")
                self._remember(name, {PINNED_FILE: 0 if pinned else None})

    def quarantine(self, name: str, why: str) -> str:
        with self._holding(name):
            hidden = str(HiddenName(Hidden.quarantined, name, self.run_id, self.attempt))
            self.uploader.drop(name)
            if name in self.local.names():
                hidden = self.local.quarantine(name, why)
            if (found := self._folder(name)) is not None:
                # The manifest goes first, so that a crash midway leaves a partial checkpoint.
                files = {*found.sizes, *self.client.list(name)}
                for file in sorted(files, key=lambda file: file != MANIFEST_FILE):
                    self.client.copy(f"{name}/{file}", f"{hidden}/{file}")
                    self.client.delete(f"{name}/{file}")
                self._forget(name)
                logger.warning("%s is quarantined as %s: %s", self.location(name), hidden, why)
            return hidden

    def fsync_names(self) -> None:
        self.local.fsync_names()

    def sweep(self) -> list[str]:
        """As of every storage. From here on this storage is that of a training, which goes on while the store is away;
        what an earlier attempt could not send is sent."""
        swept = self.local.sweep()
        self.client.check_writable(self.run_id)
        self._refresh()
        self._trains = True
        for name, found in list((self._remote or {}).items()):
            if found.manifest is None and not self._is_unsent(name) and self._is_ours(name, found):
                self._delete_objects(name)
                self._forget(name)
                swept.append(name)
        for name in self._unsent():
            self.uploader.add(name)
        return swept

    def free_bytes(self) -> int | None:
        return self.local.free_bytes()

    def free_files(self) -> int | None:
        return self.local.free_files()

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        self.uploader.retry()
        return self.uploader.wait(timeout_s)

    def _refresh(self) -> None:
        """List the store. During a training, what was known before counts while the store is away, and the store is
        asked again once something could be sent."""
        if self._away and self.uploader.waiting():
            return
        before = self._remote or {}
        try:
            found: dict[str, dict[str, int]] = {}
            tags: dict[str, str] = {}
            for key, info in self.client.list().items():
                name, slash, file = key.partition("/")
                if slash and "/" not in file and is_plain(name):
                    sizes = found.setdefault(name, {})
                    if info.size_bytes is not None:
                        sizes[file] = info.size_bytes
                    if file == MANIFEST_FILE:
                        tags[name] = info.tag
            remote = {}
            for name in {*found, *before}:
                # A listing may be older than what was read or written since.
                known = before.get(name)
                if known is not None and known.manifest is not None and known.tag and known.tag == tags.get(name):
                    remote[name] = known._replace(sizes=found[name])
                elif (one := self._look(name, found.get(name, {}), tags.get(name, ""))) is not None:
                    remote[name] = one
            self._remote, self._away = remote, False
        except StoreAwayError as error:
            if not self._trains:
                raise
            if not self._away:
                self._away = True
                logger.warning("%s does not answer, so its checkpoints stay as they are: %s", self.url, error)

    def _look(self, name: str, sizes: dict[str, int], tag: str) -> _Remote | None:
        """One folder of the store as it is now; None if nothing is there."""
        manifest = self.client.get(f"{name}/{MANIFEST_FILE}")
        if manifest is None:
            sizes = {file: size for file, size in sizes.items() if file != MANIFEST_FILE}
            return _Remote(sizes, None, "") if sizes else None
        sizes = {**sizes, MANIFEST_FILE: len(manifest)}
        with suppress(ManifestError):
            for file, entry in Manifest.parse(manifest).files.items():
                if sizes.get(file) != entry.size_bytes and (info := self.client.info(f"{name}/{file}")) is not None:
                    # A size that the store does not say shows when the file is read.
                    sizes[file] = entry.size_bytes if info.size_bytes is None else info.size_bytes
        return _Remote(sizes, manifest, tag)

    def _folder(self, name: str) -> _Remote | None:
        if self._remote is None:
            if self.client.read_only:
                self._remote = {}  # The pages of a web server are read only where a glob or a folder is named.
            else:
                self._refresh()
        assert self._remote is not None
        if _plain(name) not in self._remote and (found := self._look_once(name)) is not None:
            self._remote[name] = found
        return self._remote.get(name)

    def _look_once(self, name: str) -> _Remote | None:
        """A folder that no listing has: of http, or a new one."""
        if self._away:
            return None
        try:
            return self._look(name, {}, "")
        except StoreAwayError:
            if not self._trains:
                raise
            return None

    def _remember(self, name: str, sizes: Mapping[str, int | None], manifest: bytes | None = None) -> None:
        """Know of a change that was made in the store, before a listing shows it. None: the object was deleted."""
        known = (self._remote or {}).get(name)
        if self._remote is None or known is None:
            return
        all_sizes = {**known.sizes, **sizes}
        left = {file: size for file, size in all_sizes.items() if size is not None}
        self._remote[name] = _Remote(left, manifest or known.manifest, known.tag if manifest is None else "")

    def _forget(self, name: str) -> None:
        """Know that a folder was removed from the store."""
        if self._remote is not None:
            self._remote.pop(name, None)

    def _unsent(self) -> list[str]:
        """The local copies that are not in the store yet."""
        return [name for name in self.local.names() if self._is_unsent(name)]

    def _is_unsent(self, name: str) -> bool:
        sizes = self.local.sizes(name)
        return MANIFEST_FILE in sizes and _SENT_FILE not in sizes

    def _send(self, name: str) -> None:
        """Send a local copy, and commit it in the store. A checkpoint that was removed meanwhile is passed over."""
        with self._holding(name):
            sizes = {file: size for file, size in self.local.sizes(name).items() if file != _SENT_FILE}
            manifest = self.local.peek(name, MANIFEST_FILE)
            if manifest is None:
                return
            began = time.monotonic()
            found = self.client.get(f"{name}/{MANIFEST_FILE}")
            if found not in (None, manifest) or not self.client.put_new(f"{name}/{_WRITING_FILE}", self._own_id):
                raise FileExistsError(errno.EEXIST, "another run's checkpoint of that name is in the store", name)
            files = [file for file in sizes if file != MANIFEST_FILE and not file.startswith(".")]
            in_parallel(
                [partial(self.client.upload, f"{name}/{file}", self.cache / name / file) for file in files],
                _FILES_AT_ONCE,
            )
            if not self.client.put_new(f"{name}/{MANIFEST_FILE}", manifest):
                raise FileExistsError(
                    errno.EEXIST, "another checkpoint of that name is in the store", self.location(name)
                )
            self.client.delete(f"{name}/{_WRITING_FILE}")
            (self.cache / name / _SENT_FILE).touch()
            self._away = False
            if self._remote is not None:
                self._remote[name] = _Remote(sizes, manifest, "")
            logger.info(
                "sent %s (%s bytes, %.1f s)", self.location(name), f"{sum(sizes.values()):,}", time.monotonic() - began
            )
            self._trim(name)

    @contextmanager
    def _holding(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Keep others from sending, removing or changing a checkpoint; False if one does, and `wait` is False."""
        with self._released:
            if name in self._held and not wait:
                yield False
                return
            self._released.wait_for(lambda: name not in self._held)
            self._held.add(name)
        try:
            yield True
        finally:
            with self._released:
                self._held.discard(name)
                self._released.notify_all()

    @property
    def _own_id(self) -> bytes:
        return self.run_id.encode()

    def _is_ours(self, name: str, found: _Remote) -> bool:
        """Whether an attempt of this run left a folder half-sent or half-removed."""
        if removed_marker(self.run_id) in found.sizes:
            return True
        return _WRITING_FILE in found.sizes and self.client.get(f"{name}/{_WRITING_FILE}") == self._own_id

    def _trim(self, newest: str) -> None:
        """Remove local copies of checkpoints that are in the store, but for this one and those that are in use."""
        for name in self.local.names():
            if name != newest and not self._is_unsent(name) and MANIFEST_FILE in self.local.sizes(name):
                with self._copying(name, wait=False) as locked:
                    if locked:
                        self.local.remove(name)

    def _delete_objects(self, name: str) -> None:
        """Delete what is left of a folder, its markers last."""
        files = [file for file in self.client.list(name) if not file.startswith(".")]
        in_parallel([partial(self.client.delete, f"{name}/{file}") for file in files], _FILES_AT_ONCE)
        for marker in (_WRITING_FILE, removed_marker(self.run_id)):
            self.client.delete(f"{name}/{marker}")

    def _refresh_copy(self, name: str) -> None:
        """Download a checkpoint of the store unless the local copy has the same manifest; within `_copying`."""
        manifest = self.client.get(f"{name}/{MANIFEST_FILE}")
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        if self.local.peek(name, MANIFEST_FILE) == manifest:
            return
        if name in self.local.names() and not (self.local.remove(name) or self.local.clear(name)):
            raise OSError(errno.EBUSY, "an older copy of it is being read", str(self.cache / name))
        download(self.client, name, manifest, self.local, self.location(name))
        (self.cache / name / _SENT_FILE).touch()

    @contextmanager
    def _copying(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Keep other threads and processes from downloading or trimming a local copy; False if one does, and `wait`
        is False."""
        self.cache.mkdir(parents=True, exist_ok=True)
        path = self.cache / f".{name}.downloading"
        while True:
            with path.open("wb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    yield False
                    return
                try:
                    # The holder before unlinked its file: another thread may hold a new one of that name.
                    if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                        continue
                except FileNotFoundError:
                    continue
                try:
                    yield True
                finally:
                    os.unlink(path)
                return


def _plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{name!r} is not a plain name of a checkpoint")
    return name
