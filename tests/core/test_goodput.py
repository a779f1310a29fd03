"""Where the time of a run went, and the interval of saves that loses least, by tables."""

from __future__ import annotations

import math

import pytest

from trainer_cli.goodput import (
    best_interval_s,
    complete_killed,
    compute_goodput,
    lost_share,
    read_seconds,
    sum_attempts,
)

STOPPED = {"start": 1.0, "training": 10.0, "saving": 0.5}
KILLED = {"start": 1.0, "loading": 0.5, "training": 6.0, "data": 2.0}


@pytest.mark.parametrize(
    ("attempts", "kept_s", "training_s", "lost_s"),
    [
        ([], 0.0, 0.0, 0.0),
        ([STOPPED], 10.0, 10.0, 0.0),
        ([STOPPED, KILLED], 10.0, 10.0, 6.0),  # nothing of the second was saved
        ([STOPPED, KILLED, STOPPED], 22.0, 22.0, 4.0),
        ([STOPPED], 12.0, 10.0, 0.0),  # a checkpoint of an earlier version counts evaluations as training
    ],
)
def test_training_is_kept_or_lost_and_all_else_adds_up(
    attempts: list[dict[str, float]], kept_s: float, training_s: float, lost_s: float
) -> None:
    seconds = sum_attempts(attempts, kept_s)
    assert (seconds["training"], seconds["lost"]) == (training_s, lost_s)
    assert sum(seconds.values()) == pytest.approx(sum(sum(attempt.values()) for attempt in attempts))
    for name in ("start", "loading", "data", "saving", "evaluation"):
        assert seconds[name] == sum(attempt.get(name, 0.0) for attempt in attempts)


def test_goodput_is_the_share_of_kept_training() -> None:
    assert compute_goodput(sum_attempts([STOPPED, KILLED], 10.0)) == round(10 / 21, 4)
    assert compute_goodput(sum_attempts([], 0.0)) is None


@pytest.mark.parametrize(
    ("known", "lasted_s", "training_s"),
    [({}, 0.0, 0.0), ({}, 5.0, 5.0), (KILLED, 12.0, 8.5), (KILLED, 9.5, 6.0), (KILLED, -3600.0, 6.0)],
    ids=["nothing", "no save", "after a save", "at a save", "a clock that was set back"],
)
def test_what_a_killed_attempt_has_not_noted_was_training(
    known: dict[str, float], lasted_s: float, training_s: float
) -> None:
    seconds = complete_killed(known, lasted_s)
    assert seconds["training"] == training_s
    assert {name: seconds[name] for name in known if name != "training"} == {
        name: amount for name, amount in known.items() if name != "training"
    }


@pytest.mark.parametrize("value", [None, 3, [], {"start": "1"}, {"start": math.nan}, {"start": -1.0}, {"start": None}])
def test_other_json_has_no_seconds(value: object) -> None:
    assert read_seconds(value) is None
    assert read_seconds(STOPPED) == STOPPED


@pytest.mark.parametrize("save_s", [0.01, 1.0, 30.0, 600.0])
@pytest.mark.parametrize("between_failures_s", [3600.0, 86400.0])
def test_the_best_interval_is_where_the_expected_time_is_least(save_s: float, between_failures_s: float) -> None:
    def expected(interval_s: float) -> float:
        # Daly (2006), equation 20: time per second of work, with failures at random.
        return math.expm1((interval_s + save_s) / between_failures_s) / interval_s

    best = best_interval_s(save_s, between_failures_s)
    least = min(expected(best * factor / 100) for factor in range(20, 500))
    assert expected(best) <= 1.001 * least
    assert 0 < lost_share(best, save_s, between_failures_s) < 0.7


def test_a_save_that_takes_longer_than_two_failures_are_apart_is_made_once_a_failure() -> None:
    assert best_interval_s(7300.0, 3600.0) == 3600.0
    assert lost_share(3600.0, 7300.0, 3600.0) == 1.0
