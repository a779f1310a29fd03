"""The bytes of one save on their way into a file, from where its tensors live themselves if nothing changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.errors import SaveError

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.memory import Memory
    from trainer_cli.checkpoint.storage.port import Sink

_Sample = np.ndarray[Any, Any]
_SAMPLED_BYTES = (1 << 17) + 4
"""One byte of so many is compared, the lowest of a number, which most changes change; never in one column alone."""
_PIECE_BYTES = 1 << 24
"""So much is handed over at a time while tensors live in what is written; `leave` waits for two such pieces."""


class StateGoneError(SaveError):
    """What was to be saved is there no more. No fault of the disk: the next state can be saved."""


class Outgoing:
    """Bytes that are written in order, from their beginning, in the writer's thread.

    Args:
        refuge: where tensors live in `memory`, another memory of this size. They change only after `leave`, which
            copies there what is not written by then.
    """

    def __init__(self, memory: Memory, size_bytes: int, refuge: Memory | None = None) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._refuge = refuge
        self._sink: Sink | None = None
        self._sent_bytes = self._lost_bytes = 0
        self._turn = threading.Lock()
        self._samples: list[tuple[int, int, _Sample]] = []
        self._changed: list[tuple[int, int]] = []

    def begin(self, sink: Sink) -> None:
        """Write to a file, from the beginning on, whatever went to another before.

        Raises:
            StateGoneError: the beginning is gone.
        """
        with self._turn:
            self._sink, self._sent_bytes, self._samples = sink, 0, []
            if self._lost_bytes:
                raise StateGoneError(
                    "the step was not saved: its writer failed midway, and by then the weights had gone on"
                )

    def send(self, until: int, look: Callable[[Memory, int, int], object]) -> None:
        """Write what comes before a place. Each piece is shown to `look` meanwhile: its memory, beginning and end."""
        assert self._sink is not None
        while self._sent_bytes < until:
            with self._turn:
                start, memory = self._sent_bytes, self._memory
                end = min(until, start + _PIECE_BYTES) if self._refuge is not None else until
                self._sink.write(memory.view(self._size_bytes)[start:end], stays=True)
                self._sent_bytes = end
                if self._refuge is not None:
                    self._samples.append((start, end, _sample(memory, start, end)))
                look(memory, start, end)
            if self._refuge is not None:
                self._sink.wait(but_last=True)

    def leave(self) -> None:
        """Return once the tensors that live here may change. Where writing failed, the writer tells."""
        if self._refuge is None:
            # Whoever writes a copy is not waited for.
            return
        with self._turn:
            if self._refuge is None:
                return
            self._changed = self._compared()
            start, left = self._sent_bytes, self._size_bytes - self._sent_bytes
            if left:
                with Copying(self._refuge, torch.get_num_threads()) as copying:
                    copying.copy(self._memory.address + start, left, start)
                    copying.wait()
            if self._sink is not None:
                with suppress(Exception):
                    self._sink.wait()
            self._memory, self._refuge, self._lost_bytes = self._refuge, None, start

    def changed(self) -> list[tuple[int, int]]:
        """Beginnings and ends of pieces that were changed where tensors live after they were handed over and before
        `leave`, as far as samples of them tell: a write to every part of a tensor is seen, one to few elements may not
        be. The digest and what is written may differ there."""
        with self._turn:
            return self._changed if self._refuge is None else self._compared()

    def _compared(self) -> list[tuple[int, int]]:
        return [
            (start, end)
            for start, end, before in self._samples
            if not np.array_equal(before, _sample(self._memory, start, end))
        ]


def _sample(memory: Memory, start: int, end: int) -> _Sample:
    return np.frombuffer(memory.view(end), dtype=np.uint8)[start:end:_SAMPLED_BYTES].copy()
