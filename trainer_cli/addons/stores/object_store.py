"""Checkpoints in an object store: committed on the local disk first, then sent by a mirror, the manifest last.

    save:  hidden folder -> fsync -> renamed in `cache` (committed) ─ a thread ─> files -> manifest, if none exists
    load:  manifest -> local copy with the same manifest, or download into `cache` -> digests as for any folder
    save of several machines:  each rank sends its own files -> manifest, if none exists (committed)

A checkpoint that is not sent yet counts as part of the storage, so that its users, retention included, see one storage.
While the store is unreachable, training and saving continue.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import call
from pathlib import Path

from trainer_cli.addons.stores.download import download, fetch, locking_copy
from trainer_cli.addons.stores.mirror import Mirror
from trainer_cli.addons.stores.object_client import ObjectClient
from trainer_cli.addons.stores.object_folders import ObjectFolders, RankFolder
from trainer_cli.errors import UserError
from trainer_cli.files import as_path, replace
from trainer_cli.layout import MANIFEST_FILE, PINNED_FILE, is_plain
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage import Hidden, HiddenName, LocalReadableFolder, LocalStorage, StagedFolder
from trainer_cli.user_cache import cache_of

_SENT_FILE = "sent"
"""File in a local copy with the digest of the manifest that the store has; empty in those of earlier versions."""
_TRIES = 5
"""Maximum number of downloads of a copy that other processes remove before it is locked."""


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
        self.remote = ObjectFolders(self.client, run_id, attempt)
        self.mirror = Mirror(self.local, self.remote, on_sent=self._on_sent)
        # Copies are received not by way of the local disk, where their source is already.
        self.location, self.receive = self.remote.location, self.remote.receive
        self.fsync_names, self.removed_bytes = self.local.fsync_names, self.local.removed_bytes
        self.free_bytes, self.free_files = self.local.free_bytes, self.local.free_files
        self._rank: int | None = None
        """Rank of this process in a save by several machines; None: one machine saves."""

    def names(self, earlier: Collection[str] = ()) -> list[str]:
        # In this order: one that is sent meanwhile would be neither in an earlier listing nor unsent any more.
        return sorted({*self._unsent(), *self.remote.names()})

    @contextmanager
    def writing(
        self, name: str, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, replace: bool = False
    ) -> Iterator[StagedFolder]:
        if self.client.read_only:
            raise UserError(f"{self.url} can only be read", cure="Save to a local folder, or to an object store.")
        # A save by hand after an interrupted training.
        self.mirror.is_abandoned = False
        exists = self._is_unsent(name) or self.remote.exists(name)
        if exists and replace:
            # A store cannot replace several objects atomically: the old checkpoint would be lost before the new exists.
            raise UserError(
                f"{self.location(name)} exists, and a checkpoint in an object store cannot be replaced atomically",
                cure="Save under another name.",
            )
        if exists:
            raise FileExistsError(errno.EEXIST, "A checkpoint of that name exists", self.location(name))
        if name in self.local.names():
            self.local.remove(name)  # A copy of a checkpoint that is no longer in the store.
        if self._rank is not None:
            with self.remote.writing(name, self._rank_folder(name, digest)) as rank_folder:
                # A listing meanwhile has shown it without its manifest.
                yield rank_folder
            return
        with self.local.writing(name, digest=digest) as folder:
            # The upload begins only after the local commit: until then nothing may be sent.
            folder.after_publish = partial(self.mirror.add, name)
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
        return RankFolder(path, name, self.remote, self.local.disk, digest)

    @contextmanager
    def reading(self, name: str) -> Iterator[LocalReadableFolder]:
        """A local copy of a checkpoint, downloaded if needed and locked against removal.

        Raises:
            FileNotFoundError: the checkpoint is not in the store.
            OSError: the store does not answer, or the copy cannot be written.
        """
        # First: the name becomes that of a local file.
        self.location(name)
        with ExitStack() as stack:
            for _ in range(_TRIES):
                with locking_copy(self.cache, name):
                    if not self._is_pending(name):
                        self._refresh_copy(name)
                    # It may have been sent and trimmed since, or its removal began: only the store knows whether it
                    # still exists.
                    with suppress(FileNotFoundError):
                        folder = stack.enter_context(self.local.reading(name))
                        break
            else:
                raise OSError(errno.EBUSY, "its local copy is being removed", str(self.cache / name))
            self._trim(name)
            # Each machine has a cache of its own.
            folder.is_shared = False
            yield folder

    def peek(self, name: str, file: str) -> bytes | None:
        if not is_plain(file):
            raise ValueError(f"{file!r} is not a plain name of a file")
        if self._is_unsent(name) or (file == MANIFEST_FILE and self._is_amended(name)):
            content = self.local.peek(name, file)
            # It may have been sent and trimmed meanwhile: then the store has the file.
            if content is not None or self._is_unsent(name):
                return content
        return self.remote.peek(name, file)

    def manifest_id(self, name: str) -> tuple[int, ...] | None:
        return None  # `remote` has the manifests of a store in memory.

    def sizes(self, name: str) -> dict[str, int]:
        # Listed once: a copy that is marked and removed in between would be looked up in what is left of it. And looked
        # at again: one that was removed while it was listed was listed in part.
        local = self.local.sizes(name)
        sizes = local if _is_unsent(local) and self._is_unsent(name) else self.remote.sizes(name)
        sizes.pop(_SENT_FILE, None)
        return sizes

    def is_pinned(self, name: str) -> bool:
        return PINNED_FILE in self.sizes(name)

    def fetch(self, name: str, marks: Collection[str]) -> Path | None:
        return fetch(f"{self.url}/{name}", marks)

    def remove(self, name: str) -> bool:
        with self.mirror.locking(name, wait=False) as locked:
            if not locked:
                return False
            local = name in self.local.names()
            if self.remote.is_away and not self._is_unsent(name):
                return False  # Its objects cannot be deleted now.
            if local and not self.local.remove(name):
                return False
            self.mirror.drop(name)
            return self.remote.remove(name) or local

    def clear(self, name: str) -> bool:
        with self.mirror.locking(name):
            return not self._is_unsent(name) and self.remote.is_partial(name) and self.remote.clear(name)

    def amend(self, name: str, manifest: bytes) -> None:
        if name not in self.local.names():
            self.remote.amend(name, manifest)
            return
        is_unsent = self._is_unsent(name)
        if not is_unsent and not self.remote.exists(name):
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        # The mark no longer fits, so the thread sends it, also if it has just sent the old one.
        self.local.amend(name, manifest)
        self.mirror.add(name, is_amended=not is_unsent)

    def pin(self, name: str, *, pinned: bool) -> None:
        with self.mirror.locking(name):
            if name in self.local.names():
                self.local.pin(name, pinned=pinned)
            if not self._is_unsent(name):
                self.remote.pin(name, pinned=pinned)

    def quarantine(self, name: str, why: str) -> str:
        with self.mirror.locking(name):
            hidden = str(HiddenName(Hidden.quarantined, name, self.run_id, self.attempt))
            self.mirror.drop(name)
            if name in self.local.names():
                hidden = self.local.quarantine(name, why)
            self.remote.quarantine(name, hidden, why)
            return hidden

    def check_writable(self) -> None:
        self.client.check_writable(self.run_id)

    def sweep(self) -> list[str]:
        """See `Storage.sweep`. After this call a run owns the storage, and tolerates an unreachable store.

        Checkpoints that an earlier attempt could not send are queued.
        """
        unsent, self.mirror.is_abandoned = self._unsent(), False
        # What an earlier process has sent of an unsent one goes, too: its claim would keep this one from sending it.
        swept = [*self.local.sweep(), *(name for name in self.remote.sweep() if name not in unsent)]
        # Last: the listing above must not show what this attempt is sending.
        for name in self.local.names():
            if self._is_pending(name):
                self.mirror.add(name, is_amended=name not in unsent)
        return swept

    def finish_uploads(self, timeout_s: float | None = None) -> list[str]:
        self.mirror.retry()
        return self.mirror.wait(timeout_s)

    def abandon_uploads(self) -> None:
        self.mirror.is_abandoned = True

    def _on_sent(self, name: str, manifest: bytes, is_new: bool) -> None:
        if self.local.is_pinned(name):
            self.remote.pin(name, pinned=True)
        self._mark_sent(name, manifest)
        self._trim(name)

    def _mark_sent(self, name: str, manifest: bytes) -> None:
        replace(self.cache / name / _SENT_FILE, [_digest(manifest)])

    def _unsent(self) -> list[str]:
        """The local copies that are not in the store yet."""
        return [name for name in self.local.names() if self._is_unsent(name)]

    def _is_unsent(self, name: str) -> bool:
        return _is_unsent(self.local.sizes(name))

    def _is_amended(self, name: str) -> bool:
        """Whether the local copy of a checkpoint in the store has a manifest that is not there yet."""
        mark = self.local.peek(name, _SENT_FILE)
        manifest = self.local.peek(name, MANIFEST_FILE) if mark else None
        return manifest is not None and mark != _digest(manifest)

    def _is_pending(self, name: str) -> bool:
        """Whether the mirror is still to send something of a local copy."""
        return self._is_unsent(name) or self._is_amended(name)

    def _trim(self, newest: str) -> None:
        """Remove the local copies of checkpoints that are in the store, except `newest` and those in use."""
        for name in self.local.names():
            if name != newest and not self._is_pending(name) and MANIFEST_FILE in self.local.sizes(name):
                # Without waiting: a copy that another process downloads or reads is in use.
                with locking_copy(self.cache, name, wait=False) as locked:
                    if locked:
                        self.local.remove(name)

    def _refresh_copy(self, name: str) -> None:
        """Download a checkpoint unless the local copy has the same manifest. Needs the lock of `locking_copy`."""
        manifest = self.remote.read_manifest(name)
        if manifest is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        if self.local.peek(name, MANIFEST_FILE) == manifest:
            return
        if name in self.local.names() and not (self.local.remove(name) or self.local.clear(name)):
            raise OSError(errno.EBUSY, "an older copy of it is being read", str(self.cache / name))
        download(self.client, name, manifest, self.local, self.location(name))
        self._mark_sent(name, manifest)


def _is_unsent(files: Collection[str]) -> bool:
    """Whether a local copy with these files is not in the store yet."""
    return MANIFEST_FILE in files and _SENT_FILE not in files


def _digest(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode()
