"""Whether a full disk stops a run, to be resumed once there is space, or fails it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_cli.errors import NO_SPACE, NoSpaceError
from trainer_cli.steps import RunStatus

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


def status_after(error: BaseException, trainer: Trainer) -> RunStatus:
    """How an error ends the fit."""
    return RunStatus.after(error) if stopped_step(error, trainer) is None else RunStatus.stopped


def stopped_step(error: BaseException, trainer: Trainer) -> int | None:
    """The step from which a run is resumed that a full disk has stopped; None if it has not, or fails the run.

    It fails the run if this attempt has committed no checkpoint: a disk that stays full would otherwise have the run
    started for ever. And on another rank than 0, which alone knows the checkpoints.
    """
    is_no_space = isinstance(error, NoSpaceError) or (isinstance(error, OSError) and error.errno in NO_SPACE)
    retention = getattr(trainer.checkpoint, "retention", None)
    identity = getattr(trainer.checkpoint, "identity", None)
    if not is_no_space or not trainer.strategy.group.is_main or retention is None or identity is None:
        return None
    try:
        newest = retention.newest()
    except OSError:
        return None
    if newest is None or newest.manifest is None or newest.manifest.attempt != identity.attempt:
        return None
    return int(newest.step)
