"""Records of a replay are compared with those of the run, but for what depends on the clock."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_cli.addons.exact.replay_records import RecordComparison
from trainer_cli.loggers.base import Record


def compared(recorded: dict[str, Any], replayed: dict[str, Any], without: tuple[str, ...] = ()) -> list[str]:
    lines = [{"step": 4, "epoch": 0.5, "time": 1.0, **recorded}]
    comparison = RecordComparison(lines, after=0, without=without)
    comparison.log(Record(4, 0.5, 2.0, replayed))
    return [difference.key for difference in comparison.differences(4)]


@pytest.mark.parametrize(
    ("recorded", "replayed", "keys"),
    [
        ({"train/loss": 0.1}, {"train/loss": 0.1}, []),
        ({"train/loss": 0.1}, {"train/loss": 0.1 + 2**-56}, ["train/loss"]),
        ({"train/loss": "nan"}, {"train/loss": "nan"}, []),
        ({"train/loss": 0.1, "val/loss": 1.0}, {"train/loss": 0.1}, ["val/loss"]),
        ({"train/loss": 0.1}, {"train/loss": 0.1, "train/norm/weights": 3.0}, []),
        ({"train/loss": 0.1, "train/samples_per_s": 5.0}, {"train/loss": 0.1, "train/samples_per_s": 6.0}, []),
        ({"train/loss": 0.1, "train/time/data": 5.0}, {"train/loss": 0.1, "train/time/data": 6.0}, []),
        ({"train/loss": 0.1, "train/throughput/mfu": 0.5}, {"train/loss": 0.1}, []),
        ({"train/loss": 0.1, "train/memory/host_peak": 0.5}, {"train/loss": 0.1}, []),
    ],
)
def test_every_value_counts_but_those_of_the_clock(
    recorded: dict[str, Any], replayed: dict[str, Any], keys: list[str]
) -> None:
    assert compared(recorded, replayed) == keys


def test_metrics_at_steps_that_the_clock_chose_are_left_out() -> None:
    assert compared({"train/loss": 0.1, "val/loss": 1.0}, {"val/loss": 1.0}, ("train/*",)) == []


def test_records_of_one_step_are_one_and_empty_ones_prove_nothing() -> None:
    comparison = RecordComparison(
        [{"step": 2, "train/loss": 1.0}, {"step": 2, "end": 3.0}, {"step": 3, "time": 1.0, "train/samples_per_s": 2.0}],
        after=0,
    )
    assert comparison.steps(3) == [2]
    comparison.log(Record(2, 0.5, 0.0, {"train/loss": 1.0}))
    # At the step of a save, what is logged at the end of the run is still to come.
    assert not list(comparison.differences(2, ended=False))
    assert [str(difference) for difference in comparison.differences(2)] == [
        "step 2: end is missing, and the run recorded 3.0"
    ]
    comparison.log(Record(2, 0.5, 0.0, {"end": 3.0}))
    assert not list(comparison.differences(3))


def test_records_before_the_first_step_of_the_replay_are_left_out() -> None:
    comparison = RecordComparison([{"step": step, "train/loss": 1.0} for step in (1, 2, 3)], after=1)
    assert (comparison.steps(2), comparison.steps()) == ([2], [2, 3])
