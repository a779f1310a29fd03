"""Work behind a caller: in order, told of when it failed, and never done after it was let go."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from trainer_cli.checkpoint.threads import WorkerThread, close_all, wait_for_all


@pytest.fixture(params=["a thread", "no thread"])
def threads(request: pytest.FixtureRequest) -> str:
    if request.param == "no thread":
        request.getfixturevalue("no_threads")
    return str(request.param)


def test_pieces_are_worked_on_in_order(threads: str) -> None:
    done: list[int] = []
    worker = WorkerThread("worker", done.append)
    for piece in range(100):
        worker.hand_over(piece)
    worker.wait()
    assert done == list(range(100))
    worker.close()


def test_after_a_failure_nothing_is_worked_on_and_everybody_is_told(threads: str) -> None:
    def work(piece: int) -> None:
        tried.append(piece)
        if piece == 2:
            raise failure

    def hand_over_all() -> None:
        for piece in range(5):
            worker.hand_over(piece)
        worker.wait()

    tried: list[int] = []
    failure = OSError("full")
    worker = WorkerThread("worker", work)
    for ask in (hand_over_all, worker.wait, worker.wait, lambda: worker.hand_over(9)):
        with pytest.raises(OSError, match="full") as told:
            ask()
        assert told.value is failure
    worker.close()
    assert tried == [0, 1, 2]


def test_whoever_waits_may_leave_the_last_piece_out_or_go_when_it_takes_too_long() -> None:
    def work(piece: int) -> None:
        assert piece == 0 or goes_on.wait(60)
        done.append(piece)

    goes_on, done = threading.Event(), list[int]()
    worker = WorkerThread("worker", work)
    wait_for_all([worker], but_last=True)
    for piece in range(2):
        worker.hand_over(piece)
    wait_for_all([worker], but_last=True)
    assert done == [0]
    with pytest.raises(TimeoutError) as told:
        wait_for_all([worker], timeout_s=0.01)
    assert told.value.errno is None
    goes_on.set()
    wait_for_all([worker], timeout_s=60)
    assert done == [0, 1]
    worker.close()


def test_a_piece_that_was_let_go_is_neither_done_nor_said_to_be() -> None:
    def work(piece: int) -> None:
        begun.set()
        assert goes_on.wait(60)
        done.append(piece)

    begun, goes_on, done = threading.Event(), threading.Event(), list[int]()
    worker = WorkerThread("worker", work)
    for piece in range(3):
        worker.hand_over(piece)
    assert begun.wait(60)
    worker.let_go()
    goes_on.set()
    worker.close()
    assert done == [0]
    with pytest.raises(CancelledError):
        worker.wait()


def test_a_worker_that_is_closed_leaves_no_thread() -> None:
    worker = WorkerThread("worker-that-ends", print)
    assert "worker-that-ends" in [thread.name for thread in threading.enumerate()]
    worker.close()
    assert "worker-that-ends" not in [thread.name for thread in threading.enumerate()]


def test_several_are_waited_for_though_one_of_them_failed() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def fail(piece: int) -> None:
        raise OSError("no disk")

    def work(piece: int) -> None:
        assert may_end.wait(60)
        ended.set()

    fails, works = WorkerThread("worker", fail), WorkerThread("worker", work)
    fails.hand_over(1)
    works.hand_over(1)
    threading.Timer(0.05, may_end.set).start()
    with pytest.raises(OSError, match="no disk"):
        wait_for_all([fails, works])
    assert ended.is_set()
    close_all([fails, works])


def test_what_is_handed_over_during_a_wait_is_not_waited_for() -> None:
    """Whoever waits for the first of two would else find more and more at the second."""
    may_end: list[threading.Event] = [threading.Event() for _ in range(3)]
    first = WorkerThread[int]("worker", lambda number: may_end[number].wait(60))
    second = WorkerThread[int]("worker", lambda number: may_end[number].wait(60))
    first.hand_over(0)
    second.hand_over(1)
    waiting = threading.Thread(target=wait_for_all, args=([first, second],))
    waiting.start()
    second.hand_over(2)
    may_end[0].set()
    may_end[1].set()
    waiting.join(60)
    assert not waiting.is_alive()
    may_end[2].set()
    close_all([first, second])


def test_several_take_no_longer_together_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour goes by whenever somebody looks; two for each would never end."""
    hours = iter(range(9))
    monkeypatch.setattr("trainer_cli.checkpoint.threads.monotonic", lambda: 3600.0 * next(hours))
    may_end = threading.Event()
    quick, slow = WorkerThread[int]("quick", lambda number: None), WorkerThread[int]("slow", lambda _: may_end.wait(60))
    quick.hand_over(1)
    slow.hand_over(1)
    with pytest.raises(TimeoutError):
        wait_for_all([quick, slow], timeout_s=2 * 3600.0)
    may_end.set()
    close_all([quick, slow])
