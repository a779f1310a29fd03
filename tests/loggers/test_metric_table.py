"""Rows on a terminal: columns keep their width, fold between names, and mark the best value so far."""

from __future__ import annotations

import io
import math
import re

import pytest

from trainer_cli.core.checkpoint_config import KeepBestConfig
from trainer_cli.core.metric_modes import Mode
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.marks import MetricRange
from trainer_cli.loggers.metric_table import BestValues, MetricTable, fold
from trainer_cli.terminal import cell_width

FACTS = RunFacts(total_steps=675, start_time=100.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **metrics: float) -> Record:
    return Record(step, step / 45, 100.0 + step, {name.replace("__", "/"): value for name, value in metrics.items()})


def test_columns_keep_their_width_from_row_to_row() -> None:
    table = MetricTable(FACTS, io.StringIO())
    rows = [
        record(45, train__loss=2.0412, val__loss=0.26334, val__accuracy=0.922, train__lr=0.003),
        record(90, train__loss=0.7, val__loss=1.234e-05, val__accuracy=1.0, train__lr=6.822e-05),
        record(135, train__loss=12345.6),
    ]
    lines = [line for entry in rows for line in table.lines(entry, "17,036 samples/s", 100)]
    assert lines == [
        "step  epoch  train/loss   val/loss  val/accuracy   train/lr  samples/s     time",
        "  45   1.00       2.041     0.2633         0.922      0.003     17,036     0:45",
        "  90   2.00         0.7  1.234e-05             1  6.822e-05     17,036     1:30",
        " 135   3.00   1.235e+04                                         17,036     2:15",
    ]


def test_the_header_is_repeated_for_a_new_column_and_after_25_rows() -> None:
    table = MetricTable(FACTS, io.StringIO())
    headers = []
    for step in range(60):
        metrics = {"train__loss": 1.0} if step < 2 else {"train__loss": 1.0, "val__loss": 2.0}
        headers += [step for line in table.lines(record(step, **metrics), "", 79) if "train/loss" in line]
    assert headers == [0, 2, 27, 52]


@pytest.mark.parametrize("width", [40, 79, 119, 199])
def test_a_wide_table_is_folded_between_columns_and_no_line_is_wider_than_the_terminal(width: int) -> None:
    metrics = {f"val__metric_{number}": float(number) for number in range(9)}
    table = MetricTable(FACTS, io.StringIO())
    header, values = "", ""
    lines = table.lines(record(45, train__loss=1.0, **metrics), "9 samples/s", width)
    assert all(len(line) <= width for line in lines)
    header, values = " ".join(lines[: len(lines) // 2]), " ".join(lines[-(len(lines) // 2) :])
    hidden = re.search(r"\((\d+) more metrics are in metrics.jsonl\)", " ".join(lines))
    if hidden is None:
        names = ["step", "epoch", "train/loss", *(f"val/metric_{number}" for number in range(9)), "samples/s", "time"]
        assert header.split() == names
        assert values.split() == ["45", "1.00", "1", *map(str, range(9)), "9", "0:45"]
    else:
        assert width == 40


def test_the_speed_and_the_time_are_shown_however_many_metrics_there_are() -> None:
    metrics = {f"val__metric_{number}": float(number) for number in range(60)}
    lines = MetricTable(FACTS, io.StringIO()).lines(record(45, train__loss=1.0, **metrics), "9 samples/s", 79)
    names = " ".join(lines[:3]).split()
    assert (names[:3], names[-2:]) == (["step", "epoch", "train/loss"], ["samples/s", "time"])
    assert lines[3] == f"({60 - (len(names) - 5)} more metrics are in metrics.jsonl)"
    assert lines[-1].split()[-2:] == ["9", "0:45"]


def test_a_name_longer_than_the_terminal_is_cut_at_its_beginning() -> None:
    name = f"val__{'decoder_' * 8}entropy"
    lines = MetricTable(FACTS, io.StringIO()).lines(record(45, train__loss=1.0, **{name: 2.0}), "9 samples/s", 39)
    assert max(map(len, lines)) <= 39
    assert "  …oder_decoder_decoder_decoder_entropy" in lines


def test_a_gap_of_one_column_is_used_where_it_saves_a_line() -> None:
    names = ["a", "b", "c"]
    widths = dict.fromkeys(names, 10)
    assert fold(names, widths, 33, 2) == ([["a", "b"], ["c"]], 0)
    assert fold(names, widths, 32, 1) == ([names], 0)
    table = MetricTable(FACTS, io.StringIO())
    lines = table.lines(record(1, train__loss=1.0, val__loss=1.0, val__accuracy=1.0, train__lr=1.0), "1 samples/s", 76)
    assert len(lines) == 2
    folded = MetricTable(FACTS, io.StringIO()).lines(record(1, train__loss=1.0, val__loss=1.0), "1 samples/s", 33)
    assert folded[0] == "step  epoch  train/loss", "it saves no line here"


def test_the_loss_since_the_last_log_is_dim_where_the_record_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    table = MetricTable(FACTS, Terminal())
    first, second = (table.lines(entry, "", 79, loss=0.5)[-1] for entry in (record(1), record(2, train__loss=0.25)))
    assert "\x1b[2m0.5\x1b[0m" in first
    assert "0.25" in second
    assert "\x1b" not in second


def test_the_best_and_what_is_not_finite_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    line = MetricTable(FACTS, Terminal()).lines(
        record(1, train__loss=math.nan, val__loss=0.5), "", 79, best=["val/loss"]
    )
    assert re.search(r"\x1b\[1;38;5;196mnan\x1b\[0m +\x1b\[1;38;5;28m0.5\x1b\[0m", line[-1])


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
    assert len(first) == 2, "a long name folds no table that has room"
    assert {cell_width(line) for line in first} == {cell_width(first[0])}
    assert cell_width(first[0]) <= 100
