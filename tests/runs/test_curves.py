"""Metrics as columns, and curves that keep what a person looks for: extremes, ends, gaps and pauses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_cli.runs.curves import Columns, best_values, pace, pauses, read_columns, reduce


def written(file: Path, *records: Any, tail: str = "") -> Columns:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    file.write_text("".join(f"{line}\n" for line in lines) + tail)
    return read_columns(file)


def at(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "time": 100.0 + step, **metrics}


def test_each_metric_has_the_values_of_its_own_records(tmp_path: Path) -> None:
    found = written(tmp_path / "m", at(1, a=1), at(2, a=2, b="nan"), at(3, a=3), at(4, a=4, b=8))
    assert found.step.tolist() == [1, 2, 3, 4]
    assert found.time.tolist() == [101, 102, 103, 104]
    assert (found.metrics["a"].rows.tolist(), found.metrics["a"].values.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert found.metrics["b"].rows.tolist() == [1, 3]
    assert math.isnan(found.metrics["b"].values[0])
    assert found.metrics["b"].values[1] == 8


@pytest.mark.parametrize(
    ("odd", "tail"),
    [
        ((), '{"step": 3, "epo'), ((), json.dumps(at(3, a=3))), (("\0\0\0",), ""), (("[]", "7", "null"), ""),
        ((at(9, a="text"), at(10, a=None), at(11, a=[1])), ""), (({"step": "x"}, {"epoch": 1}), ""), (('{"a',), ""),
    ],
)  # fmt: skip
def test_what_is_torn_or_odd_is_left_out(tmp_path: Path, odd: tuple[Any, ...], tail: str) -> None:
    found = written(tmp_path / "m", at(1, a=1), *odd, at(2, a=2), tail=tail)
    assert found.metrics["a"].values.tolist() == [1, 2]
    assert found.step[found.metrics["a"].rows].tolist() == [1, 2]


def test_a_file_that_is_not_there_has_no_metrics(tmp_path: Path) -> None:
    assert read_columns(tmp_path / "none").metrics == {}


@given(
    st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=300),
    st.integers(1, 20),
    st.integers(0, 2**32),
)
def test_a_reduced_curve_keeps_both_ends_and_all_extremes(values: list[float], buckets: int, seed: int) -> None:
    y = np.array(values, float)
    x = np.sort(np.random.default_rng(seed).integers(0, 1000, len(y)))
    kept, means = reduce(x, y, buckets)
    assert {0, len(y) - 1} <= set(kept.tolist())
    assert kept.tolist() == sorted(set(kept.tolist()))
    finite = y[np.isfinite(y)]
    if len(finite):
        assert {finite.min(), finite.max()} <= set(y[kept].tolist())
    if len(y) <= 2 * buckets:
        assert means is None
        assert len(kept) == len(y)
    elif means is not None:
        assert len(means.indices) <= buckets
        assert np.isfinite(y[means.indices]).all()
        assert (np.diff(x[means.indices]) >= 0).all()
        assert finite.min() - 1e-3 * abs(finite.min()) <= means.values.min()


def test_a_hundred_thousand_points_become_two_for_each_part_and_keep_a_single_spike() -> None:
    y = np.sin(np.arange(100_000) / 5000)
    y[77_777], y[500:520] = 9.0, np.nan
    kept, means = reduce(np.arange(100_000), y, 1000)
    assert len(kept) <= 2 * 1000 + 4
    assert {500, 519, 77_777} <= set(kept.tolist())
    assert means is not None
    assert len(means.indices) == 1000
    assert means.values[0] == pytest.approx(np.nanmean(y[:100]))


def test_pauses_are_told_from_the_usual_pace_and_not_across_attempts() -> None:
    seconds = np.ones(100)
    seconds[40], seconds[60], seconds[70] = 30.0, 3.5, 500.0
    time = np.cumsum(seconds)
    columns = Columns(np.arange(2, 202, 2), np.zeros(100), time)
    per_step = pace(columns, [0.0, time[70] - 1])
    assert 70 not in per_step.rows
    assert per_step.values.min() == 0.5
    found = pauses(columns, per_step, most=5)
    assert [(one.row, one.seconds, one.usual_s) for one in found] == [(40, 30.0, 1.0), (60, 3.5, 1.0)]
    assert [one.row for one in pauses(columns, per_step, most=1)] == [40]
    assert pauses(Columns(), pace(Columns(), []), most=5) == []


def test_the_best_value_is_finite_and_the_newest_of_equals(tmp_path: Path) -> None:
    found = written(tmp_path / "m", at(1, a="-inf", b=1), at(2, a=3, b="nan"), at(3, a=2, b=1), at(4, a=2))
    assert best_values(found, {"a": "min", "b": "max", "c": "min"}) == {"a": (2.0, 4), "b": (1.0, 3)}
