"""Which validation loaders are evaluated when, and by which loop: all by `eval_interval`, or each by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_cli.config.schema import LoopConfig
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import UserError
from trainer_cli.trainer.intervals import Interval
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.validation_loop import Due, ValidationLoop


class Evaluations:
    """The intervals and loops of a training's evaluations, as `loop.eval_…` says."""

    def __init__(self, settings: LoopConfig) -> None:
        self._settings = settings
        self.validation = ValidationLoop(settings.eval_steps)
        """Evaluates the loaders without a loop of their own."""
        self.own = {
            str(name): ValidationLoop(own.get("steps", settings.eval_steps), hook=own.get("hook", "validate"))
            for name, own in settings.eval_loaders.items()
        }
        self.interval: Interval | None = None
        self._intervals: dict[str, Interval | None] = {}

    def learn(self, interval: Callable[[Any], Interval | None]) -> None:
        """Make the intervals, for epochs of a known length."""
        self.interval = interval(self._settings.eval_interval)
        self._intervals = {
            str(name): interval(own["interval"])
            for name, own in self._settings.eval_loaders.items()
            if "interval" in own
        }

    def of(self, name: str) -> ValidationLoop:
        """The loop that evaluates the loader with this name."""
        return self.own.get(name, self.validation)

    def hooks(self) -> set[str]:
        """The base names of the hooks that the loops call."""
        return {loop.hook for loop in (self.validation, *self.own.values())}

    def check(self, loaders: Iterable[str]) -> None:
        """Refuse settings for a loader that there is not.

        Raises:
            UserError: with the nearest name.
        """
        known = list(loaders)
        for name in self.own:
            if name not in known:
                cure = did_you_mean(name, known).strip() or f"There are: {', '.join(known) or 'none'}."
                raise UserError(f"there is no validation loader '{name}'", where="loop.eval_loaders", cure=cure)

    def intervals(self, loaders: Iterable[str], *, callbacks: bool) -> list[Interval]:
        """The intervals at which something is evaluated."""
        names = list(loaders)
        shared = callbacks or not names or any(name not in self._intervals for name in names)
        found = [self.interval if shared else None, *(self._intervals.get(name) for name in names)]
        return list(dict.fromkeys(one for one in found if one is not None))

    def due(self, now: Progress, loaders: Mapping[str, Any]) -> Due | None:
        """What is due at the step just made; None if nothing is."""
        shared = self.interval is not None and self.interval.due(now)
        own = {name for name, one in self._intervals.items() if one is not None and one.due(now)}
        names = own | ({name for name in loaders if name not in self._intervals} if shared else set())
        due = {name: each for name, each in loaders.items() if name in names}
        return Due(due, callbacks=shared, is_all=len(due) == len(loaders)) if shared or own else None
