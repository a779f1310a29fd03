"""What a full disk, or a run directory that is gone, means for the run that it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.core.files import is_gone
from trainer_cli.errors import NO_SPACE, FullDiskError, NoSpaceError, SaveError, TrainError, disk_cure

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


def explain_disk_failure(error: BaseException, run: Path, trainer: Trainer, attempt: int) -> TrainError | None:
    """The error to raise instead, for a full disk and a run directory that is gone; None for any other end."""
    if isinstance(error, OSError | SaveError) and is_gone(run):
        return TrainError(
            "the run directory is gone: it was moved or deleted during the run",
            where=str(run),
            cure="Move it back, or name its new path (run_dir=PATH); what was committed is in it.",
        )
    return _stop_of_full_disk(error, trainer, attempt) if _is_no_space(error) else None


def _stop_of_full_disk(error: BaseException, trainer: Trainer, attempt: int) -> FullDiskError | None:
    """An error with exit code 75, so that a scheduler starts the command again.

    None if this attempt has committed no checkpoint: a disk that stays full would otherwise have it started for ever.
    And on another rank than 0, which alone knows the checkpoints; see `RankProcesses.wait`.
    """
    step = _committed_step(trainer, attempt) if trainer.strategy.group.is_main else None
    if step is None:
        return None
    if isinstance(error, TrainError):
        what, where, cure = error.what, error.where, error.cure
    else:
        assert isinstance(error, OSError)
        what, where = error.strerror or str(error), error.filename
        cure = f"What was committed before is intact. {disk_cure(error)}"
    return FullDiskError(what, where=where, cure=f"{cure} Then run the same command again to resume at step {step}.")


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
