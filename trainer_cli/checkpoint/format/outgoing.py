"""The bytes of one save on their way into a file, from where its tensors live themselves if nothing changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.errors import SaveError

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.memory import Memory
    from trainer_cli.checkpoint.storage.port import Sink

_PIECE_BYTES = 1 << 24
"""So much is handed over at a time while tensors live in what is written, and one piece ahead of the disk."""
_PATIENCE_S = 10.0
"""So long `leave` waits for what is being written at that moment."""


class StateGoneError(SaveError):
    """What was to be saved is there no more. No fault of the state: the next one can be saved."""


class Outgoing:
    """Bytes that are written in order, from their beginning, in the writer's thread.

    Args:
        refuge: where tensors live in `memory`, another memory of this size. They change only after `leave`, which
            copies there what is not handed over by then.
    """

    def __init__(self, memory: Memory, size_bytes: int, refuge: Memory | None = None) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._refuge = refuge
        self._sink: Sink | None = None
        self._sent_bytes = self._lost_bytes = 0
        self._turn = threading.Lock()

    def begin(self, sink: Sink) -> None:
        """Write to a file, from the beginning on, whatever went to another before.

        Raises:
            StateGoneError: the beginning is gone.
        """
        with self._turn:
            self._sink, self._sent_bytes = sink, 0
            if self._lost_bytes:
                raise StateGoneError("its writer failed midway, and by then the weights had gone on")

    def send(self, until: int, look: Callable[[Memory, int, int], object]) -> None:
        """Write what comes before a place. Each piece is shown to `look` meanwhile: its memory, beginning and end."""
        assert self._sink is not None
        while self._sent_bytes < until:
            if self._refuge is None:
                # Nobody waits for a turn, however long it takes.
                self._hand_over(self._sink, until, look)
                continue
            with self._turn:
                self._hand_over(self._sink, min(until, self._sent_bytes + _PIECE_BYTES), look)
            self._sink.wait(but_last=True)

    def leave(self) -> None:
        """Return once the tensors that live here may change: the rest is copied, and what was handed over is written.

        Raises:
            StateGoneError: the disk takes too long for that; what is written is worth nothing, and is not committed.
        """
        if self._refuge is None:
            # Whoever writes a copy is not waited for.
            return
        with self._turn:
            if self._refuge is None:
                return
            start, left = self._sent_bytes, self._size_bytes - self._sent_bytes
            if left:
                with Copying(self._refuge, torch.get_num_threads()) as copying:
                    copying.copy(self._memory.address + start, left, start)
                    copying.wait()
            # Memory first: who sees no refuge any more takes it without a turn.
            self._memory = self._refuge
            self._refuge, self._lost_bytes = None, start
            self._await_the_disk()

    def end(self) -> None:
        """Nothing more is written, so that all may change."""
        with self._turn:
            self._refuge = None

    def _hand_over(self, sink: Sink, end: int, look: Callable[[Memory, int, int], object]) -> None:
        start, memory = self._sent_bytes, self._memory
        sink.write(memory.view(self._size_bytes)[start:end], stays=True)
        self._sent_bytes = end
        look(memory, start, end)

    def _await_the_disk(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.wait(timeout_s=_PATIENCE_S)
        except TimeoutError as error:
            if error.errno is None:
                raise StateGoneError(f"the disk took more than {_PATIENCE_S:.0f} s for a part of the state") from None
        except Exception:
            # The writer is told of it, too, and tells.
            return
