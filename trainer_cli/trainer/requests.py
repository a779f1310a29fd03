"""What callbacks, signals and other threads request of a training: a stop, a save, an evaluation, a roll-back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_cli.parallel.agreement import Agreement
from trainer_cli.parallel.strategy import Strategy
from trainer_cli.trainer.hooks import Callback, CheckpointSaver
from trainer_cli.trainer.stopping import Stop

if TYPE_CHECKING:
    from trainer_cli.trainer.training_loop import TrainingLoop


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
