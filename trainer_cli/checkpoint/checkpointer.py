"""Checkpointers: save state trees as checkpoints, and load them, through format, storage and manifest.

    save:  tree -> format -> files in a hidden folder -> manifest, last -> folder fsynced -> renamed
    load:  manifest -> sizes -> format, digests on the way -> tree

A save commits a complete checkpoint or nothing; a load returns what was saved or raises. Saves in the background are
written by a thread, from a copy of the state, and their files are byte for byte the same. One at a time is in flight:

    caller   save: wait for the save before ─ stage ─┐ training continues
    thread                                           └─ write ─ gather ─ commit
"""

from __future__ import annotations

import atexit
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer_cli.catalog import ForeignKind, checkpoint_at, path_to_save
from trainer_cli.checkpoint.fill_state import LoadedState, MapLocation, load_into, move_tensors
from trainer_cli.checkpoint.group_save import GroupSave, compare_ranks
from trainer_cli.checkpoint.reading import errors_of_reading, read_valid_manifest
from trainer_cli.checkpoint.save import (
    CheckpointMetadata as CheckpointMetadata,
    CheckpointWriter,
    CommitHook,
    InFlightSave,
    SaveCaller,
    SaveJob,
    Writer,
    arguments_of_parts,
    metadata_of,
)
from trainer_cli.checkpoint.snapshot import CopyStager, LiveStager, Snapshot, Stager
from trainer_cli.checkpoint.writer_thread import WriterThread, report_failure, run_now
from trainer_cli.dtensor import Targets, local_of, targets_in
from trainer_cli.errors import CheckpointError, NotDurableError, SaveError, UserError
from trainer_cli.files import as_path
from trainer_cli.format import (
    RANKS,
    CheckpointReader as CheckpointReader,
    DividedFormat,
    Format,
    ShardedFormat,
    StateReader,
    new_format,
)
from trainer_cli.layout import is_plain
from trainer_cli.manifest import Manifest
from trainer_cli.parallel import ALONE, ProcessGroup, describe_lone_rank, find_default_group, find_default_ranks
from trainer_cli.parts import READ_RANK
from trainer_cli.schema import CheckpointFormat, DigestAlgorithm
from trainer_cli.storage import ReadableFolder, Storage, open_storage
from trainer_cli.tensor_files import LiveTensors, verify

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
"""Least limit of the wait for a save in flight."""
_SLOWEST_BYTES_PER_S = 2_000_000
"""Rate at which a save is given time for its size, if that takes longer than `_TIMEOUT_S`."""
_INTERRUPTED_TIMEOUT_S = 10.0
"""The limit of the wait after a second Ctrl-C."""
_REPORTED_WAIT_S = 5.0
"""Longer waits are reported."""

State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
NO_CALLER = SaveCaller()


class Checkpointer:
    """Saves state trees to paths and loads them. With several ranks, every rank calls every method.

    Args:
        format: how a state becomes files, or the name of such a format.
        storage: the storage of a folder of checkpoints; by default selected by its scheme.
        digest: the digest of every file.
        stager: makes what is written of a state; by default a CopyStager if a thread writes it, else a LiveStager.
            A state that is staged without a copy is written before `save` returns.
        writer, reader: write and read checkpoints in a storage.
        commit_hook: is called around each commit.
        group: the ranks that save together, each its part. By default those of torch's default group, if one is
            initialised at the first save; what differs between them, each saves for itself. `ALONE`: this one alone.
        thread: writes saves in the background; its owner ends it, and reports failures.
    """

    has_thread: ClassVar[bool] = False
    """Whether it has a thread of its own if none is given. Without one, saves are committed when `save` returns."""
    waits_for_uploads: ClassVar[bool] = False
    """Whether a save, or `close`, waits for the store. In a run the callback waits, at the end."""

    def __init__(
        self,
        *,
        format: Format | str = "tensors",
        storage: Callable[[Path], Storage] | None = None,
        digest: DigestAlgorithm = DigestAlgorithm.xxh3_128,
        stager: Stager | None = None,
        writer: Writer | None = None,
        reader: StateReader | None = None,
        commit_hook: CommitHook | None = None,
        group: ProcessGroup | None = None,
        thread: WriterThread | None = None,
    ) -> None:
        self.format = new_format(format) if isinstance(format, str) else format
        self.thread = thread or (WriterThread("checkpoint-writer") if self.has_thread else None)
        self.stager = stager or (LiveStager() if self.thread is None else CopyStager())
        self.writer = writer or CheckpointWriter(digest=digest, commit_hook=commit_hook)
        self.reader = reader or CheckpointReader(self.format)
        self._new_storage = storage or partial(open_storage, run_id=uuid.uuid4().hex[:12])
        self._storages: dict[Path, Storage] = {}
        self.group: ProcessGroup = ALONE
        self._sharded: ShardedFormat | None = None
        self._joined = self._compares_ranks = self._interrupted = False
        self._ends_thread = self.thread is not thread
        if self._ends_thread:
            # By a weak reference: a checkpointer that is dropped must not live until the end of the process. Called
            # before the functions of `atexit`, when no thread pool can send anything any more.
            register = getattr(threading, "_register_atexit", atexit.register)
            register(partial(_close_at_exit, weakref.ref(self)))
        self._last_save: InFlightSave | None = None
        """The last save of a checkpointer whose thread has no other owner."""
        if group is not None:
            self.join(group)

    def storage(self, root: str | Path) -> Storage:
        """The storage of a folder of checkpoints, made once."""
        root = as_path(root).absolute()
        if root not in self._storages:
            self._storages[root] = self._new_storage(root)
        return self._storages[root]

    def save(
        self,
        state_dict: State,
        path: str | Path,
        *,
        metadata: CheckpointMetadata | None = None,
        overwrite: bool = True,
        trained: Iterable[torch.Tensor] = (),
        caller: SaveCaller = NO_CALLER,
        in_background: bool = True,
        **kwargs: Any,
    ) -> InFlightSave | None:
        """Save a tree as the checkpoint at `path`.

        In the background all of the tree may change as soon as this returns. The save before is ended first; if it
        failed and nothing has raised that yet, its failure is raised, and nothing is saved.

        Args:
            state_dict: the tree, or a function that makes it; if that fails on one rank, no rank waits for it.
            path: `{rank}`, `{local_rank}` and `{node_rank}` are those of this process, unless a group saves; counts
                such as `{step}` are those of `metadata`.
            overwrite: True: a checkpoint that exists is replaced; it stays until the new one is committed. False: one
                that exists is refused, except an intact one of the same run and step, which is left as it is.
            trained: tensors of the state that must have no NaN or infinity for the checkpoint to be finite.
            caller: its methods are called around the commit: by the thread that writes, or, with several ranks, by
                rank 0 in its main thread.
            in_background: False: commit before this returns, although there is a thread.
            kwargs: further arguments of the parts that save.

        Returns:
            The futures of the save, staged and written; None if the checkpoint is committed when this returns.

        Raises:
            NotDurableError: the checkpoint is there, but a power cut may take it away.
            SaveError: nothing was committed. In both cases older checkpoints are intact.
            UnsavableState: naming the owner of what cannot be saved.
        """
        thread = self.thread if in_background else None
        job = self._new_job(
            state_dict,
            path,
            metadata,
            stager=self.stager if thread is self.thread else LiveStager(),
            overwrite=overwrite,
            trained=trained,
            caller=caller,
            extra_arguments=kwargs,
        )
        if thread is None:
            self._end_last_save()
            job.begin()
            job.write()
            job.finish()
            if self.waits_for_uploads:
                with self.group.checking("while waiting for the store"):
                    _finish_uploads(job.storage)
            return None
        self._interrupted = False
        # The save before must have been written, because the buffer of its copy is reused.
        self.drain()
        self._end_last_save()
        job.begin()
        # Without a copy the live tensors are written now: they may change as soon as this returns.
        is_copied = job.snapshot is not None and job.snapshot.image is not None
        save = InFlightSave(job, thread.submit(job.write) if is_copied else run_now(job.write))
        if self._ends_thread:
            self._last_save = save
            save.written.add_done_callback(partial(report_failure, job.storage.location(job.name)))
        return save

    def locate(self, path: str | Path) -> Path:
        """The checkpoint that a path to load names, as in `checkpoint_at`."""
        return checkpoint_at(path, self.storage)

    def load(
        self,
        path: str | Path,
        state_dict: MutableMapping[str, Any] | None = None,
        default_map_location: MapLocation = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> LoadedState:
        """Load the checkpoint at `path`: all of it, or into `state_dict` only the keys that it names.

        Tensors in `state_dict` are filled in place, and other values are replaced; names that the checkpoint lacks
        are listed in the result's `missing`, or refused if `strict`. Damage, and what does not fit, is refused before
        anything is touched. Of a folder of torch's own Checkpointer each rank loads its `checkpoint_{rank}.pt`, which
        has no digests. A file that changes while it is loaded is a CheckpointError that says what is overwritten.

        Args:
            default_map_location: where new tensors go: a device, its name, or a mapping or function as `torch.load`
                takes them. A checkpoint holds no devices: all its tensors are at "cpu". None: they stay there.
            kwargs: further arguments of the part that reads.

        Raises:
            NoCheckpointError: there is no checkpoint; it is a FileNotFoundError too.
            MissingStateError: the checkpoint lacks a name, and `strict`; it is a RuntimeError too.
            CheckpointError: it is damaged, or does not fit `state_dict`. The other two are such errors too.
        """
        path = self.locate(path)
        (arguments,) = arguments_of_parts("load", kwargs, reader=self.reader.read)
        # Not removed before the state is filled: files are read a second time, into live tensors.
        with ExitStack() as locks:
            if state_dict is None:
                return LoadedState(move_tensors(self._read_as_rank(path, None, arguments, locks), default_map_location))
            live = LiveTensors(state_dict)
            if (targets := targets_in(state_dict)) is not None:
                arguments["targets"] = targets
            # Not by a subclass, whose `read` may change tensors, before live ones are filled.
            elif type(self.reader) is CheckpointReader:
                arguments["live"] = live
            tree = self._read_as_rank(path, list(state_dict), arguments, locks)
            return load_into(state_dict, tree, str(path.absolute()), default_map_location, live, strict=strict)

    def _read_as_rank(
        self, path: str | Path, only: Collection[str] | None, arguments: Mapping[str, Any], locks: ExitStack
    ) -> dict[str, Any]:
        """Read what this rank saved. If no group was given, as a rank of torch's default group, without a collective.

        Args:
            only: the top-level keys to read; None: all.
            arguments: further arguments of the reader.
            locks: holds the checkpoint against removal until the caller ends it.
        """
        ranks = find_default_ranks()
        if ForeignKind.of(Path(path)) is not None:
            state = READ_RANK.need(str(path))(Path(path), ranks.rank, only)
            if state is not None:
                return state
        if not self._joined and ranks.world_size > 1 and isinstance(self.reader, CheckpointReader):
            self.reader.sharded = ShardedFormat(ranks.rank, ranks.world_size)
        storage, name = self._split(path)
        with errors_of_reading(storage, name):
            folder = locks.enter_context(storage.reading(name))
            tree = self.reader.read(folder, read_valid_manifest(storage, name), only=only, **arguments)
        if not tree.get(RANKS, True):
            del tree[RANKS]  # An empty table, because one process saved it.
        return tree

    def join(self, group: ProcessGroup) -> None:
        """Save with the other ranks of a group from now on, each its part of the state, and read this rank's part.

        Raises:
            UserError: format or writer are for one process.
        """
        self._joined, self._compares_ranks = True, False
        if group.world_size == 1:
            return
        sharded = ShardedFormat(group.rank, group.world_size, group.tensor_size)
        if not isinstance(self.format, DividedFormat):
            formats = CheckpointFormat.names_where(lambda format: not format.one_process)
            raise UserError(
                f"checkpoint.format={self.format.name} saves the state of one process, and this run has "
                f"{group.world_size}",
                cure=f"Use checkpoint.format={formats}; train ckpt export writes the others.",
            )
        if not isinstance(self.writer, CheckpointWriter):
            raise UserError(f"{type(self.writer).__name__} cannot write what several processes save together")
        self.group, self.format, self._sharded = group, self.format.of_rank(sharded), sharded
        if isinstance(self.reader, CheckpointReader):
            self.reader.sharded = sharded

    def read(
        self, path: str | Path, only: Collection[str] | None = None, *, targets: Targets | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`, or those of these top-level keys that it has.

        Args:
            targets: as in `StateReader.read`.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        storage, name = self._split(self.locate(path))
        # A reader of a user's own need not know `targets`.
        arguments = {} if targets is None else {"targets": targets}
        with self._reading(storage, name) as (folder, manifest):
            return self.reader.read(folder, manifest, only=only, **arguments)

    def _new_job(
        self,
        state: State,
        path: str | Path,
        metadata: CheckpointMetadata | None,
        *,
        stager: Stager,
        overwrite: bool,
        trained: Iterable[torch.Tensor],
        caller: SaveCaller,
        extra_arguments: Mapping[str, Any],
    ) -> SaveJob:
        """The save of a state as the checkpoint at `path`, not yet begun; arguments as in `save`.

        Args:
            extra_arguments: arguments that `save` does not know, for its stager and its writer.
        """
        stage_arguments, writer_arguments = arguments_of_parts(
            "save", extra_arguments, stager=stager.stage, writer=self.writer.write
        )
        if not self._joined:
            # No group was given: save with torch's default group. Collective.
            self.join(group := find_default_group())
            self._compares_ranks = group.world_size > 1
        path = path_to_save(path, {} if metadata is None else metadata.counts(), ranks=self.group.world_size)
        storage, name = self._split(path)
        metadata = metadata or metadata_of(name)
        if self.group.world_size == 1:
            metadata = replace(metadata, saved_by=describe_lone_rank())

        # Called by `SaveJob.begin`, after the save before has ended.
        def stage() -> Snapshot:
            """Copy the state for the writing thread; tensors that the ranks hold whole are compared first."""
            if self._sharded is not None and self._compares_ranks:
                tree = compare_ranks(state, self.group, self._sharded)
            else:
                tree = state() if callable(state) else state
            return stager.stage(self.format, tree, list(map(local_of, trained)), **stage_arguments)

        facts: dict[str, Any] = {
            "path": path,
            "storage": storage,
            "metadata": metadata,
            "stage": stage,
            "writer": self.writer,
            "format": self.format.name,
            "overwrite": overwrite,
            "caller": caller,
        }
        if self.group.world_size > 1:
            return GroupSave(**facts, group=self.group)
        return SaveJob(**facts, arguments=writer_arguments)

    def manifest(self, path: str | Path) -> Manifest:
        """The manifest of the checkpoint at `path`, all of whose files exist with the right sizes.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        with self._reading(*self._split(self.locate(path))) as (_, manifest):
            return manifest

    def progress(self, path: str | Path) -> Mapping[str, int | float] | None:
        """The progress of the checkpoint at `path`, without loading its state; None if that is unknown."""
        return self.manifest(path).progress

    def average(self, path: str | Path) -> str | None:
        """Name of the callback whose average was evaluated in place of the weights of the checkpoint at `path`."""
        return self.manifest(path).average

    def left_out(self, path: str | Path) -> tuple[str, ...]:
        """States of the training that the checkpoint at `path` lacks by `checkpoint.leave_out`."""
        return self.manifest(path).left_out

    def metrics(self, path: str | Path) -> Mapping[str, float]:
        """The metrics of the step of the checkpoint at `path`; empty if they are unknown."""
        return self.manifest(path).metrics

    def verify(self, path: str | Path) -> Manifest:
        """Read every file of the checkpoint at `path` and compare its digest; its manifest.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        with self._reading(*self._split(self.locate(path))) as (folder, manifest):
            verify(folder, manifest)
            return manifest

    @property
    def timeout_s(self) -> float:
        """The limit of the wait for a save in flight."""
        if self._interrupted:
            return _INTERRUPTED_TIMEOUT_S
        return max(_TIMEOUT_S, self.stager.held_bytes / _SLOWEST_BYTES_PER_S)

    def prepare(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Allocate the memory for copies of such a state in the writing thread; the first save would wait for it.

        Args:
            kwargs: further arguments of the stager.
        """
        self.drain()
        memory = self.stager.prepare(self.format, state_dict, **kwargs)
        if memory is not None and self.thread is not None:
            self.thread.submit(memory.touch)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written or deleted; False if that took longer than `timeout_s` seconds."""
        return self.thread is None or self.thread.drain(timeout_s)

    def wait_for(self, save: InFlightSave) -> None:
        """Wait until a save has ended.

        Raises:
            SaveError: it has not ended after `timeout_s` seconds.
        """
        try:
            if self.drain(min(_REPORTED_WAIT_S, self.timeout_s)):
                return
            logger.info("waiting for the save of step %d to be written", save.metadata.step)
            if self.drain(self.timeout_s):
                return
        except BaseException:
            # An interrupt of this wait shortens the next one too.
            self.interrupt()
            raise
        raise SaveError(
            f"the save of step {save.metadata.step} has not ended after {self.timeout_s:.0f} s", where=str(save.path)
        )

    def interrupt(self) -> None:
        """Wait no longer than a few seconds for the save in flight."""
        self._interrupted = True

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the save in flight, waiting at most this time, and free the memory. None: a limit by the state's size.

        Raises:
            SaveError: the save has failed, and nothing has raised that yet.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self.thread is not None and not self.thread.close(timeout_s):
            # The thread still reads the copy.
            logger.warning(
                "a checkpoint is still being written or deleted after %.0f s; it is not used to resume", timeout_s
            )
            return
        try:
            self._end_last_save()
        finally:
            self.stager.close()
            storages = list(self._storages.values())
            self._storages.clear()
            if self.waits_for_uploads:
                for storage in storages:
                    _finish_uploads(storage, timeout_s)

    def _end_last_save(self) -> None:
        """Commit the last save with all ranks, or raise its failure, unless its caller has done so by `raise_failure`.

        Raises:
            SaveError: it failed.
        """
        save, self._last_save = self._last_save, None
        if save is not None and not save.ended:
            save.raise_failure()

    def _split(self, path: str | Path) -> tuple[Storage, str]:
        """The storage of the folder that a checkpoint is in, and its name there."""
        path = as_path(path).absolute()
        if not is_plain(path.name):
            raise CheckpointError(f"{path.name!r} cannot be the name of a checkpoint", where=str(path))
        return self.storage(path.parent), path.name

    @contextmanager
    def _reading(self, storage: Storage, name: str) -> Iterator[tuple[ReadableFolder, Manifest]]:
        """Hold a checkpoint against removal while it is read."""
        with errors_of_reading(storage, name), storage.reading(name) as folder:
            yield folder, read_valid_manifest(storage, name)


class SyncCheckpointer(Checkpointer):
    """Saves synchronously: once `save` returns, the checkpoint survives a power cut, and is in the store if it is saved
    to one."""

    waits_for_uploads = True


class AsyncCheckpointer(Checkpointer):
    """Saves in the background, by a thread of its own: `save` returns once the state is copied. `close` waits until all
    checkpoints are in the store, if they are saved to one."""

    has_thread = True
    waits_for_uploads = True


def make_sync_checkpointer(
    *,
    format: Format | str = "tensors",
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
    commit_hook: CommitHook | None = None,
    group: ProcessGroup | None = None,
) -> SyncCheckpointer:
    """A checkpointer for use without a Trainer; `group` as in `Checkpointer`."""
    return SyncCheckpointer(
        format=format, storage=storage, digest=DigestAlgorithm(digest), commit_hook=commit_hook, group=group
    )


def make_async_checkpointer(
    *,
    format: Format | str = "tensors",
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
    commit_hook: CommitHook | None = None,
    group: ProcessGroup | None = None,
) -> AsyncCheckpointer:
    """A checkpointer that writes in the background, for use without a Trainer; `group` as in `Checkpointer`."""
    return AsyncCheckpointer(
        format=format, storage=storage, digest=DigestAlgorithm(digest), commit_hook=commit_hook, group=group
    )


def _finish_uploads(storage: Storage, timeout_s: float | None = None) -> None:
    """Wait until a store has what was saved to it, at most this time.

    Raises:
        NotDurableError: it does not answer, or takes longer; the checkpoints are on the local disk.
    """
    if waiting := storage.finish_uploads(timeout_s):
        raise NotDurableError(
            f"{', '.join(waiting)} could not be sent to the store",
            where=str(storage.location(waiting[0])),
            cure="Save under another name once it answers; until then this machine reads its own copy.",
        )


def _close_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    """Finish the save in flight before the process ends."""
    checkpointer = reference()
    if checkpointer is not None:
        save, checkpointer._last_save = checkpointer._last_save, None  # Its failure was logged.
        try:
            checkpointer.close()
        except SaveError as error:
            logger.error("%s", error)
        if save is not None and save.job.waits_for_commit and not save.ended:
            # Other ranks may be gone, so that no collective commits it now.
            logger.error("%s is not committed, since close() was not called on all ranks", save.path)
