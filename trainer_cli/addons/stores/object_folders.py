"""The folders of checkpoints in an object store, without their local copies: claimed, sent, listed, changed, removed.

    send     claim the name -> files, none of which replaces an object -> manifest, if none exists -> is it still ours?
             a file that this process has sent for an earlier checkpoint is copied within the store
    remove   claim -> marker -> manifest -> files -> claim -> marker

A checkpoint exists if its manifest does. The claim says which process sends or removes a folder. A later attempt of the
run writes its own claim before it looks for a manifest, and a sender looks at the claim after it has sent one: so one
of them notices the other, whoever is first. By the marker, which means nothing beside a manifest, readers see that a
folder is being removed.
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainer_cli.addons.stores.object_client import ObjectClient, ObjectInfo
from trainer_cli.errors import StoreAwayError, UserError
from trainer_cli.layout import MANIFEST_FILE, PINNED_FILE, is_plain
from trainer_cli.manifest import FROZEN_SUFFIX, FileEntry, Manifest, ManifestError
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage import (
    REMOVED_PREFIX,
    Disk,
    Hidden,
    HiddenName,
    LocalFileWriter,
    ReadableFolder,
    StagedFolder,
    delete_tree,
)
from trainer_cli.tensor_files import verify
from trainer_cli.terminal import format_count

logger = logging.getLogger(__name__)

CLAIM_FILE = ".writing"
"""Object that names the process which sends or removes a checkpoint, until that is done."""
_NO_RUN = "local"
"""In the claim of a command, which has no run: one that was killed would keep the name from every run."""
_FILES_AT_ONCE = 4
_PAUSE_S = 60.0
"""How long a store that did not answer during training is not listed again, unless something was sent to it."""


class _Folder(NamedTuple):
    """The last known content of one folder."""

    sizes: dict[str, int]
    manifest: bytes | None
    tag: str
    """Tag of the manifest, which changes with it; empty if unknown."""


_last_listing: tuple[str, dict[str, _Folder]] = ("", {})
"""URL and folders of the last listing of this process: a command opens the same store many times."""


class _Claim(NamedTuple):
    """The content of a claim. Earlier versions of this program wrote the run alone."""

    run_id: str
    attempt: int
    process: str
    """Drawn by each process: an attempt whose directory was lost may be numbered like one that is still alive."""

    def to_bytes(self) -> bytes:
        return f"{self.run_id} {self.attempt} {self.process}".encode()

    @classmethod
    def parse(cls, content: bytes) -> _Claim:
        run_id, attempt, process, *_ = [*content.decode(errors="replace").split(" "), "", ""]
        return cls(run_id, int(attempt) if attempt.isdecimal() else -1, process)


class ObjectFolders:
    """The folders below the URL of a client.

    Args:
        run_id, attempt: of the process that sends and removes.
    """

    def __init__(self, client: ObjectClient, run_id: str, attempt: int) -> None:
        self.client = client
        self._claim = _Claim(run_id, attempt, secrets.token_hex(8))
        self._markers = (f"{REMOVED_PREFIX}{run_id}", f"{REMOVED_PREFIX}{_NO_RUN}")
        self._known: dict[str, _Folder] = {}
        self._copyable: dict[str, tuple[FileEntry, ObjectInfo]] = {}
        """Files that this process has sent, and that later checkpoints may share, by their keys; the newest last."""
        self._is_listed = False
        self._away_until: float | None = None
        """When a store that did not answer is listed again; None: it answers."""

    def location(self, name: str) -> str:
        """The URL of a folder."""
        return f"{self.client.url}/{_check_plain(name)}"

    @property
    def is_away(self) -> bool:
        """Whether the store did not answer a run, and has not since."""
        return self._away_until is not None

    def names(self) -> list[str]:
        """The folders with a plain name, listed now."""
        self._refresh()
        return list(self._known)

    def is_partial(self, name: str) -> bool:
        """Whether a folder has no manifest, as last known; also one that has only a claim."""
        folder = self._folder(name)
        return folder is not None and folder.manifest is None

    def exists(self, name: str) -> bool:
        """Whether a folder has a manifest, as last known."""
        return self.peek(name, MANIFEST_FILE) is not None

    def peek(self, name: str, file: str) -> bytes | None:
        """The content of a small file, of a manifest as last known; None if it does not exist."""
        if file == MANIFEST_FILE:
            folder = self._folder(name)
            return folder and folder.manifest
        return self.client.get(f"{_check_plain(name)}/{file}")

    def read_manifest(self, name: str) -> bytes | None:
        """The manifest as it is now, or None if there is none."""
        return self.client.get(f"{_check_plain(name)}/{MANIFEST_FILE}")

    def sizes(self, name: str) -> dict[str, int]:
        """The files of a folder and their sizes in bytes."""
        folder = self._folder(name)
        return {} if folder is None else {file: size for file, size in folder.sizes.items() if file != CLAIM_FILE}

    def sweep(self) -> list[str]:
        """Make the folders those of this run, and delete what its earlier processes have sent or removed in part."""
        # The first access of a run: a missing bucket or credential ends it now, not after the first save.
        self.client.check_writable(self._claim.run_id)
        self._refresh()
        self.client.is_training = True
        return [
            name
            for name, folder in list(self._known.items())
            if folder.manifest is None and self._is_left_behind(name, folder.sizes) and self.clear(name)
        ]

    def receive(self, name: str, manifest: bytes, source: ReadableFolder) -> None:
        """Send a local folder: its files, each verified by its digest, then the manifest.

        Raises:
            FileExistsError: another process has sent or is sending a checkpoint of that name.
            DamagedCheckpoint: a file is not what was written.
            OSError: the store does not answer. What was sent stays for the next try.
        """
        began, whole = time.monotonic(), Manifest.parse(manifest)
        self._take(name)
        try:
            _run_in_parallel([partial(self._send, name, file, source, whole) for file in whole.files])
            shared = {file: self.client.info(f"{name}/{file}") for file in whole.files if file.endswith(FROZEN_SUFFIX)}
            self.commit(name, manifest, compare=True)
        except BaseException:
            # Whatever it was, the next try sends every file.
            self._copyable.clear()
            raise
        # Not before it is known that no other process has sent to this name meanwhile.
        self._copyable |= {f"{name}/{file}": (whole.files[file], info) for file, info in shared.items() if info}
        size_bytes = len(manifest) + sum(entry.size_bytes for entry in whole.files.values())
        logger.info(
            "sent %s (%s, %.1f s)", self.location(name), format_count(size_bytes, "byte"), time.monotonic() - began
        )

    def _send(self, name: str, file: str, source: ReadableFolder, manifest: Manifest) -> None:
        with source.open(file) as opened:
            # A read of nothing raises where the sending is to end.
            on_part = partial(opened.read_at, [], 0)
            if self._copy(f"{name}/{file}", manifest.files[file], on_part):
                return
            verify(source, manifest, [file])
            self.send_file(name, file, source.path / file, self._claim, on_part)

    def _copy(self, new: str, entry: FileEntry, on_part: Callable[[], object]) -> bool:
        """Copy a file that this process has sent for another checkpoint; False if there is none, or that fails."""
        for key, (sent, info) in reversed(list(self._copyable.items())):
            if sent != entry or not self.client.copies_new:
                continue
            try:
                self.client.copy_new(key, new, info, on_part)
                return True
            except InterruptedError:
                raise
            # Of any kind: sending it needs no copy.
            except Exception as error:
                logger.debug("%s is sent, as %s cannot be copied: %s", new, key, error)
                self._copyable.pop(key, None)
                # The checkpoint may have been removed. Any other reason is probably that of each.
                if not isinstance(error, FileNotFoundError):
                    break
        return False

    def send_file(
        self,
        name: str,
        file: str,
        path: Path,
        own: tuple[str | int, ...] | None = None,
        on_part: Callable[[], object] = lambda: None,
    ) -> None:
        """Send a local file. FileExistsError if there is another one.

        Args:
            own: how the claim begins while the folder is this sender's; by default with the run and its attempt.
            on_part: as in `ObjectClient.upload_new`.
        """
        check = partial(self._check_claim, name, own or self._claim[:2])
        if not self.client.upload_new(f"{name}/{file}", path, check, on_part):
            raise _taken("another file of that name is in the store", f"{self.location(name)}/{file}")

    @contextmanager
    def writing(self, name: str, folder: RankFolder) -> Iterator[RankFolder]:
        """Claim a name for a checkpoint that several machines send; for rank 0 with its own folder.

        On exit all that the ranks have sent is deleted, unless the manifest was sent.

        Raises:
            FileExistsError: another process has sent or is sending a checkpoint of that name.
        """
        # Before any other object: by it a later attempt of this run finds what was left.
        self._take(name)
        try:
            yield folder
        except GeneratorExit:
            # The save was never ended, as another rank was lost: a request could hang while the interpreter shuts down.
            raise
        except BaseException:
            self._give_up(name)
            raise
        if not folder.is_published:
            self._give_up(name)

    def amend(self, name: str, manifest: bytes) -> None:
        """Replace a manifest. FileNotFoundError if there is no such checkpoint."""
        # Asked of the store, not of the listing: another process may have removed it, and a put would make half of it
        # again.
        if self.read_manifest(name) is None:
            raise FileNotFoundError(errno.ENOENT, "There is no such checkpoint", self.location(name))
        self.client.put(f"{name}/{MANIFEST_FILE}", manifest)
        self._remember(name, {MANIFEST_FILE: len(manifest)}, manifest)

    def pin(self, name: str, *, pinned: bool) -> None:
        """Pin a folder, or unpin it."""
        key = f"{_check_plain(name)}/{PINNED_FILE}"
        if pinned:
            self.client.put(key, b"")
        else:
            self.client.delete(key)
        self._remember(name, {PINNED_FILE: 0 if pinned else None})

    def remove(self, name: str) -> bool:
        """Remove a checkpoint; False if there is none."""
        if not self.exists(name):
            return False
        # The claim first, so that a later attempt knows whose half-removed folder this is. The manifest before the
        # other objects: a crash midway leaves a partial checkpoint, not a damaged one.
        self._put_claim(name)
        self.client.put(f"{name}/{self._markers[0]}", b"")
        self.client.delete(f"{name}/{MANIFEST_FILE}")
        self._delete_objects(name)
        return True

    def clear(self, name: str) -> bool:
        """Delete a folder that had no manifest when it was listed. False if it has one by now."""
        self._put_claim(name)
        if self._is_committed(name):
            self.client.delete(f"{name}/{CLAIM_FILE}")
            return False
        self._delete_objects(name)
        return True

    def quarantine(self, name: str, hidden: str, why: str) -> None:
        """Give a folder another name."""
        folder = self._folder(name)
        if folder is None:
            return
        # The manifest goes first, so that a crash midway leaves a partial checkpoint.
        files = {*folder.sizes, *self.client.list(name)}
        for file in sorted(files, key=lambda file: file != MANIFEST_FILE):
            # One that was deleted since the listing is passed over.
            with suppress(FileNotFoundError):
                self.client.copy(f"{name}/{file}", f"{hidden}/{file}")
            self.client.delete(f"{name}/{file}")
        self.forget(name)
        logger.warning("%s is quarantined as %s: %s", self.location(name), hidden, why)

    def forget(self, name: str) -> None:
        """Read a folder anew when it is asked for."""
        self._known.pop(name, None)

    def _take(self, name: str) -> None:
        """Claim a name, and delete what this run has left there."""
        # The caller has just looked for a manifest.
        folder, claim = self._known.get(name) if self._is_listed else self._folder(name), self._claim_of(name)
        is_own = self._is_own(claim)
        # The sweep of an attempt takes those of all others, as it owns the folders; a sender only earlier ones.
        if claim and claim != self._claim and not (is_own and claim.attempt < self._claim.attempt):
            other = "attempt of the run" if is_own else "run"
            raise _taken(f"another {other} sends a checkpoint of that name", self.location(name))
        is_left = claim is not None or (folder is not None and self._is_left_behind(name, folder.sizes))
        is_foreign = not is_left and folder is not None and folder.manifest is None
        if (is_left and not self.clear(name)) or (is_foreign and self._is_committed(name)):
            raise _taken("A checkpoint of that name exists", self.location(name))
        if is_foreign:
            hidden = HiddenName(Hidden.quarantined, name, self._claim.run_id, self._claim.attempt)
            self.quarantine(name, str(hidden), "it has no manifest")
        if not self.client.put_new(f"{name}/{CLAIM_FILE}", self._claim.to_bytes()):
            raise _taken("another run sends a checkpoint of that name", self.location(name))

    def _is_committed(self, name: str) -> bool:
        """Whether a folder that had no manifest when it was listed has one by now."""
        if self.read_manifest(name) is None:
            return False
        # The listing in memory is out of date: the next reader lists the folder again.
        self.forget(name)
        return True

    def _check_claim(self, name: str, own: tuple[str | int, ...]) -> None:
        """Raises FileNotFoundError unless the claim begins so."""
        claim = self._claim_of(name)
        if claim is None or claim[: len(own)] != own:
            raise self._lost(name)

    def _lost(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "it was deleted by a later attempt of the run", self.location(name))

    def _claim_of(self, name: str) -> _Claim | None:
        content = self.client.get(f"{name}/{CLAIM_FILE}")
        return None if content is None else _Claim.parse(content)

    def _put_claim(self, name: str) -> None:
        self.client.put(f"{_check_plain(name)}/{CLAIM_FILE}", self._claim.to_bytes())

    def commit(self, name: str, manifest: bytes, *, compare: bool = False) -> None:
        """Send the manifest: from here on the checkpoint exists.

        Args:
            compare: look at the size of each file afterwards. A save by several machines does not, as training would
                wait for a request for each file, and the only listing of a save is made before its files are sent. Each
                machine has compared its own objects after it sent them; one that an earlier attempt replaces later, in
                a store without conditional writes, shows in the listing of the next save or start.

        Raises:
            FileExistsError: there is another one.
            FileNotFoundError: a later attempt of the run has deleted what was sent, or is about to.
        """
        files = Manifest.parse(manifest).files
        self._check_claim(name, self._claim)
        if not self.client.put_new(f"{name}/{MANIFEST_FILE}", manifest):
            raise _taken("another checkpoint of that name is in the store", self.location(name))
        claim = self._claim_of(name)
        # None also where the later attempt has seen the manifest, and has left the files. And an earlier attempt that
        # was late may have replaced a file.
        may_be_changed = compare or claim is None
        if claim not in (None, self._claim) or (may_be_changed and not self._has_files(name, files)):
            self.client.delete(f"{name}/{MANIFEST_FILE}")
            raise self._lost(name)
        # One that stays beside a manifest means nothing.
        with suppress(StoreAwayError):
            self.client.delete(f"{name}/{CLAIM_FILE}")
        self._away_until = None
        sizes = {file: entry.size_bytes for file, entry in files.items()} | {MANIFEST_FILE: len(manifest)}
        self._known[name] = _Folder(sizes, manifest, "")

    def _has_files(self, name: str, files: Mapping[str, FileEntry]) -> bool:
        """Whether the store has these files with their sizes now."""
        return all(
            (info := self.client.info(f"{name}/{file}")) and info.size_bytes == entry.size_bytes
            for file, entry in files.items()
        )

    def _give_up(self, name: str) -> None:
        """Delete what the ranks have sent without a manifest, and the claim."""
        try:
            # A write of the manifest that was given up may have reached the store: then its files are there, too.
            if self._claim_of(name) == self._claim:
                self.clear(name)
        except (OSError, UserError) as error:
            logger.debug("%s is cleared by a later attempt: %s", self.location(name), error)

    def _is_left_behind(self, name: str, files: Collection[str]) -> bool:
        """Whether this run has sent or removed a folder in part."""
        return any(marker in files for marker in self._markers) or (
            CLAIM_FILE in files and self._is_own(self._claim_of(name))
        )

    def _is_own(self, claim: _Claim | None) -> bool:
        """Whether this run has made a claim, or a command, which has no run."""
        return claim is not None and claim.run_id in (self._claim.run_id, _NO_RUN)

    def _delete_objects(self, name: str) -> None:
        """Delete the objects of a folder without a manifest."""
        self.forget(name)
        for key in [key for key in list(self._copyable) if key.startswith(f"{name}/")]:
            self._copyable.pop(key, None)
        # Last, the markers after the claim: by them a later attempt of this run finds a folder deleted in part.
        # The listing may lack its own marker.
        files = {*self.client.list(name), self._markers[0]}
        markers = {file for file in files if file.startswith(REMOVED_PREFIX)}
        _run_in_parallel([partial(self.client.delete, f"{name}/{file}") for file in files - markers - {CLAIM_FILE}])
        for file in (CLAIM_FILE, *markers):
            self.client.delete(f"{name}/{file}")

    def _refresh(self) -> None:
        """List the store. During training the last listing is used while the store does not answer."""
        # A listing would wait for a time-out each time.
        if self._away_until is not None and time.monotonic() < self._away_until:
            return
        global _last_listing
        before = self._known
        if not self._is_listed and _last_listing[0] == self.client.url:
            before = _last_listing[1] | before
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
            known = {}
            for name in {*listed, *before}:
                # A listing may be older than the last read or write, so a manifest is read unless its tag is the same.
                last = before.get(name)
                if last is not None and last.manifest is not None and last.tag and last.tag == tags.get(name):
                    known[name] = last._replace(sizes=listed[name])
                elif (folder := self._read_folder(name, listed.get(name, {}), tags.get(name, ""))) is not None:
                    known[name] = folder
            self._known, self._is_listed, self._away_until = known, True, None
            _last_listing = self.client.url, dict(known)
        except StoreAwayError as error:
            if not self.client.is_training:
                raise
            if self._away_until is None:
                logger.warning("%s cannot be listed, so its checkpoints stay as they are: %s", self.client.url, error)
            self._away_until = time.monotonic() + _PAUSE_S

    def _read_folder(self, name: str, sizes: dict[str, int], tag: str) -> _Folder | None:
        """Read the manifest of a folder, and correct the listed sizes by it; None if nothing exists."""
        manifest = self.read_manifest(name)
        if manifest is None:
            if MANIFEST_FILE in sizes:
                # It was removed since the listing, which may lack the marker of the removal.
                sizes = {file: info.size_bytes or 0 for file, info in self.client.list(name).items()}
            sizes.pop(MANIFEST_FILE, None)
            return _Folder(sizes, None, "") if sizes else None
        sizes = {**sizes, MANIFEST_FILE: len(manifest)}
        with suppress(ManifestError):
            for file, entry in Manifest.parse(manifest).files.items():
                if sizes.get(file) != entry.size_bytes and (info := self.client.info(f"{name}/{file}")) is not None:
                    # Some stores give no size; a wrong one is noticed when the file is read.
                    sizes[file] = entry.size_bytes if info.size_bytes is None else info.size_bytes
        return _Folder(sizes, manifest, tag)

    def _folder(self, name: str) -> _Folder | None:
        """A folder as last known, or read now if no listing has it; None if it does not exist."""
        _check_plain(name)
        # The pages of a web server are listed only for a glob or a folder.
        if not self._is_listed and not self.client.read_only:
            self._refresh()
        if name not in self._known and not self.is_away:
            try:
                folder = self._read_folder(name, {}, "")
            except StoreAwayError:
                if not self.client.is_training:
                    raise
                folder = None
            if folder is not None:
                self._known[name] = folder
        return self._known.get(name)

    def _remember(self, name: str, sizes: Mapping[str, int | None], manifest: bytes | None = None) -> None:
        """Note a change that was made before a listing shows it. Size None: the object was deleted."""
        last = self._known.get(name)
        if last is None:
            return
        existing = {file: size for file, size in {**last.sizes, **sizes}.items() if size is not None}
        self._known[name] = _Folder(existing, manifest or last.manifest, last.tag if manifest is None else "")


class RankFolder(StagedFolder):
    """The files of one of several machines. Each is sent when it is complete, so that only one at a time is on the
    local disk. Rank 0 sends the manifest after all.

    Args:
        path: a local folder of this rank alone.
        name: of the checkpoint.

    Attributes:
        is_published: whether the manifest is in the store.
    """

    def __init__(self, path: Path, name: str, folders: ObjectFolders, disk: Disk, digest: DigestAlgorithm) -> None:
        super().__init__(path, disk, digest, self._put_manifest)
        self.name, self.folders = _check_plain(name), folders
        self.is_published = False
        self._manifest = b""

    @property
    def hidden_name(self) -> str:
        return self.name

    @contextmanager
    def create(self, file: str) -> Iterator[LocalFileWriter]:
        """A new file; on clean exit it is in `files` and in the store. The manifest waits for `publish`."""
        # A process that was killed may have left its last file.
        delete_tree(self._disk, self.path)
        self._disk.mkdir(self.path)
        try:
            with super().create(file) as writer:
                yield writer
            if file == MANIFEST_FILE:
                self._manifest = (self.path / file).read_bytes()
            else:
                self.folders.send_file(self.name, file, self.path / file)
        finally:
            delete_tree(self._disk, self.path)

    def _put_manifest(self) -> None:
        self.folders.commit(self.name, self._manifest)
        self.is_published = True


def _run_in_parallel(calls: list[Callable[[], object]]) -> None:
    """Make the calls in threads. Raises the first exception once all calls that began have ended."""
    with ThreadPoolExecutor(_FILES_AT_ONCE, "checkpoint-transfer") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        finally:
            # Calls that have not begun are pointless after an error; those in progress end before the files are closed.
            pool.shutdown(cancel_futures=True)


def _check_plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{name!r} is not a plain name of a checkpoint")
    return name


def _taken(message: str, where: str) -> FileExistsError:
    """The error of an object or a checkpoint that exists, and must not be replaced."""
    return FileExistsError(errno.EEXIST, message, where)
