"""Saving behind the training: the state is copied, and the copy is written while the next steps are made.

    caller   save: wait for the save before ─ plan ─ take ─┐            gate          (optimizer step)
    writer                                                 └─ copy, digest, write ─ prove ─ manifest ─ fsync, rename

The writer is a thread, which may have a process carry out what it writes: `process/outliving.py`. What is written is
byte for byte what `SyncCheckpointer` writes. One save is in flight at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_cli.checkpoint.checkpointer import FolderCheckpointer, Saving
from trainer_cli.checkpoint.format.memory import available_bytes
from trainer_cli.checkpoint.format.port import Format
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

log = logging.getLogger(__name__)

_CLOSING_S = 600.0
_LINGERS_S = 60.0
"""So long the writer's thread waits for the next save: one that has to be started holds the training up."""
_TOLD_S = 1.0
"""A wait for the save before is told from so long on."""


def _nothing() -> None:
    """Nobody asked for more."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be saved where, and who is told."""

    storage: Storage
    name: str
    facts: Facts
    before_commit: Callable[[], object]
    after_commit: Callable[[], object]
    written: Future[None] = field(default_factory=Future)

    @contextmanager
    def told(self) -> Iterator[None]:
        """What comes of the work inside is for whoever asks the future; what is no error of the work goes on, too."""
        try:
            yield
        except BaseException as error:
            self.written.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.written.set_result(None)


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
        self.process: Process = process or Background("checkpoint-writer", lingers_s=_LINGERS_S)
        self.stager = Stager(self.format.image(lent_to=self.process.carrier), available=available)
        self._carried: dict[Storage, Storage] = {}
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
        before_commit: Callable[[], object] = _nothing,
        after_commit: Callable[[], object] = _nothing,
    ) -> Saving:
        """Save a tree as the checkpoint at `path`; all but `late` may change as soon as this returns.

        Args:
            late: tensors that share memory with some of the tree and change only after the caller came to `gate`
                again, as weights do that only the optimizer's step changes. They are copied meanwhile.
            trained: tensors that must hold neither NaN nor infinity for the checkpoint to be called finite.
            before_commit: called by the writer before it makes the manifest; with an OSError the save fails.
            after_commit: called by the writer once it is committed; it raises nothing.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        storage, name = self._place(path)
        order = _Order(storage, name, facts or facts_of(name), before_commit, after_commit)
        self._wait_for_the_last()
        with uncollected():
            parts = list(trained)
            why = self.stager.plan(state_dict)
            try:
                staging = None if why else self.stager.take(list(late), parts)
            except OSError as error:
                why, staging = str(error), None
            if staging is None:
                self._tell_once("room", "%s, so saves interrupt the training", why)
                return self._save_here(order, state_dict, parts)
            self._last = order.written
            if (built := self.stager.build()) is not None:
                self.process.submit(built)
            self.process.submit(partial(self._write, order, staging))
            return Saving(staging.staged, order.written)

    def prepare(self, tensors: Collection[torch.Tensor]) -> None:
        """Get ready behind the caller for saves of these tensors: the first one takes much longer otherwise."""
        self._wait_for_the_last()
        try:
            work = self.stager.prepare(tensors)
        except (OSError, RuntimeError) as error:
            # Whether that matters, a save will tell.
            log.debug("no memory is got ready for saves: %s", error)
            return
        if work is not None:
            self.process.submit(work)

    def gate(self, *, asked: bool = False) -> bool:
        """Come here before `late` tensors are written: returns once they are copied, which costs next to nothing
        where nothing is left to copy. True where they were written already, which spoils the save in flight.

        `asked`: it is somebody else than the optimizer's step who writes them now.
        """
        if not self.stager.is_awaited:
            return False
        with uncollected():
            return self.stager.gate(asked=asked)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight; False where that took longer than it may."""
        self.stager.release()
        return self.process.settle(timeout_s)

    def close(self, timeout_s: float = _CLOSING_S) -> None:
        if self.settle(timeout_s):
            self.stager.close()
            self.process.close()
        else:
            log.warning("a save is still being written; where it does not become whole, nothing takes it")
        self._carried.clear()
        super().close()

    def _write(self, order: _Order, staging: Staging) -> None:
        """The writer's whole work. What fails is for whoever asks the future."""

        def last_facts(facts: Facts) -> Facts:
            finite = facts.finite and image.is_finite()
            order.before_commit()
            staging.prove()
            return replace(facts, finite=finite)

        image = self.stager.image
        with order.told():
            try:
                for storage in self._ways(order.storage):
                    if storage is order.storage or not image.arrives_in_order:
                        # Writing would hold the copy up, which the optimizer's step waits for.
                        staging.copy()
                    put = partial(image.write, arrived=staging.arrivals())
                    try:
                        self.writer.write(
                            storage, order.name, order.facts, put, needs=lambda: image.held_bytes, last_facts=last_facts
                        )
                    except SaveError as error:
                        error.where = error.where or storage.location(order.name)
                        why = error.__cause__
                        if storage is order.storage or not (isinstance(why, OSError) and _is_of_the_way(why)):
                            raise
                        log.warning("%s; the training itself writes this checkpoint", why.strerror)
                    else:
                        break
            finally:
                staging.end()
            order.after_commit()

    def _ways(self, storage: Storage) -> Iterator[Storage]:
        """How to write there: by the process, if there is one, and where that fails for reasons of its own, here."""
        carrier = self.process.carrier
        if carrier is not None and carrier.is_ready():
            if storage not in self._carried:
                self._carried[storage] = storage.carried_by(carrier)
            yield self._carried[storage]
        yield storage

    def _save_here(self, order: _Order, state_dict: Mapping[str, Any], trained: list[torch.Tensor]) -> Saving:
        """Without a copy: the caller waits for it all."""

        def last_facts(facts: Facts) -> Facts:
            order.before_commit()
            return replace(facts, finite=facts.finite and are_finite(trained))

        staged: Future[None] = Future()
        with order.told():
            self.writer.write(
                order.storage,
                order.name,
                order.facts,
                lambda folder: self.format.write(folder, state_dict),
                needs=lambda: self.format.trial(state_dict),
                last_facts=last_facts,
            )
            order.after_commit()
        staged.set_result(None)
        return Saving(staged, order.written)

    def _wait_for_the_last(self) -> None:
        self.stager.release()
        if self._last is None or self._last.done():
            return
        began = time.monotonic()
        # Of one that an interrupt kept from being handed over, its future never tells.
        self.process.settle()
        if (waited := time.monotonic() - began) >= _TOLD_S:
            self._tell_once(
                "wait",
                "a save waited %.1f s for the one before to be written: save less often, or on a faster disk",
                waited,
            )

    def _tell_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(message, *args)


def _is_of_the_way(why: OSError) -> bool:
    """Whether a save may succeed another way: its writer died, or a disk is full, on which room can be made here."""
    return isinstance(why, WriterDied) or why.errno in disk.FULL


def outliving_writer() -> Process | None:
    """A place to write that outlives this process, or None where the system does not offer what it takes."""
    if not Outliving.is_offered():
        return None
    return Outliving("checkpoint-writer", Path(disk.__file__), lingers_s=_LINGERS_S)


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
