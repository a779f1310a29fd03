"""The stager: a state's copy, made beside the training where that is safe, and proven to be of one moment.

Tensors that only the optimizer's step changes are copied behind the training, or written from where they live; before
that step comes the gate, which copies what the writer has not come to yet, waits for the little that is being written
from there at that moment, and compares their version counters. Whatever writes them elsewhere comes to
the gate first, or spoils the save: then nothing is copied beside the training any more. The first copy is made whole at
the boundary, and only watched, byte for byte: a training that always writes its weights elsewhere loses no save by it,
not even where no version counter tells of the writing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format.memory import available_bytes
from trainer_cli.checkpoint.format.outgoing import StateGoneError
from trainer_cli.checkpoint.format.port import Image
from trainer_cli.errors import SaveError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_LATEST_S = 1.0
"""So long after the last of it was read the writer waits for the gate before it judges by itself: no single write to a
tensor, of which a version counter tells at its end, lasts longer."""
_LATEST_SAMPLED_S = 0.2
"""And so long where samples tell of a write that is under way, too;"""
_WRITES_S = 0.05
"""or until the thread that trains had a processor for so long: whatever it writes has come to the next sample by then.
"""


class WeightsMovedError(StateGoneError):
    """Tensors changed while they were copied: the copy is of no one moment."""


class Staging:
    """The copy that one save writes. `staged` is done once the state may change."""

    def __init__(self, image: Image, *, overlapped: bool) -> None:
        self.staged: Future[None] = Future()
        self._image = image
        self._copied_at: float | None = None
        self.overlapped = overlapped
        self._judged = threading.Event()
        self._judging = threading.Lock()
        self._owner = threading.get_ident()
        self._used_s = _clock_of_this_thread()
        self._moved: list[str] = []
        self._late = image.copy_late() if overlapped else iter(())
        self._advancing = threading.Lock()
        if not overlapped:
            self.staged.set_result(None)

    def arrivals(self) -> Iterator[int]:
        """Copy what is left, telling how many bytes from the beginning have arrived; at the end, all have. In the
        writer's thread."""
        while (here := self._advance()) is not None:
            yield here
        self._image.finish()

    def copy(self) -> None:
        """Copy whatever is left, and wait until all has arrived. In the writer's thread."""
        for _ in self.arrivals():
            continue

    def end(self) -> None:
        """Nothing more is written. In the writer's thread."""
        try:
            self.copy()
        finally:
            self._image.end()
        self._settle()

    def copy_late(self) -> None:
        """Copy what the writer has not come to yet, whatever keeps it. Where that fails, the writer tells."""
        try:
            while self._advance() is not None:
                continue
            self._image.leave()
        except Exception as error:
            self._settle(error)
        else:
            self._settle()

    def _settle(self, failure: Exception | None = None) -> None:
        """The state may change, and the copy is worth nothing where there is a failure."""
        with self._advancing:
            if self.staged.done():
                return
            if failure is None:
                self.staged.set_result(None)
            else:
                self.staged.set_exception(failure)

    def _advance(self) -> int | None:
        """Copy some more, in whichever thread; None once nothing is left to copy."""
        with self._advancing:
            if self.staged.done() and (failure := self.staged.exception()) is not None:
                raise failure
            if self._copied_at is not None or self.staged.done():
                return None
            try:
                here = next(self._late, None)
            except BaseException as error:
                self.staged.set_exception(
                    error if isinstance(error, Exception) else SaveError("the copy was broken off")
                )
                raise
            if here is None:
                self._copied_at = time.monotonic()
                if not self._image.is_lived_in:
                    self.staged.set_result(None)
            return here

    def judge(self) -> list[str]:
        """The tensors that were changed since the copy was begun, as the first who asks finds them."""
        with self._judging:
            if not self._judged.is_set():
                self._moved = self._image.moved()
                self._judged.set()
        return self._moved

    def prove(self) -> None:
        """In the writer's thread, before the copy is committed.

        Raises:
            WeightsMovedError: it is worth nothing.
            StateGoneError: nor is it where the training did not wait for it.
        """
        if not self.overlapped:
            return
        if threading.get_ident() != self._owner:
            self._await_the_gate()
        if self.staged.done() and (failure := self.staged.exception()) is not None:
            raise failure
        if moved := self.judge():
            raise WeightsMovedError(
                f"the step was not saved: {_shown(moved)} changed outside the optimizer's step while it was copied",
                cure="Call trainer.before_weights_change() first, or set checkpoint.save_async=false.",
            )

    def _await_the_gate(self) -> None:
        """Or until all that the training wrote while the last of it was read is told by a version counter or sample."""
        now = time.monotonic()
        if not self._image.is_lived_in:
            self._judged.wait(_LATEST_S - (0.0 if self._copied_at is None else now - self._copied_at))
            return
        until, used_s = now + _LATEST_SAMPLED_S, self._used_s()
        while not self._judged.wait(_WRITES_S / 2) and time.monotonic() < until:
            if self._used_s() - used_s >= _WRITES_S:
                return


class Stager:
    """Takes copies of states into one image, one after the other."""

    def __init__(self, image: Image, *, available: Callable[[], int | None] = available_bytes) -> None:
        self.image = image
        self._available = available
        self._current: Staging | None = None
        self._late: Collection[Tensor] = ()
        self._is_built = False
        """Whether there is memory to settle in at the next gate."""
        self._to_forget = False
        """Whether memory was left at the last one."""
        self._overlaps = True
        self._proven = False

    def plan(self, tree: Mapping[str, Any]) -> str | None:
        """Get ready for a copy of a state; the reason why the host has no room for it, if it has none."""
        self._late, self._is_built = (), False
        return self._no_room(self.image.plan(tree))

    def prepare(self, tensors: Collection[Tensor]) -> Callable[[], object] | None:
        """Get memory for states of these tensors, if the host has the room; what is left of that, for any thread."""
        return None if self._no_room(self.image.needed_bytes(tensors)) is not None else self.image.prepare(tensors)

    def _no_room(self, needed: int) -> str | None:
        held = self.image.held_bytes
        if needed <= held or (available := self._available()) is None or needed <= (available + held) // 2:
            return None
        return f"a copy of the state takes {needed:,} bytes, more than half of the {available + held:,} available"

    def take(self, late: Collection[Tensor], trained: Collection[Tensor]) -> Staging:
        """Copy the planned state now, but for what may be copied beside the training."""
        overlapped = bool(late) and self._overlaps and self._proven
        self.image.take(_addresses(late), _addresses(trained), overlapped=overlapped)
        self._current, self._late = Staging(self.image, overlapped=overlapped), late
        return self._current

    def build(self) -> Callable[[], object] | None:
        """Get memory in which the state just taken may live from the next gate on, if that is worth it and the host has
        the room; what is left of that, for any thread."""
        if not (self._late and self._overlaps and self.image.is_homeless):
            return None
        # What they leave stays for a step.
        if (available := self._available()) is not None and available < 2 * self.image.held_bytes:
            return None
        try:
            left = self.image.build()
        except OSError as error:
            log.debug("weights stay where they are: %s", error)
            return None
        self._is_built = True
        return left

    @property
    def is_awaited(self) -> bool:
        """Whether there is anything to do at the gate."""
        return self._current is not None or self._is_built or self._to_forget

    def gate(self, *, asked: bool = False) -> bool:
        """Come here before the late tensors are written: waits until they are copied. True where they moved already.

        `asked` says that it is not the optimizer's step that comes now: what was only watched proves nothing then.
        """
        if self._to_forget:
            self._to_forget = False
            self.image.forget()
        moved = self._pass(asked=asked)
        if self._is_built:
            self._is_built = False
            if self._proven and self._overlaps and not (moved or asked):
                self.image.settle_in(self._late)
                self._to_forget = True
            else:
                self.image.forget()
        self._late = ()
        return moved

    def _pass(self, *, asked: bool = False) -> bool:
        current = self._current
        if current is None:
            return False
        current.copy_late()
        self._current = None
        if not current.overlapped and (asked or not self._overlaps):
            return False
        moved = current.judge()
        if not moved:
            self._proven = True
        elif self._overlaps:
            self._overlaps = False
            log.warning(
                "%s changed outside the optimizer's step, so from now on saves copy everything before training goes on",
                _shown(moved),
            )
        return bool(moved)

    def release(self) -> None:
        """Let the writer go on whatever comes: nothing is written to the late tensors meanwhile."""
        if self._current is not None and self._current.overlapped:
            self._pass()

    def close(self) -> None:
        """Give memory back."""
        self._current, self._late, self._is_built, self._to_forget = None, (), False, False
        self.image.close()


def _clock_of_this_thread() -> Callable[[], float]:
    """Tells, in any thread, for how many seconds this one has had a processor; 0 for ever where the system does not
    offer that, or once this one has ended."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def used() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0

    return used


def _addresses(tensors: Collection[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _shown(names: Collection[str]) -> str:
    few = sorted(names)[:3]
    return ", ".join(few) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
