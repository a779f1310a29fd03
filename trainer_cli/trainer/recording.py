"""A trainer's records: the scopes of their names, and when its loggers are opened, closed and written to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.errors import UserError, second_to
from trainer_cli.loggers import Logger, MetricRange, Now, RunFacts
from trainer_cli.state import find_evaluated_average
from trainer_cli.steps import RunStatus
from trainer_cli.trainer.full_disk import status_after
from trainer_cli.trainer.metric_logger import (
    Interruption,
    Medium,
    MetricLogger,
    histogram_medium,
    image_medium,
    table_medium,
    text_medium,
)

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class Recording:
    """Adds to the record of the trainer's current step, and passes records to its loggers."""

    def __init__(self, trainer: Trainer, loggers: Mapping[str, Logger]) -> None:
        self._trainer, self._loggers = trainer, loggers
        self.metric_logger = MetricLogger(loggers)
        self.first_step_recorded = False
        """Whether an earlier process has written the record of the step that this fit began with."""
        self._repeats = False
        """See `set_repeats`."""
        self.loaders: tuple[str, ...] = ()
        """Names of the validation loaders of the fit or evaluation."""
        self._ended: RunStatus | None = None
        """How the last fit ended; None: there was none."""
        self._scopes: list[str] = []
        self._warned = False

    def set_repeats(self, repeats: bool) -> None:
        """Set whether steps that earlier processes have logged are computed again with the same values."""
        self._repeats = repeats

    def reset(self) -> None:
        """Forget what an earlier fit has logged."""
        self.metric_logger = MetricLogger(self._loggers)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[str]:
        """Put `name/` before the names of what is logged inside the block, unless a name begins with it already. An
        evaluation of a loader runs in a scope of its name."""
        self._scopes.append(name)
        try:
            yield name
        finally:
            self._scopes.pop()

    @property
    def name_scope_path(self) -> str:
        """Each open scope with a `/` after it; empty outside of any."""
        return "".join(f"{scope}/" for scope in self._scopes)

    def log_metrics(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Add metrics to the record of the current step.

        What is logged before the first fit is in its first record. What is logged after a step's record, as
        in `on_fit_end`, is another record of that step; after a fit it is written at once. A finished run that is
        started again makes no step, and writes nothing again.
        """
        # Only in a fit: `validate` returns what is logged, so a logger is not needed there.
        if self._trainer.fitting and not self._loggers and not self._warned:
            self._warned = True
            log.warning("metrics are logged, but there is no logger that writes them: give the trainer `loggers`")
        self.metric_logger.add({self._scoped(name): value for name, value in metrics.items()})
        self._write_after_fit()

    def log_text(self, name: str, text: str) -> None:
        """Add a text. A text, image or histogram replaces an earlier one of the same name and step."""
        self._add_medium(text_medium(self._scoped(name), text))

    def log_image(self, name: str, image: Any) -> None:
        """Add an image: a tensor or array of shape (height, width) or (channels, height, width), with 1, 3 or 4
        channels; floats from 0 to 1, or integers from 0 to 255. A tensor is copied to the host at once.

        Raises:
            UserError: it has another shape.
        """
        self._add_medium(image_medium(self._scoped(name), image))

    def log_histogram(self, name: str, values: Any) -> None:
        """Add the distribution of the finite values. A tensor is copied to the host at once."""
        self._add_medium(histogram_medium(self._scoped(name), values))

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], matrix: bool = False) -> None:
        """Add a table of texts and numbers; `matrix`: each row is a label and numbers, which are shown in shades.

        Raises:
            UserError: a row does not fit the columns.
        """
        self._add_medium(table_medium(self._scoped(name), columns, rows, matrix))

    def _add_medium(self, medium: Medium) -> None:
        """Add a medium to the record of this step, which is written at once after a fit."""
        self.metric_logger.add_medium(medium)
        self._write_after_fit()

    def _scoped(self, name: str) -> str:
        """The name with the open scopes before it, unless it begins with them already."""
        if not isinstance(name, str):
            raise UserError(f"what is logged needs a name, a string; got {name!r}")
        scope = self.name_scope_path
        return name if name.startswith(scope) else f"{scope}{name}"

    def flush(self, *, wait: bool = True) -> dict[str, float]:
        """Pass the record of this step to every logger, and return its metrics.

        Args:
            wait: False: a record whose metrics are on a device is passed on later.
        """
        progress = self._trainer.progress
        return self.metric_logger.flush(progress, self._trainer.loop.epochs_at(progress), wait=wait)

    def start(self) -> None:
        """Drop the records that are later than the present state, and open the loggers."""
        trainer = self._trainer
        self.first_step_recorded = trainer.resumed and trainer.loop.pending_eval_record is None
        # A pending evaluation completes the record of its step, so that one is written again.
        keep = trainer.progress.step if self.first_step_recorded else trainer.progress.step - 1
        tolerant = trainer.checkpoint is not None and trainer.checkpoint.tolerates_errors
        self.metric_logger.start(self._facts(), trainer.progress, keep=keep, tolerant=tolerant)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the loggers outside of a fit, and write at the end what was logged inside the block.

        What was logged before the first fit stays in the record of that fit.
        """
        # On the way out in reverse: write, close, put back.
        with ExitStack() as stack:
            # After a fit nothing waits for a later one: everything in the record is written now.
            if not self.metric_logger.was_closed:
                stack.enter_context(self.metric_logger.record_kept())
            stack.push(self._close_opened)
            self.metric_logger.reopen(self._facts())
            yield

    def _close_opened(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the records when the fit is left, with the status that follows from its error."""
        status = RunStatus.finished if error is None else status_after(error, self._trainer)
        # Records after a fit do not change how it ended.
        self.close(self._ended or status)

    def close(self, status: RunStatus, *, writes_rest: bool = True) -> None:
        """Close all loggers, also after an error in one.

        Args:
            status: how the run ended.
            writes_rest: write what was logged after the last record.
        """
        try:
            if writes_rest:
                self._write_rest()
            else:
                self.metric_logger.record.clear()
        except BaseException as error:
            status = status_after(error, self._trainer)
            raise
        finally:
            self.metric_logger.close(status, lambda error: status_after(error, self._trainer))

    def end_fit(self, status: RunStatus, *, writes_rest: bool = True) -> None:
        """Finalize all callbacks and close all loggers, also after an error in one; arguments as in `close`."""
        self._ended = status
        try:
            # First: a save in flight, which `finalize` waits for, makes durable what was logged before it.
            self._trainer.hooks.call_all("finalize")
        except BaseException as error:
            self._ended = status_after(error, self._trainer)
            raise
        finally:
            self.close(self._ended, writes_rest=writes_rest)

    def end_failed_fit(self, error: BaseException) -> None:
        """Let the callbacks know of the error that ended a fit, then end it. A second error becomes a note of it."""
        # Both run, whatever the other raises.
        try:
            with second_to(error):
                self._trainer.hooks.call_all("on_fit_exception", self._trainer, error)
        finally:
            with second_to(error):
                self.end_fit(status_after(error, self._trainer))

    def _write_rest(self) -> None:
        """Pass on what was logged after the last record. What a failed step has logged belongs to that step."""
        if self.metric_logger.is_open:
            trainer = self._trainer
            progress, begun_step = trainer.progress, trainer.step.step_idx + 1
            step = max(progress.step, begun_step) if trainer.fitting else progress.step
            self.metric_logger.flush(replace(progress, step=step), trainer.loop.epochs_at(progress))

    def _write_after_fit(self) -> None:
        """After a fit no later record takes what is logged, so write it at once."""
        if self.metric_logger.was_closed and not self.metric_logger.is_open and not self._trainer.fitting:
            with self.opened():
                pass

    def _facts(self) -> RunFacts:
        """The facts that loggers get at the start of a fit, or of an evaluation that is not part of a fit."""
        trainer = self._trainer
        return RunFacts(
            run_dir=trainer.run_dir,
            name=trainer.name,
            total_steps=trainer.loop.last_step if trainer.fitting else None,
            start_step=trainer.progress.step,
            start_samples=trainer.progress.samples,
            console=trainer.logging.console,
            config=trainer.config,
            hparams=trainer.hparams,
            keep_best=getattr(getattr(trainer.checkpoint, "settings", None), "keep_best", None),
            now=self._now,
            loss=trainer.loop.training_log.request_loss if trainer.fitting else None,
            loaders=self.loaders,
            average=lambda: find_evaluated_average(trainer.callbacks),
            ranges=self._ranges,
            repeats=self._repeats,
        )

    def _now(self) -> Now:
        """Snapshot of the current progress, for displays, which call this from threads of their own."""
        # Read once: the main thread may change it between two reads.
        trainer = self._trainer
        activity, evaluating, loop = self.metric_logger.activity, trainer.evaluating, trainer.loop
        if activity == Interruption.evaluating and evaluating is not None:
            activity = f"{activity} {evaluating.name}, batch {evaluating.batch_idx + 1:,}"
        progress = trainer.progress
        if not trainer.fitting:
            return Now(progress.step, progress.samples, activity, self.metric_logger.pauses)
        return Now(
            progress.step,
            progress.samples,
            activity,
            self.metric_logger.pauses,
            epoch=loop.epochs_at(progress),
            share=loop.share_at(progress),
            time_left_s=loop.time_left_s,
        )

    def _ranges(self) -> Mapping[str, MetricRange]:
        """The values of the metrics of all records, if a logger knows them."""
        if self._trainer.run_dir is None:
            return {}
        for logger in self._loggers.values():
            if (ranges := logger.metric_ranges()) is not None:
                return ranges
        return {}
