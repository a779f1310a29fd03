"""A picture of generated digits."""

from collections.abc import Mapping

import torch

from trainer_cli import Callback, Trainer


class Show(Callback):
    """Logs `rows` times `rows` generated digits as one image."""

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Draw from a copy of the random state, so that looking does not change the training."""
        with torch.no_grad(), torch.random.fork_rng():
            digits = trainer.model.generate(self.rows**2).cpu().float()
        grid = digits.unflatten(0, (self.rows, self.rows)).squeeze(2).transpose(1, 2)
        trainer.log_image("val/digits", grid.reshape(8 * self.rows, 8 * self.rows))
