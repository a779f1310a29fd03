"""Jobs behind a caller: in order, each with its own outcome, and none lost at the end."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from functools import partial

import pytest

from trainer_cli.checkpoint.writer_thread import WriterThread

NAME = "a-writer"


def is_running() -> bool:
    return NAME in [thread.name for thread in threading.enumerate()]


@pytest.fixture(params=["a thread", "no thread"])
def worker(request: pytest.FixtureRequest) -> WriterThread:
    if request.param == "no thread":
        request.getfixturevalue("no_threads")
    return WriterThread(NAME)


def test_jobs_run_in_order(worker: WriterThread) -> None:
    done: list[int] = []
    for number in range(100):
        worker.submit(partial(done.append, number))
    assert worker.drain()
    assert done == list(range(100))
    assert worker.close()


@pytest.mark.parametrize("error", [OSError("full"), MemoryError(), RuntimeError("CUDA error")], ids=repr)
def test_a_job_that_fails_reports_its_own_future_alone(worker: WriterThread, error: Exception) -> None:
    def fail() -> None:
        raise error

    first, second, third = worker.submit(list), worker.submit(fail), worker.submit(list)
    worker.drain()
    assert [one.exception() for one in (first, second, third)] == [None, error, None]
    worker.close()


def test_a_job_that_is_not_done_in_time_is_reported() -> None:
    worker, may_end = WriterThread(NAME), threading.Event()
    done = worker.submit(lambda: may_end.wait(500))
    assert not worker.drain(0.01)
    assert not worker.close(0.01)
    may_end.set()
    assert done.result(500) is None


def test_an_interrupt_of_submit_loses_no_job_that_drain_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = WriterThread(NAME), list[int]()

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: done.append(1))
    assert worker.submit(lambda: done.append(2)).result(500) is None
    assert worker.drain()
    assert done == [2]
    worker.close()


def test_close_ends_the_thread_and_it_starts_again_with_the_next_job() -> None:
    worker = WriterThread(NAME)
    assert not is_running()
    for _ in range(2):
        worker.submit(list)
        assert is_running()
        assert worker.close()
        assert not is_running()


def test_a_thread_whose_owner_is_gone_ends() -> None:
    worker = WriterThread(NAME)
    worker.submit(list)
    del worker
    gc.collect()
    until = time.monotonic() + 500
    while is_running():
        assert time.monotonic() < until


def test_what_a_job_held_is_freed_when_it_is_done() -> None:
    class Large:
        pass

    worker, large = WriterThread(NAME), Large()
    freed = threading.Event()
    weakref.finalize(large, freed.set)
    worker.submit(partial(id, large))
    del large
    worker.drain()
    assert freed.wait(500)
    worker.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_jobs_run_at_once_and_nothing_hangs() -> None:
    worker = WriterThread(NAME)
    worker.submit(list).result(500)
    child = os.fork()
    if child == 0:
        done: list[int] = []
        ended = worker.submit(lambda: done.append(1)).done() and done == [1] and worker.drain() and worker.close()
        os._exit(0 if ended else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.close()


def test_a_job_that_submits_another_while_the_thread_is_closed_leaves_none_behind() -> None:
    worker, done, may_end = WriterThread(NAME), list[str](), threading.Event()

    def job() -> None:
        assert may_end.wait(500)
        worker.submit(lambda: done.append("of the job"))

    worker.submit(job)
    threading.Timer(0.05, may_end.set).start()
    assert worker.close(60)
    assert done == ["of the job"]
    assert not is_running()
    assert worker.submit(list).result(500) is None
    assert worker.close()
