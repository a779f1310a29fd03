"""SET and RigL: masks of constant size, some of whose weights are replaced again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.data.order import sample_seed
from trainer_cli.sparsity.base import Schedule, Sparsity, check_share
from trainer_cli.sparsity.densities import cosine
from trainer_cli.sparsity.masks import put, random_scores, replaced
from trainer_cli.trainer.torch_compat import whole

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


class SET(Sparsity):
    """Sparse evolutionary training (Mocanu et al., 2018, arXiv:1707.04780): the smallest weights are dropped, and as
    many others grow at random places, drawn from the run's seed and the step.

    Args:
        sparsity, parameters, exclude, init, distribution, per_layer: as of `Sparsity`.
        drop_fraction: the share of a parameter's weights that are dropped each time.
        grow_fraction: the share that grows; null: as many as are dropped. Another share changes the sparsity.
        start, stop, every: when weights are replaced; steps, or durations in steps or epochs. `stop` null: at the
            end of the training (RigL: after three quarters of it).
    """

    _stops_at = 1.0

    def __init__(
        self,
        sparsity: float | Mapping[str, float],
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        init: str = "random",
        distribution: str = "erk",
        per_layer: bool = False,
        *,
        drop_fraction: float = 0.3,
        grow_fraction: float | None = None,
        start: int | str = 0,
        stop: int | str | None = None,
        every: int | str = 100,
    ) -> None:
        erk = distribution if not isinstance(sparsity, Mapping) else "uniform"
        super().__init__(sparsity, parameters, exclude, init, erk, per_layer)
        check_share("drop_fraction", drop_fraction)
        if grow_fraction is not None:
            check_share("grow_fraction", grow_fraction)
        self.drop_fraction, self.grow_fraction = float(drop_fraction), grow_fraction
        self._schedule = Schedule(start, stop, every)

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._schedule.resolve(loop, self._stops_at)
        super().on_fit_start(trainer, train_loader, val_loaders, loop)

    def change(self, step: int, names: Sequence[str]) -> bool:
        if not self._schedule.due(step):
            return False
        decay, numbers = self.decay(step), {name: number for number, name in enumerate(self._weights)}
        for name in names:
            weight, active = self._weights[name], self._active[name]
            drop = int(active * self.drop_fraction * decay)
            wanted = drop if self.grow_fraction is None else int(active * self.grow_fraction * decay)
            grow = min(wanted, weight.numel() - (active - drop))
            growth = self.growth(weight, sample_seed(self._seed, step, numbers[name]))
            if not bool(growth.isfinite().all()):
                continue  # The gradients overflowed: the step is skipped, and the mask changes when it is next due.
            mask = self._masks[name]
            put(mask, replaced(whole(mask), whole(weight.detach()), growth, drop, grow, active))
            self._active[name] = active - drop + grow
        return True

    def decay(self, step: int) -> float:
        """The part of the fractions that counts at a step."""
        return 1.0

    def growth(self, weight: Tensor, seed: int) -> Tensor:
        """A score of at least 0 for each weight: those with the largest grow."""
        return random_scores(weight, seed)


class RigL(SET):
    """Rigging the lottery (Evci et al., 2020, arXiv:1911.11134): as SET, but those weights grow whose gradient is
    largest, and the fractions fall along a cosine to 0 at `stop`. With accumulation the gradient is that of the whole
    step, before it is clipped. The arguments are those of `SET`.
    """

    _stops_at = 0.75

    def decay(self, step: int) -> float:
        return cosine(step, self._schedule.stop)

    def growth(self, weight: Tensor, seed: int) -> Tensor:
        assert weight.grad is not None
        return whole(weight.grad).abs()
