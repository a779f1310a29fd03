"""Sparsity whose masks change on a schedule: at each due step, or at the next step at which a mask can change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_cli.config.schema import check_duration, needed_duration
from trainer_cli.errors import ConfigError
from trainer_cli.sparsity.base import Sparsity

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)


class Schedule:
    """When masks change: every so often from `start` to `stop`; durations in steps or epochs.

    Args:
        at_stop: whether they change at `stop` too, where that is none of these steps.
    """

    def __init__(self, start: int | str, stop: int | str | None, every: int | str, *, at_stop: bool = False) -> None:
        self._given = {
            "start": None if start == 0 else needed_duration("start", start),
            "stop": check_duration("stop", stop),
            "every": needed_duration("every", every),
        }
        self.start, self.stop, self.every = 0, 0, 1
        self._at_stop = at_stop

    def resolve(self, loop: TrainingLoop, share: float) -> None:
        """Convert the durations to steps. Without `stop` it is this share of the whole training.

        Raises:
            ConfigError: one of them is no number of steps, or nothing lies between start and stop.
        """
        found: dict[str, int] = {"start": 0}
        if self._given["stop"] is None and loop.total_steps is not None:
            found["stop"] = int(loop.total_steps * share)
        for key, duration in self._given.items():
            steps = found.get(key) if duration is None else loop.steps_of(duration)
            if steps is None:
                raise ConfigError(
                    f"sparsity.{key} is needed as a number of steps or epochs", location=f"sparsity.{key}"
                )
            found[key] = steps
        self.start, self.stop, self.every = found["start"], found["stop"], found["every"]
        if self.stop <= self.start:
            what = f"sparsity stops to change at step {self.stop}, but begins at step {self.start}"
            raise ConfigError(what, location="sparsity.stop")

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
        self._schedule.resolve(loop, self._stops_at)
        super().on_fit_start(trainer, train_loader, val_loaders, loop)
        # Nothing is due at the beginning. Earlier checkpoints did not hold this, and changed at due steps alone.
        self._changed = {name: self._changed.get(name, trainer.progress.step) for name in self._weights}
        self._settled = {}

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        due = self._schedule.last_due(trainer.progress.step)
        if late := [name for name in self._weights if self._is_due(name, due)]:
            log.warning(
                "sparsity: %s %s not changed as due at step %d: there was no gradient since",
                ", ".join(late), "was" if len(late) == 1 else "were", due,
            )  # fmt: skip

    def change(self, step: int, names: Sequence[str]) -> bool:
        due, key = self._schedule.last_due(step), tuple(names)
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
        return self._changed[name] < due

    def state_dict(self) -> dict[str, Any]:
        """The masks, and for which due step each was changed last."""
        return {**super().state_dict(), "changed": dict(self._changed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._changed = dict(state.get("changed", {}))
