"""Stop at NaN or infinity in the loss or the weights, or roll back to a checkpoint from before it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.model_state import are_finite
from trainer_cli.core.naming import SWEEP_FOLDER
from trainer_cli.errors import NotFiniteError
from trainer_cli.trainer.hooks import second_to

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_ANOTHER_RUN = "Start another run (name=OTHER), with a smaller optimizer.lr."
_RESUME = (
    "The same command resumes it: change the cause, for example with optimizer.lr=… 'resume_allow=[optimizer.lr]'."
)
_OTHER_JOBS = "optimizer.lr is swept: replace this value by a smaller one, which is another job."


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
            log.warning("the loss is not finite at step %d. %s", step, _last_finite(trainer)[0])
        else:
            # The log shall show the loss that ends the training.
            trainer.recording.flush()
            message = f"the loss is not finite since step {self._since}, so the run ends at step {step}"
            raise not_finite(trainer, message)


def check_end(trainer: Trainer) -> None:
    """Raise NotFiniteError if the weights at the end of a training are not finite."""
    fails = not are_finite(trainer.trained)
    # All ranks raise together: one that continues would wait for the others in its next collective.
    if fails if trainer.agreement is None else trainer.agreement.total(fails) > 0:
        raise not_finite(trainer, f"the weights are not finite at the end of the run, step {trainer.progress.step}")


def not_finite(trainer: Trainer, message: str) -> NotFiniteError:
    """Make the error, with the last finite checkpoint in its hint."""
    return NotFiniteError(message, cure=" ".join(_last_finite(trainer)).rstrip())


def _sweeps_lr(trainer: Trainer) -> bool:
    """Whether the run is a job of a sweep over `optimizer.lr`, by its directory `sweep/KEY`."""
    run_dir = trainer.run_dir
    if run_dir is None or run_dir.parent.name != SWEEP_FOLDER:
        return False
    return any(pair.startswith("optimizer.lr=") for pair in run_dir.name.split(","))


def _last_finite(trainer: Trainer) -> tuple[str, str]:
    """Two sentences for a hint: the last checkpoint with finite weights, and how to resume from it."""
    try:
        path = None if trainer.checkpoint is None else trainer.checkpoint.newest_finite()
    except OSError as error:
        return f"Its checkpoints cannot be listed: {error}.", ""
    if path is None:
        last, cure = "There is no checkpoint with finite weights.", _ANOTHER_RUN
    else:
        last, cure = f"The last finite checkpoint is {path}.", _RESUME
    return last, _OTHER_JOBS if _sweeps_lr(trainer) else cure


def roll_back(trainer: Trainer, train_loader: Any) -> None:
    """Load the newest intact checkpoint with finite weights, and continue with the data after the current position.

    Records of the undone steps are dropped, as on a resume. The steps are computed again with other data, so the length
    of the training stays the same.

    Raises:
        NotFiniteError: there is no such checkpoint.
    """
    loop, step = trainer.loop, trainer.progress.step
    # Before the checkpoint replaces the progress.
    data = loop.data_state(trainer)
    path = None if trainer.checkpoint is None else trainer.checkpoint.go_back(trainer)
    if path is None:
        raise not_finite(trainer, f"the run cannot go back from step {step}")
    trainer.metric_logger.record.clear()
    trainer.metric_logger.close()
    position = trainer.progress.epoch, trainer.progress.batch, trainer.progress.epoch_samples
    try:
        trainer.load_checkpoint(path)
        loop.pending_eval_record = None
        train_loader.check_state(data)
        loop.pass_over(trainer, *position)
        trainer.module_modes.repeat_changes()
        trainer.trained.keep()
        trainer.freezing.update(trainer)
        trainer.trained.repeat()
        # After the loader, whose passing over may draw random numbers.
        trainer.loading.restore_rng()
        # The steps are computed again with other data.
        trainer.recording.set_repeats(False)
    except BaseException as error:
        # Services are told how the run ended only by loggers that are started.
        with second_to(error):
            trainer.recording.start()
        raise
    trainer.recording.start()
    trainer.requests.end_roll_back()
    log.warning(
        "went back from step %d to step %d; training continues with the data after step %d",
        step, trainer.progress.step, step,
    )  # fmt: skip
