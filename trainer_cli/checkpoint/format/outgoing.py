"""The bytes of one save on their way into a file, from where its tensors live themselves if nothing changes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

import torch

from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.threads import WorkerThread
from trainer_cli.errors import SaveError

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.memory import Memory
    from trainer_cli.checkpoint.storage.port import Sink

_PIECE_BYTES = 1 << 22
"""So much is handed over at a time while tensors live in what is written, and two or three pieces ahead of the disk."""
_LARGE_PIECE_BYTES = 1 << 25
"""And so much while nobody is expected: each piece takes a processor away from the training, several times."""
_FAR = 2 / 3
"""Nobody is expected for so much of the time after which somebody leaves at the soonest,"""
_UNDER_WAY = 3
"""if so many large pieces, which may be on their way to the disk, are there by then."""
_PATIENCE_S = 10.0
"""So long `leave` waits for what is being written at that moment."""
_MOST_AHEAD = 0.5
"""No more of all is copied ahead, by one thread: what else there is to copy all of them share, in less time."""
_SURELY = 0.9
"""Of what comes at the pace of before, so much comes surely."""
_REMEMBERED = 4
_TELLING = 0.22
"""The pace of a disk is told by so much, the last that was written,"""
_BEGINNING = 0.03
"""and not by so much at first: a file is got ready meanwhile, and pieces are handed over that wait for the disk."""


class StateGoneError(SaveError):
    """What was to be saved is there no more. No fault of the state: the next one can be saved."""


class Reach:
    """How much of a save is written before somebody waits to `leave` it, as the last ones tell."""

    def __init__(self) -> None:
        self._reached: deque[float] = deque(maxlen=_REMEMBERED)
        self._left_after_s: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, outgoing: Outgoing) -> None:
        """Learn from one that was left."""
        if outgoing.reached is not None and outgoing.left_after_s is not None:
            self._reached.append(outgoing.reached)
            self._left_after_s.append(outgoing.left_after_s)

    @property
    def soonest_s(self) -> float | None:
        """How long after it is begun somebody leaves the next one, at the soonest; None where nobody knows."""
        return min(self._left_after_s, default=None)

    @property
    def ahead(self) -> float:
        """How much of the next one, of 1, is better copied ahead from the beginning on."""
        # Rather the better half: each save finds out by itself where it is slow, but not where it need not have copied.
        usual = sorted(self._reached)[len(self._reached) // 2] if self._reached else 0.0
        return min(max(1 - _SURELY * usual, 0.0), _MOST_AHEAD)


class Outgoing:
    """Bytes that are handed over in order, from their beginning, in the writer's thread.

    Where tensors live in them, those change only after `leave`, which copies to another memory what is not handed over
    by then. Some of it a thread copies before, from the end backwards, at the pace of the disk:

        writer   ─ a piece, a piece, … ─>│     what was copied: no disk is waited for any more │
        copier                           │<─ … a part, a part ───                              │
        gate     `leave`: in its turn, between two pieces; the rest in the middle, by all threads

    Whoever has the turn may wait for the copier and, at the gate alone, for the two or three pieces on their way to the
    disk. Neither the copier nor the threads that write ever take it.

    Args:
        refuge: where tensors live in `memory`, that other one, of the same size.
        ahead: how much of all, of 1, is copied there before.
        soonest_s: how long after it is begun somebody leaves it. Once the pace of the disk is known, what will not be
            written by then is copied before, whatever was thought.
    """

    def __init__(
        self,
        memory: Memory,
        size_bytes: int,
        refuge: Memory | None = None,
        *,
        ahead: float = 0.0,
        soonest_s: float | None = None,
    ) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._refuge = refuge
        self._sink: Sink | None = None
        self._sent_bytes = self._lost_bytes = 0
        self._turn = threading.Lock()
        self._copies_from = size_bytes
        """What comes from here on the copier has, or will have."""
        self._ahead_from = size_bytes - int(size_bytes * ahead)
        self._soonest_s = soonest_s
        self._marks: deque[tuple[int, float]] = deque()
        """How much was written, and when, over as much as tells the pace."""
        self._copier: WorkerThread[tuple[int, int]] | None = None
        self._began_at: float | None = None
        self._written_here: tuple[int, float] | None = None
        """How much was written from where tensors live, and when the last of that was."""
        self.reached: float | None = None
        """How much of all, of 1, would have been written between `begin` and `leave` at the pace of what was; that may
        be more than there is. None where nobody knows."""
        self.left_after_s: float | None = None
        """How long after `begin` that was."""

    def begin(self, sink: Sink) -> None:
        """Write to a file, from the beginning on, whatever went to another before.

        Raises:
            StateGoneError: the beginning is gone.
        """
        with self._turn:
            self._sink, self._sent_bytes = sink, 0
            if self._lost_bytes:
                raise StateGoneError("its writer failed midway, and by then the weights had gone on")
            if self._refuge is not None:
                self._began_at, self._written_here = monotonic(), None
                self._marks.clear()

    def send(self, until: int, look: Callable[[Memory, int, int], object]) -> None:
        """Write what comes before a place. Each piece is shown to `look` meanwhile: its memory, beginning and end."""
        assert self._sink is not None
        while self._sent_bytes < until:
            if self._refuge is None:
                # Nobody waits for a turn, however long it takes.
                self._hand_over(self._sink, self._memory, until, look)
                continue
            with self._turn:
                if self._refuge is None:
                    continue
                piece = self._piece_bytes()
                if until == self._size_bytes:
                    # Sooner, not all that is copied had arrived.
                    self._copy_ahead(piece)
                self._hand_over_a_piece(self._sink, self._refuge, min(until, self._sent_bytes + piece), look)
                ends_here = self._written_here is None and self._sent_bytes == self._copies_from
            self._sink.wait(but_last=not ends_here)
            if ends_here:
                self._written_here = self._sent_bytes, monotonic()

    def leave(self) -> None:
        """Return once the tensors that live here may change: the rest is copied, and what was handed over is written.

        Raises:
            StateGoneError: the disk takes too long for that; what is written is worth nothing, and is not committed.
        """
        if self._refuge is None:
            # Whoever writes a copy is not waited for.
            self._note_reach()
            return
        with self._turn:
            self._note_reach()
            if self._refuge is None:
                return
            start, left = self._sent_bytes, self._copies_from - self._sent_bytes
            if left > 0:
                with Copying(self._refuge, torch.get_num_threads()) as copying:
                    copying.copy(self._memory.address + start, left, start)
                    copying.wait()
            self._end_copying()
            is_read = self._written_here is not None or self._is_read_in_time()
            self._lost_bytes = min(start, self._copies_from)
            # Memory first, and not before: who sees no refuge any more hands all the rest over without a turn.
            self._memory = self._refuge
            self._refuge = None
            if not is_read:
                raise StateGoneError(f"the disk took more than {_PATIENCE_S:.0f} s for a part of the state")

    def end(self) -> None:
        """Nothing more is written, so that all may change."""
        with self._turn:
            self._refuge = None
            if self._sent_bytes < self._size_bytes:
                # How far it would have come is not told by one that failed.
                self._began_at = None
            copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def _hand_over_a_piece(
        self, sink: Sink, refuge: Memory, end: int, look: Callable[[Memory, int, int], object]
    ) -> None:
        """In one's turn."""
        if self._sent_bytes < self._copies_from:
            self._hand_over(sink, self._memory, min(end, self._copies_from), look)
        else:
            self._end_copying()
            self._hand_over(sink, refuge, end, look)

    def _hand_over(self, sink: Sink, memory: Memory, end: int, look: Callable[[Memory, int, int], object]) -> None:
        start = self._sent_bytes
        sink.write(memory.view(self._size_bytes)[start:end], stays=True)
        self._sent_bytes = end
        look(memory, start, end)

    def _piece_bytes(self) -> int:
        if self._soonest_s is None or self._began_at is None:
            return _PIECE_BYTES
        taken, under_way = monotonic() - self._began_at, _UNDER_WAY * _LARGE_PIECE_BYTES
        written = self._sent_bytes - under_way
        is_far = taken < _FAR * self._soonest_s
        is_quick = written * (self._soonest_s - taken) >= under_way * taken
        return _LARGE_PIECE_BYTES if is_far and is_quick else _PIECE_BYTES

    def _copy_ahead(self, piece: int) -> None:
        """Have so much copied, from the end backwards, that it keeps pace with what is written. What comes next, to the
        end of a small piece, is left to be written from where it lives."""
        self._look_ahead()
        left = self._copies_from - self._ahead_from
        if left <= 0:
            return
        turns = max((self._ahead_from - self._sent_bytes) // piece, 1)
        # From whole pieces on, as they are written.
        start = (self._copies_from - -(-left // turns)) // _PIECE_BYTES * _PIECE_BYTES
        start = max(start, (self._sent_bytes // _PIECE_BYTES + 1) * _PIECE_BYTES)
        if start < self._copies_from:
            if self._copier is None:
                self._copier = WorkerThread("checkpoint-copy", self._copy)
            self._copier.hand_over((start, self._copies_from))
            self._copies_from = start

    def _look_ahead(self) -> None:
        """Reckon anew with the pace so far: disks do not keep that of the last save."""
        if self._soonest_s is None or self._began_at is None or self._sent_bytes < _BEGINNING * self._size_bytes:
            return
        now, telling = monotonic(), int(_TELLING * self._size_bytes)
        self._marks.append((self._sent_bytes, now))
        while len(self._marks) > 1 and self._sent_bytes - self._marks[1][0] >= telling:
            self._marks.popleft()
        sent_bytes, since = self._marks[0]
        if self._sent_bytes - sent_bytes < telling:
            return
        pace = (self._sent_bytes - sent_bytes) / max(now - since, 1e-6)
        comes_to = self._sent_bytes + int(_SURELY * pace * max(self._began_at + self._soonest_s - now, 0.0))
        self._ahead_from = max(comes_to, self._size_bytes - int(self._size_bytes * _MOST_AHEAD))

    def _copy(self, part: tuple[int, int]) -> None:
        start, end = part
        refuge = self._refuge
        if refuge is not None:
            refuge.copy(self._memory.address + start, end - start, start)

    def _end_copying(self) -> None:
        if self._copier is not None:
            # Until it has done all, also where this wait is broken off, whoever writes waits for it.
            self._copier.wait()
            self._copier.close()
            self._copier = None

    def _note_reach(self) -> None:
        if self._began_at is None or self.reached is not None:
            return
        self.left_after_s = monotonic() - self._began_at
        self.reached = self._sent_bytes / self._size_bytes
        if self._written_here is not None:
            written, at = self._written_here
            taken = max(at - self._began_at, 1e-6)
            self.reached = written / self._size_bytes * self.left_after_s / taken

    def _is_read_in_time(self) -> bool:
        """Once the disk has read all that was handed over; False where that takes too long."""
        try:
            if self._sink is not None:
                self._sink.wait(timeout_s=_PATIENCE_S)
        except TimeoutError as error:
            return error.errno is not None
        except Exception:
            # The writer is told of it, too, and tells.
            return True
        return True
