"""metrics.jsonl: read while it grows, as columns and as curves, and which value of a metric is its best."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trainer_cli.addons.view.curves import pace, pauses, reduce
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.metric_names import MODES, Mode
from trainer_cli.policy.rules import BestRule
from trainer_cli.runs.columns import Columns, GrowingColumns, best_values
from trainer_cli.runs.metrics import BestSettings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def at(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "time": 100.0 + step, **values}


def write(path: Path, *records: Any, tail: str = "") -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines) + tail)
    return path


def test_each_metric_has_the_values_of_its_own_records(path: Path) -> None:
    columns = GrowingColumns(write(path, at(1, a=1), at(2, a=2, b="nan"), at(3, a=3), at(4, a=4, b=8))).read()
    assert (columns.step.tolist(), columns.time.tolist()) == ([1, 2, 3, 4], [101, 102, 103, 104])
    a, b = columns.metrics["a"], columns.metrics["b"]
    assert (a.rows.tolist(), a.values.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert (b.rows.tolist(), math.isnan(b.values[0]), b.values[1]) == ([1, 3], True, 8)
    assert GrowingColumns(path.with_name("none")).read().metrics == {}


@pytest.mark.parametrize(
    ("odd", "tail"),
    [
        ((), '{"step": 3, "epo'), ((), json.dumps(at(3, a=3))), (("\0\0\0",), ""), (("[]", "7", "null"), ""),
        ((at(9, a="text"), at(10, a=None), at(11, a=[1])), ""), (({"step": "x"}, {"epoch": 1}), ""), (('{"a',), ""),
    ],
)  # fmt: skip
def test_what_is_torn_or_odd_is_left_out(path: Path, odd: tuple[Any, ...], tail: str) -> None:
    columns = GrowingColumns(write(path, at(1, a=1), *odd, at(2, a=2), tail=tail)).read()
    assert columns.metrics["a"].values.tolist() == [1, 2]
    assert columns.step[columns.metrics["a"].rows].tolist() == [1, 2]


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
    longest = pauses(columns, per_step, most=5)
    assert [(pause.row, pause.seconds, pause.usual_s) for pause in longest] == [(40, 30.0, 1.0), (60, 3.5, 1.0)]
    assert [pause.row for pause in pauses(columns, per_step, most=1)] == [40]
    assert pauses(Columns(), pace(Columns(), []), most=5) == []


def test_the_best_value_is_finite_and_the_newest_of_equals(path: Path) -> None:
    columns = GrowingColumns(write(path, at(1, a="-inf", b=1), at(2, a=3, b="nan"), at(3, a=2, b=1), at(4, a=2))).read()
    assert best_values(columns, {"a": "min", "b": "max", "c": "min"}) == {"a": (2.0, 4), "b": (1.0, 3)}


@pytest.mark.parametrize(
    ("metric", "best_of_config", "mode"),
    [
        ("val/loss", (None, None), Mode.min),
        ("val/bpb", (None, None), Mode.min),
        ("val/PPL", (None, None), Mode.min),
        ("val/Accuracy", (None, None), Mode.max),
        ("val/auroc", (None, None), Mode.max),
        ("val/score", (None, None), None),
        ("val/neg_loss", (None, None), None),
        ("val/gain_per_token", (None, None), None),
        ("val/score", ("val/score", "max"), Mode.max),
        ("val/score", ("val/score", "min"), Mode.min),
        ("val/loss", ("val/loss", "max"), Mode.max),
        ("val/accuracy", ("val/accuracy", None), Mode.max),
        ("val/recall@5", (None, None), Mode.max),
        ("other/loss", ("val/loss", "max"), Mode.min),
        ("val/loss", ("val/loss", "auto", (("val/loss", "max"),)), Mode.min),
        ("val/loss", ("val/f1", "auto", (("val/loss", "max"),)), Mode.max),
    ],
)
def test_a_metric_has_the_mode_of_the_config_or_the_usual_one_of_its_name(
    metric: str, best_of_config: Any, mode: Mode | None
) -> None:
    assert BestSettings(*best_of_config).mode_of(metric) == mode
    assert all(name == name.lower() and "/" not in name for name in MODES), "as they are looked up"


NAMES = ["train/loss", "val/loss", "other/loss", "val/f1", "val/accuracy"]


@pytest.mark.parametrize(
    ("keep_best", "names", "expected"),
    [
        ({}, NAMES, BestRule("val/loss")),
        ({"metric": None}, NAMES, BestRule("val/loss")),
        ({"metric": "val/f1", "mode": "max"}, NAMES, BestRule("val/f1", Mode.max)),
        ({"metric": "val/f1"}, NAMES, BestRule("val/f1", Mode.max)),
        ({"metric": "val/f1", "mode": "min"}, NAMES, BestRule("val/f1")),
        ({"metric": "val/loss", "mode": "max"}, NAMES, BestRule("val/loss", Mode.max)),
        ({"metric": "train/loss"}, NAMES, BestRule("train/loss")),
        ({"metric": "val/absent"}, NAMES, BestRule("val/loss")),
        ({"metric": "other/absent"}, NAMES, BestRule("other/loss")),
        ({}, ["other/loss", "some/loss"], BestRule("other/loss")),
        ({}, ["train/loss", "val/f1"], None),
        ({}, [], None),
    ],
)
def test_the_rule_of_the_run_decides_and_else_the_validation_loss(
    keep_best: Any, names: list[str], expected: BestRule | None
) -> None:
    assert BestSettings.of({"checkpoint": {"keep_best": keep_best}}).rule(names) == expected


AT_END = {"loop": {"eval_loaders": {"held_out": {"interval": None}, "val": {"steps": 3}}}}
STOPPING = {"callbacks": {"early": {"_target_": "trainer_cli.EarlyStopping", "metric": "other/accuracy"}}}
PLATEAU = {"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "metric": "other/loss"}}


@pytest.mark.parametrize(
    ("config", "loaders", "expected"),
    [
        ({}, ["test", "val"], "val"),
        ({}, ["dev", "test", "validation"], "dev"),
        ({}, ["dev", "test_clean", "librispeech_test_other", "testset", "Test2017", "my-test"], "dev"),
        ({}, ["contest", "latest"], "contest"),
        ({}, ["test"], None),
        ({}, ["myTest"], None),
        (AT_END, ["held_out", "val"], "val"),
        (AT_END, ["held_out", "other"], "other"),
        (AT_END, ["held_out"], None),
        (STOPPING, ["other", "val"], "other"),
        (PLATEAU, ["other", "val"], "other"),
        ({"scheduler": {"first": PLATEAU["scheduler"], "second": None}}, ["other", "val"], "other"),
        ({"callbacks": {"early": {**STOPPING["callbacks"]["early"], "metric": "test/loss"}}}, ["test", "val"], "val"),
        (
            {"loop": None, "callbacks": [1], "scheduler": "x", "checkpoint": {"keep_best": {"metric": 3}}},
            ["val"],
            "val",
        ),
    ],
)
def test_a_checkpoint_is_best_by_a_set_that_the_run_watches_and_never_unasked_by_a_test_set(
    config: Any, loaders: list[str], expected: str | None
) -> None:
    rule = BestSettings.of(config).rule([f"{loader}/loss" for loader in [*loaders, "train"]])
    assert rule == (None if expected is None else BestRule(f"{expected}/loss"))


OF_METRICS = ["val/loss", "noisy/loss", "noisy/accuracy", "noisy/score", "test/accuracy", "train/loss"]


def _stops(metric: str, **more: str) -> dict[str, Any]:
    return {"_target_": "trainer_cli.EarlyStopping", "metric": metric, **more}


def _slows(metric: str, **more: str) -> dict[str, Any]:
    return {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "metric": metric, **more}


GUARD = {"_target_": "trainer_cli.ThresholdStopper", "metric": "noisy/accuracy", "threshold": 0, "mode": "min"}


@pytest.mark.parametrize(
    ("callbacks", "scheduler", "expected"),
    [
        ({"stop": _stops("noisy/accuracy")}, {}, BestRule("noisy/accuracy", Mode.max)),
        ({"stop": _stops("noisy/accuracy", mode="auto")}, {}, BestRule("noisy/accuracy", Mode.max)),
        ({"stop": _stops("noisy/score", mode="max")}, {}, BestRule("noisy/score", Mode.max)),
        ({"stop": _stops("noisy/accuracy")}, _slows("val/loss"), BestRule("noisy/accuracy", Mode.max)),
        ({}, _slows("noisy/accuracy", mode="max"), BestRule("noisy/accuracy", Mode.max)),
        ({}, {"first": None, "second": _slows("noisy/loss")}, BestRule("noisy/loss")),
        (
            {"guard": {**GUARD, "metric": "val/loss"}, "stop": _stops("noisy/accuracy")},
            {},
            BestRule("noisy/accuracy", Mode.max),
        ),
        ({"stop": _stops("train/loss")}, _slows("noisy/accuracy"), BestRule("noisy/accuracy", Mode.max)),
        ({"stop": _stops("train/loss")}, {}, BestRule("val/loss")),
        ({"stop": _stops("test/accuracy")}, {}, BestRule("val/loss")),
        ({"stop": _stops("noisy/absent")}, {}, BestRule("noisy/loss")),
        ({"guard": GUARD}, {}, BestRule("val/loss")),
        ({"guard": GUARD, "stop": _stops("noisy/accuracy")}, {}, BestRule("noisy/accuracy", Mode.max)),
        ({"mine": _stops("noisy/accuracy", _target_="mine.EarlyStopping")}, {}, BestRule("val/loss")),
        ({}, _slows("noisy/accuracy", _target_="mine.Plateau"), BestRule("val/loss")),
        (
            {"guard": GUARD, "stop": _stops("${callbacks.guard.metric}", mode="${callbacks.guard.mode}")},
            {},
            BestRule("noisy/accuracy"),
        ),
        ({"stop": _stops("${nowhere}")}, {}, BestRule("val/loss")),
        ({"stop": _stops("${callbacks.stop.metric}")}, {}, BestRule("val/loss")),
        ({"ema": {"decay": 0.9}}, {"_target_": "x"}, BestRule("val/loss")),
    ],
)
def test_without_keep_best_the_validation_metric_that_the_run_watches_decides(
    callbacks: dict[str, Any], scheduler: dict[str, Any], expected: BestRule
) -> None:
    config = {"callbacks": callbacks, "scheduler": scheduler}
    assert BestSettings.of(config).rule(OF_METRICS) == expected
    keeps = {**config, "checkpoint": {"keep_best": {"metric": "val/loss"}}}
    assert BestSettings.of(keeps).rule(OF_METRICS) == BestRule("val/loss")


@pytest.mark.parametrize("keep_best", [{"metric": "val/loss", "mode": "auto"}, {"metric": "${named}"}])
def test_the_mode_of_what_watches_it_is_not_that_of_a_metric_of_retention(keep_best: Any) -> None:
    config = {"named": "val/loss", "callbacks": {"stop": _stops("val/loss", mode="max")}}
    settings = BestSettings.of({**config, "checkpoint": {"keep_best": keep_best}})
    assert settings.rule(OF_METRICS) == BestRule("val/loss")


def test_a_test_set_decides_where_the_config_says_so() -> None:
    config = {"checkpoint": {"keep_best": {"metric": "test/accuracy"}}}
    assert BestSettings.of(config).rule(["test/accuracy", "val/loss"]) == BestRule("test/accuracy", Mode.max)


def test_a_rule_is_shared_only_where_all_runs_have_it_and_described_with_what_ties_do() -> None:
    first, second = BestSettings("val/f1", "max"), BestSettings("val/loss", "min")
    assert BestSettings.common([first, BestSettings("val/f1", "max")]) == first
    assert BestSettings.common([first, second]) == BestSettings()
    watching = first._replace(watched=(("val/score", "max"),), at_the_end=("held_out",))
    assert BestSettings.common([watching, first._replace(at_the_end=("held_out",))]) == watching._replace(watched=())
    assert BestSettings.common([watching, second._replace(watched=watching.watched)]) == BestSettings(
        watched=watching.watched
    )
    assert BestSettings.common([]) == BestSettings()
    assert BestRule("val/f1", Mode.max).note == "largest val/f1, of equal ones the newest"


def test_the_summary_has_the_best_values_of_known_modes_and_the_last_ones_of_all(path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"train/loss": 9, "val/loss": 2.0, "val/accuracy": "nan", "val/score": 2.0},
        {"train/loss": 9, "val/loss": 1.0, "val/accuracy": 0.5, "val/score": 1.0},
        {"train/loss": 9, "val/loss": 1.0, "val/accuracy": "inf", "val/score": 3.0},
    ]
    write(path, *(at(step, **values) for step, values in enumerate(records, 1)), tail='{"step": 4, "val/lo')
    best, last = BestSettings().summarize(JsonlLogger.read_ranges(path))
    assert best == {
        "val/loss": {"value": 1.0, "step": 3, "mode": "min"},
        "val/accuracy": {"value": 0.5, "step": 2, "mode": "max"},
    }
    assert last == {"val/loss": 1.0, "val/accuracy": math.inf, "val/score": 3.0}
    best, _ = BestSettings(watched=(("val/score", "max"),)).summarize(JsonlLogger.read_ranges(path))
    assert best["val/score"] == {"value": 3.0, "step": 3, "mode": "max"}
