"""How long epochs and the training are, in batches and optimizer steps, and where in them a position is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trainer_cli.data import length_of
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.policy import Limits
from trainer_cli.schema import LoopConfig
from trainer_cli.steps import Duration, Interval, StepCounts, Unit, count_epoch_steps, count_steps, limit_batches
from trainer_cli.trainer.validation_loop import EvaluationSchedule
from trainer_cli.values import check_duration

if TYPE_CHECKING:
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.steps import Progress


def begin_epoch(train_loader: Any, epoch: int) -> None:
    """Let a loader ask its data for their length in an epoch; others have one length."""
    if (begin := getattr(train_loader, "begin", None)) is not None:
        begin(epoch)


class Lengths:
    """The lengths and intervals of a training's settings, after `learn_lengths` has read the train loader."""

    limits: Limits

    def __init__(self, settings: LoopConfig) -> None:
        self.settings = settings
        self.evaluations = EvaluationSchedule(settings)
        self.log_interval: Interval | None = None
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        """Optimizer steps in `max_duration`, if known."""
        self.planned_epoch_steps: int | None = None
        """Steps of the run's first epoch, which schedules and other numbers of steps keep if epochs differ."""
        self.planned_steps: int | None = None
        """`total_steps` by the length of the first epoch."""
        self._first_epoch: tuple[int | None, int | None, int | None] | None = None
        """Batches and steps of the run's first epoch, and the steps in `max_duration` by them."""
        self.epoch_batches: int | None = None
        self.epoch_offset = 0
        """Steps that the run would be further on if all epochs had had the present length."""
        self.most_batches: int | None = None
        """Batches of the shortest of the ranks' loaders, if these have lengths."""
        self.counts_tokens = False
        """Whether some duration is in tokens."""
        self._of_epochs: list[Interval] = []
        """The intervals in epochs, which follow the length of the present one."""

    def agree_on_length(self, train_loader: Any, group: ProcessGroup) -> None:
        """Let epochs of all ranks have the batches of the shortest loader. Collective."""
        # With unequal lengths a rank would wait for gradients of one that has no batch left.
        lengths = [length for length in group.gather(length_of(train_loader)) if length is not None]
        self.most_batches = min(lengths, default=None) if group.world_size > 1 else None

    def learn_first_epoch(self, train_loader: Any, group: ProcessGroup) -> None:
        """Take over the length of the run's first epoch. Collective."""
        begin_epoch(train_loader, 0)
        self.agree_on_length(train_loader, group)
        batches, settings = self._batches_of(train_loader), self.settings
        steps = count_epoch_steps(batches, settings.grad_accum_steps, settings.steps_per_epoch)
        self._first_epoch = batches, steps, self._steps_in_max_duration(train_loader)

    def learn_lengths(self, train_loader: Any, resumed: Progress | None = None) -> None:
        """Set the lengths that intervals need; from `resumed` on, epochs may have another length than before.

        Raises:
            UserError: the loader is empty, or a duration needs the length of a loader that has none.
        """
        settings = self.settings
        begin_epoch(train_loader, 0 if resumed is None else resumed.epoch)
        self.epoch_batches = self._batches_of(train_loader)
        self.steps_per_epoch = count_epoch_steps(
            self.epoch_batches, settings.grad_accum_steps, settings.steps_per_epoch
        )
        self.epoch_offset = 0 if resumed is None else self._offset(train_loader, resumed)
        try:
            self.log_interval = self.interval(settings.log_interval)
            self.evaluations.learn(self.interval)
            max_duration, hard_stop = self.interval(settings.max_duration), self.interval(settings.hard_stop)
            min_duration = self.interval(settings.min_duration)
        except ValueError as error:
            raise UserError(str(error)) from None
        assert max_duration is not None, "the schema refuses a null max_duration"
        max_time = check_duration("loop.max_time", settings.max_time, units=(Unit.SECOND,))
        max_time_s = float(max_time.value) if max_time else None
        self.limits = Limits(max_duration, hard_stop, min_duration, max_time_s)
        self.total_steps = self.length(train_loader)
        self.planned_epoch_steps, self.planned_steps = self.steps_per_epoch, self.total_steps
        # Only if the data has grown: after a change of settings, such as a batch size, present lengths are planned.
        data_differs = self._differs() or (resumed is not None and resumed.epochs_differ)
        if self._first_epoch is not None and data_differs:
            _, self.planned_epoch_steps, self.planned_steps = self._first_epoch

    def check_hard_stop(self, progress: Progress) -> None:
        """Raise UserError if a run is beyond its `hard_stop`, which then cannot end it there."""
        hard_stop = self.limits.hard_stop
        if hard_stop is not None and hard_stop.passed(progress):
            raise UserError(
                f"loop.hard_stop is {self.settings.hard_stop}, but the run is at step {progress.step} already",
                where="loop.hard_stop",
                cure="Leave it out, or set a later one. resume=RUN@stepN goes back to an earlier checkpoint.",
            )

    def follow_length(self, train_loader: Any, at: Progress) -> bool:
        """Take over the length of the epoch that begins at `at`; intervals in epochs follow. Returns whether it differs
        from the length of the epoch before."""
        batches = self._batches_of(train_loader)
        if batches is None or batches == self.epoch_batches:
            return False
        self.epoch_batches = batches
        self._note_difference(at)
        self.steps_per_epoch = count_epoch_steps(batches, self.settings.grad_accum_steps, self.settings.steps_per_epoch)
        self.epoch_offset = self._offset(train_loader, at)
        for interval in self._of_epochs:
            interval.steps_per_epoch, interval.offset = self.steps_per_epoch, self.epoch_offset
        self.total_steps = self.length(train_loader)
        return True

    def _differs(self) -> bool:
        """Whether the present epoch has another length than the first."""
        return self._first_epoch is not None and self._first_epoch[0] != self.epoch_batches

    def _note_difference(self, progress: Progress) -> None:
        """Record in the progress, for the rest of the run, that epochs differ in length."""
        progress.epochs_differ = progress.epochs_differ or int(self._differs())

    @property
    def last_step(self) -> int | None:
        """The step at which `max_duration` or `hard_stop` ends the training, if known."""
        hard_stop = self.limits.hard_stop
        steps = [self.total_steps, None if hard_stop is None else hard_stop.end]
        return min((step for step in steps if step is not None), default=None)

    def share_at(self, progress: Progress) -> float:
        """The completed fraction of the training, which ends at `max_duration` or an earlier `hard_stop`."""
        limits = (self.limits.max_duration, self.limits.hard_stop)
        # The limit that is reached first has the largest fraction.
        return min(max(limit.share(progress) for limit in limits if limit is not None), 1.0)

    def interval(self, duration: Any) -> Interval | None:
        """An interval of this training, or None for null."""
        if duration is None:
            return None
        parsed = self.resolved(Duration.parse(duration))
        self.counts_tokens = self.counts_tokens or parsed.unit is Unit.TOKEN
        if parsed.unit is not Unit.EPOCH:
            return Interval(parsed, self.steps_per_epoch)
        # Epochs are counted in steps of the present length, so a changed length shifts their ends.
        interval = Interval(parsed, self.steps_per_epoch, self.epoch_offset)
        self._of_epochs.append(interval)
        return interval

    def resolved(self, duration: Duration) -> Duration:
        """A duration; a share of the run as one in the unit of `max_duration`."""
        return duration.within(Duration.parse(self.settings.max_duration))

    def steps_of(self, duration: Duration) -> int | None:
        """The number of optimizer steps that reach a duration by the length of the first epoch, or None if unknown."""
        if duration.unit is Unit.RUN and self.planned_steps is not None:
            return math.ceil(duration.value * self.planned_steps)
        return self.resolved(duration).steps(self.planned_epoch_steps)

    def require_steps(self, what: str, duration: Duration, location: str | None = None) -> int:
        """See `steps_of`; `what` names setting and value for the error.

        Raises:
            ConfigError: the number is unknown.
        """
        if (steps := self.steps_of(duration)) is None:
            message = f"{what}, which is not a number of steps"
            raise ConfigError(message, location=location, hint=f"{self.cure_by_steps(duration)} it in steps.")
        return steps

    def cure_by_steps(self, duration: Duration) -> str:
        """The beginning of a hint for a duration without a known number of steps."""
        lacks_length = self.planned_epoch_steps is None and self.resolved(duration).unit is Unit.EPOCH
        return "The train loader has no length: set loop.steps_per_epoch=N, or give" if lacks_length else "Give"

    def checkpoint_interval(self, key: str, duration: Any) -> Interval | None:
        """The interval of a setting of `checkpoint`.

        Raises:
            ConfigError: a part of an epoch, if the number of steps of an epoch is unknown.
        """
        try:
            return self.interval(duration)
        except ValueError as error:
            raise ConfigError(str(error), location=f"checkpoint.{key}") from None

    def step_counts(
        self,
        train_loader: Any,
        progress: Progress,
        *,
        step_time_s: float | None = None,
        step_tokens: float | None = None,
    ) -> StepCounts:
        """The counts of each step, from the length and batch size of the loader."""
        length = getattr(train_loader, "length", None)
        size = getattr(train_loader, "samples_per_batch", None)
        if size is not None and length is not None and getattr(train_loader, "drop_last", False):
            # The incomplete batch of an epoch is dropped, and so are its samples.
            length -= length % size
        return StepCounts(
            start=progress,
            grad_accum_steps=self.settings.grad_accum_steps,
            epoch_batches=self.epoch_batches,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=size,
            epoch_samples=length,
            step_tokens=step_tokens,
            step_time_s=step_time_s,
        )

    def length(self, train_loader: Any) -> int | None:
        """Optimizer steps in `max_duration`, if known."""
        steps = self._steps_in_max_duration(train_loader)
        # A number of steps is what the user wrote, whatever the epochs before were like.
        is_given = Duration.parse(self.settings.max_duration).unit is Unit.STEP
        return steps if steps is None or is_given else steps - self.epoch_offset

    def _steps_in_max_duration(self, train_loader: Any) -> int | None:
        """Optimizer steps in `max_duration` if all epochs have the present length; None if unknown."""
        settings = self.settings
        return count_steps(
            Duration.parse(settings.max_duration),
            epoch_batches=self._batches_of(train_loader),
            grad_accum_steps=settings.grad_accum_steps,
            steps_per_epoch=settings.steps_per_epoch,
            batch_size=getattr(train_loader, "samples_per_batch", None),
            epoch_samples=getattr(train_loader, "length", None),
        )

    def _offset(self, train_loader: Any, at: Progress) -> int:
        """Steps that the run would be further on than `at` if all epochs had had the present length."""
        if self.epoch_batches is None or self.steps_per_epoch is None or at.samples == 0:
            # At step 0, or from an old checkpoint without the position in its epoch.
            return 0
        return self.steps_to(train_loader, at) - at.step - at.passed_over

    def steps_to(self, train_loader: Any, at: Progress) -> int:
        """Steps of the present length from the run's beginning to a position."""
        assert self.epoch_batches is not None
        assert self.steps_per_epoch is not None
        epoch, batch = self._position(train_loader, at)
        # Rounded up: the last step of an epoch may have fewer batches.
        remaining_steps = -(-(self.epoch_batches - batch) // self.settings.grad_accum_steps)
        return (epoch + 1) * self.steps_per_epoch - remaining_steps

    def _position(self, train_loader: Any, at: Progress) -> tuple[int, int]:
        """Epoch and batch of a position, in batches of the present size if the loader counts samples. The end of an
        epoch is batch 0 of the next one."""
        # By samples where they are counted: after a change of the batch size none is left out or repeated.
        batch = at.batch
        if getattr(train_loader, "samples_per_batch", None) is not None:
            batch = len(train_loader) - train_loader.batches_after(at.epoch_samples)
        is_epoch_end = self.epoch_batches is not None and batch >= self.epoch_batches
        return (at.epoch + 1, 0) if is_epoch_end else (at.epoch, batch)

    def epochs_at(self, progress: Progress) -> float:
        """Epochs trained, with a fraction where the length of one is known."""
        if self.steps_per_epoch is None:
            return float(progress.epoch)
        # Rounded for the logs: most fractions of an epoch have no short decimal.
        return float(round((progress.step + self.epoch_offset) / self.steps_per_epoch, 4))

    def start_at(self, train_loader: Any, progress: Progress) -> None:
        """Convert a loaded position to the present batch size; at the end of an epoch, begin the next one."""
        self._note_difference(progress)
        epoch, progress.batch = self._position(train_loader, progress)
        if epoch != progress.epoch:
            progress.epoch, progress.epoch_samples = epoch, 0

    def _batches_of(self, train_loader: Any) -> int | None:
        """Batches of an epoch of this training; None if unknown.

        Raises:
            UserError: the loader is empty, or `limit_train_batches` is a fraction and the loader has no length.
        """
        batches = length_of(train_loader)
        if batches is not None and self.most_batches is not None:
            batches = min(batches, self.most_batches)
        if batches == 0:
            raise UserError("the train loader has no batches", cure="Check data and data.batch_size.")
        try:
            return limit_batches(batches, self.settings.limit_train_batches)
        except ValueError as error:
            raise UserError(str(error), where="loop.limit_train_batches") from None
