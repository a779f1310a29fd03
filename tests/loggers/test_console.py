"""What a person sees: lines in a file, a bar on a terminal, and never a stopped training."""

from __future__ import annotations

import io

import pytest

from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.console import ConsoleLogger

FACTS = RunFacts(name="digits", total_steps=500, start_time=100.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class GoneTerminal(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


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
        shown("plain", io.StringIO(), record)
        == "step 100/500  train/loss 0.1234  train/lr 0.001  1,234 samples/s  ETA 0:40\n"
    )


def test_a_measured_rate_is_shown_in_the_place_of_the_counted_one() -> None:
    record = Record(100, 1.0, 110.0, {"train/samples_per_s": 2000.0}, samples=12340)
    assert shown("plain", io.StringIO(), record) == "step 100/500  2,000 samples/s  ETA 0:40\n"


@pytest.mark.parametrize(
    ("facts", "record", "end"),
    [
        (RunFacts(start_time=100.0), Record(5, 0.0, 110.0, {}, None), "step 5  0.5 steps/s\n"),
        (RunFacts(start_time=100.0, total_steps=9), Record(0, 0.0, 100.0, {}, 0), "step 0/9\n"),
        (
            RunFacts(start_time=100.0, total_steps=400, start_step=100, start_samples=1000),
            Record(200, 0.0, 4700.0, {}, 47000),
            "step 200/400  10 samples/s  ETA 2:33:20\n",
        ),
    ],
    ids=["no total, no samples", "nothing done yet", "counted from where it goes on"],
)
def test_what_cannot_be_reported_is_left_out(facts: RunFacts, record: Record, end: str) -> None:
    assert shown("plain", io.StringIO(), record, facts=facts) == end


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
    facts = RunFacts(total_steps=10, start_time=100.0, console=facts_style)
    text = shown(style, stream(), Record(5, 0.0, 110.0, {"train/loss": 1.0}), facts=facts)
    assert ("\x1b[" in text) == live
    assert "step 5/10" in text


def test_off_shows_nothing() -> None:
    assert shown("off", Terminal(), Record(5, 0.0, 110.0, {"train/loss": 1.0})) == ""


def test_on_a_terminal_an_evaluation_leaves_a_line_that_stays() -> None:
    text = shown(
        "rich",
        Terminal(),
        Record(100, 1.0, 110.0, {"train/loss": 0.5}),
        Record(200, 1.0, 120.0, {"train/loss": 0.4, "val/loss": 0.3, "val/accuracy": 0.9}),
    )
    assert "step 200/500  train/loss 0.4  val/loss 0.3  val/accuracy 0.9\r\n" in text.replace("\n", "\r\n")
    assert text.endswith("\x1b[?25h"), "the cursor must be visible again"


def test_metric_names_are_not_taken_for_markup() -> None:
    assert "val/[red]x 1" in shown("rich", Terminal(), Record(1, 0.0, 101.0, {"val/[red]x": 1.0}))


@pytest.mark.parametrize("style", ["plain"])
def test_a_terminal_that_went_away_does_not_stop_the_training(style: str) -> None:
    assert shown(style, GoneTerminal(), Record(1, 0.0, 101.0, {}), Record(2, 0.0, 102.0, {})) == ""


def test_an_unknown_style_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'fancy'.*auto, rich, plain, off"):
        ConsoleLogger("fancy")
