"""Go back to a checkpoint within a training, after values that are not finite."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import second_to
from trainer_cli.trainer.finite import not_finite

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


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
