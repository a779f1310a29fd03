"""A picture of the generated points."""

from collections.abc import Mapping

import torch

from trainer_cli import Callback, Trainer


class Show(Callback):
    """Logs where `count` generated points lie, as an image of `side` pixels that reaches from -2 to 2."""

    def __init__(self, count: int = 2000, side: int = 64) -> None:
        self.count, self.side = count, side

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Draw from a copy of the random state, so that looking does not change the training."""
        with torch.no_grad(), torch.random.fork_rng():
            points = trainer.model.generate(self.count).cpu()
        counts, _ = torch.histogramdd(points, [self.side, self.side], range=[-2.0, 2.0, -2.0, 2.0])
        trainer.log_image("val/points", (counts.T / counts.max().clamp(min=1)).float())
