"""The requested end of a run, which its checkpoints contain so that the next fit ends by it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer_cli.policy import RecordedEnd
from trainer_cli.schema import LoopConfig

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


def note_end(trainer: Trainer, settings: LoopConfig, *, is_held: bool) -> dict[str, Any] | None:
    """The end that is requested or held, with what decided it; None if the run goes on."""
    request, end = trainer.requests.stop_request, trainer.requests.held_stop
    if request is not None and request.finished:
        end = request
    return None if end is None or not end.finished else {
        "step": trainer.progress.step, "held": is_held, "reason": end.reason, "by": end.by, "rule": list(end.rule),
        "max_duration": settings.max_duration,
    }  # fmt: skip


def request_again(end: Mapping[str, Any] | None, trainer: Trainer, settings: LoopConfig) -> None:
    """Request the end that an earlier fit was finished by, or held, unless what decided it has changed."""
    if end is None or end["step"] != trainer.progress.step:
        return
    before = replace(settings, max_duration=end["max_duration"])
    callback = trainer.callbacks.get(end["by"]) if end["by"] is not None else None
    same_rule = callback is not None and list(callback.end_rule()) == end["rule"]
    if (end["by"] is None or same_rule) and (end["held"] or not RecordedEnd(end["reason"]).is_passed(before, settings)):
        trainer.stop(end["reason"], by=callback)
