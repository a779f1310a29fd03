"""Lists the checkpoints in a folder, says which are valid, and finds the newest intact one. It reads the disk."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from trainer_cli.errors import CheckpointError, one_line
from trainer_cli.files import is_url
from trainer_cli.gc_pause import gc_paused
from trainer_cli.layout import MANIFEST_FILE, numbers_within, parse_step
from trainer_cli.manifest import DamagedCheckpoint, Manifest, ManifestError, new_digest
from trainer_cli.policy import OF_STOPS, CheckpointKind, Saved
from trainer_cli.schema import CheckpointFormat
from trainer_cli.steps import Progress
from trainer_cli.storage import REMOVED_PREFIX, ReadableFolder, Storage, open_storage
from trainer_cli.tensor_files import verify
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

PARTIAL = "it has no manifest, so it is partial"
REMOVING = "it is being removed"
GONE = "it is not there"


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder with the name of a checkpoint, or with a manifest."""

    name: str
    step: int
    manifest: Manifest | None
    problem: str | None
    """Why it is not valid: partial, damaged, or in conflict with its name."""
    pinned: bool = False
    facts: Saved | None = field(init=False, compare=False)
    """The facts for the policy; None if it is not valid."""

    def __post_init__(self) -> None:
        # They are computed once: the policy is applied to all checkpoints at each save.
        object.__setattr__(self, "facts", self._facts())

    @property
    def partial(self) -> bool:
        """Whether it has no manifest: it was never committed, or its removal has begun."""
        return self.manifest is None and self.problem in (PARTIAL, REMOVING, GONE)

    @property
    def removed(self) -> bool:
        """Whether its removal has begun or is done."""
        return self.problem in (REMOVING, GONE)

    @property
    def is_copy(self) -> bool:
        """Whether it was saved under another name: a user copied or renamed it.

        It is no checkpoint of a run by itself: nothing counts, resumes or removes it unless a command names it.
        """
        return self.manifest is not None and self.manifest.name not in (None, self.name)

    @property
    def is_replayed(self) -> bool:
        """Whether it was computed later, from an earlier checkpoint. It is treated as a copy is."""
        return self.manifest is not None and self.manifest.kind is CheckpointKind.replayed

    @property
    def valid(self) -> bool:
        """Whether manifest, files and sizes fit. Digests are verified when it is read."""
        return self.manifest is not None and self.problem is None

    @property
    def resumable(self) -> bool:
        """Whether a resume may choose it by itself: it is valid, and its weights are finite."""
        return self.valid and self.manifest is not None and self.manifest.finite

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files; 0 if they are unknown."""
        return sum(file.size_bytes for file in self.manifest.files.values()) if self.manifest is not None else 0

    @property
    def order(self) -> tuple[Any, ...]:
        """The key by which newer ones sort later: by step, then epoch.

        A plain `step10` sorts after `step10-ema`; if no step is known, numbers in names decide.
        """
        epoch = -1 if self.manifest is None else self.manifest.epoch
        has_plain_name = parse_step(self.name) is not None
        return self.step, epoch, has_plain_name, numbers_within(self.name), -len(self.name), self.name

    def may_be_of(self, run_id: str | None) -> bool:
        """Whether it is of a run, None for any, or has no readable manifest, so that it may be of any run."""
        return self.manifest is None or run_id in (None, self.manifest.run_id)

    def _facts(self) -> Saved | None:
        """The value of `facts`."""
        if self.manifest is None or not self.valid:
            return None
        return Saved(
            self.name,
            self.step,
            self.manifest.kind,
            finished=self.manifest.finished is not None,
            pinned=self.pinned,
            finite=self.manifest.finite,
            of_stop=self.manifest.reason in OF_STOPS,
            metrics=self.manifest.metrics,
            progress=Progress.of(self.manifest.progress),
        )


Check = Callable[[ReadableFolder, Manifest], object]
"""Verifies a checkpoint: `verify` the digest of every file, `verify_and_decode` also that it can be loaded."""


def verify_and_decode(folder: ReadableFolder, manifest: Manifest, digests: Check = verify) -> None:
    """Verify the digest of every file of a checkpoint, then decode it.

    Raises:
        DamagedCheckpoint: a file is not what was written, or cannot be decoded.
    """
    digests(folder, manifest)
    # After the digests, during which torch is imported.
    from trainer_cli.format import check_readable

    check_readable(folder, manifest)


class Catalog:
    """The checkpoints of one storage: folders called `step{N}`, and all others that hold a manifest.

    Copies and replayed checkpoints are left out.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._assumed_valid: dict[str, Entry] | None = None
        """Checkpoints that are taken to be valid and not pinned, by name. None before the first listing. Replaced as a
        whole: the thread that writes and the main thread may list at the same time."""
        self._to_examine: set[str] = set()
        """Names for which that was wrong once: each listing examines them whole."""

    @classmethod
    def of(cls, folder: Path, cache: Path | None = None) -> Catalog:
        """The checkpoints in a folder, to be read; `cache` as in `open_storage`."""
        return cls(open_storage(folder, cache=cache))

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints, which may be the URL of an object store."""
        return self.storage.root

    def names(self) -> list[str]:
        """The folders that may be checkpoints, by name or because they have a manifest; no manifest is read."""
        return [
            name
            for name in self.storage.names()
            if parse_step(name) is not None or MANIFEST_FILE in self.storage.sizes(name)
        ]

    def entries(self) -> list[Entry]:
        """All checkpoints by step, partial and damaged ones too, but no copies. Sizes are checked."""
        found: list[Entry] = []
        names: list[str] = []
        # As in `LocalStorage.names`: all of a listing may have been removed while it was examined.
        while not found and (latest_names := self.storage.names()) != names:
            names = latest_names
            found = [entry for entry in map(self._examine, names) if entry is not None]
        return _sort_by_step(found)

    def remembered(self) -> list[Entry]:
        """Like `entries`, but a checkpoint with a manifest is taken to be valid and not pinned, and is read only once.

        With any number of known checkpoints it costs one listing of names. Call `look_again` for those that a decision
        depends on: one may be pinned or incomplete, and a user may have pinned, damaged or replaced one since.
        """
        remembered_entries = self._entries_read_before() if self._assumed_valid is None else self._assumed_valid
        names = self.storage.names(remembered_entries.keys())
        if removed_names := remembered_entries.keys() - set(names):
            remembered_entries = {name: remembered_entries[name] for name in names if name in remembered_entries}
            for name in removed_names:
                _entries_of_process(self.folder).pop(name, None)
            # In a long run manifests of removed checkpoints would fill the cache.
            if _parse_manifest.cache_info().currsize > 2 * len(names) + _MAX_REMOVED_PARSED:
                _parse_manifest.cache_clear()
        new_entries: list[Entry] = []
        # All entries stay in memory: with thousands, garbage collections would take half as long as the reading.
        with gc_paused() if len(names) - len(remembered_entries) > _MAX_REMOVED_PARSED else nullcontext():
            for name in names:
                if name in remembered_entries:
                    continue
                # By its manifest alone if that suffices.
                entry = None if name in self._to_examine else self._read_manifest_entry(name)
                entry = self._examine(name, remembered_entries.keys()) if entry is None else entry
                if entry is not None:
                    new_entries.append(entry)
        self._assumed_valid = {
            **remembered_entries,
            **{entry.name: entry for entry in new_entries if entry.valid and not entry.pinned},
        }
        self._to_examine = self._to_examine.intersection(names) - self._assumed_valid.keys()
        return _sort_by_step([*remembered_entries.values(), *new_entries])

    def look_again(self, names: Iterable[str]) -> bool:
        """Examine these remembered checkpoints now. Returns whether one has changed: `remembered` then examines it."""
        remembered_entries = self._assumed_valid or {}
        changed = {
            name for name in names if name in remembered_entries and self._examine(name) != remembered_entries[name]
        }
        if changed:
            self._to_examine |= changed
            self._assumed_valid = {name: entry for name, entry in remembered_entries.items() if name not in changed}
        return bool(changed)

    def newest_first(self, run_id: str | None = None) -> Iterator[Entry]:
        """The checkpoints of a run, or of any run, newest first. Each is examined when it is its turn."""
        for remembered in reversed(self.remembered()):
            entry = self._examine(remembered.name) if remembered.may_be_of(run_id) else None
            if entry is not None and entry.may_be_of(run_id):
                yield entry

    def entry(self, name: str, earlier: Collection[str] = ()) -> Entry:
        """The checkpoint of that name, which may be a copy or missing; `earlier` as in `Storage.names`."""
        manifest, problem = examine(self.storage, name, earlier)
        return _entry_of(name, manifest, problem, self.is_pinned(name))

    def is_pinned(self, name: str) -> bool:
        """Whether a checkpoint is pinned; True if that cannot be read."""
        try:
            return self.storage.is_pinned(name)
        except OSError as error:
            log.warning("cannot see whether %s is pinned, so it is kept: %s", name, error)
            # When in doubt it stays: a removal cannot be undone.
            return True

    def valid(self, run_id: str | None = None, entries: Iterable[Entry] | None = None) -> list[Entry]:
        """The valid checkpoints of a run, or of any run, by step; among `entries`, by default as they are now."""
        return [
            entry
            for entry in (self.entries() if entries is None else entries)
            # A valid one has facts and a manifest; without calls, as there may be thousands.
            if entry.facts is not None and entry.manifest is not None and run_id in (None, entry.manifest.run_id)
        ]

    def newest_valid(self, run_id: str | None = None) -> Entry | None:
        """The newest checkpoint of a run, or of any run, that a resume may start from; None if there is none."""
        return next((entry for entry in self.newest_first(run_id) if entry.resumable), None)

    def holds_steps(self, run_id: str, *, counts_first: bool = False) -> bool:
        """Whether a run has a checkpoint to continue from: of a step after 0, or pinned. It may be damaged.

        Args:
            counts_first: whether one of step 0 counts too, because its weights were loaded from another checkpoint.
        """
        # One that cannot be read may be of any step.
        return any(
            entry.manifest is None or entry.step > 0 or entry.pinned or counts_first
            for entry in self.newest_first(run_id)
            if not entry.partial
        )

    def why_damaged(self, entry: Entry, check: Check = verify_and_decode) -> str | None:
        """What is wrong with a checkpoint; None if it is intact. By default every file is read, digested and decoded.

        Raises:
            OSError: it cannot be read now, so it is unknown whether it is damaged.
        """
        if entry.problem is not None or entry.manifest is None:
            return entry.problem or "it has no manifest"
        try:
            with self.storage.reading(entry.name) as folder:
                check(folder, entry.manifest)
        except CheckpointError as error:
            return str(error)
        # Memory says nothing about the bytes: a checkpoint must not be quarantined for lack of it.
        except MemoryError as error:
            raise OSError(errno.ENOMEM, "there is not enough memory to read it") from error
        return None

    def is_intact(self, entry: Entry) -> bool:
        """Whether a checkpoint can be read and every digest is right."""
        try:
            return self.why_damaged(entry) is None
        except OSError:
            return False

    def read_small(self, name: str, file: str, manifest: Manifest) -> bytes:
        """The content of a small file of a checkpoint, whose digest is verified; its other files are not read.

        Raises:
            DamagedCheckpoint: it is missing, or not what was written.
        """
        content, entry = self.storage.peek(name, file), manifest.files[file]
        digest = new_digest(entry.algorithm)
        digest.update(content or b"")
        if content is None or f"{entry.algorithm}:{digest.hexdigest()}" != entry.digest:
            raise DamagedCheckpoint(f"{file} is missing, or not what was written", where=self.storage.location(name))
        return content

    def complete_paths(self) -> list[Path]:
        """The paths of the complete checkpoints, in the order of their steps."""
        entries = sorted(self.entries(), key=attrgetter("order"))
        return [self.folder / entry.name for entry in entries if entry.problem is None]

    def _entries_read_before(self) -> dict[str, Entry]:
        """The entries that this process has read before, without those whose manifests have changed since."""
        # A copy: another thread may add to it.
        read = list(_entries_of_process(self.folder).items())
        return {name: entry for name, (id, entry) in read if self.storage.manifest_id(name) == id}

    def _read_manifest_entry(self, name: str) -> Entry | None:
        """The entry of a checkpoint by its manifest alone; None if the manifest does not suffice."""
        try:
            # The id before the content: of a manifest that is replaced in between, the id fits no later one.
            id = self.storage.manifest_id(name)
            data = None if id is None else self.storage.peek(name, MANIFEST_FILE)
            manifest = None if data is None else _parse_manifest(data)
        except (OSError, ManifestError):
            return None
        if id is None or manifest is None:
            return None
        entry = _entry_of(name, manifest, None, pinned=False)
        if entry.is_copy or entry.is_replayed or not entry.valid:
            return None
        _entries_of_process(self.folder)[name] = id, entry
        return entry

    def _examine(self, name: str, earlier: Collection[str] = ()) -> Entry | None:
        """The entry of a checkpoint as it is now; None if the folder is missing, no checkpoint, a copy, or replayed."""
        entry = self.entry(name, earlier)
        # Without a manifest only the name shows that it is a checkpoint.
        is_other_folder = entry.problem == PARTIAL and parse_step(name) is None
        is_missing = entry.problem == GONE
        return None if is_other_folder or is_missing or entry.is_copy or entry.is_replayed else entry


def _sort_by_step(entries: Iterable[Entry]) -> list[Entry]:
    """Sort by step, and by name, so that equal steps keep their order."""
    return sorted(entries, key=attrgetter("step", "name"))


def _entry_of(name: str, manifest: Manifest | None, problem: str | None, pinned: bool) -> Entry:
    """The entry of a checkpoint with this manifest, None if it has none, and the problem that was found so far."""
    step = parse_step(name)
    # A manifest that has no name is of an older version, which named checkpoints by their step alone.
    if manifest is not None and manifest.name is not None:
        step = manifest.step
    elif manifest is not None and problem is None and step not in (None, manifest.step):
        problem = f"its manifest is of step {manifest.step}"
    if manifest is not None and problem is None and manifest.format not in tuple(CheckpointFormat):
        problem = f"its format {one_line(manifest.format[:40])!r} is unknown"
    if step is None:
        step = manifest.step if manifest is not None else 0
    return Entry(name, step, manifest, problem, pinned)


# The last two: the folder of a run's checkpoints, and that of their copies.
@lru_cache(maxsize=2)
def _entries_of_process(folder: Path) -> dict[str, tuple[tuple[int, ...], Entry]]:
    """The checkpoints of a folder that this process has read, each with `Storage.manifest_id`. Filled by catalogs."""
    return {}


_MAX_REMOVED_PARSED = 1000
"""Limit of the manifests of removed checkpoints that are kept parsed, at about 5 kB each."""


@lru_cache(maxsize=1 << 14)
def _parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest; the same bytes are parsed once."""
    return Manifest.parse(data)


def examine(storage: Storage, name: str, earlier: Collection[str] = ()) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint, and what is wrong with it, its files or their sizes.

    A problem counts only if the manifest is the same before and after: a removal in between looks like damage.

    Args:
        earlier: as in `Storage.names`.
    """
    try:
        while True:
            data = storage.peek(name, MANIFEST_FILE)
            problem: str | None
            if data is None:
                manifest, problem = None, _why_no_manifest(storage, name, earlier)
            else:
                manifest, problem = _compare_sizes(storage, name, data)
            # Read again: a save or a removal in between shows up as another manifest.
            if problem is None or storage.peek(name, MANIFEST_FILE) == data:
                return manifest, problem
    except OSError as error:
        return None, f"it cannot be read: {error}"


def _compare_sizes(storage: Storage, name: str, data: bytes) -> tuple[Manifest | None, str | None]:
    """Parse a manifest and compare the sizes of the files with it. Returns the manifest, and the first problem."""
    try:
        manifest = _parse_manifest(data)
    except ManifestError as error:
        return None, str(error)
    sizes = storage.sizes(name)
    for file, entry in sorted(manifest.files.items()):
        if file not in sizes:
            return manifest, f"{file} is missing"
        if sizes[file] != entry.size_bytes:
            return manifest, f"{file} has {format_count(sizes[file], 'byte')} instead of {entry.size_bytes:,}"
    return manifest, None


def _why_no_manifest(storage: Storage, name: str, earlier: Collection[str]) -> str:
    """Why a folder has no manifest: it is partial, being removed, or missing."""
    if any(file.startswith(REMOVED_PREFIX) for file in storage.sizes(name)):
        return REMOVING
    return PARTIAL if name in storage.names(earlier) else GONE


_MAX_LISTED = 20


def newest_intact(
    catalog: Catalog,
    run_id: str,
    *,
    limit: int | None = None,
    check: Check = verify_and_decode,
    quarantine: bool = True,
) -> Entry | None:
    """The newest intact checkpoint of a run whose weights are finite; None if the run has no checkpoint.

    Newer ones of the run that are damaged or not finite are quarantined, with a warning. Others are reported and stay:
    a checkpoint whose manifest cannot be read may belong to another run, one that cannot be read now may be readable
    later, and one without a manifest may be a folder of another program.

    Args:
        limit: later steps are not used: the training went back to this one.
        quarantine: False changes nothing on the disk.

    Raises:
        CheckpointError: there are checkpoints, but none can be used; nothing was changed.
    """
    # Name -> problem. Only the unfit ones are quarantined.
    unfit: dict[str, str] = {}
    unread: dict[str, str] = {}
    for entry in catalog.newest_first(run_id):
        if entry.manifest is None:
            if not entry.partial:
                unread[entry.name] = entry.problem or ""
            elif entry.problem == PARTIAL and _was_committed(catalog, entry.name):
                # Not among the unread: it may be a folder of another program, so it stops no new beginning.
                log.warning("checkpoint %s is not used: it has no manifest", entry.name)
            continue
        if limit is not None and entry.step > limit:
            log.warning("checkpoint %s is not used: the run went back to step %d", entry.name, limit)
            continue
        try:
            problem: str | None = "its weights are not finite"
            if entry.manifest.finite:
                problem = catalog.why_damaged(entry, check)
        except OSError as error:
            unread[entry.name] = f"it cannot be read: {error}"
            continue
        if problem is None:
            # They are moved only now: if none is intact, nothing is changed, so that the user can still repair one.
            if quarantine:
                _report_and_quarantine(catalog.storage, unfit, unread)
            return entry
        unfit[entry.name] = problem
    if unfit or unread:
        lines = [f"  {name}: {problem}" for name, problem in {**unfit, **unread}.items()]
        more = [f"  … and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
        listed = "\n".join(lines[:_MAX_LISTED] + more)
        raise CheckpointError(
            f"{catalog.folder} holds checkpoints, but none is valid:\n{listed}\n",
            cure="Restore one of them, or start another run, under another name or in another folder.",
        )
    return None


def _was_committed(catalog: Catalog, name: str) -> bool:
    """Whether a folder without a manifest was committed: a local save gives it its name and its files only then."""
    return not is_url(catalog.folder) and bool(catalog.storage.sizes(name))


def _report_and_quarantine(storage: Storage, unfit: dict[str, str], unread: dict[str, str]) -> None:
    """Warn of the unread checkpoints and quarantine the unfit ones: name -> problem."""
    for name, problem in unread.items():
        log.warning("checkpoint %s is not used: %s", name, problem)
    for name, problem in unfit.items():
        # The storage logs it.
        storage.quarantine(name, problem)


def _newest_step(catalog: Catalog, run_id: str) -> int:
    """The step of the newest valid checkpoint of a run; -1 without one."""
    return next((entry.step for entry in catalog.newest_first(run_id) if entry.valid), -1)


def newest_of_all(
    catalogs: Sequence[Catalog],
    run_id: str,
    *,
    limit: int | None = None,
    check: Check = verify_and_decode,
    quarantine: bool = True,
) -> tuple[Catalog, Entry] | None:
    """The newest intact checkpoint of a run, with its catalog: that of the run's folder, the first, or one of copies.

    Of equal steps the first catalog's is taken. None if no checkpoint exists. See `newest_intact` for the arguments.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    newest: tuple[Catalog, Entry] | None = None
    failure: CheckpointError | None = None
    for catalog in catalogs:
        step = -1 if newest is None else newest[1].step
        # A copy is downloaded and verified only if it would be taken. If no checkpoint was found yet, damaged copies
        # count too: the run must not silently begin anew beside them.
        if newest is not None and _newest_step(catalog, run_id) <= step:
            continue
        try:
            entry = newest_intact(catalog, run_id, limit=limit, check=check, quarantine=quarantine)
        except CheckpointError as error:
            # The first failure is that of the run's own folder, which the user knows.
            failure = failure or error
            continue
        if entry is not None and entry.step > step:
            newest = catalog, entry
    if newest is None and failure is not None:
        raise failure
    if newest is not None and newest[0] is not catalogs[0]:
        log.warning(
            "%s is taken from the copies in %s: %s holds no valid checkpoint of this step or a later one",
            newest[1].name,
            newest[0].folder,
            catalogs[0].folder,
        )
    return newest
