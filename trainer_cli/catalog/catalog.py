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
from trainer_cli.policy import CheckpointKind, Saved
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
        # Once: the policy is applied to all checkpoints at each save.
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
        """Whether it was saved under another name: a user copied or renamed it. It is no checkpoint of a run by itself:
        nothing counts, resumes or removes it unless it is named."""
        return self.manifest is not None and self.manifest.name not in (None, self.name)

    @property
    def is_replayed(self) -> bool:
        """Whether it was computed after its step, from an earlier checkpoint. As with a copy, nothing counts, resumes
        or removes it unless it is named."""
        return self.manifest is not None and self.manifest.kind is CheckpointKind.replayed

    @property
    def valid(self) -> bool:
        """Whether manifest, files and sizes fit. Digests are verified when it is read."""
        return self.manifest is not None and self.problem is None

    @property
    def resumable(self) -> bool:
        """True for a valid one whose weights are finite; no resume chooses another by itself."""
        return self.valid and self.manifest is not None and self.manifest.finite

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files; 0 if they are unknown."""
        return sum(file.size_bytes for file in self.manifest.files.values()) if self.manifest is not None else 0

    @property
    def order(self) -> tuple[Any, ...]:
        """Newer ones sort later: by step, then epoch. A plain `step10` sorts after `step10-ema`; where no step is
        known, numbers in names decide."""
        epoch = -1 if self.manifest is None else self.manifest.epoch
        plain = parse_step(self.name) is not None
        return self.step, epoch, plain, numbers_within(self.name), -len(self.name), self.name

    def _facts(self) -> Saved | None:
        if self.manifest is None or not self.valid:
            return None
        return Saved(
            self.name,
            self.step,
            self.manifest.kind,
            finished=self.manifest.finished is not None,
            pinned=self.pinned,
            finite=self.manifest.finite,
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
    """The checkpoints of one storage: folders called `step{N}`, and all others that hold a manifest, but no copies and
    no replayed ones."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._settled: dict[str, Entry] | None = None
        """Checkpoints that are taken to be valid and not pinned. Replaced as a whole: the thread that writes and the
        main thread may list at once. None before the first listing."""
        self._doubtful: set[str] = set()
        """Those of them that were found not to be, by a whole look."""

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
        looked = [self._look(name) for name in self.storage.names()]
        return _by_step(entry for entry in looked if entry is not None)

    def remembered(self) -> list[Entry]:
        """Like `entries`, but one with a manifest is taken to be valid and not pinned, and is read once.

        Beside any number of these it costs one listing of names. Call `look_again` for those that a decision depends
        on: one may be pinned or incomplete, and a user may have pinned, damaged or replaced one since.
        """
        settled = self._read_before() if self._settled is None else self._settled
        names = self.storage.names(settled.keys())
        if gone := settled.keys() - set(names):
            settled = {name: settled[name] for name in names if name in settled}
            for name in gone:
                _read_in(self.folder).pop(name, None)
            # Manifests of removed checkpoints would fill it in a long run.
            if _parsed.cache_info().currsize > 2 * len(names) + _MOST_GONE:
                _parsed.cache_clear()
        unsettled: list[Entry] = []
        # Of thousands, each stays in memory: collections of garbage would take half as long as the reading.
        with gc_paused() if len(names) - len(settled) > _MOST_GONE else nullcontext():
            for name in names:
                if name in settled:
                    continue
                entry = None if name in self._doubtful else self._glance(name)
                entry = self._look(name, settled.keys()) if entry is None else entry
                if entry is not None:
                    unsettled.append(entry)
        self._settled = {**settled, **{entry.name: entry for entry in unsettled if entry.valid and not entry.pinned}}
        self._doubtful = self._doubtful.intersection(names) - self._settled.keys()
        return _by_step([*settled.values(), *unsettled])

    def look_again(self, names: Iterable[str]) -> bool:
        """Look at these remembered checkpoints now. Returns whether one has changed, and is listed anew next time."""
        settled = self._settled or {}
        changed = {name for name in names if name in settled and self._look(name) != settled[name]}
        if changed:
            self._doubtful |= changed
            self._settled = {name: entry for name, entry in settled.items() if name not in changed}
        return bool(changed)

    def newest_first(self, run_id: str | None = None) -> Iterator[Entry]:
        """The checkpoints of a run, or of any, from the newest on, each looked at when it is its turn. One without a
        readable manifest may be of any run."""
        for seen in reversed(self.remembered()):
            if seen.manifest is None or run_id in (None, seen.manifest.run_id):
                entry = self._look(seen.name)
                if entry is not None and (entry.manifest is None or run_id in (None, entry.manifest.run_id)):
                    yield entry

    def entry(self, name: str, earlier: Collection[str] = ()) -> Entry:
        """The checkpoint of that name, or the copy; `earlier` as in `Storage.names`."""
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
        """The newest one of a run, or of any run, that a resume may start from."""
        return next((entry for entry in self.newest_first(run_id) if entry.resumable), None)

    def holds_steps(self, run_id: str, *, counts_first: bool = False) -> bool:
        """Whether a run has a checkpoint after step 0, also a damaged one; without it there is nothing to continue.

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
        """What is wrong with a checkpoint, by default after every file was read, digested and decoded; None for an
        intact one.

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
        # It says nothing of the bytes: a checkpoint must not be quarantined for it.
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

    def _read_before(self) -> dict[str, Entry]:
        """What this process has read of the checkpoints before, as far as their manifests are the same now."""
        read = _read_in(self.folder)
        return {name: entry for name, (id, entry) in list(read.items()) if self.storage.manifest_id(name) == id}

    def _glance(self, name: str) -> Entry | None:
        """The entry of a checkpoint by its manifest alone; None if the manifest does not suffice."""
        try:
            # Before it is read: if it is replaced in between, the value fits no later one.
            id = self.storage.manifest_id(name)
            data = None if id is None else self.storage.peek(name, MANIFEST_FILE)
            manifest = None if data is None else _parsed(data)
        except (OSError, ManifestError):
            return None
        if id is None or manifest is None:
            return None
        entry = _entry_of(name, manifest, None, pinned=False)
        if entry.is_copy or entry.is_replayed or not entry.valid:
            return None
        _read_in(self.folder)[name] = id, entry
        return entry

    def _look(self, name: str, earlier: Collection[str] = ()) -> Entry | None:
        """The entry of a folder; None if it does not exist, has neither a checkpoint's name nor a manifest, is a copy,
        or was replayed."""
        entry = self.entry(name, earlier)
        is_other = entry.problem == PARTIAL and parse_step(name) is None
        return None if is_other or entry.is_copy or entry.is_replayed or entry.problem == GONE else entry


def _by_step(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=attrgetter("step", "name"))


def _entry_of(name: str, manifest: Manifest | None, problem: str | None, pinned: bool) -> Entry:
    step = parse_step(name)
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
def _read_in(folder: Path) -> dict[str, tuple[tuple[int, ...], Entry]]:
    """The checkpoints of a folder that this process has read, each with `Storage.manifest_id`. Filled by catalogs."""
    return {}


_MOST_GONE = 1000
"""Limit of the manifests of removed checkpoints that are kept parsed, at about 5 kB each."""


@lru_cache(maxsize=1 << 14)
def _parsed(data: bytes) -> Manifest:
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
            manifest, problem = (
                _without_manifest(storage, name, earlier) if data is None else _with_manifest(storage, name, data)
            )
            # Read again: a save or a removal in between shows up as another manifest.
            if problem is None or storage.peek(name, MANIFEST_FILE) == data:
                return manifest, problem
    except OSError as error:
        return None, f"it cannot be read: {error}"


def _with_manifest(storage: Storage, name: str, data: bytes) -> tuple[Manifest | None, str | None]:
    try:
        manifest = _parsed(data)
    except ManifestError as error:
        return None, str(error)
    sizes = storage.sizes(name)
    for file, entry in sorted(manifest.files.items()):
        if file not in sizes:
            return manifest, f"{file} is missing"
        if sizes[file] != entry.size_bytes:
            return manifest, f"{file} has {format_count(sizes[file], 'byte')} instead of {entry.size_bytes:,}"
    return manifest, None


def _without_manifest(storage: Storage, name: str, earlier: Collection[str]) -> tuple[None, str]:
    if any(file.startswith(REMOVED_PREFIX) for file in storage.sizes(name)):
        return None, REMOVING
    return None, PARTIAL if name in storage.names(earlier) else GONE


_LISTED = 20


def newest_intact(
    catalog: Catalog,
    run_id: str,
    *,
    limit: int | None = None,
    check: Check = verify_and_decode,
    quarantine: bool = True,
) -> Entry | None:
    """The newest intact checkpoint of a run whose weights are finite; None if the run has no checkpoint.

    Newer ones of the run that are damaged or not finite are quarantined, with a warning. One whose manifest cannot be
    read may belong to another run, and one that cannot be read now may be readable later: both are reported and stay,
    as is one that has lost its manifest.

    Args:
        limit: later steps are not used: the training went back to this one.
        quarantine: False changes nothing on the disk.

    Raises:
        CheckpointError: there are checkpoints, but none can be used; nothing was changed.
    """
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
            # Only now: if none is intact, nothing is changed, so that the user can still repair one.
            if quarantine:
                _report_and_quarantine(catalog.storage, unfit, unread)
            return entry
        unfit[entry.name] = problem
    if unfit or unread:
        all_of_them = [f"  {name}: {problem}" for name, problem in {**unfit, **unread}.items()]
        more = [f"  … and {len(all_of_them) - _LISTED} more"] if len(all_of_them) > _LISTED else []
        listed = "\n".join(all_of_them[:_LISTED] + more)
        raise CheckpointError(
            f"{catalog.folder} holds checkpoints, but none is valid:\n{listed}\n",
            cure="Restore one of them, or start another run, under another name or in another folder.",
        )
    return None


def _was_committed(catalog: Catalog, name: str) -> bool:
    """Whether a folder without a manifest was committed: on a disk it has its name, and files, only from then on."""
    return not is_url(catalog.folder) and bool(catalog.storage.sizes(name))


def _report_and_quarantine(storage: Storage, unfit: dict[str, str], unread: dict[str, str]) -> None:
    for name, problem in unread.items():
        log.warning("checkpoint %s is not used: %s", name, problem)
    for name, problem in unfit.items():
        # The storage logs it.
        storage.quarantine(name, problem)


def _newest_step(catalog: Catalog, run_id: str) -> int:
    return next((entry.step for entry in catalog.newest_first(run_id) if entry.valid), -1)


def newest_of_all(
    catalogs: Sequence[Catalog],
    run_id: str,
    *,
    limit: int | None = None,
    check: Check = verify_and_decode,
    quarantine: bool = True,
) -> tuple[Catalog, Entry] | None:
    """The newest intact checkpoint of a run in its folder, the first catalog, and in those of its copies; of equal
    steps the first. None if none exists. See `newest_intact` for the arguments.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    newest: tuple[Catalog, Entry] | None = None
    failure: CheckpointError | None = None
    for catalog in catalogs:
        step = -1 if newest is None else newest[1].step
        # A copy is downloaded and verified only if it would be taken. Damaged ones count if the run has no checkpoint:
        # it must not silently begin anew beside them.
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
