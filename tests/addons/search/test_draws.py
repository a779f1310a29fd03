"""Draws stay in their space, depend on the seed and the trials before, and never repeat a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from trainer_cli.addons.search.draws import draw_at_random, draw_by_optuna
from trainer_cli.errors import UserError
from trainer_cli.search_parts import Draw, Numbers, Space, Trial

SPACE: Space = {
    "optimizer.lr": Numbers(1e-4, 1e-1, is_log=True),
    "model.dropout": Numbers(0.0, 0.5),
    "model.width": Numbers(8, 64),
    "data.batch_size": Numbers(1, 1024, is_log=True),
    "model.depth": [4, 1, 2],
    "scheduler": [None, "cosine", "1"],
}


def drawn(draw: Draw, count: int, *, space: Space = SPACE, seed: int = 0) -> list[Mapping[str, Any]]:
    """So many draws, where a small learning rate is best."""
    trials: list[Trial] = []
    for _ in range(count):
        values = draw(space, seed, trials)
        trials.append(Trial(values, (abs(math.log(values.get("optimizer.lr", 1.0) / 3e-4)),), has_ended=True))
    return [trial.values for trial in trials]


def by_optuna(space: Space, seed: int, trials: Sequence[Trial]) -> Mapping[str, Any]:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    return draw_by_optuna(space, seed, trials)


@pytest.mark.parametrize("draw", [draw_at_random, by_optuna])
def test_draws_are_in_the_space_and_only_the_seed_and_the_trials_decide(draw: Draw) -> None:
    found = drawn(draw, 14)
    for values in found:
        assert list(values) == list(SPACE)
        for key, of in SPACE.items():
            if not isinstance(of, Numbers):
                assert values[key] in of
            else:
                assert of.low <= values[key] <= of.high
                assert type(values[key]) is type(of.low)
    assert len({repr(values) for values in found}) == 14
    assert drawn(draw, 14) == found
    assert drawn(draw, 9) == found[:9], "more trials add to the same ones"
    assert drawn(draw, 9, seed=1) != found[:9]


def test_chance_is_even_by_the_logarithm_where_that_is_asked_for() -> None:
    found = drawn(draw_at_random, 400)
    below = {key: sum(values[key] < limit for values in found) for key, limit in (
        ("optimizer.lr", 1e-4 * math.sqrt(1000)), ("data.batch_size", 32), ("model.dropout", 0.25), ("model.width", 36)
    )}  # fmt: skip
    assert all(150 < count < 250 for count in below.values()), below


def test_a_small_space_is_drawn_whole() -> None:
    space: Space = {"a": [1, True, "1"], "b": Numbers(1, 3)}
    assert len({repr(values) for values in drawn(draw_at_random, 9, space=space)}) == 9


def test_optuna_learns_which_values_are_good() -> None:
    found = drawn(by_optuna, 40)
    late, early = (
        [abs(math.log(values["optimizer.lr"] / 3e-4)) for values in part] for part in (found[20:], found[:10])
    )
    assert sum(late) / len(late) < 0.6 * sum(early) / len(early)


def test_optuna_draws_after_trials_that_run_were_paused_or_have_no_finite_loss() -> None:
    values = drawn(draw_at_random, 4)
    trials = [
        Trial(values[0]),
        Trial(values[1], (0.5,)),
        Trial(values[2], (0.3, math.inf)),
        Trial(values[3], (1.0,), True),
    ]
    assert by_optuna(SPACE, 0, trials) == by_optuna(SPACE, 0, trials)


def test_optuna_never_draws_a_trial_again() -> None:
    space: Space = {"a": [1, 2], "b": ["x", "y"]}
    assert len({repr(values) for values in drawn(by_optuna, 4, space=space)}) == 4


def test_where_optuna_is_missing_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'trainer-cli\[optuna\]', or sweep.search=random"):
        draw_by_optuna(SPACE, 0, [])
