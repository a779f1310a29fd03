"""Saves written by a thread: the state is copied before `save` returns, then the copy is written.

    caller   save: wait for the save before ─ stage ─┐ training goes on
    thread                                           └─ write ─ gather ─ commit

The files are byte for byte those of `SyncCheckpointer`. At most one save is in flight.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.checkpointer import FolderCheckpointer, InFlightSave, Reader, State, arguments_of_parts
from trainer_cli.checkpoint.format.base import Format
from trainer_cli.checkpoint.group_save import GroupSave
from trainer_cli.checkpoint.save import (
    CheckpointMetadata,
    CommitHook,
    Writer,
    WriterThread,
    metadata_of,
    nothing,
    run_now,
)
from trainer_cli.checkpoint.snapshot import CopyStager, Snapshot, Stager
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.core.checkpoint_config import DigestAlgorithm
from trainer_cli.core.url_path import as_path
from trainer_cli.errors import SaveError
from trainer_cli.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
"""A save in flight is waited for at least this long,"""
_SLOWEST_BYTES_PER_S = 2_000_000
"""or for its size at this rate, if that is longer."""
_INTERRUPTED_TIMEOUT_S = 10.0
"""The limit of the wait after a second Ctrl-C."""
_REPORTED_WAIT_S = 5.0
"""Longer waits are reported."""


class AsyncCheckpointer(FolderCheckpointer):
    """Saves in the background: `save` returns once the state is copied.

    Args:
        stager: makes the copies; by default a CopyStager. What it stages without a copy is written before `save`
            returns.
        thread: writes the copies; by default a new one.
    """

    def __init__(
        self,
        *,
        format: Format | str = "tensors",
        storage: Callable[[Path], Storage] | None = None,
        digest: DigestAlgorithm = DigestAlgorithm.xxh3_128,
        stager: Stager | None = None,
        writer: Writer | None = None,
        reader: Reader | None = None,
        commit_hook: CommitHook | None = None,
        thread: WriterThread | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            format=format,
            storage=storage,
            digest=digest,
            stager=stager or CopyStager(),
            writer=writer,
            reader=reader,
            commit_hook=commit_hook,
            group=group,
        )
        self.thread = thread or WriterThread("checkpoint-writer")
        self._reports = thread is None
        if thread is None:
            # The owner of a given thread ends it, and reports failures.
            atexit.register(_close_at_exit, weakref.ref(self))
        self._interrupted = False
        self._last_save: InFlightSave | None = None
        """The last save of a checkpointer that has no owner who ends it."""

    @property
    def timeout_s(self) -> float:
        """The limit of the wait for a save in flight."""
        longest = max(_TIMEOUT_S, self.stager.held_bytes / _SLOWEST_BYTES_PER_S)
        return _INTERRUPTED_TIMEOUT_S if self._interrupted else longest

    def save(
        self,
        state_dict: State,
        path: str | Path,
        *,
        metadata: CheckpointMetadata | None = None,
        overwrite: bool = True,
        trained: Iterable[torch.Tensor] = (),
        before_commit: Callable[[], object] = nothing,
        after_commit: Callable[[], object] = nothing,
        after_write: Callable[[], object] = nothing,
        **kwargs: Any,
    ) -> InFlightSave:
        """Save a tree as the checkpoint at `path`; all of it may change as soon as this returns.

        The save before is ended first; if it failed and nothing has raised that yet, its failure is raised, and nothing
        is saved.

        Args:
            state_dict, overwrite, kwargs: as of `Checkpointer.save`.
            trained: tensors of the state that must hold neither NaN nor infinity for the checkpoint to be finite.
            before_commit: called in the writing thread before the manifest is made; an OSError fails the save.
            after_commit: called in the writing thread after the commit; it raises nothing.
            after_write: with several ranks, called in the writing thread when this rank's files are written or could
                not be. The other two are called by rank 0 in its main thread then.

        Raises:
            SaveError: the save before failed.
            UnsavableState: naming the owner of what cannot be saved.
        """
        stage, arguments = arguments_of_parts("save", kwargs, stager=self.stager.stage, writer=self.writer.write)
        self._join_default_group()
        storage, name = self._place(path)
        metadata = metadata or metadata_of(name)
        self._interrupted = False
        self.drain()
        self._end_last_save()
        staging = partial(self._stage, state_dict, trained, stage)
        if self.group.world_size > 1:
            together = self._group_save(
                storage, name, metadata, before_commit, after_commit, after_write, overwrite=overwrite
            )
            saving = self._save_together(together, staging, path)
        else:
            snapshot = staging()

            def write() -> None:
                self.writer.write(
                    storage,
                    name,
                    snapshot,
                    metadata,
                    format=self.format.name,
                    overwrite=overwrite,
                    before_commit=before_commit,
                    **arguments,
                )
                after_commit()

            written = run_now(write) if snapshot.image is None else self.thread.submit(write)
            saving = InFlightSave(as_path(path), metadata, written)
        if self._reports:
            self._last_save = saving
            saving.written.add_done_callback(partial(_report_failure, storage.location(name)))
        return saving

    def _end_last_save(self) -> None:
        """Commit the save before with all ranks, or raise its failure, unless its owner has done so.

        Raises:
            SaveError: it failed.
        """
        saving, self._last_save = self._last_save, None
        if saving is not None and not saving.ended:
            saving.raise_failure()

    def _save_together(self, save: GroupSave, stage: Callable[[], Snapshot], path: str | Path) -> InFlightSave:
        """Begin a save with all ranks, and write this rank's files; `finish` of the result commits it."""
        staged: list[Snapshot] = []

        def staging() -> Snapshot:
            staged.append(stage())
            return staged[0]

        if not save.begin(staging):
            return InFlightSave(as_path(path), save.metadata, run_now(nothing))
        written = run_now(save.write) if staged[0].image is None else self.thread.submit(save.write)
        return InFlightSave(as_path(path), save.metadata, written, save.finish)

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Allocate the memory for copies of such a state in the writing thread; the first save would wait for it."""
        self.drain()
        if (memory := self.stager.prepare(self.format, state_dict)) is not None:
            self.thread.submit(memory.touch)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written or deleted; False if that took longer than `timeout_s` seconds."""
        return self.thread.drain(timeout_s)

    def wait_for(self, save: InFlightSave) -> None:
        """Wait until a save has ended.

        Raises:
            SaveError: it has not ended after `timeout_s` seconds.
        """
        try:
            if self.drain(min(_REPORTED_WAIT_S, self.timeout_s)):
                return
            log.info("waiting for the save of step %d to be written", save.metadata.step)
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
        """Finish the save in flight and free the memory.

        Raises:
            SaveError: the save has failed, and nothing has raised that yet.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self.thread.close(timeout_s):
            try:
                self._end_last_save()
            finally:
                super().close()
        else:
            # The thread still reads the copy.
            log.warning("a checkpoint is still being written or deleted after %.0f s; no resume takes it", timeout_s)


def _close_at_exit(reference: weakref.ref[AsyncCheckpointer]) -> None:
    """Finish the save in flight before the process ends."""
    checkpointer = reference()
    if checkpointer is not None:
        saving, checkpointer._last_save = checkpointer._last_save, None  # Its failure was logged.
        checkpointer.close()
        if saving is not None and saving.finish is not None and not saving.ended:
            # Other ranks may be gone, so that no collective commits it now.
            log.error("%s is not committed, since close() was not called on all ranks", saving.path)


def _report_failure(where: str, written: Future[None]) -> None:
    if (error := written.exception()) is not None:
        log.error("the checkpoint %s was not saved: %s", where, error)


def make_async_checkpointer(
    *,
    format: Format | str = "tensors",
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
    commit_hook: CommitHook | None = None,
    group: ProcessGroup | None = None,
) -> AsyncCheckpointer:
    """A checkpointer for use without a Trainer that writes in the background; `group` as of `FolderCheckpointer`."""
    return AsyncCheckpointer(
        format=format, storage=storage, digest=DigestAlgorithm(digest), commit_hook=commit_hook, group=group
    )
