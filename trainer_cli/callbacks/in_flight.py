"""The save that is being written while the training goes on: at most one, from its copy to its outcome."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.async_checkpointer import AsyncCheckpointer
from trainer_cli.checkpoint.commit import INTACT, CheckpointMetadata, disk_error
from trainer_cli.checkpoint.policy import Decision, Occasion
from trainer_cli.errors import SaveError, UserError

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
"""A save in flight is waited for at least this long,"""
_SLOWEST_BYTES_PER_S = 2_000_000
"""or as long as it takes at this rate."""
_INTERRUPTED_TIMEOUT_S = 10.0
"""After a second Ctrl-C it is waited for no longer than this."""
_REPORTED_WAIT_S = 5.0
"""A wait is reported from this length on."""
ORDINARY = (Occasion.pre_train, Occasion.step)
"""Occasions after which the training goes on, so that a save may be written behind it."""


@dataclass(frozen=True, slots=True)
class InFlightSave:
    """One save whose outcome the training does not know yet."""

    step: int
    path: Path
    decision: Decision
    written: Future[None]
    metrics: Mapping[str, float]
    requested: bool
    """Whether this save was requested by the user; if it fails, it is requested again."""
    last_saved_step: int | None
    """The step saved before it, which is the newest again if this save fails."""


class BackgroundSaves:
    """Saves behind the training, at most one at a time. The training's thread alone calls its methods."""

    def __init__(self, checkpointer: AsyncCheckpointer) -> None:
        self.checkpointer = checkpointer
        self.current: InFlightSave | None = None
        self.prepared = False
        self._interrupted = False

    def interrupt(self) -> None:
        """Wait no longer than a few seconds from now on."""
        self._interrupted = True

    @property
    def needs_memory(self) -> bool:
        """Whether `prepare` is due: the memory is still reserved for no state, and no save uses it."""
        return not self.prepared and self.current is None

    def prepare(self, trainer: Trainer) -> None:
        """Reserve memory for saves of this training's state, which is complete after the first step. The first save
        would wait for it otherwise."""
        self.prepared = True
        self.checkpointer.prepare(trainer.checkpoint_state())

    def begin(
        self,
        trainer: Trainer,
        path: Path,
        decision: Decision,
        metadata: CheckpointMetadata,
        *,
        requested: bool,
        last_saved_step: int | None,
        after_commit: Callable[[], object],
    ) -> None:
        """Copy the state of this step and have it written; the trainer polls once it is.

        Raises:
            SaveError: the state could not be copied.
        """
        self._interrupted = False
        with errors_of_save(metadata.step, path):
            trainer.metric_logger.write_out()
            saving = self.checkpointer.save(
                trainer.checkpoint_state(),
                path,
                metadata=metadata,
                trained=[parameter for parameter in trainer.model.parameters() if parameter.requires_grad],
                before_commit=trainer.metric_logger.make_durable,
                after_commit=after_commit,
            )
        self.current = InFlightSave(
            metadata.step, path, decision, saving.written, metadata.metrics, requested, last_saved_step
        )

        def request_poll(written: Future[None]) -> None:
            trainer.interrupt_requested = True

        saving.written.add_done_callback(request_poll)

    def request(self) -> None:
        """The save in flight serves a request, too."""
        assert self.current is not None
        self.current = replace(self.current, requested=True)

    def must_wait(self, trainer: Trainer, occasion: Occasion, best_metric: str | None) -> bool:
        """Whether what is decided now depends on the outcome of the save in flight, so that it never depends on how
        fast the disk is.

        Args:
            best_metric: the metric that ranks checkpoints, if one does.
        """
        save, metrics = self.current, trainer.metric_logger.last
        if save is None:
            return False
        if occasion not in ORDINARY:
            return True
        if save.step == trainer.progress.step:
            # The same step again: only an evaluation since then makes a difference.
            return not same_metrics(save.metrics, metrics)
        return best_metric in metrics

    def poll(self, *, wait: bool) -> tuple[InFlightSave, SaveError | None] | None:
        """The save in flight and why it failed, if it did, once it has ended; None while it has not.

        Args:
            wait: return only once it has ended.

        Raises:
            SaveError: it does not end.
        """
        save = self.current
        if save is None or not (wait or save.written.done()):
            return None
        if not save.written.done() and not self._drained(save):
            raise SaveError(
                f"the save of step {save.step} has not ended after {self._timeout_s:.0f} s", where=str(save.path)
            )
        self.current = None
        try:
            with errors_of_save(save.step, save.path):
                save.written.result()
        except SaveError as failure:
            return save, failure
        return save, None

    def close(self) -> None:
        """Wait for the save in flight, and give its memory back."""
        self.checkpointer.close(self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        held_bytes = self.checkpointer.buffer.held_bytes
        return _INTERRUPTED_TIMEOUT_S if self._interrupted else max(_TIMEOUT_S, held_bytes / _SLOWEST_BYTES_PER_S)

    def _drained(self, save: InFlightSave) -> bool:
        try:
            if self.checkpointer.drain(min(_REPORTED_WAIT_S, self._timeout_s)):
                return True
            log.info("waiting for the save of step %d to be written", save.step)
            return self.checkpointer.drain(self._timeout_s)
        except BaseException:
            # An interrupt of this wait is meant for the next one, too.
            self.interrupt()
            raise


@contextmanager
def errors_of_save(step: int, path: Path) -> Iterator[None]:
    """Raise whatever goes wrong as a SaveError that names the save. Mistakes of the user's stay what they are."""
    try:
        yield
    except (SaveError, UserError):
        raise
    except OSError as error:
        raise disk_error(error, path) from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise SaveError(f"step {step} could not be saved: {said}", where=str(path), cure=INTACT) from error


def same_metrics(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Equal metrics; NaN equals NaN here."""
    return first.keys() == second.keys() and all(
        value == second[name] or (math.isnan(value) and math.isnan(second[name])) for name, value in first.items()
    )
