"""The stager: a state's copy, made beside the training where that is safe, and proven to be of one moment.

Tensors that only the optimizer's step changes are copied behind the training; before that step comes the gate, which
waits for the copy and compares their version counters. Whatever writes them elsewhere comes to the gate first, or
spoils the save: then nothing is copied beside the training any more. The first copy is made whole at the boundary, and
only watched, byte for byte: a training that always writes its weights elsewhere loses no save by it, not even where no
version counter tells of the writing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from trainer_cli.checkpoint.format.memory import available_bytes
from trainer_cli.checkpoint.format.port import Image
from trainer_cli.errors import SaveError

log = logging.getLogger(__name__)

_LATEST_S = 1.0
"""So long the writer waits for the gate before it judges by itself: no single write to a tensor lasts longer."""


class WeightsMovedError(SaveError):
    """Tensors changed while they were copied: the copy is of no one moment."""


class Staging:
    """The copy that one save writes."""

    def __init__(self, image: Image, *, overlapped: bool) -> None:
        self.staged: Future[None] = Future()
        self._image = image
        self.overlapped = overlapped
        self._judged = threading.Event()
        self._judging = threading.Lock()
        self._owner = threading.get_ident()
        self._moved: list[str] = []
        if not overlapped:
            self.staged.set_result(None)

    def copy(self) -> None:
        """Copy what was left, and wait until all has arrived. In the writer's thread."""
        if self.overlapped:
            try:
                self._image.copy_late()
            except BaseException as error:
                self.staged.set_exception(error)
                raise
            self.staged.set_result(None)
        self._image.finish()

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
        """
        if not self.overlapped:
            return
        if threading.get_ident() != self._owner:
            self._judged.wait(_LATEST_S)
        if moved := self.judge():
            raise WeightsMovedError(
                f"the step was not saved: {_shown(moved)} changed outside the optimizer's step while it was copied",
                cure="Call trainer.before_weights_change() first, or set checkpoint.save_async=false.",
            )


class Stager:
    """Takes copies of states into one image, one after the other."""

    def __init__(self, image: Image, *, available: Callable[[], int | None] = available_bytes) -> None:
        self.image = image
        self._available = available
        self._current: Staging | None = None
        self._overlaps = True
        self._proven = False

    def plan(self, tree: Mapping[str, Any]) -> str | None:
        """Get ready for a copy of a state; the reason why the host has no room for it, if it has none."""
        needed, held = self.image.plan(tree), self.image.held_bytes
        if needed <= held or (available := self._available()) is None or needed <= (available + held) // 2:
            return None
        return f"a copy of the state takes {needed:,} bytes, more than half of the {available + held:,} available"

    def take(self, late: Collection[int], trained: Collection[int]) -> Staging:
        """Copy the planned state now, but for what may be copied beside the training."""
        overlapped = bool(late) and self._overlaps and self._proven
        self.image.take(late, trained, overlapped=overlapped)
        self._current = Staging(self.image, overlapped=overlapped)
        return self._current

    def gate(self, *, asked: bool = False) -> bool:
        """Come here before the late tensors are written: waits until they are copied. True where they moved already.

        `asked` says that it is not the optimizer's step that comes now: what was only watched proves nothing then.
        """
        current = self._current
        if current is None:
            return False
        current.staged.exception()
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
            self.gate()


def _shown(names: Collection[str]) -> str:
    few = sorted(names)[:3]
    return ", ".join(few) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
