"""Which batches of a user's DataLoader are being made, and of which samples: told when one fails, dies or never comes.

torch's iterator tells neither. So its sampler is listened to, its regular look at workers while a batch is waited for,
and its signal handler, which raises wherever the training is when a worker dies.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import wait
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from trainer_cli.data.children import GRACE_S
from trainer_cli.data.position import type_name

log = logging.getLogger(__name__)

LONG_S = 60.0
"""After how long a batch that has not come is told of, where nothing limits the waiting."""


class InHand:
    """One pass over a loader, from its batch `first` on.

    Samples are known where torch's own iterator takes their indices from the sampler of a map-style dataset; workers
    where it has any.
    """

    def __init__(self, loader: Any, epoch: int, first: int = 0) -> None:
        self._loader, self._epoch, self._first = loader, epoch, first
        self._iterator: Any = None
        self._drawn: dict[int, Any] = {}
        self._number, self._since = first, time.monotonic()
        self._reported = False

    def begin(self) -> Iterator[Any]:
        """Start the pass."""
        self._iterator = _listened_to(self._loader)
        sampler = getattr(self._iterator, "_index_sampler", None)
        # Persistent workers have kept the iterator of the first pass, and its sampler.
        if isinstance(sampler, _Listened):
            self._drawn = sampler.drawn
        if self._workers:
            _living.add(self)
            _hear_of_deaths()
            if not self._loader.timeout and hasattr(self._iterator, "_try_get_data"):
                look = type(self._iterator)._try_get_data
                self._iterator._try_get_data = lambda *args, **named: self._looked(look(self._iterator, *args, **named))
        return cast("Iterator[Any]", self._iterator)

    def wait(self, number: int) -> None:
        """From now on this batch is waited for; those before have come."""
        self._drawn.pop(number - self._first - 1, None)
        self._number, self._since = number, time.monotonic()

    def end(self) -> None:
        """Listen no more."""
        if self._workers:
            vars(self._iterator).pop("_try_get_data", None)
        self._iterator = None

    def tell(self, error: BaseException) -> None:
        """Add to an error which batch it is about, of which samples, and which worker died over it."""
        if isinstance(error, ConnectionError | EOFError):
            # Of a worker that is about to be dead: what it had open is closed a moment before.
            dying = wait([worker.sentinel for worker in self._workers], timeout=GRACE_S)
            for worker in self._workers:
                if worker.sentinel in dying:
                    worker.join(GRACE_S)
        told, notes = getattr(error, "__notes__", ()), self.deaths()
        if any(note in told for note in notes):
            return
        if not notes:
            # A worker that died without a trace, and batches in any order, may have been about another.
            known = all(worker.is_alive() for worker in self._workers) and getattr(self._loader, "in_order", True)
            at = f"while loading {self._named(self._number)}"
            notes = [at if known else f"while waiting for batch {self._number} of epoch {self._epoch}"]
        for note in notes:
            error.add_note(note)

    def deaths(self) -> list[str]:
        """In words, what each worker that died was asked for and has not given. What it was at is one of these."""
        asked = getattr(self._iterator, "_task_info", {})
        notes = []
        for number, worker in enumerate(self._workers):
            batches = [one + self._first for one, info in sorted(asked.items()) if tuple(info) == (number,)]
            if batches and not worker.is_alive():
                over = " or ".join(map(self._named, batches))
                notes.append(f"data worker {number} (pid {worker.pid}) died over {over}")
        return notes

    @property
    def _workers(self) -> list[Any]:
        return getattr(self._iterator, "_workers", []) if isinstance(self._loader, DataLoader) else []

    def _named(self, batch: int) -> str:
        text, indices = f"batch {batch} of epoch {self._epoch}", self._drawn.get(batch - self._first)
        if indices is None:
            return text
        samples = f"samples {list(indices)}" if isinstance(indices, list | tuple) else f"sample {indices}"
        return f"{text} ({samples})"

    def _looked(self, found: tuple[bool, Any]) -> tuple[bool, Any]:
        """After each of torch's looks for a batch, every few seconds; it looks for ever."""
        waited = time.monotonic() - self._since
        if not found[0] and not self._reported and waited >= LONG_S:
            self._reported = True
            info = getattr(self._iterator, "_task_info", {}).get(self._number - self._first)
            worker = f"data worker {info[0]} (pid {self._workers[info[0]].pid})" if info else "a worker"
            log.warning(
                "%s has been loading %s for %.0f s: should it hang, the training waits for ever; "
                "%s(timeout=SECONDS) ends it with an error",
                worker, self._named(self._number), waited, type_name(self._loader),
            )  # fmt: skip
        return found


class _Listened:
    """A sampler, with what its latest pass has given, by number, until it is taken out."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        # At once, as without us: what it draws at its start must come before what others draw.
        return self._noted(iter(self._sampler))

    def _noted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for number, indices in enumerate(iterator):
            self.drawn[number] = indices
            yield indices


def _listened_to(loader: Any) -> Iterator[Any]:
    """The loader's iterator; where nothing but torch's own sees the sampler, with that listened to."""
    name = "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader).__iter__ is not DataLoader.__iter__
        or hasattr(loader, "state_dict")
        or name not in vars(loader)
    ):
        return iter(loader)
    # A DataLoader lets nobody set these. Its iterator takes them once, at its start.
    own = vars(loader)[name]
    vars(loader)[name] = _Listened(own)
    try:
        return iter(loader)
    finally:
        vars(loader)[name] = own


_living: weakref.WeakSet[InHand] = weakref.WeakSet()


@cache
def _hear_of_deaths() -> None:
    """Say what a dead worker had in hand where torch's own handler, which is there from the first pass on, raises."""
    torchs = signal.getsignal(signal.SIGCHLD)
    if not callable(torchs) or threading.current_thread() is not threading.main_thread():
        return

    def handler(number: int, frame: Any) -> None:
        try:
            torchs(number, frame)
        except RuntimeError as error:
            for note in [note for one in list(_living) for note in one.deaths()]:
                error.add_note(note)
            raise

    signal.signal(signal.SIGCHLD, handler)
