"""The time left, with evaluations and saves to come as often and as long as before."""

from __future__ import annotations

import pytest

from trainer_cli.loggers.base import Now, Pauses
from trainer_cli.loggers.console import Pace

EVALUATIONS = Pauses(count=2, seconds=20.0, last_step=200)
"""Ten seconds, every hundred steps."""


@pytest.mark.parametrize(
    ("moments", "left"),
    [
        pytest.param({0.0: Now(0)}, None, id="no step yet"),
        pytest.param({9.0: Now(1)}, None, id="the first step, which may be slow, is no rate"),
        pytest.param({9.0: Now(1), 19.0: Now(101)}, 89.9, id="ten steps a second"),
        pytest.param({9.0: Now(1), 19.0: Now(101), 29.0: Now(101)}, 79.9, id="a step takes long"),
        pytest.param({9.0: Now(1), 19.0: Now(101), 29.0: Now(101, activity="evaluating")}, 89.9, id="a pause"),
        pytest.param({0.0: Now(1), 40.0: Now(201, pauses=(EVALUATIONS,))}, 79.9 + 80, id="8 evaluations to come"),
        pytest.param({0.0: Now(1), 49.9: Now(300, pauses=(EVALUATIONS,))}, 70 + 80, id="8 to come before the next"),
        pytest.param({0.0: Now(1), 69.9: Now(300, pauses=(EVALUATIONS,) * 2)}, 70 + 160, id="evaluations and saves"),
        pytest.param({0.0: Now(1), 99.0: Now(100), 109.0: Now(200)}, 438.2, id="the last minute and what is before it"),
        pytest.param({0.0: Now(1), 99.0: Now(100), 109.0: Now(200), 170.0: Now(201)}, 48739, id="the last minute"),
        pytest.param({0.0: Now(1), 1.0: Now(1000)}, 0.0, id="done"),
    ],
)
def test_the_time_left_of_a_thousand_steps(moments: dict[float, Now], left: float | None) -> None:
    pace = Pace(start_step=0)
    for time, now in moments.items():
        pace.read(now, time)
    found = pace.eta_s(now, 1000, time)
    assert found == (None if left is None else pytest.approx(left, abs=0.5))


def test_a_run_that_goes_on_counts_from_where_it_does() -> None:
    pace, pauses = Pace(start_step=900), (Pauses(1, 10.0, 950),)
    for time, now in {0.0: Now(901), 14.9: Now(950, pauses=pauses)}.items():
        pace.read(now, time)
    assert pace.eta_s(now, 1000, time) == pytest.approx(5 + 10, abs=0.5)
