"""Work here and now, or behind: each piece once, in order, and waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from trainer_cli.checkpoint.process.background import Background
from trainer_cli.checkpoint.process.inline import Inline
from trainer_cli.checkpoint.process.port import Process

forks_beside_threads = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
"""Which Python 3.12 and later warn of."""


@pytest.mark.parametrize(
    "make",
    [Inline, lambda: Background("test"), lambda: Background("test", lingers_s=60.0)],
    ids=["inline", "background", "lingering"],
)
def test_work_is_done_once_and_in_order(make: Callable[[], Process]) -> None:
    process = make()
    done: list[int] = []
    for number in range(200):
        process.submit(lambda number=number: done.append(number))
    assert process.settle(30)
    assert done == list(range(200))


@pytest.mark.parametrize("lingers_s", [0.0, 60.0])
def test_the_background_waits_no_longer_than_it_may_and_leaves_no_thread(lingers_s: float) -> None:
    process, free = Background("removal", lingers_s=lingers_s), threading.Event()
    for _ in range(2):
        process.submit(free.wait)
        assert not process.settle(0.01)
        free.set()
        assert process.settle(30)
        assert not threads("removal")
        assert process.settle()
        free.clear()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_thread_waits_for_more_as_long_as_it_may_and_ends_then() -> None:
    for lingers_s in (60.0, 0.05):
        process, done = Background("lingers", lingers_s=lingers_s), threading.Event()
        process.submit(done.set)
        assert done.wait(30)
        first = threads("lingers")
        done.clear()
        if lingers_s == 0.05:
            for thread in first:
                thread.join(30)
            assert not threads("lingers")
        process.submit(done.set)
        assert done.wait(30)
        if lingers_s == 60.0:
            assert threads("lingers") == first
        assert process.settle(30)


@pytest.mark.parametrize("busy", [False, True])
def test_who_is_dropped_does_what_it_was_given_and_lingers_no_more(busy: bool) -> None:
    process, free, done = Background("dropped", lingers_s=60.0), threading.Event(), threading.Event()
    if not busy:
        free.set()
    process.submit(free.wait)
    process.submit(done.set)
    if not busy:
        assert done.wait(30)
    kept, [thread] = weakref.ref(process), threads("dropped")
    del process
    assert kept() is None
    free.set()
    thread.join(30)
    assert not thread.is_alive()
    assert done.is_set()


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_what_an_interrupt_kept_from_being_handed_over_is_not_done_and_waited_for_by_nobody(
    started: bool, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, free = Background("test", lingers_s=60.0), threading.Event()
    done: list[int] = []
    start, notify = threading.Thread.start, threading.Condition.notify

    def broken_off(*args: Any) -> None:
        if started:
            (notify if busy else start)(*args)
        raise KeyboardInterrupt

    if busy:
        process.submit(free.wait)
    with monkeypatch.context() as patch:
        patch.setattr(*((threading.Condition, "notify") if busy else (threading.Thread, "start")), broken_off)
        with pytest.raises(KeyboardInterrupt):
            process.submit(lambda: done.append(1))
    process.submit(lambda: done.append(2))
    free.set()
    assert process.settle(30)
    assert done == [2]


@pytest.mark.filterwarnings("ignore:Exception in thread test")
def test_what_waits_behind_a_piece_that_ends_its_thread_is_done_all_the_same() -> None:
    process, free = Background("test"), threading.Event()
    done: list[int] = []

    def ends() -> None:
        free.wait()
        raise SystemExit

    process.submit(ends)
    process.submit(lambda: done.append(1))
    [ending] = threads("test")
    free.set()
    assert process.settle(30)
    ending.join(30)
    assert done == [1]


def exit_of_a_forked_child_by(process: Process) -> int:
    """The exit code of a child that ends with 7 where the process does what it is given there."""
    child = os.fork()
    if child == 0:
        process.submit(lambda: os._exit(7))
        time.sleep(30)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@forks_beside_threads
def test_where_a_thread_waits_a_forked_child_has_one_of_its_own() -> None:
    process, done = Background("lingers", lingers_s=60.0), threading.Event()
    process.submit(done.set)
    assert done.wait(30)
    assert exit_of_a_forked_child_by(process) == 7  # there the thread is not: another is started
    assert process.settle(30)


@forks_beside_threads
def test_what_waits_in_the_parent_no_forked_child_does() -> None:
    process, free = Background("busy"), threading.Event()
    process.submit(free.wait)
    process.submit(lambda: os._exit(1) if os.getpid() != parent else None)
    parent = os.getpid()
    assert exit_of_a_forked_child_by(process) == 7
    free.set()
    assert process.settle(30)


@forks_beside_threads
def test_a_child_forked_at_any_moment_has_work_done_and_waits_for_it() -> None:
    process, held, free = Background("busy"), threading.Event(), threading.Event()

    def hold() -> None:
        with process._queue._news:
            held.set()
            free.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        settled = process.settle(10)
        done: list[int] = []
        process.submit(lambda: done.append(1))
        settled = process.settle(10) and settled
        process._queue.close()
        os._exit(7 if settled and done else 1)
    free.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_many_may_submit_and_settle_at_once() -> None:
    process = Background("lingers", lingers_s=0.001)
    done: list[tuple[int, int]] = []

    def much(own: int) -> None:
        for number in range(300):
            process.submit(lambda number=number: done.append((own, number)))
            if number % 7 == 0:
                assert process.settle(30)
            if number % 50 == 0:
                time.sleep(0.002)

    callers = [threading.Thread(target=much, args=(own,)) for own in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert process.settle(30)
    assert sorted(done) == [(own, number) for own in range(4) for number in range(300)]
    assert all([one for own, one in done if own == caller] == list(range(300)) for caller in range(4))


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
