"""GMP: gradual magnitude pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_cli.sparsity.base import Schedule, Sparsity, check_share
from trainer_cli.sparsity.densities import cubic, kept
from trainer_cli.sparsity.masks import largest, put
from trainer_cli.trainer.torch_compat import whole

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


class GMP(Sparsity):
    """Gradual magnitude pruning (Zhu & Gupta, 2017, arXiv:1710.01878): the smallest weights of each parameter are
    masked, more and more from `start` to `stop`, along a cubic curve. What is masked never comes back.

    Args:
        sparsity, parameters, exclude, distribution, per_layer: as of `Sparsity`; the sparsity is the final one.
        initial: the sparsity at `start`.
        start, stop, every: when weights are masked; steps, or durations in steps or epochs. `stop` null: after three
            quarters of the training.
    """

    def __init__(
        self,
        sparsity: float | Mapping[str, float],
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        distribution: str = "uniform",
        per_layer: bool = False,
        *,
        initial: float = 0.0,
        start: int | str = 0,
        stop: int | str | None = None,
        every: int | str = 100,
    ) -> None:
        super().__init__(sparsity, parameters, exclude, "magnitude", distribution, per_layer)
        check_share("initial", initial)
        self.initial = float(initial)
        self._schedule = Schedule(start, stop, every)

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._schedule.resolve(loop, 0.75)
        super().on_fit_start(trainer, train_loader, val_loaders, loop)

    def begin(self) -> None:
        """All weights are there at first."""

    def change(self, step: int, names: Sequence[str]) -> bool:
        times = self._schedule
        if not times.due(step) and step != times.stop:
            return False
        for name in names:
            weight = self._weights[name]
            share = cubic(step, times.start, times.stop, min(self.initial, self._targets[name]), self._targets[name])
            scores = whole(weight.detach().abs() * self._masks[name])
            self._active[name] = kept(weight.numel(), share)
            put(self._masks[name], largest(scores, self._active[name]))
        return True
