"""Train a batch that does not fit into memory in smaller microbatches, with the same gradient."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.batches import split_batch
from trainer_cli.errors import TrainError
from trainer_cli.outputs import ForwardState
from trainer_cli.state import capture_rng, restore_rng
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

AUTO = "auto"


class Microbatches:
    """Split batches into microbatches of a fixed size, or of a size that is halved when memory runs out.

    Args:
        setting: samples in a microbatch, or `auto`, which begins with whole batches.
    """

    def __init__(self, setting: int | str) -> None:
        self.is_auto = setting == AUTO
        self.size: int | None = None if self.is_auto else int(setting)

    def train(
        self,
        trainer: Trainer,
        batch: Any,
        size: int,
        train_one: Callable[[Any, int], Any],
        reset_weights: Callable[[], None],
    ) -> list[Any]:
        """Train a batch of `size` samples in microbatches.

        If memory runs out, the gradients of the batch are dropped, buffers (such as the statistics of norms) and
        random generators are restored, and the batch is trained again in microbatches of half the size. That size is
        kept.

        Args:
            train_one: runs forward and backward of a microbatch, given its number of samples.
            reset_weights: restores the weights of the accumulated gradients before the batch is trained again.

        Returns:
            The result of `train_one` for each microbatch.

        Raises:
            TrainError: there is not enough memory for one sample.
        """
        if not self.is_auto:
            return [train_one(microbatch, count) for microbatch, count in split_batch(batch, size, self.size or size)]
        forward_state, rng = ForwardState(trainer.model), capture_rng()
        while True:
            try:
                return [
                    train_one(microbatch, count) for microbatch, count in split_batch(batch, size, self.size or size)
                ]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            # Outside of the handler, because a traceback would keep the tensors of the failed microbatch alive.
            self._halve(min(self.size or size, size), failure)
            for optimizer in trainer.optimizers.values():
                optimizer.zero_grad()
            forward_state.restore()
            restore_rng(rng)
            reset_weights()

    def _halve(self, failed: int, failure: str) -> None:
        """Halve the size, after microbatches of `failed` samples ran out of memory."""
        if failed == 1:
            raise TrainError(
                f"there is no memory for one sample: {failure}",
                cure="Use a smaller model, precision=bf16, or a larger device.",
            )
        # Rounded up: 3 samples are split into 2 and 1, not into three.
        self.size = -(-failed // 2)
        log.warning(
            "out of memory with %s at once: the batch is trained in parts of %d",
            format_count(failed, "sample"),
            self.size,
        )
        # Cycles may hold tensors, and cached blocks of the old sizes would leave no room for new ones.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
