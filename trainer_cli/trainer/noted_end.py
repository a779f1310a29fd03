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
    """The requested or held end of the run, and what decided it; None if no end is requested.

    Args:
        is_held: the end waits until `loop.min_duration` is reached.
    """
    request, end = trainer.requests.stop_request, trainer.requests.held_stop
    if request is not None and request.finished:
        end = request
    if end is None or not end.finished:
        return None
    return {
        "step": trainer.progress.step, "held": is_held, "reason": end.reason, "by": end.by, "rule": list(end.rule),
        "max_duration": settings.max_duration,
    }  # fmt: skip


def request_again(end: Mapping[str, Any] | None, trainer: Trainer, settings: LoopConfig) -> None:
    """Request the end by which an earlier fit finished, or which it held, unless what decided it has changed."""
    if end is None or end["step"] != trainer.progress.step:
        return
    callback = trainer.callbacks.get(end["by"]) if end["by"] is not None else None
    if end["by"] is not None and (callback is None or list(callback.end_rule()) != end["rule"]):
        return
    # A larger max_duration continues a run that its limit had ended.
    settings_then = replace(settings, max_duration=end["max_duration"])
    if end["held"] or not RecordedEnd(end["reason"]).is_passed(settings_then, settings):
        trainer.stop(end["reason"], by=callback)
