"""Requests to a training from callbacks, signals and other threads: a stop, a save, an evaluation, a roll-back."""

from __future__ import annotations

from itertools import chain

import torch

from trainer_cli.parallel import Agreement, ProcessGroup
from trainer_cli.policy import Stop
from trainer_cli.trainer.hooks import CheckpointSaver


class Requests:
    """The open requests to a trainer. The loop handles them after the current step.

    Args:
        agreement: the sums that the ranks exchange at each step; None for one process.
        saver: the callback that saves, if there is one.
        may_hold: whether the run has a `loop.min_duration`, before which a request to finish is held.
    """

    def __init__(
        self, group: ProcessGroup, agreement: Agreement | None, saver: CheckpointSaver | None, *, may_hold: bool
    ) -> None:
        self._group, self._agreement, self._saver, self._may_hold = group, agreement, saver, may_hold
        self.clear()

    def clear(self) -> None:
        """Drop all requests: those to one fit or evaluation do not apply to the next one."""
        self.stop_request: Stop | None = None
        self.held_stop: Stop | None = None
        """A request to finish the run that came before `loop.min_duration`."""
        self.evaluation_requested = False
        self.interrupt_requested = False
        """Whether the loop must handle a request after this step."""
        self.roll_back_requested = False
        """Whether the loop must go back to the newest checkpoint after this step."""
        self._stops_of_rank: list[Stop] = []
        """The stops that this rank has requested, and that the other ranks may not know yet."""
        self._saves_on_rank = self._evaluates_on_rank = self._rolls_back_on_rank = False
        """What else this rank has requested, and has not shared yet."""

    def stop(self, stop: Stop) -> None:
        """Request an end after the current step; see `Trainer.stop`."""
        if self._agreement is None:
            self._add_stop(stop)
        else:
            # Kept apart until `share`: no rank may act on a stop that the others do not know.
            self._stops_of_rank.append(stop)
        self.interrupt()

    def _add_stop(self, stop: Stop) -> None:
        """Add a stop that all ranks know. Of the requests to finish, and of those to leave, only the first counts."""
        first = self.stop_request
        if first is None:
            self.stop_request = stop
        elif first.finished != stop.finished:
            finish, leave = (first, stop) if first.finished else (stop, first)
            if self._may_hold:
                # A signal must end this process although the request to finish may be held.
                self.held_stop, self.stop_request = self.held_stop or finish, leave
            else:
                # The run is over, as it is without the signal: a resume would not decide it again.
                self.stop_request = finish

    def stop_on_all(self, stop: Stop) -> None:
        """Request an end before the next step. Every rank calls it between two steps."""
        self.stop_request, self.interrupt_requested = stop, True

    def save(self) -> None:
        """Request a save after the current step; from any thread."""
        # Before the interrupt: the loop may handle requests at once.
        if self._agreement is not None:
            self._saves_on_rank = True
        elif self._saver is not None:
            self._saver.save_requested = True
        self.interrupt()

    def evaluate(self) -> None:
        """Request an evaluation after the current step; from any thread."""
        if self._agreement is None:
            self.evaluation_requested = True
        else:
            self._evaluates_on_rank = True
        self.interrupt()

    def roll_back(self) -> None:
        """Request a roll-back after the current step; see `Trainer.ask_to_roll_back`."""
        if self._agreement is None:
            self.roll_back_requested = True
        else:
            self._rolls_back_on_rank = True
        self.interrupt()

    def interrupt(self) -> None:
        """Let the loop handle requests after the current step, on every rank; from any thread."""
        if self._agreement is None:
            self.interrupt_requested = True
        else:
            # All ranks must leave their loops after the same step, so the next agreement carries the request.
            self._agreement.request()

    def accept_interrupt(self) -> None:
        """Let the loop handle requests, because a rank asked for it in the last agreement."""
        assert self._agreement is not None
        self._agreement.interrupt, self.interrupt_requested = False, True

    def share(self, seconds: float) -> float:
        """Share the requests of every rank with all of them. Returns the `seconds` of rank 0. Collective."""
        if self._agreement is None:
            return seconds
        # Read once: another thread may request something meanwhile, which is shared by the next exchange.
        stops, evaluates, rolls_back = [*self._stops_of_rank], self._evaluates_on_rank, self._rolls_back_on_rank
        saves = self._saves_on_rank
        # Only what was read is cleared, for the same reason.
        del self._stops_of_rank[: len(stops)]
        if saves:
            self._saves_on_rank = False
        if evaluates:
            self._evaluates_on_rank = False
        if rolls_back:
            self._rolls_back_on_rank = False
        # One exchange for all requests and the time: each costs a round trip of all ranks.
        rank_seconds = seconds if self._group.is_main else 0.0
        numbers = torch.tensor([bool(stops), saves, evaluates, rolls_back, rank_seconds], dtype=torch.float64)
        # Each number is how many ranks request it; rank 0 alone contributes seconds.
        stopping, saving, evaluating, rolling_back, seconds = self._group.sum(numbers).tolist()
        if stopping > 0:
            # In the order of the ranks, so that all have the same reason.
            for stop in chain.from_iterable(self._group.gather(stops)):
                self._add_stop(stop)
        # Rank 0 alone decides about saves.
        if saving > 0 and self._saver is not None and self._group.is_main:
            self._saver.save_requested = True
        self.evaluation_requested |= evaluating > 0
        self.roll_back_requested |= rolling_back > 0
        return seconds

    def hold_stop(self, *, holds: bool) -> None:
        """Hold a request to finish the run; or, if `holds` is False, release the one that was held."""
        request = self.stop_request
        if not holds:
            self.stop_request, self.held_stop = self.held_stop or request, None
        elif request is not None and request.finished:
            self.stop_request = None
            self.held_stop = self.held_stop or request

    def take_evaluation(self, *, holds: bool) -> bool:
        """Share the requests, and return whether an evaluation must be made now. Collective.

        A request beside a roll-back stays open until the training has gone back.

        Args:
            holds: whether `loop.min_duration` is not reached yet.
        """
        # First: a request that another thread makes from here on is handled after the next step.
        self.interrupt_requested = False
        self.share(0.0)
        self.hold_stop(holds=holds)
        if self.stop_request is not None:
            self.interrupt_requested = True
        if self.roll_back_requested:
            return False
        requested = self.evaluation_requested
        # Cleared only if it was set: another thread may request one between these two lines.
        if requested:
            self.evaluation_requested = False
        return requested

    def end_roll_back(self) -> None:
        """Drop the request, now that the training has gone back; only a stop still interrupts it."""
        self.roll_back_requested, self.interrupt_requested = False, self.stop_request is not None
