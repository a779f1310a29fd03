"""Rows on a terminal: columns keep their width, fold between names, and mark the best value so far."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from trainer_cli.loggers.base import RATE_KEY, Record, RunFacts
from trainer_cli.loggers.marks import MetricRange
from trainer_cli.loggers.metric_table import BestValues, MetricTable, choose_columns, format_metric
from trainer_cli.metric_names import Mode
from trainer_cli.schema.checkpoint_config import KeepBestConfig
from trainer_cli.terminal import cell_width

FACTS = RunFacts(total_steps=675, start_time=100.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **metrics: float) -> Record:
    return Record(step, step / 45, 100.0 + step, {name.replace("__", "/"): value for name, value in metrics.items()})


def table_lines(table: MetricTable, entry: Record, width: int, **more: Any) -> list[str]:
    return table.lines(entry, "17,036 samples/s", width, **more)


def test_columns_keep_their_width_and_numbers_their_digits_from_row_to_row() -> None:
    table = MetricTable(FACTS, io.StringIO())
    rows = [
        record(45, train__loss=2.24, val__loss=2.297, val__accuracy=0.922, train__lr=0.003),
        record(90, train__loss=0.7, val__loss=1.234e-05, val__accuracy=1.0, train__lr=6.822e-05),
        record(135, train__loss=12345.6),
    ]
    lines = [line for entry in rows for line in table_lines(table, entry, 100)]
    assert lines == [
        "             train ──────────  val ─────────────",
        "step  epoch     loss       lr     loss  accuracy  samples/s     time",
        "  45   1.00    2.240  0.00300    2.297    0.9220     17,036     0:45",
        "             train ───────────  val ──────────────",
        "step  epoch     loss        lr      loss  accuracy  samples/s     time",
        "  90   2.00   0.7000  6.82e-05  1.23e-05     1.000     17,036     1:30",
        " 135   3.00    12346                                   17,036     2:15",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.24, "2.240"), (0.9, "0.9000"), (1.0, "1.000"), (0.0, "0.000"), (-0.0644321, "-0.0644"), (1234.0, "1234"),
        (99999.6, "100000"), (12345678.0, "1.23e+07"), (0.0065441, "0.00654"), (1.234e-05, "1.23e-05"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_a_number_has_four_digits_or_three_where_four_are_long(value: float, text: str) -> None:
    assert format_metric(value) == text


def test_the_header_is_repeated_for_a_new_column_and_after_25_rows() -> None:
    table = MetricTable(FACTS, io.StringIO())
    headers = []
    for step in range(60):
        metrics = {"train__loss": 1.0} if step < 2 else {"train__loss": 1.0, "val__loss": 2.0}
        headers += [step for line in table.lines(record(step, **metrics), "", 79) if "step" in line]
    assert headers == [0, 2, 27, 52]


def test_the_first_header_of_a_resume_has_the_metrics_of_earlier_attempts() -> None:
    ranges = {"train/loss": MetricRange(1.0, 10, 3.0, 5, 2.0), "val/loss": MetricRange(0.25, 10, 3.0, 5, 0.5)}
    table = MetricTable(replace(FACTS, start_step=20, ranges=lambda: ranges), io.StringIO())
    counts = [
        len(table_lines(table, record(21, **metrics), 79)) for metrics in ({"train__loss": 1.0}, {"val__loss": 2.0})
    ]
    assert counts == [3, 1]


NAMES = ["loss", "accuracy", "brier", "entropy", "confidence", "top_2_accuracy", "margin", "ece"]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("loaders", [("val", "noisy"), ("val", "noisy", "shifted"), ("easy/long", "easy")])
@pytest.mark.parametrize("width", [39, 79, 119, 199])
def test_a_row_is_one_line_with_the_losses_of_all_sets_however_many_metrics_there_are(
    loaders: tuple[str, ...], width: int, averaged: bool
) -> None:
    metrics = {f"{group}/{name}": 0.5 for group in ("train", *loaders) for name in NAMES}
    facts = replace(FACTS, loaders=loaders, keep_best=KeepBestConfig(metric=f"{loaders[0]}/loss"))
    table = MetricTable(facts, io.StringIO())
    left_out, groups, names, row = table_lines(table, record(45, **metrics), width, averaged=averaged)
    assert left_out == "(columns that do not fit are left out; metrics.jsonl has all)"[:width] or width < 60
    assert max(len(groups), len(names), len(row)) <= width
    assert len(names.split()) == len(row.split()), "each column has its value"
    if width > 60:
        assert names.split()[:4] == ["step", "epoch", "loss", "loss"]
        titles = [f"{loader} (average)" if averaged else loader for loader in loaders]
        assert re.findall(r"[a-z/]+(?: \(average\))?", groups) == ["train", *titles]
        counts = [names[groups.index(f" {title} ") :].split().count("loss") for title in titles[:1]]
        assert counts == [len(loaders)], "each set has its loss"
    assert len(table_lines(table, record(90, **metrics), width, averaged=averaged)) == 1, "it is said once"


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, "step epoch train/loss train/lr a/loss a/f1 b/loss b/f1 rate time"),
        (79, "step epoch train/loss a/loss a/f1 b/loss b/f1 rate time"),
        (70, "step epoch train/loss a/loss a/f1 b/loss b/f1 time"),
        (61, "step epoch train/loss a/loss a/f1 b/loss b/f1"),
        (55, "step epoch train/loss a/loss a/f1 b/f1"),
        (46, "step epoch train/loss a/loss b/f1"),
        (37, "step epoch train/loss b/f1"),
        (28, "step train/loss b/f1"),
        (21, "step b/f1"),
        (12, "step"),
    ],
)
def test_columns_are_left_out_by_their_importance(width: int, columns: str) -> None:
    groups = {"train": ["train/loss", "train/lr"], "a": ["a/loss", "a/f1"], "b": ["b/loss", "b/f1"]}
    widths = {"step": 4, "epoch": 5, RATE_KEY: 7, "time": 4}
    widths |= {name: 7 for names in groups.values() for name in names}
    shown = choose_columns(groups, widths, {}, width, best="b/f1")
    names = ["rate" if name == RATE_KEY else name for members in shown.values() for name in members]
    assert " ".join(names) == columns


def test_the_header_says_from_when_on_an_average_is_evaluated() -> None:
    table = MetricTable(replace(FACTS, loaders=("val",)), io.StringIO())
    before, after, same = (
        table_lines(table, record(step, train__loss=1.0, val__loss=0.5, mine__x=1.0), 79, averaged=averaged)
        for step, averaged in ((1, False), (2, True), (3, True))
    )
    assert before[0] == "             train ─  val ───  mine ──"
    assert after[0] == "             train ─  val (average)  mine ──"
    assert len(same) == 1


def test_a_name_longer_than_the_terminal_is_cut_at_its_beginning() -> None:
    name = f"val__{'decoder_' * 8}entropy"
    lines = MetricTable(FACTS, io.StringIO()).lines(record(45, train__loss=1.0, **{name: 2.0}), "9 samples/s", 62)
    assert max(map(len, lines)) <= 62
    assert "  …decoder_decoder_decoder_decoder_entropy" in lines[-2]


def test_the_best_and_what_is_not_finite_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    line = MetricTable(FACTS, Terminal()).lines(
        record(1, train__loss=math.nan, val__loss=0.5), "", 79, best=["val/loss"]
    )
    assert re.search(r"\x1b\[1;38;5;196mnan\x1b\[0m +\x1b\[1;38;5;28m0.5000\x1b\[0m", line[-1])


@pytest.mark.parametrize(
    ("keep_best", "values", "best"),
    [
        (None, {"val/loss": [3.0, 2.0, 2.5, 2.0, math.nan]}, [1, 1, 0, 1, 0]),
        (None, {"val/accuracy": [0.5, 0.4, 0.6]}, [1, 0, 1]),
        (None, {"val/unknown": [1.0, 2.0]}, [0, 0]),
        (None, {"train/loss": [3.0, 2.0]}, [0, 0]),
        (KeepBestConfig(metric="val/unknown", mode=Mode.max), {"val/unknown": [1.0, 2.0, 1.5]}, [1, 1, 0]),
    ],
    ids=["a loss is smallest", "an accuracy is largest", "an unknown metric", "of the training", "as keep_best says"],
)  # fmt: skip
def test_the_best_value_so_far_is_known_by_the_mode_of_its_metric(
    keep_best: KeepBestConfig | None, values: dict[str, list[float]], best: list[int]
) -> None:
    seen = BestValues(RunFacts(keep_best=keep_best))
    ((name, numbers),) = values.items()
    assert [len(seen.update({name: number})) for number in numbers] == best


def test_the_best_value_of_earlier_attempts_counts_on_a_resume() -> None:
    ranges = {"val/loss": MetricRange(0.25, 10, 3.0, 5, 0.5)}
    seen = BestValues(RunFacts(start_step=20, ranges=lambda: ranges))
    assert [seen.update({"val/loss": value}) for value in (0.3, 0.2)] == [set(), {"val/loss"}]


@pytest.mark.parametrize(
    "name", ["val/précision", "val/精度", "val/pre\u0301cision", "val/😀", "val/" + "n" * 100], ids=ascii
)
def test_columns_are_right_under_names_of_any_letters_and_a_long_name_leaves_room(name: str) -> None:
    table = MetricTable(FACTS, io.StringIO())
    first = table.lines(record(45, train__loss=1.0, **{name: 0.5}), "9 samples/s", 100)
    _, names, row = first
    assert cell_width(names) == cell_width(row) <= 100
