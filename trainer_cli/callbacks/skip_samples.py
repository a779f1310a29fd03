"""SkipSamples: pass over samples of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


class SkipSamples(Callback):
    """Passes over the next `samples` samples when a training begins, or is resumed.

    Samples are passed over once: a later resume passes over what `samples` was raised by. They make no steps, so the
    training is as long as without. It needs a loader that counts samples, such as one over a map-style dataset.
    """

    def __init__(self, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ConfigError(f"samples is {samples!r}, but it is a number of samples", location="samples")
        self.samples = samples
        self._skipped = 0

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        more, self._skipped = self.samples - self._skipped, max(self.samples, self._skipped)
        if more <= 0:
            return
        per_batch = getattr(train_loader, "samples_per_batch", None)
        if per_batch is None or loop.epoch_batches is None:
            raise UserError("SkipSamples needs a train loader that counts samples", cure="Use a map-style dataset.")
        an_epoch = min(train_loader.length, loop.epoch_batches * per_batch)
        epochs, samples = divmod(trainer.progress.epoch_samples + more, an_epoch)
        batch = len(train_loader) - train_loader.batches_after(samples)
        loop.pass_over(trainer, trainer.progress.epoch + epochs, batch, samples)

    def state_dict(self) -> dict[str, Any]:
        """How many samples were passed over."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = int(state["skipped"])
