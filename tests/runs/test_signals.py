"""Signals are requests, and only the second Ctrl-C is an order."""

from __future__ import annotations

import signal

import pytest

from trainer_cli.runs.signals import STOPPING, StopSignals


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")]
)
def test_the_first_one_is_noted_said_and_passed_on(
    number: signal.Signals, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []
    with StopSignals() as signals:
        signals.listen(heard.append)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert heard == [reason]
    assert capfd.readouterr().err == f"{reason}: stopping after this step; Ctrl-C again stops at once\n"


def test_one_that_came_before_anybody_listened_is_kept() -> None:
    heard: list[str] = []
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signals.listen(heard.append)
    assert heard == ["SIGUSR1"]


def test_the_second_ctrl_c_interrupts_whatever_other_signals_came() -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handlers_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with StopSignals():
        assert [signal.getsignal(number) for number in STOPPING] != before
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_under_nohup_the_end_of_the_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.stop_request is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
