"""Why training stops, and that a run which is complete is finished."""

from __future__ import annotations

import pytest

from trainer_cli.policy.stopping import Limits, Stop
from trainer_cli.steps.intervals import Duration, Interval
from trainer_cli.steps.progress import Progress

TEN = Interval(Duration.parse(10))
SEVEN = Interval(Duration.parse(7))
WISH = Stop("signal", finished=False)
DONE = Stop("no better", finished=True, by="early_stopping")


@pytest.mark.parametrize(
    ("limits", "step", "process_s", "stop_request", "reason", "finished"),
    [
        (Limits(TEN), 9, 0.0, None, None, None),
        (Limits(TEN), 10, 0.0, None, "max_duration of 10 steps reached", True),
        (Limits(TEN), 10, 0.0, WISH, "max_duration of 10 steps reached", True),
        (Limits(TEN), 10, 0.0, DONE, "max_duration of 10 steps reached", True),
        (Limits(TEN), 3, 0.0, WISH, "signal", False),
        (Limits(TEN, max_time_s=5), 3, 4.9, None, None, None),
        (Limits(TEN, max_time_s=5), 3, 5.1, None, "max_time of 5s used up", False),
        (Limits(TEN, max_time_s=5), 10, 5.1, WISH, "max_duration of 10 steps reached", True),
    ],
)
def test_the_strongest_reason_ends_the_run(
    limits: Limits, step: int, process_s: float, stop_request: Stop | None, reason: str | None, finished: bool | None
) -> None:
    stop = limits.why_stop(Progress(step=step), process_s=process_s, stop_request=stop_request)
    assert stop == (None if reason is None else Stop(reason, bool(finished)))


@pytest.mark.parametrize("request_of", [None, WISH])
def test_a_hard_stop_ends_a_part_of_the_run(request_of: Stop | None) -> None:
    stop = Limits(TEN, SEVEN, max_time_s=5).why_stop(Progress(step=7), process_s=9, stop_request=request_of)
    assert stop == Stop("hard_stop at 7 steps", finished=True, is_part=True)
    assert not stop.is_end


def test_a_run_that_ends_at_its_hard_stop_is_at_its_end() -> None:
    assert Limits(SEVEN, SEVEN).why_stop(Progress(step=7), process_s=0.0, stop_request=None) == Stop(
        "max_duration of 7 steps reached", finished=True
    )
    assert Limits(TEN, SEVEN).why_stop(Progress(step=7), process_s=0.0, stop_request=DONE) == DONE


@pytest.mark.parametrize(
    ("limits", "following"),
    [
        (Limits(TEN), 10),
        (Limits(TEN, SEVEN), 7),
        (Limits(TEN, max_time_s=5), 4),
        (Limits(Interval(Duration.parse("9tok"))), 4),
        (Limits(Interval(Duration.parse("2ep"), 6)), 12),
        (Limits(TEN, Interval(Duration.parse("9s"))), 4),
    ],
)
def test_an_end_is_looked_for_where_it_may_come(limits: Limits, following: int) -> None:
    assert limits.next_step(Progress(step=3)) == following
