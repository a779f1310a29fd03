"""A worker process: answers requests until it is told to leave, or until its parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch.utils.data._utils import worker as torch_worker

from trainer_cli.data.children import PARENTS_SIGNALS
from trainer_cli.data.randomness import seed_random
from trainer_cli.data.transport import send

NOWHERE = -1
"""The place of a worker that is at none."""

_WATCH_S = 0.25


class Source(Protocol):
    """What workers get a copy of."""

    dataset: Any

    def fetch(self, request: Any, at: Callable[[int], None]) -> Any:
        """The answer to a request; `at(place)` is called before each thing that may take long."""
        ...

    def tell(self, request: Any, place: int | None) -> str:
        """In words, what is done for a request at a place: `sample 5 of epoch 0`."""
        ...


def work(source: Source, pipe: Any, shared: tuple[Any, Any, Any], number: int, count: int, seed: int) -> None:
    """A worker's life."""
    closing, turn, progress = shared
    for one in PARENTS_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    threading.Thread(target=_leave_in_time, args=(closing,), daemon=True).start()
    torch.set_num_threads(1)
    seed_random((seed + number) & 0xFFFFFFFFFFFFFFFF)
    # What `torch.utils.data.get_worker_info()` tells the dataset.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=count, seed=seed + number, dataset=source.dataset
    )

    def at(place: int) -> None:
        progress[2 * number] += 1
        progress[2 * number + 1] = place

    while (asked := _received(pipe)) is not None:
        at(NOWHERE)
        of_turn, request = asked
        answer: Any
        try:
            answer = source.fetch(request, at) if of_turn == turn.value else None
        except BaseException as error:
            answer = Failure.of(error, number)
        at(NOWHERE)
        try:
            send(pipe, answer)
        except BrokenPipeError:
            return
        except Exception as error:
            send(pipe, Failure.of(error, number))


@dataclass(frozen=True, slots=True)
class Failure:
    """What `fetch` raised, in a form that survives the way to the parent."""

    type: type[Exception]
    text: str
    whole: Exception | None
    """The error itself, where it survives the way as it is."""
    notes: list[str]

    @classmethod
    def of(cls, error: BaseException, number: int) -> Failure:
        """The failure of worker `number`, while the error is being handled."""
        error.add_note(f"in data worker {number}:\n{traceback.format_exc().rstrip()}")
        text, kind = str(error), type(error)
        if isinstance(error, Exception):
            assert issubclass(kind, Exception)
            for made in (cls(kind, text, error, error.__notes__), cls(kind, text, None, error.__notes__)):
                with suppress(Exception):
                    if str(ForkingPickler.loads(ForkingPickler.dumps(made)).error()) == text:
                        return made
        return cls(RuntimeError, f"{kind.__name__}: {text}", None, error.__notes__)

    def error(self) -> Exception:
        """The error, to be raised."""
        error = self.whole if self.whole is not None else self.type(self.text)
        error.__notes__ = self.notes
        return error


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _leave_in_time(closing: Any) -> None:
    """Leave, whatever the dataset is doing, when told to or when the parent, killed, can tell nobody.

    Another parent's id shows its death at once, unless it died before this thread began; its pipe shows that
    too, but only when no process that it started later holds a copy of it.
    """
    above = os.getppid()
    parent = multiprocessing.parent_process()
    while os.getppid() == above and parent is not None and parent.is_alive() and not closing.value:
        time.sleep(_WATCH_S)
    os._exit(0)
