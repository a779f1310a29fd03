"""Saving behind the training: the state is copied, and a thread writes the copy while the next steps are made.

    caller   save: wait for the save before ─ plan ─ take ─┐            gate          (optimizer step)
    writer                                                 └─ copy ─ write, digest, fsync ─ prove ─ manifest ─ rename

What is written is byte for byte what `SyncCheckpointer` writes. One save is in flight at most.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.checkpointer import FolderCheckpointer, Saving
from trainer_cli.checkpoint.format.memory import available_bytes
from trainer_cli.checkpoint.format.port import Format, Image
from trainer_cli.checkpoint.process.background import Background
from trainer_cli.checkpoint.process.outliving import Outliving, WriterDied
from trainer_cli.checkpoint.process.port import Process
from trainer_cli.checkpoint.snapshot import are_finite
from trainer_cli.checkpoint.staging import Stager, Staging
from trainer_cli.checkpoint.storage import disk
from trainer_cli.checkpoint.storage.port import Storage
from trainer_cli.checkpoint.writer import Facts, facts_of
from trainer_cli.config.garbage import uncollected
from trainer_cli.config.schema import DigestAlgorithm, SaveWriter
from trainer_cli.errors import SaveError

logger = logging.getLogger(__name__)

_CLOSING_S = 600.0
_TOLD_S = 1.0
"""A wait for the save before is told from so long on."""


class AsyncCheckpointer(FolderCheckpointer):
    """Saves behind its caller: `save` returns once the state is copied, or may be copied safely later.

    Args:
        process: where copies are finished and written; by default a thread, and `Outliving` writes in a process of
            its own, whose work a kill of this one does not end.
        available: tells how much memory can be had. A state of more than half of it is saved here and now.
    """

    def __init__(
        self,
        *,
        format: Format | None = None,
        storage: Callable[[Path], Storage] | None = None,
        digest: DigestAlgorithm = DigestAlgorithm.xxh3_128,
        process: Process | None = None,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        super().__init__(format=format, storage=storage, digest=digest)
        self.process: Process = process or Background("checkpoint-writer")
        self.stager = Stager(self.format.image(shared=self.process.carrier is not None), available=available)
        self._last: Future[None] | None = None
        self._told: set[str] = set()

    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | Path,
        *,
        facts: Facts | None = None,
        late: Iterable[torch.Tensor] = (),
        trained: Iterable[torch.Tensor] = (),
        before_commit: Callable[[], object] | None = None,
    ) -> Saving:
        """Save a tree as the checkpoint at `path`; all but `late` may change as soon as this returns.

        Args:
            late: tensors that share memory with some of the tree and change only after the caller came to `gate`
                again, as weights do that only the optimizer's step changes. They are copied meanwhile.
            trained: tensors that must hold neither NaN nor infinity for the checkpoint to be called finite.
            before_commit: called by the writer when all files are at rest; with an OSError the save fails.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        storage, name = self._place(path)
        facts = facts or facts_of(name)
        self._wait_for_the_last()
        written: Future[None] = Future()
        with uncollected():
            if (why := self.stager.plan(state_dict)) is not None:
                self._tell_once("room", "%s, so saves interrupt the training", why)
                trained = list(trained)
                return self._save_here(storage, name, state_dict, facts, trained, before_commit, written)
            places = {tensor.data_ptr() for tensor in late}
            staging = self.stager.take(places, {tensor.data_ptr() for tensor in trained})
        self._last = written
        last_facts = partial(self._last_facts, staging, before_commit)
        self.process.submit(partial(self._write, storage, name, facts, staging, last_facts, written))
        return Saving(staging.staged, written)

    def storage(self, root: str | Path) -> Storage:
        root = Path(root).absolute()
        if root not in self._storages and self.process.carrier is not None:
            self._storages[root] = self._new_storage(root).carried_by(self.process.carrier)
        return super().storage(root)

    def gate(self, *, asked: bool = False) -> bool:
        """Come here before `late` tensors are written: waits until they are copied, which costs next to nothing
        where nothing is. True where they were written already, which spoils the save in flight.

        `asked`: it is somebody else than the optimizer's step who writes them now.
        """
        return self.stager.gate(asked=asked)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight; False where that took longer than it may."""
        self.stager.release()
        return self.process.settle(timeout_s)

    def close(self, timeout_s: float = _CLOSING_S) -> None:
        if self.settle(timeout_s):
            self.stager.image.close()
            self.process.close()
        else:
            logger.warning("a save is still being written; where it does not become whole, nothing takes it")
        super().close()

    def _write(
        self,
        storage: Storage,
        name: str,
        facts: Facts,
        staging: Staging,
        last_facts: Callable[[Facts], Facts],
        written: Future[None],
    ) -> None:
        """The writer's whole work. What fails is for whoever asks the future."""
        image = self.stager.image
        try:
            staging.copy()
            if self.process.carrier is not None:
                image.lend(self.process.carrier.lend)
            self._commit(storage, name, facts, image, last_facts)
        except Exception as error:
            written.set_exception(error)
        except BaseException as error:
            written.set_exception(error)
            raise
        else:
            written.set_result(None)

    def _commit(
        self, storage: Storage, name: str, facts: Facts, image: Image, last_facts: Callable[[Facts], Facts]
    ) -> None:
        """Write the image, and once more where the process that wrote it died, or a full disk has room again."""
        for again in (True, False):
            try:
                return self.writer.write(
                    storage, name, facts, image.write, needs=lambda: image.held_bytes, last_facts=last_facts
                )
            except SaveError as error:
                if not (again and _is_worth_another(error.__cause__, storage)):
                    raise

    def _last_facts(self, staging: Staging, before_commit: Callable[[], object] | None, facts: Facts) -> Facts:
        finite = facts.finite and self.stager.image.is_finite()
        if before_commit is not None:
            before_commit()
        staging.prove()
        return replace(facts, finite=finite)

    def _save_here(
        self,
        storage: Storage,
        name: str,
        state_dict: Mapping[str, Any],
        facts: Facts,
        trained: list[torch.Tensor],
        before_commit: Callable[[], object] | None,
        written: Future[None],
    ) -> Saving:
        """Without a copy: the caller waits for it all."""

        def last_facts(facts: Facts) -> Facts:
            if before_commit is not None:
                before_commit()
            return replace(facts, finite=facts.finite and are_finite(trained))

        staged: Future[None] = Future()
        try:
            self.writer.write(
                storage,
                name,
                facts,
                lambda folder: self.format.write(folder, state_dict),
                needs=lambda: self.format.trial(state_dict),
                last_facts=last_facts,
            )
        except Exception as error:
            written.set_exception(error)
        else:
            written.set_result(None)
        staged.set_result(None)
        return Saving(staged, written)

    def _wait_for_the_last(self) -> None:
        self.stager.release()
        if self._last is None or self._last.done():
            return
        began = time.monotonic()
        wait_for([self._last])
        if (waited := time.monotonic() - began) >= _TOLD_S:
            self._tell_once(
                "wait",
                "a save waited %.1f s for the one before to be written: save less often, or on a faster disk",
                waited,
            )

    def _tell_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *args)


def _is_worth_another(cause: BaseException | None, storage: Storage) -> bool:
    if isinstance(cause, WriterDied):
        logger.warning("%s; another one begins the save anew", cause.strerror)
        return True
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) and storage.make_room()


def outliving_writer() -> Process | None:
    """A place to write that outlives this process, or None where the system does not offer what it takes."""
    return Outliving("checkpoint-writer", Path(disk.__file__)) if Outliving.is_offered() else None


def make_async_checkpointer(
    *,
    format: Format | None = None,
    storage: Callable[[Path], Storage] | None = None,
    digest: DigestAlgorithm | str = DigestAlgorithm.xxh3_128,
    writer: SaveWriter | str = SaveWriter.process,
) -> AsyncCheckpointer:
    """A checkpointer that works by itself, without a Trainer, and writes behind its caller.

    Args:
        writer: a process, which outlives its caller where the system offers what that takes, or a thread.
    """
    process = outliving_writer() if SaveWriter(writer) is SaveWriter.process else None
    return AsyncCheckpointer(format=format, storage=storage, digest=DigestAlgorithm(digest), process=process)
