"""GMP: gradual magnitude pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_cli.sparsity.base import check_share
from trainer_cli.sparsity.changing import ChangingSparsity, Schedule
from trainer_cli.sparsity.densities import cubic, kept
from trainer_cli.sparsity.masks import largest, put
from trainer_cli.trainer.torch_compat import whole


class GMP(ChangingSparsity):
    """Gradual magnitude pruning (Zhu & Gupta, 2017, arXiv:1710.01878): the smallest weights of each parameter are
    masked, more and more from `start` to `stop`, along a cubic curve. What is masked never comes back.

    Args:
        sparsity, parameters, exclude, distribution, per_layer: as of `Sparsity`; the sparsity is the final one.
        initial: the sparsity at `start`.
        start, stop, every: when weights are masked; steps, or durations in steps or epochs. `stop` null: after three
            quarters of the training.
    """

    _stops_at = 0.75

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
        self._schedule = Schedule(start, stop, every, at_stop=True)

    def begin(self) -> None:
        """All weights are there at first."""

    def change_mask(self, name: str, due: int) -> bool:
        weight, times = self._weights[name], self._schedule
        share = cubic(due, times.start, times.stop, min(self.initial, self._targets[name]), self._targets[name])
        # A schedule that was made longer on a resume wants fewer masked weights for a while.
        self._active[name] = min(self._active[name], kept(weight.numel(), share))
        put(self._masks[name], largest(whole(weight.detach().abs() * self._masks[name]), self._active[name]))
        return True

    def _is_due(self, name: str, due: int) -> bool:
        # A schedule that was made shorter on a resume may have ended before the present step.
        ended = due >= self._schedule.stop
        return super()._is_due(name, due) or (
            ended and self._active[name] > kept(self._weights[name].numel(), self._targets[name])
        )
