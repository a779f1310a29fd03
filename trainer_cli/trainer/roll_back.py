"""Go back to the newest checkpoint in the middle of a training, and pass over the data trained on since."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer_cli.trainer.finite import not_finite

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def roll_back(trainer: Trainer, train_loader: Any) -> None:
    """Load the newest intact checkpoint with finite weights; continue with the data after the present position.

    Records of the steps undone are dropped, as on a resume. The steps are made again, over other data, so the length
    of the training stays as it is.

    Raises:
        NotFiniteError: there is no such checkpoint.
    """
    loop, step = trainer.loop, trainer.progress.step
    data = loop.data_state(trainer)
    path = None if trainer.checkpoint is None else trainer.checkpoint.go_back(trainer)
    if path is None:
        raise not_finite(trainer, f"the training cannot go back from step {step}")
    trainer.metric_logger.record.clear()
    trainer.metric_logger.close()
    place = trainer.progress.epoch, trainer.progress.batch, trainer.progress.epoch_samples
    trainer.load_checkpoint(path)
    loop.pending_eval_record = None
    train_loader.check_state(data)
    loop.pass_over(trainer, *place)
    trainer.restore_rng()
    trainer.start_loggers()
    trainer.roll_back_requested, trainer.interrupt_requested = False, trainer.stop_request is not None
    log.warning(
        "went back from step %d to step %d; the training continues with the data after step %d",
        step, trainer.progress.step, step,
    )  # fmt: skip
