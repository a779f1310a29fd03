"""Checkpoints in an object store: committed on the local disk first, then sent by a mirror, the manifest last.

    save:  hidden folder -> fsync -> renamed in `cache` (committed) ─ mirror ─> files -> manifest, if none exists
    load:  manifest -> local copy with the same manifest, or download into `cache` -> digests as for any folder
    save of several machines:  each rank sends its own files -> manifest, if none exists (committed)

In the store a checkpoint exists if its manifest does. A checkpoint that is not sent yet counts as part of the storage,
so that its users, retention included, see one storage. While the store is unreachable, training and saving continue.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.checkpoint.storage.base import ReadableFolder
from trainer_cli.checkpoint.storage.copying import check_digest
from trainer_cli.checkpoint.storage.download import cache_of, download, locking_copy
from trainer_cli.checkpoint.storage.folder import LocalReadableFolder, StagedFolder
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.mirror import Mirror
from trainer_cli.checkpoint.storage.object_client import ObjectClient, ObjectInfo
from trainer_cli.checkpoint.storage.remote_folder import (
    WRITING_FILE,
    RemoteFolder,
    call_in_parallel,
    claiming,
    delete_objects,
    is_left_by,
)
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.manifest import Manifest, ManifestError
from trainer_cli.core.naming import MANIFEST_FILE, PINNED_FILE, Hidden, HiddenName, is_plain, removed_marker
from trainer_cli.core.url_path import as_path
from trainer_cli.errors import StoreAwayError, UserError
from trainer_cli.terminal import format_count

logger = logging.getLogger(__name__)

_SENT_FILE = "sent"
"""Empty file in a local copy: its checkpoint is in the store."""
_TRIES = 5
"""Maximum number of downloads of a copy that other processes remove before it is locked."""


class _RemoteFolder(NamedTuple):
    """The content of one folder in the store when it was read."""

    sizes: dict[str, int]
    manifest: bytes | None
    tag: str
    """Tag of the manifest, which changes with it; empty if unknown."""


_last_listing: tuple[str, dict[str, _RemoteFolder | None]] = ("", {})
"""URL and folders of the last listing of this process: a command opens the same store many times."""


class ObjectStorage:
    """Checkpoints under a URL such as `s3://bucket/run`, with copies in a local folder.

    Args:
        url: the folder of the checkpoints in the store.
        cache: the local folder for copies; by default one in the user's cache for this URL.
        client: sends the requests.
        identity: `run_id`, `attempt` and `later`, as in `LocalStorage`.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        cache: Path | None = None,
        client: ObjectClient | None = None,
        **identity: Any,
    ) -> None:
        self.url = str(url).rstrip("/")
        self.root = as_path(self.url)
        self.cache = cache or cache_of(self.url)
        self.client = client or ObjectClient(self.url)
        self.local = LocalStorage(self.cache, **identity)
        self.run_id = self.local.run_id
        self.mirror = Mirror(self.local, self._send, self.location)
        self._rank: int | None = None
        """Rank of this process in a save by several machines; None: one machine saves."""
        self._remote: dict[str, _RemoteFolder | None] | None = None
        """None for a folder that was changed since it was read."""
        self._is_away = False

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
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", self.location(name))
        if self._rank is not None:
            self._trim(name)
            self._clear_leftover(name, remote)
            with claiming(self._new_folder(name, digest), self.run_id) as folder:
                yield folder
            return
        if name in self.local.names():
            self.local.remove(name)  # A copy of a checkpoint that is no longer in the store.
        with self.local.writing(name, digest=digest) as staged:
            # Only after the local commit: until then nothing may be sent.
            staged.after_publish = partial(self.mirror.add, name)
            yield staged

    def joining(self, hidden_name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128) -> StagedFolder:
        if self._rank is not None:
            self._trim(hidden_name)
            return self._new_folder(hidden_name, digest)
        return self.local.joining(hidden_name, digest=digest)

    def separate(self, rank: int) -> None:
        self._rank = rank

    def send(self, name: str, manifest: bytes, source: ReadableFolder) -> None:
        began, entries = time.monotonic(), Manifest.parse(manifest).files
        self._clear_leftover(name, self._folder(name))
        folder = self._new_folder(name, DigestAlgorithm.xxh3_128)
        folder.manifest = manifest

        def send_file(file: str) -> None:
            check_digest(source, file, entries[file], str(source.path))
            folder.send(file, source.path / file)

        # After a failure what was sent stays: the next try compares it, and the next attempt of the run deletes it.
        folder.claim(self.run_id)
        call_in_parallel(send_file, entries)
        folder.publish()
        self.client.delete(f"{name}/{WRITING_FILE}")
        sizes = {MANIFEST_FILE: len(manifest), **{file: entry.size_bytes for file, entry in entries.items()}}
        if self._remote is not None:
            # Known without a request, which the store may not answer.
            self._remote[name] = _RemoteFolder(sizes, manifest, "")
        self._is_away = False
        size, taken_s = format_count(sum(sizes.values()), "byte"), time.monotonic() - began
        logger.info("sent %s (%s, %.1f s)", self.location(name), size, taken_s)

    def _send(self, name: str) -> None:
        """Send a checkpoint of the local disk, which is locked until it is marked as sent."""
        with self.local.reading(name) as folder:
            manifest, sent = self.local.peek(name, MANIFEST_FILE), self.client.get(f"{name}/{MANIFEST_FILE}")
            assert manifest is not None
            if sent == manifest:
                self.client.delete(f"{name}/{WRITING_FILE}")  # A kill may have left it.
            elif sent is not None and Manifest.parse(manifest).amends(Manifest.parse(sent)):
                self._put_manifest(name, manifest)
            else:
                self.send(name, manifest, folder)
            (self.cache / name / _SENT_FILE).touch()
            # After the mark: one that was pinned before it, was pinned on the local disk alone.
            if self.local.is_pinned(name):
                self.pin(name, pinned=True)
        self._trim(name)

    def _new_folder(self, name: str, digest: DigestAlgorithm) -> RemoteFolder:
        self.cache.mkdir(parents=True, exist_ok=True)
        # The same for each save: what a killed process left here is replaced by the next one.
        path = self.cache / str(HiddenName(Hidden.tmp, f"rank{self._rank}", self.run_id, 0))
        folder = RemoteFolder(path, _check_plain(name), self.client, self.local.disk, digest)
        folder.after_publish = partial(self._forget, name)
        return folder

    def _clear_leftover(self, name: str, remote: _RemoteFolder | None) -> None:
        """Delete what a failed save of this run left in a folder without a manifest; quarantine what is of no run."""
        if remote is None:
            return
        # A write of the manifest that was given up may have reached the store since the last listing.
        if self.client.get(f"{name}/{MANIFEST_FILE}") is not None:
            self._forget(name)
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", self.location(name))
        if is_left_by(self.run_id, self.client, name, remote.sizes):
            self._delete_objects(name)
        elif WRITING_FILE not in remote.sizes:
            self._quarantine_objects(name, remote, self._quarantined_name(name), "it has no manifest")

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
            return self.local.sizes(name)
        remote = self._folder(name)
        sizes = {} if remote is None else remote.sizes
        return {file: size for file, size in sizes.items() if file != WRITING_FILE}

    def is_pinned(self, name: str) -> bool:
        return PINNED_FILE in self.sizes(name)

    def remove(self, name: str) -> bool:
        unsent = self._is_unsent(name)
        # The objects of an unreachable store cannot be deleted. A copy that is read, also to be sent, is locked.
        if (self._is_away and not unsent) or (name in self.local.names() and not self.local.remove(name)):
            return False
        # Also one that was sent since it was looked at.
        remote = self._folder(name)
        if remote is None or remote.manifest is None:
            return unsent
        # The marker first, so that a later attempt knows whose half-removed folder this is.
        self.client.put(f"{name}/{removed_marker(self.run_id)}", b"")
        # The manifest before the other objects: a crash midway leaves a partial checkpoint, not a damaged one.
        self.client.delete(f"{name}/{MANIFEST_FILE}")
        self._forget(name)
        self._delete_objects(name)
        return True

    def clear(self, name: str) -> bool:
        remote = None if self._is_unsent(name) else self._folder(name)
        if remote is None or remote.manifest is not None:
            return False
        self._delete_objects(name)
        return True

    def amend(self, name: str, manifest: bytes) -> None:
        # The local copy first: it may be marked as sent meanwhile.
        with suppress(FileNotFoundError):
            self.local.amend(name, manifest)
        if self._is_unsent(name):
            self.mirror.add(name)  # It may be half-sent.
        else:
            self._put_manifest(name, manifest)

    def _put_manifest(self, name: str, manifest: bytes) -> None:
        # Asked of the store, not of the listing: another process may have removed it, and a put would make half of it
        # again.
        if self.client.get(f"{_check_plain(name)}/{MANIFEST_FILE}") is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        self.client.put(f"{name}/{MANIFEST_FILE}", manifest)
        self._forget(name)

    def pin(self, name: str, *, pinned: bool) -> None:
        with suppress(FileNotFoundError):
            self.local.pin(name, pinned=pinned)
        if not self._is_unsent(name):
            if pinned:
                self.client.put(f"{_check_plain(name)}/{PINNED_FILE}", b"")
            else:
                self.client.delete(f"{_check_plain(name)}/{PINNED_FILE}")
            self._forget(name)

    def quarantine(self, name: str, why: str) -> str:
        hidden = self._quarantined_name(name)
        if name in self.local.names():
            hidden = self.local.quarantine(name, why)
            if name in self.mirror.waiting():
                self.mirror.drain()  # It may be half-sent.
        if (remote := self._folder(name)) is not None:
            self._quarantine_objects(name, remote, hidden, why)
        return hidden

    def _quarantined_name(self, name: str) -> str:
        return str(HiddenName(Hidden.quarantined, name, self.run_id, self.local.attempt))

    def _quarantine_objects(self, name: str, remote: _RemoteFolder, hidden: str, why: str) -> None:
        # The manifest goes first, so that a crash midway leaves a partial checkpoint.
        for file in sorted({*remote.sizes, *self.client.list(name)}, key=lambda file: file != MANIFEST_FILE):
            self.client.copy(f"{name}/{file}", f"{hidden}/{file}")
            self.client.delete(f"{name}/{file}")
        self._forget(name)
        logger.warning("%s is quarantined as %s: %s", self.location(name), hidden, why)

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
        self.client.is_training = True
        for name, remote in list((self._remote or {}).items()):
            if (
                remote is not None
                and remote.manifest is None
                and is_left_by(self.run_id, self.client, name, remote.sizes)
            ):
                self._delete_objects(name)
                swept.append(name)
        # Last: the sweep must not delete what this attempt is sending.
        for name in self._unsent():
            self.mirror.add(name)
        return swept

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        return self.mirror.finish(timeout_s)

    def _delete_objects(self, name: str) -> None:
        delete_objects(self.client, name, self.run_id)
        self._forget(name)

    def _refresh(self) -> None:
        """List the store. During training the last listing is used while the store is unreachable."""
        # A listing would wait for a time-out each time. The next checkpoint that is sent clears `_is_away`.
        if self._is_away and self.mirror.waiting():
            return
        global _last_listing
        before = self._remote
        if before is None:
            before = _last_listing[1] if _last_listing[0] == self.url else {}
        try:
            listed: dict[str, dict[str, ObjectInfo]] = {}
            for key, info in self.client.list().items():
                name, slash, file = key.partition("/")
                if slash and "/" not in file and is_plain(name):
                    listed.setdefault(name, {})[file] = info
            remote: dict[str, _RemoteFolder | None] = {}
            for name in {*listed, *before}:
                # A listing may be older than the last read or write, so a manifest is read unless its tag is the same.
                last, infos = before.get(name), listed.get(name, {})
                if last is not None and last.manifest is not None and last.tag and last.tag == _tag_of(infos):
                    remote[name] = last._replace(sizes=_sizes_of(infos))
                elif (folder := self._read_folder(name, infos)) is not None:
                    remote[name] = folder
            self._remote, self._is_away = remote, False
            _last_listing = self.url, dict(remote)
        except StoreAwayError as error:
            if not self.client.is_training:
                raise
            if not self._is_away:
                self._is_away = True
                logger.warning("%s cannot be listed, so its checkpoints stay as they are: %s", self.url, error)

    def _read_folder(self, name: str, infos: Mapping[str, ObjectInfo] | None = None) -> _RemoteFolder | None:
        """Read a folder in the store; None if nothing exists.

        Args:
            infos: its files in a listing, which may be older than the last write; None: it is listed if it exists.
        """
        manifest = self.client.get(f"{name}/{MANIFEST_FILE}")
        if infos is None:
            infos = {} if manifest is None else self.client.list(name)
        sizes = _sizes_of(infos)
        sizes.pop(MANIFEST_FILE, None)
        if manifest is None:
            return _RemoteFolder(sizes, None, "") if sizes else None
        sizes[MANIFEST_FILE] = len(manifest)
        with suppress(ManifestError):
            for file, entry in Manifest.parse(manifest).files.items():
                if sizes.get(file) != entry.size_bytes and (info := self.client.info(f"{name}/{file}")) is not None:
                    # Some stores give no size; a wrong one is noticed when the file is read.
                    sizes[file] = entry.size_bytes if info.size_bytes is None else info.size_bytes
        return _RemoteFolder(sizes, manifest, _tag_of(infos))

    def _folder(self, name: str) -> _RemoteFolder | None:
        """A folder of the store as last known, or read now if no listing has it; None if it does not exist."""
        _check_plain(name)
        if self._remote is None:
            if self.client.read_only:
                self._remote = {}  # The pages of a web server are listed only for a glob or a folder.
            else:
                self._refresh()
        assert self._remote is not None
        if self._remote.get(name) is None and not self._is_away:
            try:
                folder = self._read_folder(name)
            except StoreAwayError:
                if not self.client.is_training:
                    raise
            else:
                self._remote.pop(name, None)
                if folder is not None:
                    self._remote[name] = folder
        return self._remote.get(name)

    def _forget(self, name: str) -> None:
        """Note that a folder was changed in the store: it is read again, since a listing may not show it yet."""
        if self._remote is not None:
            self._remote[name] = None

    def _unsent(self) -> list[str]:
        """The local copies that are not in the store yet."""
        return [name for name in self.local.names() if self._is_unsent(name)]

    def _is_unsent(self, name: str) -> bool:
        # In this order: a copy that is trimmed meanwhile loses its manifest first, and is not taken for an unsent one.
        return self.local.peek(name, _SENT_FILE) is None and self.local.manifest_id(name) is not None

    def _trim(self, newest: str) -> None:
        """Remove the local copies of checkpoints that are in the store, except `newest` and those in use."""
        for name in self.local.names():
            if name != newest and _SENT_FILE in self.local.sizes(name):
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


def _sizes_of(infos: Mapping[str, ObjectInfo]) -> dict[str, int]:
    return {file: info.size_bytes for file, info in infos.items() if info.size_bytes is not None}


def _tag_of(infos: Mapping[str, ObjectInfo]) -> str:
    return infos[MANIFEST_FILE].tag if MANIFEST_FILE in infos else ""


def _check_plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{name!r} is not a plain name of a checkpoint")
    return name
