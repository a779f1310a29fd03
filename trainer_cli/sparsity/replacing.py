"""SET and RigL: masks of constant size, some of whose weights are replaced again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from trainer_cli.data.order import sample_seed
from trainer_cli.sparsity.base import check_share
from trainer_cli.sparsity.changing import ChangingSparsity, Schedule
from trainer_cli.sparsity.densities import cosine
from trainer_cli.sparsity.masks import put, random_scores, replaced
from trainer_cli.trainer.torch_compat import whole

if TYPE_CHECKING:
    pass


class SET(ChangingSparsity):
    """Sparse evolutionary training (Mocanu et al., 2018, arXiv:1707.04780): the smallest weights are dropped, and as
    many others grow at random places, drawn from the run's seed and the step.

    Args:
        sparsity, parameters, exclude, init, distribution, per_layer: as of `Sparsity`.
        drop_fraction: the share of a parameter's weights that are dropped each time.
        grow_fraction: the share that grows; null: as many as are dropped. Another share changes the sparsity.
        start, stop, every: when weights are replaced; steps, or durations in steps or epochs. `stop` null: at the
            end of the training (RigL: after three quarters of it).
    """

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

    def change_mask(self, name: str, due: int) -> bool:
        weight, active, decay = self._weights[name], self._active[name], self.decay(due)
        growth = self.growth(weight, sample_seed(self._seed, due, list(self._weights).index(name)))
        if growth is None or not bool(growth.isfinite().all()):
            # Without a gradient, or where it overflowed so that the step is skipped.
            return False
        drop = int(active * self.drop_fraction * decay)
        wanted = drop if self.grow_fraction is None else int(active * self.grow_fraction * decay)
        grow = min(wanted, weight.numel() - (active - drop))
        mask = self._masks[name]
        put(mask, replaced(whole(mask), whole(weight.detach()), growth, drop, grow, active))
        self._active[name] = active - drop + grow
        return True

    def decay(self, step: int) -> float:
        """The part of the fractions that counts at a step."""
        return 1.0

    def growth(self, weight: Tensor, seed: int) -> Tensor | None:
        """A score of at least 0 for each weight: those with the largest grow. None: they are not known at this step."""
        return random_scores(weight, seed)


class RigL(SET):
    """Rigging the lottery (Evci et al., 2020, arXiv:1911.11134): as SET, but those weights grow whose gradient is
    largest, and the fractions fall along a cosine to 0 at `stop`. With accumulation the gradient is that of the whole
    step, before it is clipped. The arguments are those of `SET`.
    """

    _stops_at = 0.75

    def decay(self, step: int) -> float:
        return cosine(step, self._schedule.stop)

    def growth(self, weight: Tensor, seed: int) -> Tensor | None:
        return None if weight.grad is None else whole(weight.grad).abs()
