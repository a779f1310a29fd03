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
    """The step from which a run that a full disk has ended can be resumed; None if the run counts as failed.

    It counts as failed if another error has ended it, or if this attempt has committed no checkpoint: a scheduler would
    start the run again and again while the disk stays full. None on ranks other than 0, which do not know the
    checkpoints.
    """
    is_no_space = isinstance(error, NoSpaceError) or (isinstance(error, OSError) and error.errno in NO_SPACE)
    retention = getattr(trainer.checkpoint, "retention", None)
    identity = getattr(trainer.checkpoint, "identity", None)
    if not is_no_space or not trainer.strategy.group.is_main:
        return None
    if retention is None or identity is None:
        return None  # Another saver than CheckpointerCallback.
    try:
        newest = retention.newest()
    except OSError:
        return None
    if newest is None or newest.manifest is None:
        return None
    is_of_this_attempt = newest.manifest.attempt == identity.attempt
    return int(newest.step) if is_of_this_attempt else None
