"""A save that goes on behind the training: from the step that it holds to the moment when its outcome is known."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.checkpoint.asynchronous import AsyncCheckpointer
from trainer_cli.checkpoint.checkpointer import Saving
from trainer_cli.checkpoint.policy import Decision, Occasion
from trainer_cli.checkpoint.writer import Facts
from trainer_cli.errors import SaveError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_DRAINING_S = 600.0
"""So long a save in flight is waited for at least,"""
_SLOWEST = 2_000_000
"""or as long as it takes at so many bytes a second."""
_TOLD_S = 5.0
"""A wait is told from so long on."""
_HURRIED_S = 10.0
"""So long an end that somebody wants at once does."""
ORDINARY = (Occasion.pre_train, Occasion.step)
"""Moments after which the training goes on: the save may, too."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One save in flight."""

    step: int
    path: Path
    decision: Decision
    saving: Saving
    metrics: Mapping[str, float]
    asked: bool
    last_saved_step: int | None
    """The one before it: it holds again if this one fails."""


class Flights:
    """At most one save in flight. All but writing, and removing what may go for it, is the training's own thread's."""

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        self.checkpointer = checkpointer
        self.current: Flight | None = None
        self.prepared = False
        self._spoilt = False
        self._hurried = False

    @property
    def is_to_prepare(self) -> bool:
        """Whether nothing is got ready yet, and nothing is in the way of that."""
        return not self.prepared and self.current is None

    def hurry(self) -> None:
        """Somebody wants the end at once: do not wait long any more."""
        self._hurried = True

    def prepare(self, trainer: Trainer) -> None:
        """Get ready for saves of this training's state, which is all there after a first step."""
        self.prepared = True
        weights = [one for one in trainer.model.state_dict().values() if isinstance(one, Tensor)]
        self.checkpointer.prepare([*weights, *_late_tensors(trainer)])

    def begin(
        self,
        trainer: Trainer,
        path: Path,
        decision: Decision,
        facts: Facts,
        *,
        state: Mapping[str, Any],
        asked: bool,
        last_saved_step: int | None,
        after_commit: Callable[[], object],
    ) -> None:
        """Begin to save this step; `trainer` is told to look up once it is written."""
        self._hurried = False
        saving = self.checkpointer.save(
            state,
            path,
            facts=facts,
            late=_late_tensors(trainer),
            trained=[parameter for parameter in trainer.model.parameters() if parameter.requires_grad],
            before_commit=trainer.journal.make_durable,
            after_commit=after_commit,
        )
        self.current = Flight(facts.step, path, decision, saving, facts.metrics, asked, last_saved_step)

        def tell(written: Future[None]) -> None:
            trainer.attention = True

        saving.written.add_done_callback(tell)

    def gate(self, *, asked: bool = False) -> None:
        """Come here before weights are written: waits until a save in flight has its copy of them.

        `asked`: it is somebody else than the optimizer's step who writes them.
        """
        if self.checkpointer.gate(asked=asked):
            self._spoilt = True

    def must_land(self, trainer: Trainer, occasion: Occasion, best: str | None) -> bool:
        """Whether what is decided now depends on what becomes of the save: never on how fast the disk is.

        `best` is the metric that ranks checkpoints, if one does.
        """
        flight, metrics = self.current, trainer.journal.last
        if flight is None:
            return False
        if occasion not in ORDINARY or self._spoilt:
            return True
        if flight.step == trainer.progress.step:
            # Once more the same step's end: only an evaluation since then is news.
            return not same_metrics(flight.metrics, metrics)
        return best in metrics

    def ask(self) -> None:
        """The save in flight is one that was asked for, too."""
        assert self.current is not None
        self.current = replace(self.current, asked=True)

    def land(self, *, wait: bool) -> tuple[Flight, SaveError | None] | None:
        """Take up the save in flight, if it has come to its end, or once it has: the save, and why it failed if it did.

        Raises:
            SaveError: it comes to no end.
        """
        flight = self.current
        if flight is None or not (wait or flight.saving.written.done()):
            return None
        if not flight.saving.written.done() and not self._settled(flight):
            raise SaveError(
                f"the save of step {flight.step} has not come to an end in {self._patience_s:.0f} s",
                where=str(flight.path),
            )
        self.current, self._spoilt = None, False
        failure = flight.saving.written.exception()
        if failure is not None and not isinstance(failure, SaveError):
            raise failure
        return flight, failure

    @property
    def _patience_s(self) -> float:
        size_bytes = self.checkpointer.stager.image.held_bytes
        return _HURRIED_S if self._hurried else max(_DRAINING_S, size_bytes / _SLOWEST)

    def _settled(self, flight: Flight) -> bool:
        """Wait for its end, as long as that may take."""
        try:
            if self.checkpointer.settle(min(_TOLD_S, self._patience_s)):
                return True
            log.info("waiting for the save of step %d to be written", flight.step)
            return self.checkpointer.settle(self._patience_s)
        except BaseException:
            # Whoever breaks the wait off wants the end, not the next wait.
            self.hurry()
            raise

    def close(self) -> None:
        """Wait for the end of what is written, and let go."""
        self.checkpointer.close(self._patience_s)


def saves_behind(wanted: bool | None) -> bool:
    """Whether saves are written behind the training: as wished, else where that takes no processor from it."""
    if wanted is not None:
        return wanted
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable > 1


def same_metrics(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Equal metrics; NaN equals NaN here."""
    return first.keys() == second.keys() and all(
        value == second[name] or (math.isnan(value) and math.isnan(second[name])) for name, value in first.items()
    )


def _late_tensors(trainer: Trainer) -> list[Tensor]:
    """The tensors that change in the optimizer's step or right after it: its parameters, what it keeps of them, and
    what callbacks say of theirs."""
    kept = [] if trainer.optimizer is None else trainer.optimizer.state.values()
    states = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
    return [*trainer.parameters, *states, *(one for call in trainer.callbacks.values() for one in call.late_tensors())]
