"""The requested end of a run, which its checkpoints contain so that the next fit ends by it too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer_cli.core.stopping import reopens

if TYPE_CHECKING:
    from trainer_cli.core.schema import LoopConfig
    from trainer_cli.trainer.trainer import Trainer


class NotedEnd:
    """A request to finish the run, or one that is held, with the facts by which a later fit decides whether it counts.

    Args:
        settings: those of the present fit.
    """

    def __init__(self, settings: LoopConfig) -> None:
        self._settings = settings
        self._end: dict[str, Any] | None = None
        """Of a loaded checkpoint, or of the one being saved."""

    def state_dict(self) -> dict[str, Any] | None:
        """The end that was noted, or None."""
        return self._end

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load the end that was noted; None: none was."""
        self._end = state

    def note(self, trainer: Trainer, *, is_held: bool) -> None:
        """Before a save: note the end that is requested, or held, for the next fit."""
        request, end = trainer.requests.stop_request, trainer.requests.held_stop
        if request is not None and request.finished:
            end = request
        self._end = None if end is None or not end.finished else {
            "step": trainer.progress.step, "held": is_held, "reason": end.reason, "by": end.by, "rule": list(end.rule),
            "max_duration": self._settings.max_duration, "hard_stop": self._settings.hard_stop,
        }  # fmt: skip

    def request_again(self, trainer: Trainer) -> None:
        """Request the end that an earlier fit was finished by, or held, unless what decided it has changed."""
        end, self._end = self._end, None
        if end is None or end["step"] != trainer.progress.step:
            return
        # A run that was finished by a shorter length continues when that length has grown.
        before = replace(self._settings, max_duration=end["max_duration"], hard_stop=end["hard_stop"])
        callback = trainer.callbacks.get(end["by"]) if end["by"] is not None else None
        same_rule = callback is not None and list(callback.end_rule()) == end["rule"]
        if (end["by"] is None or same_rule) and (end["held"] or not reopens(before, self._settings)):
            trainer.stop(end["reason"], by=callback)
