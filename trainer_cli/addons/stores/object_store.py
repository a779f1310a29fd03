"""Checkpoints in an object store: committed on the local disk first, then sent, the manifest last.

    save:  hidden folder -> fsync -> renamed in `cache` (committed) ─ a thread ─> files -> manifest, if none exists
    load:  manifest -> local copy with the same manifest, or download into `cache` -> digests as for any folder
    save of several machines:  each rank sends its own files -> manifest, if none exists (committed)

In the store a checkpoint exists if its manifest does. A checkpoint that is not sent yet counts as part of the storage,
so that its users, retention included, see one storage. While the store is unreachable, training and saving continue.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import call
from pathlib import Path
from typing import NamedTuple

from trainer_cli.addons.stores.download import cache_of, download, locking_copy
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.rank_folder import (
    FILES_AT_ONCE,
    WRITING_FILE,
    RankFolder,
    claiming,
    delete_objects,
    is_left_by,
    name_taken,
)
from trainer_cli.addons.stores.uploader import Uploader, run_in_parallel
from trainer_cli.errors import StoreAwayError, UserError
from trainer_cli.files import as_path
from trainer_cli.layout import MANIFEST_FILE, PINNED_FILE, is_plain
from trainer_cli.manifest import Manifest, ManifestError
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage import Hidden, HiddenName, LocalReadableFolder, LocalStorage, StagedFolder, removed_marker
from trainer_cli.terminal import format_count

logger = logging.getLogger(__name__)

_SENT_FILE = "sent"
"""Empty file in a local copy: its checkpoint is in the store."""
_TRIES = 5
"""Maximum number of downloads of a copy that other processes remove before it is locked."""


class _RemoteFolder(NamedTuple):
    """The last known content of one folder in the store."""

    sizes: dict[str, int]
    manifest: bytes | None
    tag: str
    """Tag of the manifest, which changes with it; empty if unknown."""


_last_listing: tuple[str, dict[str, _RemoteFolder]] = ("", {})
"""URL and folders of the last listing of this process: a command opens the same store many times."""


class ObjectStorage:
    """Checkpoints under a URL such as `s3://bucket/run`, with copies in a local folder.

    Args:
        url: the folder of the checkpoints in the store.
        cache: the local folder for copies; by default one in the user's cache for this URL.
        run_id, attempt, later: see `LocalStorage`.
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
        self.root = as_path(self.url)
        self.cache = cache or cache_of(self.url)
        self.run_id, self.attempt = run_id, attempt
        self.client = client or ObjectClient(self.url)
        self.local = LocalStorage(self.cache, run_id=run_id, attempt=attempt, later=later)
        self.uploader = Uploader(self._send, self.location)
        self._rank: int | None = None
        """Rank of this process in a save by several machines; None: one machine saves."""
        self._remote: dict[str, _RemoteFolder] | None = None
        self._is_training = False
        self._away = False
        self._locked: set[str] = set()
        """Checkpoints that are being sent, removed or changed."""
        self._unlocked = threading.Condition()

    def names(self, earlier: Collection[str] = ()) -> list[str]:
        # Before the listing: one that is sent meanwhile would be neither unsent nor in a listing made before.
        unsent = self._unsent()
        self._refresh()
        return sorted({*unsent, *(self._remote or {})})

    def location(self, name: str) -> str:
        return f"{self.url}/{_check_plain(name)}"

    @contextmanager
    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> Iterator[StagedFolder]:
        if self.client.read_only:
            raise UserError(f"{self.url} can only be read", cure="Save to a local folder, or to an object store.")
        unsent = self._is_unsent(name)
        remote = None if unsent else self._folder(name)
        exists = unsent or (remote is not None and remote.manifest is not None)
        if exists and replace:
            # A store cannot replace several objects atomically: the old checkpoint would be lost before the new exists.
            raise UserError(
                f"{self.location(name)} exists, and a checkpoint in an object store cannot be replaced atomically",
                cure="Save under another name.",
            )
        if exists:
            raise name_taken("A checkpoint of that name exists", self.location(name))
        if name in self.local.names():
            self.local.remove(name)  # A copy of a checkpoint that is no longer in the store.
        if self._rank is not None:
            if remote is not None:
                self._clear_leftover(name, remote)
            with claiming(self._rank_folder(name, digest), self.run_id) as rank_folder:
                # A listing meanwhile has shown it without its manifest.
                rank_folder.after_publish = partial(self._forget, name)
                yield rank_folder
            return
        with self.local.writing(name, digest=digest) as folder:
            # The upload begins only after the local commit: until then nothing may be sent.
            folder.after_publish = partial(self.uploader.add, name)
            yield folder

    def joining(self, hidden_name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> StagedFolder:
        if self._rank is not None:
            return self._rank_folder(hidden_name, digest)
        return self.local.joining(hidden_name, digest=digest)

    def separate(self, rank: int) -> None:
        self._rank = rank

    def _rank_folder(self, name: str, digest: DigestAlgorithm) -> RankFolder:
        self._trim(name)
        self.cache.mkdir(parents=True, exist_ok=True)
        # The same for each save: what a killed process left here is replaced by the next one.
        path = self.cache / str(HiddenName(Hidden.tmp, f"rank{self._rank}", self.run_id, 0))
        return RankFolder(path, _check_plain(name), self.client, self.local.disk, digest)

    def _clear_leftover(self, name: str, remote: _RemoteFolder) -> None:
        """Delete what a failed save of this run left in a folder without a manifest; quarantine what is of no run."""
        # A write of the manifest that was given up may have reached the store since the last listing.
        if self.client.get(f"{name}/{MANIFEST_FILE}") is not None:
            self._forget(name)
            raise name_taken("A checkpoint of that name exists", self.location(name))
        if is_left_by(self.run_id, self.client, name, remote.sizes):
            delete_objects(self.client, name, self.run_id)
            self._forget(name)
        elif WRITING_FILE not in remote.sizes:
            self.quarantine(name, "it has no manifest")

    def _delete_leftover(self, name: str) -> bool:
        """Delete a folder that had no manifest when it was listed. Returns False if it has one by now."""
        marker = f"{name}/{removed_marker(self.run_id)}"
        # Before the look for a manifest: one that a process sends after it, which was thought dead, is taken back.
        self.client.put(marker, str(self.attempt).encode())
        is_sent = self.client.get(f"{name}/{MANIFEST_FILE}") is not None
        if is_sent:
            self.client.delete(marker)
        else:
            delete_objects(self.client, name, self.run_id)
        self._forget(name)
        return not is_sent

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        with ExitStack() as stack:
            yield self._open_copy(name, stack)

    def _open_copy(self, name: str, stack: ExitStack) -> LocalReadableFolder:
        """A local copy of a checkpoint, downloaded if needed and locked against removal until `stack` ends.

        Raises:
            FileNotFoundError: the checkpoint is not in the store.
            OSError: the store does not answer, or the copy cannot be written.
        """
        for _ in range(_TRIES):
            with locking_copy(self.cache, _check_plain(name)):
                if not self._is_unsent(name):
                    self._refresh_copy(name)
                try:
                    folder = stack.enter_context(self.local.reading(name))
                except FileNotFoundError:
                    # It was sent and trimmed since, or a removal began. Only the store knows whether it still exists.
                    continue
            self._trim(name)
            # Each machine has a cache of its own.
            folder.is_shared = False
            return folder
        raise OSError(errno.EBUSY, "its local copy is being removed", str(self.cache / name))

    def peek(self, name: str, file: str) -> bytes | None:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        if self._is_unsent(name):
            return self.local.peek(name, file)
        if file == MANIFEST_FILE:
            remote = self._folder(name)
            return None if remote is None else remote.manifest
        return self.client.get(f"{_check_plain(name)}/{file}")

    def manifest_id(self, name: str) -> tuple[int, ...] | None:
        return None  # `_remote` has the manifests of a store in memory.

    def sizes(self, name: str) -> dict[str, int]:
        if self._is_unsent(name):
            return {file: size for file, size in self.local.sizes(name).items() if file != _SENT_FILE}
        remote = self._folder(name)
        sizes = {} if remote is None else remote.sizes
        return {file: size for file, size in sizes.items() if file != WRITING_FILE}

    def is_pinned(self, name: str) -> bool:
        return PINNED_FILE in self.sizes(name)

    def remove(self, name: str) -> bool:
        with self._locking(name, wait=False) as locked:
            if not locked:
                return False
            local = name in self.local.names()
            if self._away and not self._is_unsent(name):
                return False  # Its objects cannot be deleted now.
            if local and not self.local.remove(name):
                return False
            self.uploader.drop(name)
            remote = self._folder(name)
            if remote is None or remote.manifest is None:
                return local
            # The marker first, so that a later attempt knows whose half-removed folder this is.
            self.client.put(f"{name}/{removed_marker(self.run_id)}", b"")
            # The manifest before the other objects: a crash midway leaves a partial checkpoint, not a damaged one.
            self.client.delete(f"{name}/{MANIFEST_FILE}")
            self._forget(name)
            delete_objects(self.client, name, self.run_id)
            return True

    def clear(self, name: str) -> bool:
        with self._locking(name):
            if self._is_unsent(name):
                return False
            remote = self._folder(name)
            return remote is not None and remote.manifest is None and self._delete_leftover(name)

    def amend(self, name: str, manifest: bytes) -> None:
        with self._locking(name):
            unsent = self._is_unsent(name)
            if name in self.local.names():
                self.local.amend(name, manifest)
            if unsent:
                return
            # Asked of the store, not of the listing: another process may have removed it, and a put would make half of
            # it again.
            if self.client.get(f"{_check_plain(name)}/{MANIFEST_FILE}") is None:
                raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
            self.client.put(f"{name}/{MANIFEST_FILE}", manifest)
            self._remember(name, {MANIFEST_FILE: len(manifest)}, manifest)

    def pin(self, name: str, *, pinned: bool) -> None:
        with self._locking(name):
            if name in self.local.names():
                self.local.pin(name, pinned=pinned)
            if not self._is_unsent(name):
                if pinned:
                    self.client.put(f"{_check_plain(name)}/{PINNED_FILE}", b"")
                else:
                    self.client.delete(f"{_check_plain(name)}/{PINNED_FILE}")
                self._remember(name, {PINNED_FILE: 0 if pinned else None})

    def quarantine(self, name: str, why: str) -> str:
        with self._locking(name):
            hidden = str(HiddenName(Hidden.quarantined, name, self.run_id, self.attempt))
            self.uploader.drop(name)
            if name in self.local.names():
                hidden = self.local.quarantine(name, why)
            if (remote := self._folder(name)) is not None:
                # The manifest goes first, so that a crash midway leaves a partial checkpoint.
                files = {*remote.sizes, *self.client.list(name)}
                for file in sorted(files, key=lambda file: file != MANIFEST_FILE):
                    self.client.copy(f"{name}/{file}", f"{hidden}/{file}")
                    self.client.delete(f"{name}/{file}")
                self._forget(name)
                logger.warning("%s is quarantined as %s: %s", self.location(name), hidden, why)
            return hidden

    def fsync_names(self) -> None:
        self.local.fsync_names()

    def sweep(self) -> list[str]:
        """See `Storage.sweep`. After this call a run owns the storage, and tolerates an unreachable store.

        Checkpoints that an earlier attempt could not send are queued.
        """
        swept = self.local.sweep()
        # The first access of a run: a missing bucket or credential ends it now, not after the first save.
        self.client.check_writable(self.run_id)
        self._refresh()
        self._is_training = self.client.is_training = True
        for name, remote in list((self._remote or {}).items()):
            if (
                remote.manifest is None
                and not self._is_unsent(name)
                and is_left_by(self.run_id, self.client, name, remote.sizes)
                and self._delete_leftover(name)
            ):
                swept.append(name)
        # Last: the listing above must not show what this attempt is sending.
        for name in self._unsent():
            self.uploader.add(name)
        return swept

    def free_bytes(self) -> int | None:
        return self.local.free_bytes()

    def free_files(self) -> int | None:
        return self.local.free_files()

    def removed_bytes(self) -> int:
        return self.local.removed_bytes()

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        self.uploader.retry()
        return self.uploader.wait(timeout_s)

    def _refresh(self) -> None:
        """List the store. During training the last listing is used while the store is unreachable."""
        # A listing would wait for a time-out each time. The next upload that succeeds clears `_away`.
        if self._away and self.uploader.waiting():
            return
        global _last_listing
        before = self._remote
        if before is None:
            before = _last_listing[1] if _last_listing[0] == self.url else {}
        try:
            listed: dict[str, dict[str, int]] = {}
            tags: dict[str, str] = {}
            for key, info in self.client.list().items():
                name, slash, file = key.partition("/")
                if slash and "/" not in file and is_plain(name):
                    sizes = listed.setdefault(name, {})
                    if info.size_bytes is not None:
                        sizes[file] = info.size_bytes
                    if file == MANIFEST_FILE:
                        tags[name] = info.tag
            remote = {}
            for name in {*listed, *before}:
                # A listing may be older than the last read or write, so a manifest is read unless its tag is the same.
                last = before.get(name)
                if last is not None and last.manifest is not None and last.tag and last.tag == tags.get(name):
                    remote[name] = last._replace(sizes=listed[name])
                elif (folder := self._read_folder(name, listed.get(name, {}), tags.get(name, ""))) is not None:
                    remote[name] = folder
            self._remote, self._away = remote, False
            _last_listing = self.url, dict(remote)
        except StoreAwayError as error:
            if not self._is_training:
                raise
            if not self._away:
                self._away = True
                logger.warning("%s cannot be listed, so its checkpoints stay as they are: %s", self.url, error)

    def _read_folder(self, name: str, sizes: dict[str, int], tag: str) -> _RemoteFolder | None:
        """Read the manifest of a folder in the store, and correct the listed sizes by it; None if nothing exists."""
        manifest = self.client.get(f"{name}/{MANIFEST_FILE}")
        if manifest is None:
            sizes = {file: size for file, size in sizes.items() if file != MANIFEST_FILE}
            return _RemoteFolder(sizes, None, "") if sizes else None
        sizes = {**sizes, MANIFEST_FILE: len(manifest)}
        with suppress(ManifestError):
            for file, entry in Manifest.parse(manifest).files.items():
                if sizes.get(file) != entry.size_bytes and (info := self.client.info(f"{name}/{file}")) is not None:
                    # Some stores give no size; a wrong one is noticed when the file is read.
                    sizes[file] = entry.size_bytes if info.size_bytes is None else info.size_bytes
        return _RemoteFolder(sizes, manifest, tag)

    def _folder(self, name: str) -> _RemoteFolder | None:
        """A folder of the store as last known, or read now if no listing has it; None if it does not exist."""
        _check_plain(name)
        if self._remote is None:
            if self.client.read_only:
                self._remote = {}  # The pages of a web server are listed only for a glob or a folder.
            else:
                self._refresh()
        assert self._remote is not None
        if name not in self._remote and not self._away:
            try:
                folder = self._read_folder(name, {}, "")
            except StoreAwayError:
                if not self._is_training:
                    raise
                folder = None
            if folder is not None:
                self._remote[name] = folder
        return self._remote.get(name)

    def _remember(self, name: str, sizes: Mapping[str, int | None], manifest: bytes | None = None) -> None:
        """Note a change that was made in the store before a listing shows it. Size None: the object was deleted."""
        last = (self._remote or {}).get(name)
        if self._remote is None or last is None:
            return
        existing = {file: size for file, size in {**last.sizes, **sizes}.items() if size is not None}
        self._remote[name] = _RemoteFolder(existing, manifest or last.manifest, last.tag if manifest is None else "")

    def _forget(self, name: str) -> None:
        """Note that a folder was removed from the store."""
        if self._remote is not None:
            self._remote.pop(name, None)

    def _unsent(self) -> list[str]:
        """The local copies that are not in the store yet."""
        return [name for name in self.local.names() if self._is_unsent(name)]

    def _is_unsent(self, name: str) -> bool:
        sizes = self.local.sizes(name)
        return MANIFEST_FILE in sizes and _SENT_FILE not in sizes

    def _send(self, name: str) -> None:
        """Send a local copy, and commit it in the store. A checkpoint that was removed meanwhile is skipped."""
        with self._locking(name):
            sizes = {file: size for file, size in self.local.sizes(name).items() if file != _SENT_FILE}
            manifest = self.local.peek(name, MANIFEST_FILE)
            if manifest is None:
                return
            began = time.monotonic()
            sent = self.client.get(f"{name}/{MANIFEST_FILE}")
            # The id of this run claims the name: two runs that send to one name would mix their files.
            if sent not in (None, manifest) or not self.client.put_new(f"{name}/{WRITING_FILE}", self.run_id.encode()):
                raise name_taken("another run's checkpoint of that name is in the store", name)
            files = [file for file in sizes if file != MANIFEST_FILE and not file.startswith(".")]
            run_in_parallel(
                [partial(self.client.upload, f"{name}/{file}", self.cache / name / file) for file in files],
                FILES_AT_ONCE,
            )
            # Manifest last: from here on the checkpoint exists in the store.
            if not self.client.put_new(f"{name}/{MANIFEST_FILE}", manifest):
                raise name_taken("another checkpoint of that name is in the store", self.location(name))
            # After the manifest, not before: a later attempt of the run, which deletes what it takes for left behind,
            # either sees the manifest or is noticed here. The local copy goes only once all files are in the store.
            if (deleted := self._find_deleted(name, files)) is not None:
                self.client.delete(f"{name}/{MANIFEST_FILE}")
                message = f"{deleted} was deleted by a later attempt of the run"
                raise FileNotFoundError(errno.ENOENT, message, self.location(name))
            self.client.delete(f"{name}/{WRITING_FILE}")
            (self.cache / name / _SENT_FILE).touch()
            self._away = False
            if self._remote is not None:
                self._remote[name] = _RemoteFolder(sizes, manifest, "")
            logger.info(
                "sent %s (%s, %.1f s)",
                self.location(name),
                format_count(sum(sizes.values()), "byte"),
                time.monotonic() - began,
            )
            self._trim(name)

    def _find_deleted(self, name: str, files: Collection[str]) -> str | None:
        """What a later attempt of this run has deleted of a folder in the store, or is about to; None: nothing."""
        # Before the files: it is deleted after them. That of a removal has no number.
        if int(self.client.get(f"{name}/{removed_marker(self.run_id)}") or 0) > self.attempt:
            return "it"
        return next((file for file in files if self.client.info(f"{name}/{file}") is None), None)

    @contextmanager
    def _locking(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Keep other threads from sending, removing or changing a checkpoint.

        Yields False, without a lock, if another thread does so and `wait` is False.
        """
        with self._unlocked:
            if name in self._locked and not wait:
                yield False
                return
            self._unlocked.wait_for(lambda: name not in self._locked)
            self._locked.add(name)
        try:
            yield True
        finally:
            with self._unlocked:
                self._locked.discard(name)
                self._unlocked.notify_all()

    def _trim(self, newest: str) -> None:
        """Remove the local copies of checkpoints that are in the store, except `newest` and those in use."""
        for name in self.local.names():
            if name != newest and not self._is_unsent(name) and MANIFEST_FILE in self.local.sizes(name):
                # Without waiting: a copy that another process downloads or reads is in use.
                with locking_copy(self.cache, name, wait=False) as locked:
                    if locked:
                        self.local.remove(name)

    def _refresh_copy(self, name: str) -> None:
        """Download a checkpoint unless the local copy has the same manifest. Needs the lock of `locking_copy`."""
        manifest = self.client.get(f"{name}/{MANIFEST_FILE}")
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        if self.local.peek(name, MANIFEST_FILE) == manifest:
            return
        if name in self.local.names() and not (self.local.remove(name) or self.local.clear(name)):
            raise OSError(errno.EBUSY, "an older copy of it is being read", str(self.cache / name))
        download(self.client, name, manifest, self.local, self.location(name))
        (self.cache / name / _SENT_FILE).touch()


def _check_plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{name!r} is not a plain name of a checkpoint")
    return name
