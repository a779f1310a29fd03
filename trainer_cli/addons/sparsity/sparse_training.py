"""Ways of sparse training: a constant mask, gradual magnitude pruning, and masks whose weights are replaced.

`Static` keeps its mask. `GMP`, `SET` and `RigL` change theirs on a schedule: at each due step, or at the next step at
which the mask can change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.addons.sparsity.sparsity import (
    Sparsity,
    check_share,
    cosine,
    cubic,
    kept,
    largest,
    put,
    random_scores,
    replaced,
)
from trainer_cli.data import sample_seed
from trainer_cli.dtensor import whole_of
from trainer_cli.errors import ConfigError
from trainer_cli.steps import Duration
from trainer_cli.values import check_duration

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop


class Static(Sparsity):
    """Static sparse training: weights that are zero at the start stay zero. The arguments are those of `Sparsity`."""


log = logging.getLogger(__name__)


class Schedule:
    """When masks change: at an interval from `start` to `stop`; durations in steps or epochs.

    Args:
        at_stop: whether they change at `stop` too, even if that step is not due.
    """

    def __init__(self, start: int | str, stop: int | str | None, every: int | str, *, at_stop: bool = False) -> None:
        self._given = {
            "start": None if start == 0 else Duration.read("start", start),
            "stop": check_duration("stop", stop),
            "every": Duration.read("every", every),
        }
        self.start, self.stop, self.every = 0, 0, 1
        self._at_stop = at_stop

    def resolve(self, loop: TrainingLoop, share: float) -> None:
        """Convert the durations to steps. Without `stop` it is this share of the whole training.

        Raises:
            ConfigError: one of them is not a number of steps, or nothing lies between start and stop.
        """
        steps_by_key: dict[str, int] = {"start": 0}
        if self._given["stop"] is None and loop.planned_steps is not None:
            steps_by_key["stop"] = int(loop.planned_steps * share)
        for key, duration in self._given.items():
            if duration is not None:
                steps_by_key[key] = loop.require_steps(f"sparsity.{key} is {duration}", duration, f"sparsity.{key}")
            elif key not in steps_by_key:
                raise ConfigError(
                    f"sparsity.{key} is needed as a number of steps or epochs", location=f"sparsity.{key}"
                )
        self.start, self.stop, self.every = steps_by_key["start"], steps_by_key["stop"], steps_by_key["every"]
        if self.stop <= self.start:
            message = f"sparsity stops changing at step {self.stop}, but begins at step {self.start}"
            raise ConfigError(message, location="sparsity.stop")

    def last_due(self, step: int) -> int:
        """The last step up to this one at which masks change; 0 before the first."""
        if step < self.start:
            return 0
        if self._at_stop and step >= self.stop:
            return self.stop
        return min(step, self.stop) - (min(step, self.stop) - self.start) % self.every


class ChangingSparsity(Sparsity):
    """Changes each mask when the schedule says so. A mask that cannot change then, as its parameter has no gradient or
    its optimizer is not stepped, changes at the next step at which it can. Subclasses set `_schedule`.
    """

    _schedule: Schedule
    _stops_at = 1.0
    """Without `stop`: the share of the training after which masks stay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._changed: dict[str, int] = {}
        """By parameter: the due step for which its mask was changed last."""
        self._settled: dict[tuple[str, ...], int] = {}
        """By parameters of an optimizer: the due step for which all their masks have changed."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Find the steps at which masks change, and make the first masks of a new training."""
        self._schedule.resolve(loop, self._stops_at)
        super().on_fit_start(trainer, train_loader, val_loaders, loop)
        # Nothing is due at the beginning. Earlier checkpoints did not hold this, and changed at due steps alone.
        self._changed = {name: self._changed.get(name, trainer.progress.step) for name in self._weights}
        self._settled = {}

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Warn also of masks that have not changed when they were due."""
        super().on_fit_end(trainer, loop)
        due = self._schedule.last_due(trainer.progress.step)
        if late := [name for name in self._weights if self._is_due(name, due)]:
            log.warning(
                "sparsity: %s %s not changed as due at step %d: there was no gradient since",
                ", ".join(late), "was" if len(late) == 1 else "were", due,
            )  # fmt: skip

    def change(self, step: int, names: Sequence[str]) -> bool:
        """Change those masks that were due up to this step and have not changed since. True if one did."""
        due, key = self._schedule.last_due(step), tuple(names)
        # The common case of a step: one comparison, and no look at the parameters.
        if self._settled.get(key) == due:
            return False
        has_changed = False
        late = [name for name in names if self._is_due(name, due)]
        for name in late:
            if self.change_mask(name, due):
                self._changed[name] = due
                has_changed = True
        if not any(self._is_due(name, due) for name in late):
            self._settled[key] = due
        return has_changed

    def change_mask(self, name: str, due: int) -> bool:
        """Change the mask of a parameter as due at a step. False: it cannot change before this step."""
        raise NotImplementedError

    def _is_due(self, name: str, due: int) -> bool:
        """Whether the mask of a parameter has still to change for this due step."""
        return self._changed[name] < due

    def state_dict(self) -> dict[str, Any]:
        """The masks, and for which due step each was changed last."""
        return {**super().state_dict(), "changed": dict(self._changed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the masks, and for which due step each was changed last."""
        super().load_state_dict(state)
        # Earlier checkpoints lack it: their masks changed at due steps alone.
        self._changed = dict(state.get("changed", {}))


class GMP(ChangingSparsity):
    """Gradual magnitude pruning (Zhu & Gupta, 2017, arXiv:1710.01878): the smallest weights of each parameter are
    masked, more and more from `start` to `stop`, along a cubic curve. Masked weights stay masked.

    Args:
        sparsity, parameters, exclude, distribution, per_layer: as in `Sparsity`; the sparsity is the final one.
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
        """Mask the smallest weights of a parameter, so that it has the sparsity of this due step."""
        weight, times, target = self._weights[name], self._schedule, self._targets[name]
        share = cubic(due, times.start, times.stop, initial=min(self.initial, target), final=target)
        # With a schedule that a resume has made longer, the share may be smaller than before for a while.
        self._active[name] = min(self._active[name], kept(weight.numel(), share))
        put(self._masks[name], largest(whole_of(weight.detach().abs() * self._masks[name]), self._active[name]))
        return True

    def _is_due(self, name: str, due: int) -> bool:
        """Whether the mask has still to change for this due step; after the last one, whether it is too dense."""
        # A schedule that was made shorter on a resume may have ended before the present step.
        ended = due >= self._schedule.stop
        return super()._is_due(name, due) or (
            ended and self._active[name] > kept(self._weights[name].numel(), self._targets[name])
        )


class SET(ChangingSparsity):
    """Sparse evolutionary training (Mocanu et al., 2018, arXiv:1707.04780): the smallest weights are dropped, and as
    many others grow at random places, drawn from the run's seed and the step.

    Args:
        sparsity, parameters, exclude, init, distribution, per_layer: as in `Sparsity`.
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
        # A mapping has a share for each parameter already.
        erk = distribution if not isinstance(sparsity, Mapping) else "uniform"
        super().__init__(sparsity, parameters, exclude, init, erk, per_layer)
        check_share("drop_fraction", drop_fraction)
        if grow_fraction is not None:
            check_share("grow_fraction", grow_fraction)
        self.drop_fraction, self.grow_fraction = float(drop_fraction), grow_fraction
        self._schedule = Schedule(start, stop, every)

    def change_mask(self, name: str, due: int) -> bool:
        """Drop the smallest weights of a parameter, and let others grow; not in a step without a finite gradient."""
        weight, active, decay = self._weights[name], self._active[name], self.decay(due)
        # From the run's seed and the due step, not from the global generator: a resume draws the same.
        growth = self.growth(weight, sample_seed(self._seed, due, list(self._weights).index(name)))
        if growth is None or not bool(growth.isfinite().all()):
            # Without a gradient, or where it overflowed so that the step is skipped.
            return False
        drop = int(active * self.drop_fraction * decay)
        count = drop if self.grow_fraction is None else int(active * self.grow_fraction * decay)
        # No more can grow than are masked.
        grow = min(count, weight.numel() - (active - drop))
        mask = self._masks[name]
        new_mask = replaced(whole_of(mask), whole_of(weight.detach()), growth, drop=drop, grow=grow, active=active)
        put(mask, new_mask)
        self._active[name] = active - drop + grow
        return True

    def decay(self, step: int) -> float:
        """The part of the fractions that counts at a step."""
        return 1.0

    def growth(self, weight: Tensor, seed: int) -> Tensor | None:
        """A score of at least 0 for each weight: those with the largest grow. None: they are not known at this step."""
        return random_scores(weight, seed)


class RigL(SET):
    """Rigging the lottery (Evci et al., 2020, arXiv:1911.11134): like SET, but grows the weights whose gradient is
    largest, and the fractions fall along a cosine to 0 at `stop`. With accumulation the gradient is that of the whole
    step, before it is clipped. The arguments are those of `SET`.
    """

    _stops_at = 0.75

    def decay(self, step: int) -> float:
        return cosine(step, self._schedule.stop)

    def growth(self, weight: Tensor, seed: int) -> Tensor | None:
        return None if weight.grad is None else whole_of(weight.grad).abs()
