"""What a full disk, or a run directory that is gone, means for the run that it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.errors import FullDiskError, SaveError, TrainError, disk_cure
from trainer_cli.files import is_gone
from trainer_cli.trainer import stopped_step

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer


def explain_disk_failure(error: BaseException, run: Path, trainer: Trainer) -> TrainError | None:
    """The error to raise instead of one that a full disk or a missing run directory caused; None for other errors."""
    if isinstance(error, OSError | SaveError) and is_gone(run):
        return TrainError(
            "the run directory is gone: it was moved or deleted during the run",
            where=str(run),
            cure="Move it back, or name its new path (run_dir=PATH); what was committed is in it.",
        )
    return _stop_of_full_disk(error, trainer)


def _stop_of_full_disk(error: BaseException, trainer: Trainer) -> FullDiskError | None:
    """The error for a run that a full disk has stopped; None if another cause did.

    Its exit code is 75, so that a scheduler starts the command again; see `RankProcesses.wait`.
    """
    step = stopped_step(error, trainer)
    if step is None:
        return None
    if isinstance(error, TrainError):
        message, where, cure = error.what, error.where, error.cure
    else:
        assert isinstance(error, OSError)
        message, where = error.strerror or str(error), error.filename
        cure = f"What was committed before is intact. {disk_cure(error)}"
    return FullDiskError(message, where=where, cure=f"{cure} Then run the same command again to resume at step {step}.")
