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

from trainer_cli.checkpoint.checkpointer import NO_CALLER, Checkpointer, State
from trainer_cli.checkpoint.format.base import Format
from trainer_cli.checkpoint.reader import Reader
from trainer_cli.checkpoint.save import CheckpointMetadata, CommitHook, InFlightSave, SaveCaller, Writer
from trainer_cli.checkpoint.snapshot import CopyStager, Stager
from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.writer_thread import WriterThread, run_now
from trainer_cli.core.checkpoint_config import DigestAlgorithm
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


class AsyncCheckpointer(Checkpointer):
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
        caller: SaveCaller = NO_CALLER,
        **kwargs: Any,
    ) -> InFlightSave:
        """Save a tree as the checkpoint at `path`; all of it may change as soon as this returns.

        The save before is ended first; if it failed and nothing has raised that yet, its failure is raised, and nothing
        is saved.

        Args:
            state_dict, overwrite, kwargs: as of `Checkpointer.save`.
            trained: tensors of the state that must hold neither NaN nor infinity for the checkpoint to be finite.
            caller: its methods are called around the commit: by the writing thread, or, with several ranks, by rank 0
                in its main thread.

        Raises:
            SaveError: the save before failed.
            UnsavableState: naming the owner of what cannot be saved.
        """
        job = self._new_job(
            state_dict, path, metadata, overwrite=overwrite, trained=trained, caller=caller, further=kwargs
        )
        self._interrupted = False
        # The buffer of the copy is reused: the save before must have read it.
        self.drain()
        self._end_last_save()
        job.begin()
        # Live tensors may change as soon as this returns, so they are written before.
        is_copied = job.snapshot is not None and job.snapshot.image is not None
        save = InFlightSave(job, self.thread.submit(job.write) if is_copied else run_now(job.write))
        if self._reports:
            self._last_save = save
            save.written.add_done_callback(partial(_report_failure, job.storage.location(job.name)))
        return save

    def _end_last_save(self) -> None:
        """Commit the save before with all ranks, or raise its failure, unless its owner has done so.

        Raises:
            SaveError: it failed.
        """
        save, self._last_save = self._last_save, None
        if save is not None and not save.ended:
            save.raise_failure()

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
        save, checkpointer._last_save = checkpointer._last_save, None  # Its failure was logged.
        checkpointer.close()
        if save is not None and save.job.waits_for_commit and not save.ended:
            # Other ranks may be gone, so that no collective commits it now.
            log.error("%s is not committed, since close() was not called on all ranks", save.path)


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
    """A checkpointer for use without a Trainer that writes in the background; `group` as of `Checkpointer`."""
    return AsyncCheckpointer(
        format=format, storage=storage, digest=DigestAlgorithm(digest), commit_hook=commit_hook, group=group
    )
