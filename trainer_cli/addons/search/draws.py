"""Draw the values of the next trial: functions of the space, the seed and the trials before it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError
from trainer_cli.search_parts import Numbers, Space, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_DIGITS = 6
"""Of a number that is drawn from an interval, which names the run's directory."""


def draw_at_random(space: Space, seed: int, trials: Sequence[Trial]) -> Mapping[str, Any]:
    """Values by chance, which no trial has had. There must be such ones."""
    known = {repr(trial.values) for trial in trials}
    for attempt in itertools.count():
        chance = random.Random(f"{seed} {len(trials)} {attempt}")
        values = {key: _draw(of, chance) for key, of in space.items()}
        if repr(values) not in known:
            break
    return values


def _draw(of: Sequence[Any] | Numbers, chance: random.Random) -> Any:
    if not isinstance(of, Numbers):
        return chance.choice(of)
    low, high, is_log = of
    if isinstance(low, int):
        if not is_log:
            return chance.randrange(low, int(high) + 1)
        return min(int(math.exp(chance.uniform(math.log(low), math.log(high + 1)))), int(high))
    drawn = math.exp(chance.uniform(math.log(low), math.log(high))) if is_log else chance.uniform(low, high)
    return _shorten(drawn, of)


def _shorten(number: float, of: Numbers) -> float:
    return min(max(float(f"{number:.{_DIGITS}g}"), of.low), of.high)


def draw_by_optuna(space: Space, seed: int, trials: Sequence[Trial]) -> Mapping[str, Any]:
    """The values that Optuna's TPE suggests after these trials; by chance where a trial has had them.

    The sampler is made anew for each draw, so that a sweep that was killed draws as one that was not.

    Raises:
        UserError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        cure = "pip install 'trainer-cli[optuna]', or sweep.search=random"
        raise UserError(f"Optuna cannot be imported: {error}", where="sweep.search", cure=cure) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=random.Random(f"{seed} {len(trials)}").getrandbits(32))
    study = optuna.create_study(sampler=sampler)
    choices = {key: _order(of) for key, of in space.items()}
    distributions = {key: _distribution(of) for key, of in choices.items()}
    for trial in trials:
        params = {
            key: of.index(trial.values[key]) if isinstance(of, list) else trial.values[key]
            for key, of in choices.items()
        }
        study.add_trial(_freeze(trial, params, distributions))
    drawn = study.ask(distributions).params
    values = {key: _decode(drawn[key], of) for key, of in choices.items()}
    if any(repr(values) == repr(trial.values) for trial in trials):
        return draw_at_random(space, seed, trials)
    return values


def _decode(drawn: Any, of: list[Any] | Numbers) -> Any:
    if not isinstance(of, Numbers):
        return of[drawn]
    return _shorten(drawn, of) if isinstance(drawn, float) else drawn


def _order(of: Sequence[Any] | Numbers) -> list[Any] | Numbers:
    """The values of a key, sorted if they are numbers."""
    if isinstance(of, Numbers):
        return of
    return sorted(of) if _are_numbers(of) else list(of)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _distribution(of: list[Any] | Numbers) -> BaseDistribution:
    """That of Optuna; values of a list are given by their places in it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(of, Numbers):
        return IntDistribution(0, len(of) - 1) if _are_numbers(of) else CategoricalDistribution(range(len(of)))
    if isinstance(of.low, int):
        return IntDistribution(of.low, int(of.high), log=of.is_log)
    return FloatDistribution(of.low, of.high, log=of.is_log)


def _freeze(trial: Trial, params: dict[str, Any], distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    """A trial as Optuna knows it: one that was paused early counts with what was measured until then."""
    from optuna.trial import TrialState, create_trial

    known: dict[str, Any] = {"params": params, "distributions": distributions}
    if not trial.losses:
        return create_trial(state=TrialState.RUNNING, **known)
    if not all(map(math.isfinite, trial.losses)):
        return create_trial(state=TrialState.FAIL, **known)
    if trial.has_ended:
        return create_trial(state=TrialState.COMPLETE, value=trial.losses[-1], **known)
    return create_trial(state=TrialState.PRUNED, intermediate_values=dict(enumerate(trial.losses)), **known)
