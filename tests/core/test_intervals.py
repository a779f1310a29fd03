"""Durations and what repeats at them: absolute, exact, and the same whoever asks from where; progress."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainer_cli.steps.intervals import (
    Duration,
    Interval,
    StepCounts,
    Unit,
    count_epoch_steps,
    count_steps,
    limit_batches,
)
from trainer_cli.steps.progress import Progress


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (500, 500, Unit.STEP),
        ("500", None, None),
        ("500st", 500, Unit.STEP),
        ("1 step", 1, Unit.STEP),
        ("3ep", 3, Unit.EPOCH),
        ("1e18tok", 10**18, Unit.TOKEN),
        (10**18 + 1, None, None),
        ("0.25ep", Fraction(1, 4), Unit.EPOCH),
        ("0.1 epochs", Fraction(1, 10), Unit.EPOCH),
        ("1e9tok", 10**9, Unit.TOKEN),
        ("1.5e3 Tokens", 1500, Unit.TOKEN),
        ("2048sp", 2048, Unit.SAMPLE),
        ("90s", 90, Unit.SECOND),
        ("0.5s", Fraction(1, 2), Unit.SECOND),
        ("30min", 1800, Unit.SECOND),
        ("1h30m", 5400, Unit.SECOND),
        ("1d 2h", 93600, Unit.SECOND),
        ("0.25dur", Fraction(1, 4), Unit.RUN),
        ("1 dur", 1, Unit.RUN),
        ("1.5dur", None, None),
        ("0dur", None, None),
        ("", None, None),
        ("ep", None, None),
        ("0ep", None, None),
        (0, None, None),
        (-3, None, None),
        ("-3ep", None, None),
        ("1.5st", None, None),
        ("2.5sp", None, None),
        ("3 parsecs", None, None),
        ("1h30", None, None),
        ("nan ep", None, None),
        ("1e30tok", None, None),
        (True, None, None),
        (2.0, None, None),
        (None, None, None),
    ],
)
def test_a_duration_is_a_positive_exact_amount_of_a_known_unit(text: Any, value: Any, unit: Any) -> None:
    if unit is None:
        with pytest.raises(ValueError, match="is not a duration"):
            Duration.parse(text)
    else:
        assert Duration.parse(text) == Duration(Fraction(value), unit)


def test_a_duration_is_its_own_parse() -> None:
    assert Duration.parse(Duration(Fraction(3), Unit.STEP)) == Duration.parse(3)


@pytest.mark.parametrize(
    ("text", "run", "amount"),
    [
        ("0.25dur", 150, Duration(Fraction(75, 2), Unit.STEP)),
        ("0.1dur", "3ep", Duration(Fraction(3, 10), Unit.EPOCH)),
        ("1dur", "90s", Duration(Fraction(90), Unit.SECOND)),
        ("2ep", 150, Duration(Fraction(2), Unit.EPOCH)),
    ],
)
def test_a_share_is_counted_in_the_unit_of_the_run(text: str, run: Any, amount: Duration) -> None:
    assert Duration.parse(text).within(Duration.parse(run)) == amount


@pytest.mark.parametrize(
    ("text", "steps_per_epoch", "steps"),
    [
        ("7st", None, 7),
        ("2ep", 5, 10),
        ("0.25ep", 10, 3),
        ("2ep", None, None),
        ("8sp", 5, None),
        ("8tok", 5, None),
        ("8s", 5, None),
    ],
)
def test_steps_are_reported_only_where_they_can_be(text: str, steps_per_epoch: int | None, steps: int | None) -> None:
    assert Duration.parse(text).steps(steps_per_epoch) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1st", "1 step"),
        ("5ep", "5 epochs"),
        ("0.25ep", "0.25 epochs"),
        ("1h30m", "5400s"),
        ("8tok", "8 tokens"),
        ("0.25dur", "0.25dur"),
    ],
)
def test_a_duration_says_itself_in_words(text: str, said: str) -> None:
    assert str(Duration.parse(text)) == said


def interval_of(text: str, steps_per_epoch: int | None = None) -> Interval:
    return Interval(Duration.parse(text), steps_per_epoch)


@pytest.mark.parametrize(
    ("text", "steps_per_epoch", "due"),
    [
        ("4st", None, [4, 8, 12]),
        ("1ep", 5, [5, 10]),
        ("0.25ep", 10, [3, 5, 8, 10]),
        ("0.1ep", 5, list(range(1, 13))),
    ],
)
def test_an_interval_in_steps_is_due_at_its_multiples(text: str, steps_per_epoch: int | None, due: list[int]) -> None:
    interval = interval_of(text, steps_per_epoch)
    assert [step for step in range(13) if interval.due(Progress(step=step))] == due


@given(st.sampled_from(["3st", "0.25ep", "0.3ep", "1.7ep", "2ep"]), st.integers(1, 30), st.integers(0, 200))
def test_the_next_step_is_the_first_that_is_due(text: str, steps_per_epoch: int, step: int) -> None:
    interval = interval_of(text, steps_per_epoch)
    following = interval.next_step(Progress(step=step))
    assert interval.due(Progress(step=following))
    assert not any(interval.due(Progress(step=between)) for between in range(step + 1, following))


@pytest.mark.parametrize(
    ("text", "before", "after", "due"),
    [
        ("100sp", {"last_samples": 96}, {"samples": 104}, True),
        ("100sp", {"last_samples": 104}, {"samples": 112}, False),
        ("100sp", {"last_samples": 96}, {"samples": 100}, True),
        ("1e3tok", {"last_tokens": 900}, {"tokens": 3100}, True),
        ("1e3tok", {"last_tokens": 3100}, {"tokens": 3900}, False),
        ("10s", {"last_seconds": 9.5}, {"seconds": 10.1}, True),
        ("10s", {"last_seconds": 10.1}, {"seconds": 19.9}, False),
        ("1ep", {"last_epoch": 0}, {"epoch": 1}, True),
        ("2ep", {"last_epoch": 0}, {"epoch": 1}, False),
        ("2ep", {"last_epoch": 1}, {"epoch": 2}, True),
    ],
)
def test_where_steps_cannot_tell_a_crossed_multiple_is_due(
    text: str, before: dict[str, Any], after: dict[str, Any], due: bool
) -> None:
    now = Progress(step=9, **before, **after)
    assert interval_of(text).due(now) is due
    assert interval_of(text).next_step(now) == 10


def test_nothing_is_due_before_the_first_step() -> None:
    assert not interval_of("1st").due(Progress())


def test_a_part_epoch_needs_the_length_of_one() -> None:
    with pytest.raises(ValueError, match=r"loop\.steps_per_epoch"):
        interval_of("0.5ep")


@pytest.mark.parametrize(
    ("text", "now", "reached"),
    [
        ("5st", Progress(step=4), False),
        ("5st", Progress(step=5), True),
        ("8sp", Progress(samples=7), False),
        ("8sp", Progress(samples=9), True),
        ("2ep", Progress(epoch=2), True),
        ("3s", Progress(seconds=2.9), False),
    ],
)
def test_a_duration_is_reached_once_it_lies_behind(text: str, now: Progress, reached: bool) -> None:
    assert interval_of(text).reached(now) is reached


@pytest.mark.parametrize(("text", "said"), [("1ep", "every epoch"), ("250st", "every 250 steps"), ("1s", "every 1s")])
def test_an_interval_says_itself_in_words(text: str, said: str) -> None:
    assert str(interval_of(text, 5)) == said


@pytest.mark.parametrize(
    ("batches", "limit", "left"),
    [
        (10, None, 10),
        (10, 3, 3),
        (10, 30, 10),
        (10, 0.25, 3),
        (10, 0.1, 1),
        (10, 0.01, 1),
        (None, 4, 4),
        (None, None, None),
    ],
)
def test_a_limit_is_a_number_or_a_fraction_rounded_up(
    batches: int | None, limit: int | float | None, left: int | None
) -> None:
    assert limit_batches(batches, limit) == left


def test_a_fraction_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no length"):
        limit_batches(None, 0.5)


@pytest.mark.parametrize(
    ("batches", "accum", "configured", "steps"), [(10, 3, None, 4), (10, 1, 7, 10), (None, 2, 7, 7)]
)
def test_leftover_batches_make_one_more_step(
    batches: int | None, accum: int, configured: int | None, steps: int
) -> None:
    assert count_epoch_steps(batches, accum, configured) == steps


@pytest.mark.parametrize(
    ("length", "batches", "accum", "configured", "samples", "steps"),
    [
        ("12st", None, 1, None, None, 12),
        ("2ep", 3, 1, None, 10, 6),
        ("2ep", 3, 2, None, 10, 4),
        ("2ep", None, 1, 9, None, 18),
        ("2ep", None, 1, None, None, None),
        ("10sp", 3, 1, None, 10, 3),
        ("14sp", 3, 1, None, 10, 4),
        ("15sp", 3, 2, None, 10, 3),
        ("16sp", 2, 1, None, 10, 4),
        ("14sp", None, 1, None, None, None),
        ("9tok", 3, 1, None, 10, None),
        ("9s", 3, 1, None, 10, None),
    ],
)
def test_the_total_is_reported_where_it_can_be(
    length: str, batches: int | None, accum: int, configured: int | None, samples: int | None, steps: int | None
) -> None:
    found = count_steps(
        Duration.parse(length),
        epoch_batches=batches,
        grad_accum_steps=accum,
        steps_per_epoch=configured,
        batch_size=4 if samples else None,
        epoch_samples=samples,
    )
    assert found == steps


@pytest.mark.parametrize(
    ("interval", "now", "share"),
    [
        (Interval(Duration.parse("40st")), Progress(step=10), 0.25),
        (Interval(Duration.parse("4ep"), steps_per_epoch=10), Progress(step=30, epoch=3), 0.75),
        (Interval(Duration.parse("4ep"), steps_per_epoch=5, offset=-10), Progress(step=20, epoch=3), 0.5),
        (Interval(Duration.parse("4ep")), Progress(step=33, epoch=3), 0.75),
        (Interval(Duration.parse("1e3tok")), Progress(step=1, tokens=500), 0.5),
        (Interval(Duration.parse("1min")), Progress(step=1, seconds=15.0), 0.25),
    ],
    ids=["steps", "epochs", "epochs of another length", "epochs without a length", "tokens", "time"],
)
def test_the_share_of_a_duration_that_has_passed(interval: Interval, now: Progress, share: float) -> None:
    assert interval.share(now) == share


@pytest.mark.parametrize("offset", [3, -3])
def test_part_epochs_of_another_length_are_due_where_a_run_that_far_has_them(offset: int) -> None:
    interval = Interval(Duration.parse("0.5ep"), steps_per_epoch=10, offset=offset)
    due = [step for step in range(4, 40) if interval.due(Progress(step=step))]
    assert due == [step for step in range(4, 40) if (step + offset) % 5 == 0]
    assert [interval.next_step(Progress(step=step - 1)) for step in due] == due
    assert [interval.next_step(Progress(step=step)) for step in due[:-1]] == due[1:]


def test_whole_epochs_of_another_length_are_due_where_the_count_says_so() -> None:
    interval = Interval(Duration.parse("1ep"), steps_per_epoch=10, offset=3)
    assert interval.due(Progress(step=12, epoch=1, last_epoch=0))
    assert not interval.due(Progress(step=7, epoch=1, last_epoch=1))


@pytest.mark.parametrize("offset", [0, 3, -3])
def test_a_duration_ends_at_the_first_step_at_which_it_is_reached(offset: int) -> None:
    interval = Interval(Duration.parse("2.5ep"), steps_per_epoch=10, offset=offset)
    assert interval.end == 25 - offset
    assert [interval.reached(Progress(step=interval.end + more)) for more in (-1, 0, 1)] == [False, True, True]


def test_the_counts_at_the_start_are_those_that_were_counted_up_to_it() -> None:
    start = Progress(7, 1, 2, 8, 28, 0, 0.0, last_samples=25, last_epoch=1)
    assert StepCounts(start=start, epoch_batches=5, batch_size=4, epoch_samples=20).at(7) == start


def test_epochs_without_batches_are_counted_by_their_steps() -> None:
    epochs = [StepCounts(steps_per_epoch=3).at(step) for step in range(1, 7)]
    assert [(now.last_epoch, now.epoch) for now in epochs] == [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1), (1, 2)]


# Progress: carried whole, or refused.


def test_progress_comes_back_as_it_was_saved() -> None:
    saved = Progress(step=7, epoch=2, batch=1, epoch_samples=4, samples=24, tokens=96, seconds=1.5, last_samples=20)
    found = Progress()
    found.load_state_dict(saved.state_dict())
    assert found == saved


@pytest.mark.parametrize("change", [{"era": 3}, {"step": None}])
def test_a_count_that_is_missing_or_unknown_is_named(change: dict[str, int | None]) -> None:
    counts = {**Progress().state_dict(), **change}
    state = {name: value for name, value in counts.items() if value is not None}
    with pytest.raises(ValueError, match=next(iter(change))):
        Progress().load_state_dict(state)
