"""The training loop: steps, logs, evaluations and saves until the run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer_cli.batches import sample_count
from trainer_cli.errors import second_to
from trainer_cli.goodput import Activity
from trainer_cli.outputs import TokenCount, read_outputs
from trainer_cli.parallel import is_of_peer
from trainer_cli.policy import Occasion, Stop
from trainer_cli.schema import LoopConfig, SchedulerInterval
from trainer_cli.signatures import build_section, takes_fields_of
from trainer_cli.steps import Interval
from trainer_cli.terminal import format_count, html_table
from trainer_cli.trainer.evaluate import evaluate, evaluate_remaining
from trainer_cli.trainer.finite import check_end
from trainer_cli.trainer.lengths import Lengths, begin_epoch
from trainer_cli.trainer.metric_logger import Interruption
from trainer_cli.trainer.noted_end import note_end, request_again
from trainer_cli.trainer.prefetch import PaddingPrefetcher, TrainBatches, device_prefetcher
from trainer_cli.trainer.training_log import TrainingLog
from trainer_cli.trainer.validation_loop import Due, ValidationLoop, last_due

if TYPE_CHECKING:
    from trainer_cli.parallel import Agreement
    from trainer_cli.steps import Progress
    from trainer_cli.trainer.microbatch import Microbatches
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a fit ended."""

    finished: bool
    reason: str
    step: int
    metrics: dict[str, float]
    """The last record; of a finished run that was resumed, those of its last checkpoint."""
    ended_by: str | None = None
    """The name of the callback that decided the end, if one did."""
    comes_again: bool = False
    """Whether the same fit would end here again, though the run is not finished."""

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        facts = {"finished": str(self.finished), "reason": self.reason, "step": f"{self.step:,}"}
        metrics = {name: f"{value:.6g}" for name, value in self.metrics.items()}
        return html_table(["FitResult", ""], list({**facts, **metrics}.items()))


@takes_fields_of(LoopConfig)
class TrainingLoop(Lengths):
    """Trains a model until a limit of its settings, or until a stop is requested.

    Args:
        config: the settings as a whole; or give fields of `LoopConfig` by their names, such as `max_duration="3ep"`.
    """

    def __init__(self, *, config: LoopConfig | None = None, **fields: Any) -> None:
        settings = build_section(LoopConfig, type(self).__name__, config, fields)
        super().__init__(settings)
        self.microbatches = self._make_microbatches()
        self.pending_eval_record: dict[str, float] | None = None
        self._pending_at_end = False
        """Whether the pending evaluation was due because the run was at its end."""
        self._length_epoch: int | None = None
        """The epoch for which the train loader was last asked for its length."""
        self.next_event = 0
        """The next step at which anything but training may be due: a log, an evaluation, a save or the end."""
        self.next_log_step = 0
        """The next step that may be logged; exact if `log_interval` is in steps or epochs, else every step."""
        self.leave_out_not_finite = False
        """Whether batches whose loss is not finite are left out of the logged means."""
        self.failed_step: int | None = None
        """The step that was being made, or had just been, when an error ended the training; None: it came elsewhere."""
        self.batch_size = 1
        """Samples in a batch of one rank, or 1 if the loader does not say."""
        self._batches: TrainBatches | None = None
        self.training_log = TrainingLog()
        self._start_step = 0
        self._noted_end: dict[str, Any] | None = None
        """The requested end that the loaded checkpoint contains, or the one being saved; see `note_end`."""
        self._eval_intervals: list[Interval] = []

    @property
    def validation(self) -> ValidationLoop:
        """Evaluates the loaders that have no loop of their own."""
        return self.evaluations.validation

    @validation.setter
    def validation(self, loop: ValidationLoop) -> None:
        self.evaluations.validation = loop

    def prepare(self, trainer: Trainer, train_loader: Any, resumed: Progress | None = None) -> None:
        """Prepare to train on a loader.

        Args:
            resumed: the progress of the checkpoint that is resumed.

        Raises:
            UserError: as from `learn_lengths`.
        """
        self._train_loader, self._length_epoch = train_loader, None
        self.learn_lengths(train_loader, resumed)
        if resumed is not None:
            self.check_hard_stop(resumed)
        trainer.freezing.learn_lengths(self)
        prefetcher = device_prefetcher(trainer.device)
        if trainer.agreement is not None:
            prefetcher = PaddingPrefetcher(prefetcher, trainer.strategy.group)
        account = trainer.metric_logger.time
        self._batches = TrainBatches(train_loader, prefetcher, self.epoch_batches, account)
        self.batch_size = getattr(train_loader, "batch_size", None) or 1
        self.training_log.prepare(trainer.device, only_finite=self.leave_out_not_finite)
        self._began = time.monotonic()

    def pass_over(self, trainer: Trainer, epoch: int, batch: int, epoch_samples: int) -> None:
        """Continue the training at a later position of its data. The skipped data counts as no step."""
        progress = trainer.progress
        self.batches.close()
        epoch_before = progress.epoch
        progress.epoch, progress.batch, progress.epoch_samples = epoch, batch, epoch_samples
        if self.epoch_batches is not None and self.steps_per_epoch is not None:
            steps = self.steps_to(self._train_loader, progress)
            progress.passed_over = steps - progress.step - self.epoch_offset
        for begun_epoch in range(epoch_before + 1, epoch + 1):
            trainer.schedulers.step(trainer, SchedulerInterval.epoch, epoch=begun_epoch)

    def run(self, trainer: Trainer, val_loaders: Mapping[str, Any]) -> Stop:
        """Train until there is a reason to stop, and return it."""
        self._start_step, trainer.step.step_idx = trainer.progress.step, -1
        self.failed_step = None
        self._eval_intervals = self.evaluations.intervals(val_loaders, callbacks=bool(trainer.hooks["run_validation"]))
        request_again(self._noted_end, trainer, self.settings)
        self._noted_end = None
        trainer.freezing.update(trainer)
        trainer.trained.repeat()
        stop = self._begin(trainer, val_loaders)
        trainer.loading.restore_rng()
        loop_idx = 0
        try:
            with trainer.metric_logger.time.during(Activity.training):
                while stop is None:
                    stop = self._run_until_eval(trainer, val_loaders, loop_idx)
                    loop_idx += 1
        except RuntimeError as error:
            # The error of another rank's death names no step.
            if is_of_peer(error):
                error.add_note(f"while step {trainer.progress.step + 1} was trained")
            raise
        finally:
            if trainer.progress.step != self._start_step:
                trainer.loading.keep_generators()
            # Also after an error: workers of the loader must not outlive the fit.
            if self._batches is not None:
                self._batches.end()
        if stop.is_end and trainer.progress.step == self._start_step > 0 and trainer.strategy.group.is_main:
            log.warning(
                "nothing was trained: the run was finished at step %d before (%s); a larger max_duration continues it",
                trainer.progress.step,
                stop.reason,
            )
        return stop

    def why_stop(self, trainer: Trainer) -> Stop | None:
        """The stop that is due, or None."""
        process_s = trainer.requests.share(time.monotonic() - self._began)
        trainer.requests.hold_stop(holds=self._holds(trainer.progress))
        return self.limits.why_stop(trainer.progress, process_s=process_s, stop_request=trainer.stop_request)

    @property
    def time_left_s(self) -> float | None:
        """Seconds until `max_time` stops this process; None without it."""
        limit_s = self.limits.max_time_s
        return None if limit_s is None else max(limit_s - (time.monotonic() - self._began), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The means since the last log, the record of a pending evaluation, and a requested end if there is one."""
        state: dict[str, Any] = {"meter": self.training_log.state_dict(), "owed_record": self.pending_eval_record}
        if self._pending_at_end:
            state["owed_at_end"] = True
        if self._noted_end is not None:
            state["ended"] = self._noted_end
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        self.training_log.load_state_dict(state["meter"])
        self.pending_eval_record, self._noted_end = state["owed_record"], state.get("ended")
        self._pending_at_end = state.get("owed_at_end", False)

    def reset(self) -> None:
        """Reset the state of an earlier training."""
        self.training_log.reset()
        self.pending_eval_record, self._pending_at_end, self._noted_end = None, False, None
        # Also what callbacks and a small memory have set.
        self.leave_out_not_finite = False
        self.microbatches = self._make_microbatches()

    def _make_microbatches(self) -> Microbatches | None:
        """What splits batches, if `loop.microbatch` is set; else None."""
        if self.settings.microbatch is None:
            return None
        # Not above: few trainings split batches.
        from trainer_cli.trainer.microbatch import Microbatches

        return Microbatches(self.settings.microbatch)

    def follow(self, earlier: TrainingLoop) -> None:
        """Continue the training of another loop of the same trainer, such as a shorter one."""
        self.training_log, self.pending_eval_record = earlier.training_log, earlier.pending_eval_record
        self._pending_at_end, self._noted_end = earlier._pending_at_end, earlier._noted_end

    @property
    def has_data(self) -> bool:
        """Whether a train loader was given, so that a checkpoint has a position in it."""
        return self._batches is not None

    @property
    def batches(self) -> TrainBatches:
        """The batches of the train loader, after `prepare`."""
        assert self._batches is not None
        return self._batches

    @property
    def batch_samples(self) -> int | None:
        """The number of samples that the train loader states for the present batch; None: it states none."""
        return self.batches.batch_samples

    def data_state(self, trainer: Trainer) -> dict[str, Any]:
        """The train loader's position after the last batch trained on, not after one fetched ahead."""
        return self.batches.state(trainer.progress)

    def _begin(self, trainer: Trainer, val_loaders: Mapping[str, Any]) -> Stop | None:
        """The evaluation and save before the first step of this process; returns a stop that is already due."""
        # The record of the resumed step is written already: metrics logged now join the next one.
        evaluates_first = self.pending_eval_record is not None or self._wants_evaluation_at_start(trainer)
        is_recorded = trainer.resumed and not evaluates_first
        if self.pending_eval_record is not None:
            trainer.metric_logger.add(self.pending_eval_record)
            due_stop = self.why_stop(trainer)
            is_over = due_stop is not None and due_stop.is_end
            # At an end although max_duration has grown: schedules and patience skip evaluations due only by an end.
            at_end = is_over or self._pending_at_end
            self.pending_eval_record, self._pending_at_end = None, False
            pending = self.evaluations.owed(trainer.progress, val_loaders, is_last=at_end)
            if not evaluate(trainer, pending, is_last=is_over):
                return self._stop_before_eval(trainer, at_end=at_end)
            self._log_remaining(trainer, self.why_stop(trainer))
        elif self._wants_evaluation_at_start(trainer) and not evaluate(trainer, Due(val_loaders), is_last=False):
            # Interrupted: the next attempt makes this evaluation and its record.
            trainer.metric_logger.record.clear()
            return trainer.stop_request
        if not is_recorded:
            trainer.recording.flush()
        with trainer.metric_logger.pause(Interruption.saving, trainer.progress):
            trainer.hooks.call("on_save_opportunity", trainer, Occasion.pre_train)
        stop = self.why_stop(trainer)
        if stop is not None:
            self._offer_save(trainer, stop)
        return stop

    def _wants_evaluation_at_start(self, trainer: Trainer) -> bool:
        """Whether `eval_at_start` asks for an evaluation before step 1 that no earlier attempt has made."""
        progress = trainer.progress
        return self.settings.eval_at_start and progress.step == 0 and progress.evaluated_step != 0

    def _run_until_eval(self, trainer: Trainer, val_loaders: Mapping[str, Any], loop_idx: int) -> Stop | None:
        """Train up to the next evaluation or the end, with logs and saves on the way; then evaluate."""
        requests = trainer.requests
        stop = due = None
        with ExitStack() as stack:
            try:
                with trainer.module_modes.beginning(trainer):
                    trainer.hooks.call("on_enter_train", trainer, stack, self._train_loader, self, loop_idx)
                    trainer.hooks.call("on_train_start", trainer, trainer.model, self._train_loader, self, loop_idx)
                while True:
                    self._follow_length(trainer)
                    next_event = self._next_event(trainer)
                    try:
                        self._steps(trainer, next_event)
                    except Exception:
                        self.failed_step = trainer.step.step_idx + 1
                        raise
                    eval_requested = requests.take_evaluation(holds=self._holds(trainer.progress))
                    if requests.roll_back_requested:
                        # Not above: few trainings go back.
                        from trainer_cli.trainer.roll_back import roll_back

                        roll_back(trainer, self._train_loader)
                        continue
                    trainer.freezing.update(trainer)
                    # Before the stop is decided: it may be due by time.
                    self._count_time(trainer)
                    trainer.schedulers.warn_of_lost_rate(trainer.progress.step, self.steps_per_epoch, self.total_steps)
                    stop = self.why_stop(trainer)
                    is_over = stop is not None and stop.is_end
                    # If a stop was requested between two steps, this step has its record and evaluation already.
                    is_log_due = _due(self.log_interval, trainer.progress)
                    writes_log = (is_over or is_log_due) and self.training_log.has_means(trainer)
                    if writes_log:
                        self.training_log.write(trainer, is_due=is_log_due)
                    if trainer.progress.evaluated_step != trainer.progress.step:
                        due = self.evaluations.due(trainer.progress, val_loaders)
                        if eval_requested:
                            due = Due(val_loaders)
                        elif is_over:
                            due = last_due(val_loaders, due)
                    if due is not None or stop is not None:
                        break
                    trainer.recording.flush(wait=writes_log)
                    self._offer_save(trainer, None)
                # Before hooks that a longer training does not call here.
                trainer.module_modes.end(continues=due is None or not _has_work(trainer, due.regular))
                trainer.hooks.call_all("on_train_end", trainer, trainer.model, self, loop_idx)
            except BaseException as error:
                with second_to(error):
                    trainer.hooks.call_all("on_train_exception", trainer, error)
                raise
        if due is not None and _has_work(trainer, due):
            stops_early = stop is not None and not stop.finished
            if stops_early or not evaluate(trainer, due, is_last=is_over):
                return self._stop_before_eval(trainer, at_end=is_over)
            if stop is None or stop.is_part:
                stop = self.why_stop(trainer)
                # This evaluation may have ended the run, and the final weights are evaluated on every loader.
                remaining = due.remaining(val_loaders)
                if stop is not None and stop.is_end and (remaining.loaders or trainer.hooks["run_validation"]):
                    evaluate_remaining(trainer, remaining)
            self._log_remaining(trainer, stop)
        trainer.recording.flush()
        self._offer_save(trainer, stop)
        return stop

    def _stop_before_eval(self, trainer: Trainer, *, at_end: bool) -> Stop:
        """Stop before a due evaluation: the next attempt makes it, and completes this step's record.

        Args:
            at_end: the evaluation is due because the run is at its end.
        """
        self.pending_eval_record, self._pending_at_end = trainer.recording.flush(), at_end
        stop = trainer.stop_request or self.why_stop(trainer)
        assert stop is not None, "an evaluation is only put off for a stop"
        limit_reached = self.limits.why_stop(trainer.progress, process_s=0.0, stop_request=None)
        self._offer_save(trainer, stop, no_step_left=limit_reached is not None and limit_reached.is_end)
        return stop

    def _offer_save(self, trainer: Trainer, stop: Stop | None, *, no_step_left: bool = False) -> None:
        """Offer callbacks a save after a step: an ordinary one, the final one, or one that stops early.

        Args:
            no_step_left: the stop came after the last step of the run, but before its evaluation.

        Raises:
            NotFiniteError: the training is at its end, and its weights are not finite.
        """
        if no_step_left or (stop is not None and stop.finished):
            check_end(trainer)
        occasion = Occasion.last_stop if no_step_left else Occasion.at(stop)
        trainer.note_stop(stop)
        self._noted_end = note_end(trainer, self.settings, is_held=self._holds(trainer.progress))
        with trainer.metric_logger.pause(Interruption.saving, trainer.progress):
            trainer.hooks.call("on_save_opportunity", trainer, occasion)

    def _holds(self, progress: Progress) -> bool:
        """Whether a request to finish the run is held, because `min_duration` is not reached."""
        min_duration = self.limits.min_duration
        return min_duration is not None and not min_duration.reached(progress)

    def _next_event(self, trainer: Trainer) -> int:
        """The earliest step after this one at which something other than training may be due."""
        now = trainer.progress
        end_step = self.limits.next_step(now, holds=trainer.requests.held_stop is not None)
        steps = [end_step, *trainer.freezing.next_step(now)]
        steps += [step for call in trainer.hooks["next_step"] if (step := call(trainer)) is not None]
        intervals = [interval for interval in (self.log_interval, *self._eval_intervals) if interval is not None]
        steps += [interval.next_step(now) for interval in intervals]
        self.next_log_step = end_step if self.log_interval is None else min(end_step, self.log_interval.next_step(now))
        # Rank 0 decides: the others know nothing of saves in flight and requests.
        self.next_event = int(trainer.strategy.group.broadcast_number(min(steps)))
        return self.next_event

    def _steps(self, trainer: Trainer, event: int) -> None:
        """Make optimizer steps until step `event`, or until a request or logged metrics must be handled.

        The hot path: hooks are looked up once, and nothing but training is done.
        """
        model, progress, step = trainer.model, trainer.progress, trainer.step
        training_log = self.training_log
        batches_per_step, means, hooks = self.settings.grad_accum_steps, training_log.means, trainer.hooks
        record, batches = trainer.metric_logger.record, self.batches
        # The loader's samples per batch can differ from the leading size of the tensors.
        samples_per_batch = batches.samples_per_batch
        step.bind(trainer)
        batch_start, step_start = hooks["on_train_batch_start"], hooks["on_train_step_start"]
        step_end, batch_end = hooks["on_train_step_end"], hooks["on_train_batch_end"]
        check_sample, train_loader = trainer.sample_check.check, self._train_loader
        requests, agreement, length = trainer.requests, trainer.agreement, self.epoch_batches
        tokens = TokenCount(progress, agreement, at_every_step=self.counts_tokens)

        while progress.step < event and not requests.interrupt_requested:
            if not progress.batch and self._follow_length(trainer):
                break  # What is due, and when, has changed.
            step.step_idx = progress.step
            progress.last_samples, progress.last_tokens = progress.samples, progress.tokens
            progress.last_epoch = progress.epoch
            for batch_number in range(1, batches_per_step + 1):
                batch_idx = progress.batch
                batch = batches.next(progress)
                for call in batch_start:
                    call(trainer, model, batch, batch_idx)
                for call in step_start:
                    call(trainer, model, batch)
                size = sample_count(batch, batches.batch_samples)
                if agreement is not None:
                    is_last = batch_number == batches_per_step
                    size = self._begin_shared_batch(trainer, agreement, size, is_last=is_last)
                step.begin_batch(size)
                if step.evaluates_again:
                    step.batches.append((batch, size))
                raw = step.train_batch(batch)
                loss, outputs = read_outputs(raw)
                if step.counts:
                    means.add(loss, outputs, step.weigh(outputs))
                    check_sample(train_loader, "train", batch, size, outputs)
                if training_log.expected:
                    training_log.check_expected(trainer)
                progress.samples += size
                if step.counts and (self.counts_tokens or (outputs and "tokens" in outputs)):
                    tokens.add(outputs)
                progress.batch += 1
                progress.epoch_samples += size if samples_per_batch is None else samples_per_batch
                is_epoch_end = batches.is_over(progress)
                if agreement is not None and length is None:
                    # Ranks whose loaders differ in length must begin the next epoch together.
                    is_epoch_end = agreement.total(is_epoch_end) > 0
                if batch_number == batches_per_step or is_epoch_end:
                    step.end_step()
                    progress.step += 1
                    if agreement is not None:
                        self._end_shared_step(trainer, agreement, tokens)
                    if is_epoch_end:
                        self._end_epoch(trainer)
                for call in step_end:
                    call(trainer, model, raw, batch)
                for call in batch_end:
                    call(trainer, model, raw, batch, batch_idx)
                if is_epoch_end:
                    break
            if record:
                if agreement is None:
                    break
                if progress.step < event and not requests.interrupt_requested:
                    # The other ranks may have nothing to record.
                    trainer.recording.flush()
        tokens.finish()

    def _follow_length(self, trainer: Trainer) -> bool:
        """At the beginning of an epoch, ask the train loader for its length: a dataset may have grown. Returns whether
        the length has changed."""
        progress, loader = trainer.progress, self._train_loader
        if progress.batch or self._length_epoch == progress.epoch:
            return False
        self._length_epoch = progress.epoch
        begin_epoch(loader, progress.epoch)
        if self.epoch_batches is None:
            return False
        self.agree_on_length(loader, trainer.strategy.group)
        batches_before, differed_before = self.epoch_batches, progress.epochs_differ
        if not self.follow_length(loader, progress):
            return False
        self.batches.length = self.epoch_batches
        # Told once a run: loaders whose length changes often would fill the log.
        if not differed_before:
            log.info(
                "epoch %d has %s instead of %d: durations in epochs follow, and schedules keep the number of steps "
                "that they were made for",
                progress.epoch, format_count(self.epoch_batches or 0, "batch"), batches_before,
            )  # fmt: skip
        return True

    def _begin_shared_batch(self, trainer: Trainer, agreement: Agreement, size: int, is_last: bool) -> int:
        """Prepare the step for a batch, if there is more than one rank.

        Args:
            size: samples in the batch.
            is_last: whether `grad_accum_steps` batches of the step are complete with it.

        Returns:
            The number of samples that count: 0 for a padding batch.
        """
        assert self._batches is not None
        step, length = trainer.step, self.epoch_batches
        step.counts = self._batches.prefetcher.counts
        size = size if step.counts else 0
        step.completes = is_last or trainer.progress.batch + 1 == length
        agreement.batch_samples += size
        if self.settings.grad_accum_steps != 1:
            # Without a length it is unknown whether a batch is the last of its epoch: average every one.
            trainer.strategy.sync_gradients(trainer.model, step.completes or length is None)
        return size

    def _end_shared_step(self, trainer: Trainer, agreement: Agreement, tokens: TokenCount) -> None:
        """Count the samples and tokens of all ranks, and let the loop handle what any of them has requested."""
        # Not this rank's samples, so that the progress of all ranks is the same.
        trainer.progress.samples = trainer.progress.last_samples + agreement.samples
        tokens.end_step()
        if agreement.interrupt:
            trainer.requests.accept_interrupt()

    def _end_epoch(self, trainer: Trainer) -> None:
        """Move to the beginning of the next epoch, after the last step of one."""
        progress = trainer.progress
        steps, stated = -(-progress.batch // self.settings.grad_accum_steps), self.settings.steps_per_epoch
        if progress.epoch == 0 and self.epoch_batches is None and stated not in (None, steps):
            log.warning(
                "the first epoch has %s, and loop.steps_per_epoch is %d, which durations and logs count as an epoch",
                format_count(steps, "step"), stated,
            )  # fmt: skip
        progress.epoch, progress.batch, progress.epoch_samples = progress.epoch + 1, 0, 0
        trainer.schedulers.step(trainer, SchedulerInterval.epoch)
        self.batches.close()

    def logs(self, trainer: Trainer) -> bool:
        """`Trainer.is_log_step`."""
        progress, stop = _after_step(trainer), trainer.stop_request
        if progress is None:
            return False
        # A stop from which the run is resumed makes no log.
        ends = self.limits.max_duration.reached(progress) or (stop is not None and stop.is_end)
        return _due(self.log_interval, progress) or ends

    def is_first(self, trainer: Trainer) -> bool:
        """`Trainer.is_first_iteration`."""
        return bool(trainer.step.step_idx == self._start_step)

    def is_final(self, trainer: Trainer) -> bool:
        """`Trainer.is_final_iteration`."""
        if (progress := _after_step(trainer)) is None:
            return False
        limits = (self.limits.max_duration, self.limits.hard_stop)
        is_at_limit = any(limit is not None and limit.reached(progress) for limit in limits)
        return trainer.stop_request is not None or is_at_limit

    def _count_time(self, trainer: Trainer) -> None:
        """Set the seconds of the progress to those of rank 0. Collective."""
        progress = trainer.progress
        # Rank 0's clock: a stop by time must come at the same step on every rank.
        seconds = trainer.strategy.group.broadcast_number(trainer.metric_logger.seconds())
        progress.last_seconds, progress.seconds = progress.seconds, seconds

    def _log_remaining(self, trainer: Trainer, stop: Stop | None) -> None:
        """Log the means since the last log at the end of the run."""
        if stop is not None and stop.is_end and self.training_log.has_means(trainer):
            self.training_log.write(trainer, is_due=False)


def _after_step(trainer: Trainer) -> Progress | None:
    """The progress at the end of the current step; None before the first one.

    While the step is being made only its number is known, and the other counts are those before it.
    """
    step_idx, progress = trainer.step.step_idx, trainer.progress
    if step_idx < 0:
        return None
    is_made = progress.step > step_idx
    return progress if is_made else replace(progress, step=step_idx + 1)


def _has_work(trainer: Trainer, due: Due) -> bool:
    """Whether an evaluation that is due has loaders, or callbacks that evaluate."""
    return bool(due.loaders or (due.callbacks and trainer.hooks["run_validation"]))


def _due(interval: Interval | None, progress: Progress) -> bool:
    """Whether something at this interval is due at the step just made; None: never."""
    return interval is not None and interval.due(progress)
