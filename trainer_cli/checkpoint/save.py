"""One save in four calls: `stage` (in snapshot.py), `write`, `gather`, `commit`.

    stage    the state as it will be written: a copy of it, made at the step's boundary
    write    its files in a hidden folder, each digested and fsynced
    gather   what every rank wrote, if there are several (in group_save.py)
    commit   the manifest, the folder fsynced and renamed, its parent fsynced

A process that dies before the rename leaves a hidden folder, which no load looks at and the run's next start removes.
"""

from __future__ import annotations

import inspect
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

from trainer_cli.catalog import Spent, examine
from trainer_cli.checkpoint.disk_errors import check_room, disk_error, older_ones
from trainer_cli.checkpoint.snapshot import Snapshot
from trainer_cli.errors import SaveError, UserError
from trainer_cli.layout import MANIFEST_FILE, PartTable, step_within
from trainer_cli.manifest import DamagedCheckpoint, FileEntry, Manifest, ManifestError
from trainer_cli.parallel import is_of_peer
from trainer_cli.policy import CheckpointKind
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.tensor_files import verify

if TYPE_CHECKING:
    from trainer_cli.storage import StagedFolder, Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """The facts about a checkpoint for its manifest."""

    run_id: str = ""
    attempt: int = 0
    step: int = 0
    epoch: int = 0
    kind: CheckpointKind = CheckpointKind.regular
    reason: str = "saved by hand"
    finished: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    average: str | None = None
    left_out: tuple[str, ...] = ()
    finite: bool = True
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    world_size: int = 1
    tensor_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions beyond those of python, torch and numpy."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files to save with the state, such as config.yaml."""
    progress: Mapping[str, int | float] = field(default_factory=dict)
    samples: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    number: int | None = None
    saved_by: str | None = None
    spent: Spent | None = None
    """For the history; not in the manifest."""

    def counts(self) -> dict[str, object]:
        """The counts that a path may contain as variables, by name."""
        return {**self.progress, "step": self.step, "epoch": self.epoch, "world_size": self.world_size}


class SaveCaller:
    """What the caller of a save does around its commit; by default nothing."""

    def checksums(self) -> dict[str, int]:
        """Before the state is staged, on every rank: checksums that must be equal on all of them. May be collective."""
        return {}

    def before_commit(self) -> None:
        """The files are written, and the manifest is not. An OSError fails the save. In the thread that commits."""

    def on_committed(self, job: SaveJob) -> None:
        """The checkpoint exists. In the thread that committed it; raises nothing."""


@dataclass(kw_only=True, eq=False)
class SaveJob:
    """One save by one process: `begin` and `finish` in the main thread, `write` between them in any thread.

    Args:
        stage: makes the snapshot.
        format: the name of the format, for the manifest.
        overwrite: as in `Checkpointer.save`.
        arguments: further arguments of the writer.
    """

    path: Path
    storage: Storage
    metadata: CheckpointMetadata
    stage: Callable[[], Snapshot]
    writer: Writer
    format: str
    overwrite: bool
    caller: SaveCaller
    arguments: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = field(default=None, init=False)
    is_there: bool = field(default=False, init=False)
    """Whether `begin` has found an intact checkpoint of this run and step, so that nothing is written."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def waits_for_commit(self) -> bool:
        """Whether `finish` commits; else `write` does."""
        return False

    def begin(self) -> None:
        """Stage the state.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        self.snapshot = self.stage()

    def write(self) -> None:
        """Write the files, and commit.

        Raises:
            SaveError: as in `Writer.write`.
        """
        assert self.snapshot is not None
        # Committed here, in the writer thread: a commit that waited for the main thread would come at the end of a step
        # or of an evaluation, and a crash in between would lose what is already on the disk.
        self.writer.write(
            self.storage,
            self.name,
            self.snapshot,
            self.metadata,
            format=self.format,
            overwrite=self.overwrite,
            before_commit=self.caller.before_commit,
            **self.arguments,
        )
        self.caller.on_committed(self)

    def finish(self) -> None:
        """Nothing is left to do for one process."""


class InFlightSave(tuple[Future[None], Future[None]]):
    """A save that a thread writes from a copy: the pair of its futures, staged and written.

    Args:
        job: the save, which has begun.
        written: done once the checkpoint is committed, or the save has failed, with the exception. With several ranks:
            once this rank's files are written, or could not be.
    """

    def __new__(cls, job: SaveJob, written: Future[None]) -> Self:
        # The state is copied before `save` returns, and may change.
        staged: Future[None] = Future()
        staged.set_result(None)
        save = super().__new__(cls, (staged, written))
        save.job, save.staged, save.written, save.ended = job, staged, written, False
        return save

    job: SaveJob
    staged: Future[None]
    written: Future[None]
    ended: bool
    """Whether `raise_failure` was called: the save is committed, or its failure was raised."""

    @property
    def path(self) -> Path:
        return self.job.path

    @property
    def metadata(self) -> CheckpointMetadata:
        return self.job.metadata

    def raise_failure(self) -> None:
        """Wait until the save has ended. With several ranks, every rank calls this, and it commits.

        Raises:
            SaveError: it failed.
        """
        # Set before `finish` can fail: its collective is never entered twice.
        is_first, self.ended = not self.ended, True
        with errors_of_save(self.metadata.step, self.path):
            error = self.written.exception()
            if error is not None:
                raise as_failure(error, self.metadata.step, self.path)
            if is_first:
                self.job.finish()


def arguments_of_parts(
    method: str, kwargs: Mapping[str, Any], **parts: Callable[..., object]
) -> tuple[dict[str, Any], ...]:
    """Divide further arguments of a method among the functions that it calls: for each, those that it takes.

    Args:
        method: its name, for the error.
        parts: name of a part -> its function.

    Raises:
        TypeError: no function takes one of the arguments.
    """
    if not kwargs:
        return tuple({} for _ in parts)
    arguments = []
    for function in parts.values():
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments.append({name: value for name, value in kwargs.items() if takes_any or name in parameters})
    unknown = [name for name in kwargs if not any(name in accepted for accepted in arguments)]
    if unknown:
        message = f"{method}() got an unexpected argument {unknown[0]!r}"
        raise TypeError(f"{message}, which is none of its {' and '.join(parts)}")
    return tuple(arguments)


def metadata_of(name: str) -> CheckpointMetadata:
    """The metadata of a checkpoint of which only the name is known."""
    return CheckpointMetadata(step=step_within(name) or 0)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank, the names under which their tied tensors are stored, and the parts of tensors in them."""

    files: Mapping[str, FileEntry]
    aliases: Mapping[str, Mapping[str, str]]
    parts: PartTable = field(default_factory=lambda: PartTable({}))


def write(folder: StagedFolder, snapshot: Snapshot, files: Mapping[str, bytes]) -> RankFiles:
    """Write the state, and small files beside it; all are digested and fsynced when this returns."""
    # On CUDA the copy may still be in progress: its bytes are not written before.
    snapshot.wait()
    aliases = snapshot.write(folder)
    for file, content in files.items():
        with folder.create(file) as writer:
            writer.write(content)
    return RankFiles(dict(folder.files), aliases, PartTable.of(snapshot.layout.parts_of_files))


def commit(
    folder: StagedFolder, ranks: Sequence[RankFiles], metadata: CheckpointMetadata, *, name: str, format: str
) -> Manifest:
    """Write the manifest and rename the folder: from here on the checkpoint exists.

    Raises:
        UnsyncedError: it is there, but a power cut may take it away.
    """
    files: dict[str, FileEntry] = {}
    aliases: dict[str, Mapping[str, str]] = {}
    for rank in ranks:
        files |= rank.files
        aliases |= rank.aliases
    facts = {
        field.name: getattr(metadata, field.name)
        for field in fields(metadata)
        if field.name not in ("files", "versions", "spent")
    }
    versions = {**library_versions(), **metadata.versions}
    parts = PartTable.joined(rank.parts for rank in ranks)
    manifest = Manifest(
        **facts, name=name, versions=versions, format=format, files=files, aliases=aliases, shards=parts
    )
    # Last: a folder with a manifest is a checkpoint.
    with folder.create(MANIFEST_FILE) as writer:
        writer.write(manifest.to_bytes())
    folder.publish()
    return manifest


class CommitHook(Protocol):
    """Is called around the commit of each checkpoint, in the thread that writes."""

    def pre_commit(self, path: str) -> None:
        """The files of the checkpoint at `path` are written and fsynced; an OSError fails the save."""
        ...

    def post_commit(self, path: str) -> None:
        """The checkpoint at `path` is committed. Must not raise."""
        ...


class Writer(Protocol):
    """Writes and commits a save of one process."""

    def write(
        self,
        storage: Storage,
        name: str,
        snapshot: Snapshot,
        metadata: CheckpointMetadata,
        *,
        format: str,
        overwrite: bool = True,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a snapshot as the checkpoint of this name, and commit it.

        Args:
            format: the name of the snapshot's format, for the manifest.
            overwrite: as in `Checkpointer.save`.
            before_commit: called when the files are written, before the manifest is made; an OSError fails the save.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: nothing was committed. In both cases older checkpoints are intact.
        """
        ...


class CheckpointWriter:
    """Writes and commits in the calling thread."""

    def __init__(
        self, *, digest: DigestAlgorithm = DigestAlgorithm.xxh3_128, commit_hook: CommitHook | None = None
    ) -> None:
        self.digest = digest
        self.commit_hook = commit_hook

    def write(
        self,
        storage: Storage,
        name: str,
        snapshot: Snapshot,
        metadata: CheckpointMetadata,
        *,
        format: str,
        overwrite: bool = True,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a snapshot as the checkpoint of this name, and commit it; see `Writer.write`."""
        where = storage.location(name)
        try:
            if is_saved(storage, name, metadata, overwrite=overwrite):
                storage.fsync_names()
                logger.info("%s already exists, and is not written again", where)
                return
            check_room(storage, where, snapshot.layout.least_bytes, metadata.files)
            with storage.writing(name, digest=self.digest, replace=overwrite) as folder:
                if metadata.saved_by is not None:
                    folder.check_replaced = partial(refuse_other_rank, saved_by=metadata.saved_by, where=where)
                rank_files = write(folder, snapshot, metadata.files)
                # Records of this step become durable before the checkpoint that says they exist.
                before_commit()
                if self.commit_hook is not None:
                    self.commit_hook.pre_commit(where)
                # Only here, in the thread that writes: on a GPU it waits for the device.
                finite = metadata.finite and snapshot.is_finite()
                if not finite:
                    logger.warning(
                        "the weights of step %d are not finite: %s will not be used to resume", metadata.step, name
                    )
                commit(folder, [rank_files], replace(metadata, finite=finite), name=name, format=format)
        except OSError as error:
            size_bytes = snapshot.layout.total_bytes + sum(len(content) for content in metadata.files.values())
            raise disk_error(error, where, size_bytes, storage) from error
        if self.commit_hook is not None:
            self.commit_hook.post_commit(where)
        logger.debug("saved %s (%s)", where, metadata.reason)


def is_saved(storage: Storage, name: str, metadata: CheckpointMetadata, *, overwrite: bool) -> bool:
    """Whether nothing is to be written, because an intact checkpoint of the same run and step has this name already.

    Args:
        overwrite: True: any checkpoint of this name is replaced. False: only a damaged one, which is quarantined.

    Raises:
        SaveError: a checkpoint has this name that may not be replaced.
    """
    if (content := storage.peek(name, MANIFEST_FILE)) is None:
        return False
    refuse_other_rank(content, metadata.saved_by, storage.location(name))
    if overwrite:
        # A replacement would remove what the user asked to keep.
        if storage.is_pinned(name):
            raise SaveError(
                "the existing checkpoint is pinned, so it is not replaced",
                where=storage.location(name),
                cure="Unpin it (train ckpt unpin), or save to another path.",
            )
        return False
    # Sizes alone do not show damage: what is reused instead of written is verified byte for byte.
    manifest, problem = examine(storage, name)
    if manifest is not None and problem is None:
        try:
            with storage.reading(name) as folder:
                verify(folder, manifest)
        except DamagedCheckpoint as error:
            # It is quarantined below, so that what an earlier attempt has left does not stop this one.
            problem = str(error)
    if manifest is not None and manifest.name not in (None, name):
        problem = f"it is a copy of {manifest.name}"
    if manifest is None or problem is not None:
        storage.quarantine(name, problem or "it has no manifest")
        return False
    # A save without a run cannot tell its own checkpoint from another.
    if metadata.run_id and (manifest.run_id, manifest.step) == (metadata.run_id, metadata.step):
        return True
    raise SaveError(
        "another checkpoint is in the way: it is valid, so it is not replaced. "
        f"It is step {manifest.step} of run {manifest.run_id or 'unknown'}",
        where=storage.location(name),
        cure="Use another run directory, or move that checkpoint away.",
    )


def refuse_other_rank(content: bytes, saved_by: str | None, where: str) -> None:
    """Refuse to replace a checkpoint that another rank of this launch has saved, without the group.

    Args:
        content: of the manifest of that checkpoint.
        saved_by: launch and rank of this process, as `describe_lone_rank` returns them; None: it is the only process.

    Raises:
        SaveError: another rank has saved it.
    """
    if saved_by is None:
        return
    try:
        other_saved_by = Manifest.parse(content).saved_by
    except ManifestError:
        return  # It is damaged, and replaced.
    if other_saved_by is None:
        return
    launch, _, rank = saved_by.partition(" ")
    other_launch, _, other_rank = other_saved_by.partition(" ")
    if other_launch == launch and other_rank != rank:
        raise SaveError(
            f"{rank} would replace what {other_rank} of the same launch has saved",
            where=where,
            cure="Put {rank} into the path, let one rank save, or initialise torch.distributed to save together.",
        )


def as_failure(error: BaseException, step: int, where: str | Path) -> Exception:
    """An exception of the thread that writes, as the main thread raises it: SystemExit and KeyboardInterrupt, which
    would end that thread alone, become a SaveError."""
    if isinstance(error, Exception):
        return error
    ending = f"{type(error).__name__}: {error}".removesuffix(": ")
    message = f"step {step} could not be saved: the writer thread was ended by {ending}"
    return SaveError(message, where=str(where), cure=older_ones(where))


@contextmanager
def errors_of_save(step: int, path: Path) -> Iterator[None]:
    """Raise exceptions as a SaveError that names the save; user errors, and those of other ranks, keep their type."""
    try:
        yield
    except (SaveError, UserError):
        raise
    except OSError as error:
        raise disk_error(error, path) from error
    except Exception as error:
        # An error of another rank ends all ranks: as a SaveError, on_save_error might tolerate it.
        if is_of_peer(error):
            raise
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise SaveError(f"step {step} could not be saved: {reason}", where=str(path), cure=older_ones(path)) from error


def library_versions() -> dict[str, str]:
    """The versions that every manifest has."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
