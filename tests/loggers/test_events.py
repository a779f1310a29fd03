"""Event records: TensorBoard's own package reads what is written, and writes what is read."""

from __future__ import annotations

import io
import math

import pytest

from trainer_cli.loggers.events import first_event, framed, scalars_event, spans_up_to, start_event


def _read(event: bytes):  # type: ignore[no-untyped-def]
    from tensorboard.compat.proto.event_pb2 import Event

    return Event.FromString(event)


@pytest.mark.parametrize("step", [0, 1, 127, 128, 300, 2**31, 2**62, -1])
@pytest.mark.parametrize("value", [0.0, -1.5, 1e30, math.inf, -math.inf])
def test_a_scalar_is_read_as_it_was_written(step: int, value: float) -> None:
    event = _read(scalars_event(1e9 + 0.25, step, {"train/loss": value, "val/größe": 1.0}))
    assert (event.wall_time, event.step) == (1e9 + 0.25, step)
    found = {one.tag: one.simple_value for one in event.summary.value}
    assert found == {"train/loss": pytest.approx(value), "val/größe": 1.0}


def test_not_a_number_stays_one() -> None:
    assert math.isnan(_read(scalars_event(0.0, 1, {"x": math.nan})).summary.value[0].simple_value)


def test_what_32_bits_cannot_hold_is_infinite() -> None:
    values = _read(scalars_event(0.0, 1, {"up": 1e300, "down": -1e300})).summary.value
    assert [one.simple_value for one in values] == [math.inf, -math.inf]


def test_the_events_of_a_beginning_say_what_they_say() -> None:
    from tensorboard.compat.proto.event_pb2 import SessionLog

    assert _read(first_event(1e9)).file_version == "brain.Event:2"
    start = _read(start_event(1e9, 7))
    assert (start.step, start.session_log.status) == (7, SessionLog.START)


def test_records_of_others_are_told_by_their_step() -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    several = [Summary.Value(tag="a", simple_value=1.0), Summary.Value(tag="b", simple_value=2.0)]
    theirs = [
        Event(wall_time=1.0, file_version="brain.Event:2"),
        Event(wall_time=2.0, step=5, summary=Summary(value=several)),
        Event(wall_time=3.0, step=400, graph_def=b"graph"),
        Event(wall_time=4.0, step=6),
    ]
    parts = [framed(event.SerializeToString()) for event in theirs]
    assert int.from_bytes(parts[1][8:12], "little") == masked_crc32c(parts[1][:8])
    starts = [sum(map(len, parts[:number])) for number in range(5)]
    kept = list(spans_up_to(io.BytesIO(b"".join(parts)), 399))
    assert kept == [(starts[0], starts[1]), (starts[1], starts[2]), (starts[3], starts[4])]
