"""Two traces: where they first differ, and what of the hidden had differed just before."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.addons.exact.attempts import ProbeAttempt
from trainer_cli.addons.exact.trace import (
    Trace,
    TraceKind,
    TraceRecord,
    TraceWriter,
    differences,
    first_difference,
    read_trace,
)

STRAIGHT = Trace(
    [
        record
        for step in range(4)
        for record in (
            TraceRecord(TraceKind.hidden, step, 0, {"model.calls": str(step)}),
            TraceRecord(TraceKind.state, step, 0, {"model.weight": f"w{step}"}),
            TraceRecord(TraceKind.batch, step, 1, {"batch[0]": f"b{step}"}),
            TraceRecord(TraceKind.loss, step, 1, {"loss": f"l{step}"}),
        )
    ]
)


def changed(begin: int, kind: TraceKind, step: int, value: str = "other") -> Trace:
    """The straight trace from a record on, with one value changed."""
    records = [
        TraceRecord(one.kind, one.step, one.batch, dict.fromkeys(one.values, value))
        if (one.kind, one.step) == (kind, step)
        else one
        for one in STRAIGHT.records[begin:]
    ]
    return Trace(records)


@pytest.mark.parametrize("begin", [0, 4, 8])
def test_equal_traces_have_no_difference(begin: int) -> None:
    assert not list(differences(STRAIGHT, Trace(STRAIGHT.records[begin:]), resumed=True))


@pytest.mark.parametrize(
    ("kind", "step", "moment", "at_step"),
    [
        (TraceKind.state, 1, "as restored, before step 2", 2),
        (TraceKind.state, 2, "after step 2", 2),
        (TraceKind.batch, 1, "step 2, batch", 2),
        (TraceKind.loss, 3, "step 4, loss", 4),
    ],
)
def test_a_difference_says_when(kind: TraceKind, step: int, moment: str, at_step: int) -> None:
    difference = first_difference(differences(STRAIGHT, changed(4, kind, step), resumed=True))
    assert difference is not None
    assert (difference.moment, difference.at_step) == (moment, at_step)


def test_hidden_things_alone_are_no_verdict() -> None:
    assert first_difference(differences(STRAIGHT, changed(4, TraceKind.hidden, 2), resumed=True)) is None


@pytest.mark.parametrize("kind", [TraceKind.state, TraceKind.loss])
def test_a_difference_comes_with_the_hidden_one_of_its_step(kind: TraceKind) -> None:
    other = changed(4, kind, 2)
    hidden = changed(4, TraceKind.hidden, 2, "0")
    both = Trace([h if h.kind is TraceKind.hidden else o for h, o in zip(hidden.records, other.records, strict=True)])
    difference = first_difference(differences(STRAIGHT, both, resumed=True))
    assert difference is not None
    assert [(value.name, value.straight, value.other) for value in difference.hidden] == [("model.calls", "2", "0")]


def test_a_moment_that_is_missing_is_a_difference() -> None:
    other = Trace([record for record in STRAIGHT.records if (record.kind, record.step) != (TraceKind.batch, 2)])
    difference = first_difference(differences(STRAIGHT, other, resumed=False))
    assert difference is not None
    assert difference.values[0].name == "what happens"
    assert (difference.kind, difference.step) == (TraceKind.loss, 2)


def test_what_is_ignored_does_not_differ() -> None:
    assert (
        first_difference(differences(STRAIGHT, changed(0, TraceKind.loss, 2), resumed=False, ignored={"loss"})) is None
    )


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace")
    writer.write(facts={"device": "cpu"})
    writer.record(TraceKind.loss, 3, 1, {"loss": "1.0"})
    writer.write(stopped={"step": 3})
    writer.close()
    with (tmp_path / "trace").open("a") as file:
        file.write('{"kind": "loss", "st')
    found = read_trace(tmp_path / "trace")
    assert list(found.records) == [TraceRecord(TraceKind.loss, 3, 1, {"loss": "1.0"})]
    assert (found.facts, found.stopped) == ({"device": "cpu"}, {"step": 3})
    assert found.last_step == 4


def test_a_process_that_wrote_nothing_has_an_empty_trace(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none") == Trace([])


@pytest.mark.parametrize(("loaded", "came_back"), [("w1", True), ("other", False), (None, False)])
def test_what_was_loaded_tells_what_came_back_and_was_changed(loaded: str | None, came_back: bool) -> None:
    resumed = Trace(changed(4, TraceKind.state, 1).records, loaded={} if loaded is None else {"model.weight": loaded})
    difference = first_difference(differences(STRAIGHT, resumed, resumed=True))
    assert difference is not None
    assert difference.came_back is came_back


def test_a_trace_has_what_was_loaded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace")
    writer.record(TraceKind.loaded, 1, 0, {"model.weight": "w1"})
    writer.record(TraceKind.state, 1, 0, {"model.weight": "w2"})
    writer.close()
    trace = read_trace(tmp_path / "trace")
    assert (trace.loaded, [record.kind for record in trace.records]) == ({"model.weight": "w1"}, [TraceKind.state])


TRACEBACK = """2026-01-01 resuming
Traceback (most recent call last):
  File "parts.py", line 3, in on_fit_start
    self.spoil()
AttributeError: no attribute 'spoil'
in on_fit_start of callback 'at' (AtStart)
"""


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (TRACEBACK, "AttributeError: no attribute 'spoil'"),
        ("killed by\nsomething\n", "something"),
        ("", "it ended with exit code 1"),
    ],
)
def test_a_failed_process_is_described_by_its_error(output: str, message: str) -> None:
    attempt = ProbeAttempt(stop=None, after=None, code=1, trace=Trace(), output=output)
    assert attempt.message == message
