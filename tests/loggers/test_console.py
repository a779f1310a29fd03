"""What a person sees: lines in a file, a bar and rows on a terminal, and never a stopped training."""

from __future__ import annotations

import io
import logging
import math
import re
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
from printed import Terminal

from trainer_cli import messages
from trainer_cli.errors import UserError
from trainer_cli.loggers.base import RATE_KEY, SAVES, Now, Pauses, Record, RunFacts
from trainer_cli.loggers.bottom_lines import BottomLines
from trainer_cli.loggers.console import ConsoleLogger
from trainer_cli.loggers.marks import MetricRange
from trainer_cli.loggers.metric_table import BestValues, MetricTable, choose_columns, format_metric
from trainer_cli.loggers.pace import Pace
from trainer_cli.loggers.progress_bar import ProgressBar
from trainer_cli.metric_names import Mode
from trainer_cli.schema.checkpoint_config import KeepBestConfig
from trainer_cli.terminal import cell_width

FACTS = RunFacts(name="digits", total_steps=500, start_time=100.0)


class GoneTerminal(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def shown(style: str | None, stream: io.StringIO, *records: Record, facts: RunFacts = FACTS) -> str:
    logger = ConsoleLogger(style, stream)
    logger.start(facts)
    for record in records:
        logger.log(record)
    logger.close()
    return stream.getvalue()


def test_a_plain_line_shows_step_metrics_rate_and_remaining_time() -> None:
    record = Record(100, 1.0, 110.0, {"train/loss": 0.12341234, "train/lr": 0.001}, samples=12340)
    assert (
        shown("plain", Terminal(), record)
        == "step=100/500 epoch=1 train/loss=0.1234 train/lr=0.001 samples/s=1234 eta=0:40\n"
    )


def test_a_measured_rate_is_shown_in_the_place_of_the_counted_one() -> None:
    record = Record(100, 1.0, 110.0, {"train/samples_per_s": 2000.0}, samples=12340)
    assert shown("plain", Terminal(), record) == "step=100/500 epoch=1 samples/s=2000 eta=0:40\n"


@pytest.mark.parametrize(
    ("facts", "record", "end"),
    [
        (RunFacts(start_time=100.0), Record(5, 0.0, 110.0, {}, None), "step=5 epoch=0 steps/s=0.5\n"),
        (RunFacts(start_time=100.0, total_steps=9), Record(0, 0.0, 100.0, {}, 0), "step=0/9 epoch=0\n"),
        (
            RunFacts(start_time=100.0, total_steps=400, start_step=100, start_samples=1000),
            Record(200, 0.0, 4700.0, {}, 47000),
            "step=200/400 epoch=0 samples/s=10 eta=2:33:20\n",
        ),
    ],
    ids=["no total, no samples", "nothing done yet", "counted from where it goes on"],
)
def test_what_cannot_be_reported_is_left_out(facts: RunFacts, record: Record, end: str) -> None:
    assert shown("plain", Terminal(), record, facts=facts) == end


@pytest.mark.parametrize(
    ("style", "facts_style", "stream", "term", "live"),
    [
        (None, "auto", Terminal, "xterm", True),
        (None, "auto", io.StringIO, "xterm", False),
        (None, "auto", Terminal, "dumb", False),
        (None, "plain", Terminal, "xterm", False),
        ("rich", "plain", io.StringIO, "xterm", True),
        ("auto", "off", Terminal, "xterm", True),
    ],
)
def test_the_style_fits_the_stream_unless_it_is_named(
    style: str | None, facts_style: str, stream: type[io.StringIO], term: str, live: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TERM", term)
    facts = RunFacts(total_steps=10, start_time=100.0, console=facts_style, now=lambda: Now(5))
    text = shown(style, stream(), Record(5, 0.0, 110.0, {"train/loss": 1.0}), facts=facts)
    assert ("\x1b[" in text) == live
    assert ("step 5/10" if live else "step=5/10") in text


def test_off_shows_nothing() -> None:
    assert shown("off", Terminal(), Record(5, 0.0, 110.0, {"train/loss": 1.0})) == ""


def test_the_rate_of_rows_is_limited_but_not_that_of_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.4, 0.5, 0.6, 1.6, 1.7, 1.8])
    stream = Terminal()
    bar = ProgressBar(stream, replace(FACTS, loaders=("val",)))
    monkeypatch.setattr("trainer_cli.loggers.progress_bar.time.monotonic", lambda: next(clock))
    for step, metrics in {
        100: {"train/loss": 0.5}, 101: {"train/loss": 0.4}, 102: {"val/loss": 0.3}, 103: {"val/loss": 0.2},
        104: {"mine/x": 0.1}, 105: {"mine/x": 0.1}, 106: {"train/loss": 0.05},
    }.items():  # fmt: skip
        bar.show(Record(step, 1.0, 110.0, metrics))
    bar.close()
    lines = [line.split() for line in plain(stream.getvalue()).splitlines()]
    assert [line[0] for line in lines if line[0].isdigit()] == ["100", "102", "103", "105", "106"]


@pytest.mark.parametrize("begins", [0, 2])
def test_an_average_is_named_from_its_first_evaluation_on(begins: int) -> None:
    names = iter([None] * 2 * begins + ["ema"] * 6)
    stream = Terminal()
    bar = ProgressBar(stream, replace(FACTS, loaders=("val",), average=lambda: next(names)))
    for step in range(3):
        bar.show(Record(step, 1.0, 110.0, {"val/loss": 0.5}))
        bar.show(Record(step, 1.0, 110.0, {"train/loss": 0.5}))
    bar.close()
    text = plain(stream.getvalue())
    assert text.count("val (average)") == 1
    assert text.count("val ─") == bool(begins)


def test_a_record_that_waits_for_its_row_is_shown_without_another_record() -> None:
    stream = Terminal()
    bar = ProgressBar(stream, RunFacts(total_steps=500, now=lambda: NOW))
    try:
        for step in (1, 2):
            bar.show(Record(step, 0.0, 110.0, {"val/loss": 0.5}))
        assert "   2   0.00" not in stream.getvalue()
        deadline = time.monotonic() + 500
        while "   2   0.00" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "   2   0.00" in stream.getvalue()
    finally:
        bar.close()


NOW = Now(200, 3200)

EARLY = {0: Now(0), 100: Now(100, 1600), 110: NOW}


@pytest.mark.parametrize(
    ("moments", "total", "width", "words"),
    [
        ({0: Now(0)}, 500, 79, "step 0/500  0%  waiting for the first step"),
        ({0: Now(0), 75: Now(0)}, 500, 79, "step 0/500  0%  waiting for the first step 1:15"),
        (EARLY, 500, 79, "step 200/500  40%  160 samples/s  elapsed 1:50  ETA 0:30"),
        (EARLY, 500, 22, "step 200/500"),
        (EARLY, None, 79, "step 200  160 samples/s  elapsed 1:50"),
        ({**EARLY, 113: NOW}, 500, 79, "step 200/500  40%  (0:03)  160 samples/s  elapsed 1:53  ETA 0:27"),
        (
            {**EARLY, 111: Now(200, 3200, "saving")}, 500, 79,
            "step 200/500  40%  saving  160 samples/s  elapsed 1:51  ETA 0:30",
        ),
        ({0: Now(0), 1: Now(1), 11: Now(11)}, 12, 79, "step 11/12  91%  1 steps/s  elapsed 0:11  ETA 0:01"),
        (
            {**EARLY, 110: replace(NOW, epoch=4.25, time_left_s=12.0)}, 500, 120,
            "step 200/500  40%  epoch 4.2  160 samples/s  elapsed 1:50  max_time in 0:12",
        ),
        ({**EARLY, 110: replace(NOW, time_left_s=31.0)}, 500, 60, "step 200/500  40%  160 samples/s  ETA 0:30"),
        ({**EARLY, 110: replace(NOW, share=0.25)}, None, 79, "step 200  25%  160 samples/s  elapsed 1:50  ETA 1:00"),
    ],
    ids=[
        "no step yet", "a slow first step", "a rate", "narrow", "no length", "a slow step", "a save", "no samples",
        "max_time ends it first", "max_time ends it later", "a length in tokens or time",
    ],
)  # fmt: skip
def test_the_bar_shows_the_progress_and_the_time_to_the_real_end(
    moments: dict[int, Now], total: int | None, width: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_cli.loggers.progress_bar.time.monotonic", lambda: 0.0)
    bar = ProgressBar(Terminal(), RunFacts(total_steps=total))
    (*_, lines) = (bar.text(now, float(seconds), width) for seconds, now in moments.items())
    status, drawn = map(plain, lines)
    assert len(drawn) <= width
    assert len(status) <= width
    assert re.fullmatch(rf"\S+ {re.escape(words)}", drawn), drawn


def test_an_evaluation_between_two_logs_has_no_training_loss() -> None:
    stream = Terminal()
    bar = ProgressBar(stream, RunFacts(total_steps=9, loaders=("val",), loss=lambda: 0.125))
    try:
        bar.show(Record(1, 0.0, 110.0, {"train/loss": 0.25, "val/loss": 0.5}))
        bar.show(Record(2, 0.0, 111.0, {"val/loss": 0.5}))
    finally:
        bar.close()
    first, second = (line.split() for line in plain(stream.getvalue()).splitlines() if "0.5000" in line)
    # A live value would differ between two equal runs.
    assert (first[2:4], second[2:3]) == (["0.2500", "0.5000"], ["0.5000"])


def test_the_first_header_of_a_resume_says_that_an_average_is_evaluated() -> None:
    ranges = {"val/loss": MetricRange(0.25, 10, 3.0, 5, 0.5)}
    stream = Terminal()
    bar = ProgressBar(
        stream, RunFacts(total_steps=9, start_step=3, loaders=("val",), average=lambda: "ema", ranges=lambda: ranges)
    )
    try:
        bar.show(Record(4, 0.0, 110.0, {"train/loss": 0.25}))
        bar.show(Record(5, 0.0, 111.0, {"val/loss": 0.5}))
    finally:
        bar.close()
    assert plain(stream.getvalue()).count("val (average)") == plain(stream.getvalue()).count("epoch") == 1


def test_what_the_bar_has_no_room_for_is_on_the_status_line_beside_the_last_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, messages.ROOT)
    bar = ProgressBar(Terminal(), RunFacts(total_steps=500, now=lambda: NOW, loss=lambda: 0.125))
    try:
        bar.show(Record(200, 1.0, 110.0, {"train/loss": 0.25}))
        SAVES.info("committed step %d (%s)", 150, "every 50 steps")
        SAVES.info("removed %s (%s)", "step100", "ephemeral")
        (wide_status, wide), (status, narrow), (tiny_status, _) = (
            tuple(map(plain, bar.text(NOW, time.monotonic(), width))) for width in (120, 45, 22)
        )
    finally:
        bar.close()
    assert re.fullmatch(r"removed step100 \(ephemeral\) +RAM [\d.]+ [MG]B", wide_status)
    assert re.fullmatch(r"\S+ step 200/500  40%  loss 0.125  elapsed \d:\d\d", wide)
    assert re.fullmatch(r"\S+ step 200/500  40%  loss 0.125", narrow)
    assert re.match(r"removed step100 \(ephemeral\) +elapsed \d:\d\d", status)
    assert tiny_status == "removed step100 (ephe…", "cut, not wrapped"


def test_what_the_bar_shows_is_no_line_unless_the_level_is_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    try:
        for level, now in (("info", lambda: NOW), ("debug", lambda: NOW), ("info", None)):
            messages.to_console(level)
            bar = ProgressBar(Terminal(), RunFacts(now=now))
            SAVES.info("committed step %d (%s)", 150, "every 50 steps")
            bar.close()
            said.append("committed step 150 (every 50 steps)\n" in capsys.readouterr().err)
    finally:
        logging.getLogger(messages.ROOT).handlers.clear()
        logging.getLogger(messages.ROOT).propagate = True
    assert said == [False, True, True]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_label_of_a_row_is_dim_and_its_text_beside_it(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr(messages, "columns", lambda stream: 20)
    try:
        messages.to_console("info")
        logging.getLogger(messages.ROOT).info("data   five words of some text", extra={"indent": 7})
    finally:
        logging.getLogger(messages.ROOT).handlers.clear()
        logging.getLogger(messages.ROOT).propagate = True
    shown = stream.getvalue().removeprefix("\x1b[K")
    assert plain(shown) == "data   five words\n       of some text\n"
    assert shown.startswith("data   f" if no_color else "\x1b[2mdata   \x1b[0mf")


@pytest.mark.parametrize("count", [1, 2])
def test_bottom_lines_are_one_write_and_leave_the_cursor_where_it_was(count: int) -> None:
    stream = Terminal()
    lines = BottomLines(stream)
    lines.draw(["a"] * count)
    lines.draw(["b"] * count)
    lines.close()
    lines.close()
    up = "\n" * count
    opened, closed = f"{up}\x1b7\x1b[1;{24 - count}r\x1b8\x1b[{count}A", "\x1b7\x1b[r\x1b8\x1b[J"
    rows = range(25 - count, 25)
    drawn = "".join("\x1b7" + "".join(f"\x1b[{row};1H\x1b[2K{text}" for row in rows) + "\x1b8" for text in "ab")
    assert stream.getvalue() == opened + drawn + closed


def test_lines_have_the_time_in_front_where_there_is_no_terminal() -> None:
    record = Record(5, 0.0, 110.0, {"val/loss": 1.0})
    assert shown("plain", Terminal(), record) == "step=5/500 epoch=0 val/loss=1 steps/s=0.5 eta=16:30\n"
    stamped = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(110.0))
    assert shown("plain", io.StringIO(), record) == f"{stamped}step=5/500 epoch=0 val/loss=1 steps/s=0.5 eta=16:30\n"


def test_metric_names_are_not_taken_for_markup() -> None:
    assert " [red]x " in shown("rich", Terminal(), Record(1, 0.0, 101.0, {"val/[red]x": 1.0}))


@pytest.mark.parametrize("style", ["plain", "rich"])
def test_a_terminal_that_is_gone_at_the_start_does_not_stop_the_training(style: str) -> None:
    before = warnings.formatwarning, list(SAVES.handlers)
    facts = replace(FACTS, now=lambda: Now(0))
    record = Record(1, 0.0, 101.0, {"train/loss": 1.0})
    assert shown(style, GoneTerminal(), record, record, facts=facts) == ""
    assert (warnings.formatwarning, SAVES.handlers) == before
    assert "progress-bar" not in {thread.name for thread in threading.enumerate()}


def test_an_unknown_style_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'fancy'.*auto, rich, plain, off"):
        ConsoleLogger("fancy")


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
    for at, now in moments.items():
        pace.read(now, at)
    found = pace.eta_s(now, 1000, at)
    assert found == (None if left is None else pytest.approx(left, abs=0.5))


def test_a_run_that_goes_on_counts_from_where_it_does() -> None:
    pace, pauses = Pace(start_step=900), (Pauses(1, 10.0, 950),)
    for at, now in {0.0: Now(901), 14.9: Now(950, pauses=pauses)}.items():
        pace.read(now, at)
    assert pace.eta_s(now, 1000, at) == pytest.approx(5 + 10, abs=0.5)


def test_a_slow_start_is_no_longer_counted_after_as_much_time_again() -> None:
    pace = Pace(start_step=900)
    pace.begin(Now(900), 0.0)
    left = []
    for at, step in {9.0: 909, 10.0: 919, 20.0: 939}.items():
        pace.read(Now(step), at)
        left.append(pace.eta_s(Now(step), 1000, at))
    assert left == [pytest.approx(91), pytest.approx(81 * 10 / 19), pytest.approx(61 * 11 / 30)]


# Rows on a terminal: columns keep their width, fold between names, and mark the best value so far.


TABLE_FACTS = RunFacts(total_steps=675, start_time=100.0)


def record(step: int, **metrics: float) -> Record:
    return Record(step, step / 45, 100.0 + step, {name.replace("__", "/"): value for name, value in metrics.items()})


def table_lines(table: MetricTable, entry: Record, width: int, **more: Any) -> list[str]:
    return table.lines(entry, "17,036 samples/s", width, **more)


def test_columns_keep_their_width_and_numbers_their_digits_from_row_to_row() -> None:
    table = MetricTable(TABLE_FACTS, io.StringIO())
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
    table = MetricTable(TABLE_FACTS, io.StringIO())
    headers = []
    for step in range(60):
        metrics = {"train__loss": 1.0} if step < 2 else {"train__loss": 1.0, "val__loss": 2.0}
        headers += [step for line in table.lines(record(step, **metrics), "", 79) if "step" in line]
    assert headers == [0, 2, 27, 52]


def test_the_first_header_of_a_resume_has_the_metrics_of_earlier_attempts() -> None:
    ranges = {"train/loss": MetricRange(1.0, 10, 3.0, 5, 2.0), "val/loss": MetricRange(0.25, 10, 3.0, 5, 0.5)}
    table = MetricTable(replace(TABLE_FACTS, start_step=20, ranges=lambda: ranges), io.StringIO())
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
    facts = replace(TABLE_FACTS, loaders=loaders, keep_best=KeepBestConfig(metric=f"{loaders[0]}/loss"))
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
    table = MetricTable(replace(TABLE_FACTS, loaders=("val",)), io.StringIO())
    before, after, same = (
        table_lines(table, record(step, train__loss=1.0, val__loss=0.5, mine__x=1.0), 79, averaged=averaged)
        for step, averaged in ((1, False), (2, True), (3, True))
    )
    assert before[0] == "             train ─  val ───  mine ──"
    assert after[0] == "             train ─  val (average)  mine ──"
    assert len(same) == 1


def test_a_name_longer_than_the_terminal_is_cut_at_its_beginning() -> None:
    name = f"val__{'decoder_' * 8}entropy"
    lines = MetricTable(TABLE_FACTS, io.StringIO()).lines(record(45, train__loss=1.0, **{name: 2.0}), "9 samples/s", 62)
    assert max(map(len, lines)) <= 62
    assert "  …decoder_decoder_decoder_decoder_entropy" in lines[-2]


def test_the_best_and_what_is_not_finite_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    line = MetricTable(TABLE_FACTS, Terminal()).lines(
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
    table = MetricTable(TABLE_FACTS, io.StringIO())
    first = table.lines(record(45, train__loss=1.0, **{name: 0.5}), "9 samples/s", 100)
    _, names, row = first
    assert cell_width(names) == cell_width(row) <= 100
