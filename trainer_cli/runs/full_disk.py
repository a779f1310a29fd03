"""A full disk ends a run like a requested stop, once the attempt has committed a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_cli.errors import NO_SPACE, FullDiskError, NoSpaceError, TrainError, disk_cure

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


def stop_of_full_disk(error: BaseException, trainer: Trainer, attempt: int) -> FullDiskError | None:
    """The error with exit code 75 for a training that a full disk has ended; None for any other end.

    None also where this attempt has committed no checkpoint: a scheduler that starts the command again after each 75
    would otherwise do so for ever. And with several processes, whose exit code is that of the first one to fail.
    """
    if not _is_no_space(error) or trainer.strategy.world_size > 1:
        return None
    step = _committed_step(trainer, attempt)
    if step is None:
        return None
    if isinstance(error, TrainError):
        what, where, cure = error.what, error.where, error.cure
    else:
        assert isinstance(error, OSError)
        what, where = error.strerror or str(error), error.filename
        cure = f"What was committed before is intact. {disk_cure(error)}"
    return FullDiskError(what, where=where, cure=f"{cure} The same command again then resumes at step {step}.")


def _is_no_space(error: BaseException) -> bool:
    return isinstance(error, NoSpaceError) or (isinstance(error, OSError) and error.errno in NO_SPACE)


def _committed_step(trainer: Trainer, attempt: int) -> int | None:
    """The step of the newest checkpoint, if this attempt has committed it."""
    retention = getattr(trainer.checkpoint, "retention", None)
    try:
        newest = None if retention is None else retention.newest()
    except OSError:
        return None
    if newest is None or newest.manifest is None or newest.manifest.attempt != attempt:
        return None
    return int(newest.step)
