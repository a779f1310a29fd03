"""Work here and now, or behind: each piece once, in order, and waited for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from trainer_cli.checkpoint.process.background import Background
from trainer_cli.checkpoint.process.inline import Inline
from trainer_cli.checkpoint.process.port import Process


@pytest.mark.parametrize("make", [Inline, lambda: Background("test")], ids=["inline", "background"])
def test_work_is_done_once_and_in_order(make: Callable[[], Process]) -> None:
    process = make()
    done: list[int] = []
    for number in range(200):
        process.submit(lambda number=number: done.append(number))
    assert process.settle(30)
    assert done == list(range(200))


def test_the_background_waits_no_longer_than_it_may_and_leaves_no_thread() -> None:
    process, free = Background("removal"), threading.Event()
    process.submit(free.wait)
    assert not process.settle(0.01)
    free.set()
    assert process.settle(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "removal"]
    assert process.settle()


def test_what_goes_on_is_waited_for_after_a_signal_broke_a_wait_off() -> None:
    process, free = Background("removal"), threading.Event()

    def broken_off(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, broken_off)
    try:
        process.submit(free.wait)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            process.settle(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not process.settle(0.01)
    free.set()
    assert process.settle(30)


def test_where_no_thread_can_be_had_work_is_done_here_and_now(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Background("test")
    done: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in range(3):
            process.submit(lambda number=number: done.append(number))
        assert done == [0, 1, 2]
        assert process.settle(30)
    process.submit(lambda: done.append(3))
    assert process.settle(30)
    assert done == [0, 1, 2, 3]
