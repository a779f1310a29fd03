"""Stop at NaN or infinity in the loss or the weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import NotFiniteError
from trainer_cli.state import are_finite
from trainer_cli.terminal import format_first

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_IN_PYTHON = (
    "Make a new trainer without the cause: a sample, which CheckFinite() among the callbacks names with "
    "TrainingLoop(log_interval=1), or a learning rate that is too large"
)


class LossCheck:
    """Check the losses that are logged, so that no value is read from the device for the check alone."""

    def __init__(self) -> None:
        self._since: int | None = None
        """Step of the last log, if its loss was not finite."""

    def check(self, trainer: Trainer, *, finite: bool) -> None:
        """Warn of the first loss that is not finite: loss scaling may have skipped its step.

        Raises:
            NotFiniteError: it is the second in a row.
        """
        step = trainer.progress.step
        if finite:
            self._since = None
        elif self._since is None:
            self._since = step
            log.warning("the loss is not finite at step %d. %s", step, _last_finite(trainer))
        else:
            # The log shall show the loss that ends the training.
            trainer.recording.flush()
            between = step - self._since
            seen = f" (it is looked at every {between} steps)" if between > 1 else ""
            message = f"the loss was first seen not finite at step {self._since}{seen}, and the run ends at step {step}"
            raise not_finite(trainer, message)


def check_end(trainer: Trainer) -> None:
    """Raise NotFiniteError if the weights at the end of a training are not finite."""
    fails = not are_finite(trainer.trained)
    if trainer.agreement is not None:
        # All ranks raise together: one that continues would wait for the others in its next collective.
        fails = trainer.agreement.total(fails) > 0
    if fails:
        raise not_finite(trainer, f"the weights are not finite at the end of the run, step {trainer.progress.step}")


def not_finite(trainer: Trainer, message: str, batch: Any = None) -> NotFiniteError:
    """Make the error, with the last finite checkpoint in its cure.

    For a training in Python the cure also says what to do; for a run `train fit` adds more, see `runs/failed_step`.

    Args:
        batch: the last batch, in which samples with NaN are looked for.
    """
    # Only an error needs it.
    from trainer_cli.batches import rows_with_nan

    nan_rows = {} if batch is None else rows_with_nan(batch, trainer.step.batch_size)
    rows = tuple(sorted(set().union(*nan_rows.values())))
    if rows:
        message += f"; in its batch, NaN is in the {'samples' if len(rows) > 1 else 'sample'} at "
        message += f"{format_first(rows)}, counted from 0"
    error = NotFiniteError(message, cure=_last_finite(trainer))
    error.rows = rows
    if not trainer.config:
        keep = "; fit(..., keep_settings=['lr']) resumes with another" if trainer.checkpoint is not None else ""
        advice = "Mend the sample, and make a new trainer." if rows else f"{_IN_PYTHON}{keep}."
        error.cure = f"{error.cure} {advice}"
    return error


def _last_finite(trainer: Trainer) -> str:
    """A sentence for a hint: the last checkpoint with finite weights."""
    try:
        path = None if trainer.checkpoint is None else trainer.checkpoint.newest_finite()
    except OSError as error:
        return f"Its checkpoints cannot be listed: {error}."
    return "There is no checkpoint with finite weights." if path is None else f"The last finite checkpoint is {path}."
