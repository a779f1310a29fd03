"""Saves written behind their caller: the state is copied before `save` returns, then a thread writes the copy.

    caller   save: wait for the save before ─ copy the state ─┐ training goes on
    thread                                                    └─ digest, write, fsync ─ manifest ─ rename ─ fsync

What is written is byte for byte what `SyncCheckpointer` writes. One save is in flight at most.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.checkpointer import FolderCheckpointer, Saving
from trainer_cli.checkpoint.commit import CheckpointMetadata, metadata_of
from trainer_cli.checkpoint.format.file_layout import FileLayout
from trainer_cli.checkpoint.format.interfaces import Format
from trainer_cli.checkpoint.host_memory import available_bytes
from trainer_cli.checkpoint.model_state import are_finite
from trainer_cli.checkpoint.snapshot_buffer import Snapshot, SnapshotBuffer
from trainer_cli.checkpoint.storage.interfaces import Storage
from trainer_cli.checkpoint.writer_thread import WriterThread, run_now
from trainer_cli.config.schema import DigestAlgorithm

log = logging.getLogger(__name__)

_CLOSING_S = 600.0
_REPORTED_WAIT_S = 1.0
"""A wait for the save before is reported from this length on."""


def _nothing() -> None:
    """The default of callbacks that a caller leaves out."""


class AsyncCheckpointer(FolderCheckpointer):
    """Saves behind its caller: `save` returns once the state is copied.

    Args:
        thread: writes the copies; by default one of its own.
        available: the memory in bytes that can still be had. A state whose copy needs more than half of it is saved
            before `save` returns, without a copy.
    """

    def __init__(
        self,
        *,
        format: Format | None = None,
        storage: Callable[[Path], Storage] | None = None,
        digest: DigestAlgorithm = DigestAlgorithm.xxh3_128,
        thread: WriterThread | None = None,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        super().__init__(format=format, storage=storage, digest=digest)
        self.thread = thread or WriterThread("checkpoint-writer")
        self._reports = thread is None
        if thread is None:
            # Whoever lends a thread also ends it, and reports what failed.
            atexit.register(_close_at_exit, weakref.ref(self))
        self.buffer = SnapshotBuffer()
        self._available = available
        self._warned: set[str] = set()

    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | Path,
        *,
        metadata: CheckpointMetadata | None = None,
        trained: Iterable[torch.Tensor] = (),
        before_commit: Callable[[], object] = _nothing,
        after_commit: Callable[[], object] = _nothing,
    ) -> Saving:
        """Save a tree as the checkpoint at `path`; all of it may change as soon as this returns.

        Args:
            trained: tensors of the state that must hold neither NaN nor infinity for the checkpoint to be finite.
            before_commit: called in the writing thread before the manifest is made; an OSError fails the save.
            after_commit: called in the writing thread after the commit; it raises nothing.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        storage, name = self._place(path)
        metadata = metadata or metadata_of(name)
        self._wait_for_last_save()
        trained = list(trained)
        layout = self.format.plan(state_dict)
        snapshot = self._captured(layout, trained)

        def final_metadata(metadata: CheckpointMetadata) -> CheckpointMetadata:
            before_commit()
            finite = are_finite(trained) if snapshot is None else snapshot.is_finite()
            return replace(metadata, finite=metadata.finite and finite)

        def write() -> None:
            if snapshot is not None:
                snapshot.wait()
            put = layout.write if snapshot is None else snapshot.write
            self._commit(storage, name, metadata, put, size_bytes=layout.total_bytes, final_metadata=final_metadata)
            after_commit()

        staged: Future[None] = Future()
        written = run_now(write) if snapshot is None else self.thread.submit(write)
        if self._reports:
            written.add_done_callback(partial(_report_failure, storage.location(name)))
        staged.set_result(None)
        return Saving(staged, written)

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Get the memory for the copy of such a state behind the caller; the first save would wait for it otherwise."""
        self._wait_for_last_save()
        layout = self.format.plan(state_dict)
        if self._why_no_memory(layout) is None:
            try:
                memory = self.buffer.reserve(layout)
            except (OSError, MemoryError, RuntimeError) as error:
                log.debug("no memory is reserved for saves: %s", error)
            else:
                self.thread.submit(memory.touch)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written or deleted; False where that took longer than `timeout_s` seconds."""
        return self.thread.drain(timeout_s)

    def close(self, timeout_s: float = _CLOSING_S) -> None:
        """Finish the save in flight and give the memory back."""
        if self.thread.close(timeout_s):
            self.buffer.close()
        else:
            log.warning("a checkpoint is still being written or deleted after %.0f s; no resume takes it", timeout_s)
        super().close()

    def _captured(self, layout: FileLayout, trained: list[torch.Tensor]) -> Snapshot | None:
        """The copy of the state, or None where the host has no memory for it."""
        why = self._why_no_memory(layout)
        if why is None:
            try:
                return self.buffer.capture(layout, trained)
            except (OSError, MemoryError) as error:
                why = str(error) or "there is no memory for a copy of the state"
        self._warn_once("memory", "%s, so the training waits for each save", why)
        return None

    def _why_no_memory(self, layout: FileLayout) -> str | None:
        needed, held = layout.tensor_bytes, self.buffer.held_bytes
        if needed <= held or (available := self._available()) is None or needed <= (available + held) // 2:
            return None
        return f"a copy of the state takes {needed:,} bytes, more than half of the {available + held:,} available"

    def _wait_for_last_save(self) -> None:
        began = time.monotonic()
        self.thread.drain()
        if (waited := time.monotonic() - began) >= _REPORTED_WAIT_S:
            self._warn_once(
                "wait",
                "a save waited %.1f s until the last one was written and removed ones deleted: save less often, or on "
                "a faster disk",
                waited,
            )

    def _warn_once(self, topic: str, message: str, *args: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(message, *args)


def _close_at_exit(reference: weakref.ref[AsyncCheckpointer]) -> None:
    """Finish the save in flight before the process ends."""
    checkpointer = reference()
    if checkpointer is not None:
        checkpointer.close()


def _report_failure(where: str, written: Future[None]) -> None:
    if (error := written.exception()) is not None:
        log.error("the checkpoint %s was not saved: %s", where, error)


def make_async_checkpointer(
    *,
    format: Format | None = None,
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
) -> AsyncCheckpointer:
    """A checkpointer that works without a Trainer, and writes behind its caller."""
    return AsyncCheckpointer(format=format, storage=storage, digest=DigestAlgorithm(digest))
