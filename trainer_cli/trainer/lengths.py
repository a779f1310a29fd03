"""How long epochs and the training are, in batches and optimizer steps, and where in them a position is.

What callbacks, signals and other threads request of a training: a stop, a save, an evaluation, a roll-back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trainer_cli.core.field_rules import check_duration
from trainer_cli.core.intervals import Duration, Interval, Unit, epoch_steps, limited_batches, total_steps
from trainer_cli.core.schema import LoopConfig
from trainer_cli.core.stopping import Limits, Stop
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.parallel.agreement import Agreement
from trainer_cli.parallel.strategy import Strategy
from trainer_cli.trainer.hooks import Callback, CheckpointSaver
from trainer_cli.trainer.validation_loop import Evaluations

if TYPE_CHECKING:
    from trainer_cli.core.progress import Progress
    from trainer_cli.parallel.process_group import ProcessGroup
    from trainer_cli.trainer.training_loop import TrainingLoop


class Lengths:
    """The lengths and intervals of `settings`, once `learn_lengths` knows the train loader."""

    limits: Limits

    def __init__(self, settings: LoopConfig) -> None:
        self.settings = settings
        self.evaluations = Evaluations(settings)
        self.log_interval: Interval | None = None
        self.steps_per_epoch: int | None = None
        self.total_steps: int | None = None
        """Optimizer steps in `max_duration`, if known."""
        self.epoch_batches: int | None = None
        self.epoch_offset = 0
        """How many steps further the run would be if all epochs had had the present length."""
        self.most_batches: int | None = None
        """Batches of the shortest of the ranks' loaders, if these have lengths."""
        self.counts_tokens = False
        """Whether some duration is in tokens."""

    def agree_on_length(self, train_loader: Any, group: ProcessGroup) -> None:
        """Let epochs of all ranks have the batches of the shortest loader. Collective."""
        lengths = [length for length in group.gather(length_of(train_loader)) if length is not None]
        self.most_batches = min(lengths, default=None) if group.world_size > 1 else None

    def learn_lengths(self, train_loader: Any, resumed: Progress | None = None) -> None:
        """Set the lengths that intervals need; from `resumed` on, epochs may have another length than before.

        Raises:
            UserError: the loader is empty, or a duration needs the length of a loader that has none.
        """
        settings = self.settings
        self.epoch_batches = self._batches_of(train_loader)
        self.steps_per_epoch = epoch_steps(self.epoch_batches, settings.grad_accum_steps, settings.steps_per_epoch)
        self.epoch_offset = 0 if resumed is None else self._offset(train_loader, resumed)
        try:
            self.log_interval = self.interval(settings.log_interval)
            self.evaluations.learn(self.interval)
            longest, hard_stop = self.interval(settings.max_duration), self.interval(settings.hard_stop)
            least = self.interval(settings.min_duration)
        except ValueError as error:
            raise UserError(str(error)) from None
        assert longest is not None, "the schema refuses a null max_duration"
        max_time = check_duration("loop.max_time", settings.max_time, units=(Unit.SECOND,))
        self.limits = Limits(longest, hard_stop, least, float(max_time.value) if max_time else None)
        self.total_steps = self.length(train_loader)

    @property
    def last_step(self) -> int | None:
        """The step at which `max_duration` or `hard_stop` ends the training, if known."""
        stop = self.limits.hard_stop
        steps = [self.total_steps, None if stop is None else stop.end]
        return min((step for step in steps if step is not None), default=None)

    def interval(self, duration: Any) -> Interval | None:
        """An interval of this training, or None for null."""
        if duration is None:
            return None
        parsed = self.resolved(Duration.parse(duration))
        self.counts_tokens = self.counts_tokens or parsed.unit is Unit.TOKEN
        return Interval(parsed, self.steps_per_epoch, self.epoch_offset if parsed.unit is Unit.EPOCH else 0)

    def resolved(self, duration: Duration) -> Duration:
        """A duration; a share of the run as one in the unit of `max_duration`."""
        return duration.within(Duration.parse(self.settings.max_duration))

    def steps_of(self, duration: Duration) -> int | None:
        """The number of optimizer steps that reach a duration, or None if unknown."""
        if duration.unit is Unit.RUN and self.total_steps is not None:
            return math.ceil(duration.value * self.total_steps)
        return self.resolved(duration).steps(self.steps_per_epoch)

    def checkpoint_interval(self, key: str, duration: Any) -> Interval | None:
        """The interval of a setting of `checkpoint`.

        Raises:
            ConfigError: a part of an epoch, if the number of steps of an epoch is unknown.
        """
        try:
            return self.interval(duration)
        except ValueError as error:
            raise ConfigError(str(error), location=f"checkpoint.{key}") from None

    def length(self, train_loader: Any) -> int | None:
        """Optimizer steps in `max_duration`, if known."""
        settings, duration = self.settings, Duration.parse(self.settings.max_duration)
        steps = total_steps(
            duration,
            epoch_batches=self._batches_of(train_loader),
            grad_accum_steps=settings.grad_accum_steps,
            steps_per_epoch=settings.steps_per_epoch,
            batch_size=getattr(train_loader, "samples_per_batch", None),
            epoch_samples=getattr(train_loader, "length", None),
        )
        return steps if steps is None or duration.unit is Unit.STEP else steps - self.epoch_offset

    def _offset(self, train_loader: Any, at: Progress) -> int:
        """How many steps further than `at` the run would be if all epochs had had the present length."""
        if self.epoch_batches is None or self.steps_per_epoch is None or at.samples == 0:
            # At step 0, or from an old checkpoint without the position in its epoch.
            return 0
        return self.steps_to(train_loader, at) - at.step - at.passed_over

    def steps_to(self, train_loader: Any, at: Progress) -> int:
        """Steps of the present length from the run's beginning to a position."""
        assert self.epoch_batches is not None
        assert self.steps_per_epoch is not None
        epoch, batch = self._position(train_loader, at)
        left = -(-(self.epoch_batches - batch) // self.settings.grad_accum_steps)
        return (epoch + 1) * self.steps_per_epoch - left

    def _position(self, train_loader: Any, at: Progress) -> tuple[int, int]:
        """Epoch and batch of a position, in batches of the present size if the loader counts samples."""
        counts_samples = getattr(train_loader, "samples_per_batch", None) is not None
        batch = len(train_loader) - train_loader.batches_after(at.epoch_samples) if counts_samples else at.batch
        over = self.epoch_batches is not None and batch >= self.epoch_batches
        return (at.epoch + 1, 0) if over else (at.epoch, batch)

    def start_at(self, train_loader: Any, progress: Progress) -> None:
        """Convert the batches of a loaded position to the present size. An epoch without a rest is over."""
        epoch, progress.batch = self._position(train_loader, progress)
        if epoch != progress.epoch:
            progress.epoch, progress.epoch_samples = epoch, 0

    def _batches_of(self, train_loader: Any) -> int | None:
        """Batches of an epoch of this training; None if unknown.

        Raises:
            UserError: there are none, or `limit_train_batches` is a part of what has no length.
        """
        batches = length_of(train_loader)
        if batches is not None and self.most_batches is not None:
            batches = min(batches, self.most_batches)
        if batches == 0:
            raise UserError("the train loader has no batches", cure="Check data and data.batch_size.")
        try:
            return limited_batches(batches, self.settings.limit_train_batches)
        except ValueError as error:
            raise UserError(str(error), where="loop.limit_train_batches") from None


def length_of(loader: Any) -> int | None:
    """Batches of an epoch; None if unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


class Requests:
    """The trainer's methods that request something. The loop handles requests after the current step."""

    checkpoint: CheckpointSaver | None
    callbacks: dict[str, Callback]
    loop: TrainingLoop

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.agreement = Agreement(strategy.group) if strategy.world_size > 1 else None
        """What the ranks exchange at each step; None for one process."""
        self._clear_requests()

    def _clear_requests(self) -> None:
        """Requests to this fit or evaluation do not apply to the next one."""
        self.stop_request: Stop | None = None
        self.held_stop: Stop | None = None
        """A request to finish the run that came before `loop.min_duration`."""
        self.evaluation_requested = False
        self.interrupt_requested = False
        """Whether the loop must handle a request after this step."""
        self.roll_back_requested = False
        """Whether the loop must go back to the newest checkpoint after this step."""
        self._own_stop: Stop | None = None

    def stop(self, reason: str, *, finished: bool = True, by: Callback | None = None) -> None:
        """Request an end after the current step.

        Args:
            finished: the run is finished, and stays so when it is started again, unless with a longer `max_duration`.
                Before `loop.min_duration` the request is held until then. False: the run ends with exit code 75, to
                be resumed.
            by: the callback that decided it. If its `end_rule` has changed, a run started again goes on.
        """
        name = next((name for name, callback in self.callbacks.items() if callback is by), None)
        stop = Stop(reason, finished, name, () if by is None else tuple(by.end_rule()))
        if self.agreement is not None:
            self._own_stop = self._own_stop or stop
        elif self.stop_request is None:
            self.stop_request = stop
        elif self.stop_request.finished and not finished and self.loop.settings.min_duration is not None:
            # A signal must end this process although the first request may be held.
            self.held_stop, self.stop_request = self.stop_request, stop
        self.interrupt()

    def hold_stop(self, *, holds: bool) -> None:
        """Hold a request to finish the run; or, if `holds` is False, make the one that was held."""
        request = self.stop_request
        if not holds:
            self.stop_request, self.held_stop = request or self.held_stop, None
        elif request is not None and request.finished:
            self.stop_request = self._own_stop = None
            self.held_stop = self.held_stop or request

    def interrupt(self) -> None:
        """Let the loop handle requests after the current step, on every rank; from any thread."""
        if self.agreement is None:
            self.interrupt_requested = True
        else:
            self.agreement.request()

    def share_requests(self, seconds: float) -> float:
        """Make every rank's requests those of all. Returns rank 0's `seconds`. Collective."""
        if self.agreement is None:
            return seconds
        own = self._own_stop, self.evaluation_requested, self.roll_back_requested, seconds
        stops, evaluations, roll_backs, times = zip(*self.strategy.group.gather(own), strict=True)
        self.stop_request = self.stop_request or next(filter(None, stops), None)
        self.evaluation_requested, self.roll_back_requested = any(evaluations), any(roll_backs)
        return float(times[0])

    def ask_for_save(self) -> None:
        """Request a save after the current step; from any thread."""
        if self.checkpoint is not None:
            self.checkpoint.save_requested = True
        self.interrupt()

    def ask_for_evaluation(self) -> None:
        """Request an evaluation after the current step; from any thread."""
        self.evaluation_requested = True
        self.interrupt()

    def ask_to_roll_back(self) -> None:
        """Request to go back, after the current step, to the newest checkpoint, and on with the data after this step.

        The training ends with a NotFiniteError if there is no checkpoint whose weights are finite.
        """
        self.roll_back_requested = True
        self.interrupt()
