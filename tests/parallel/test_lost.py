"""Which rank is lost: few ask, with requests that do not grow with the square of the ranks, and no other is named."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from trainer_cli.parallel import rendezvous as lost
from trainer_cli.parallel.peer_errors import is_of_peer
from trainer_cli.parallel.rendezvous import LostRanks, find_lost_ranks, report_failure, wait_for_hosts, write_host

dist: Any = torch.distributed


class CountingStore:
    """Counts the requests of all ranks to a store in this process."""

    def __init__(self, *, silent: bool = False, ended: bool = False) -> None:
        self.store, self.requests = dist.HashStore(), Counter[str]()
        self.silent, self.ended = silent, ended
        self.waited_for: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        if self.ended:
            raise RuntimeError("Connection reset by peer")
        if self.silent:
            threading.Event().wait(10)
        return getattr(self.store, name)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Also notes for how many keys a rank waits."""
        self.requests["wait"] += 1
        self.waited_for.add(len(keys))
        self.store.wait(keys, *timeout)


def _answers(store: Any, world_size: int, dead: set[int], wait_s: float = 0.5) -> dict[int, LostRanks]:
    """What each rank that lives finds out."""
    answers: dict[int, LostRanks] = {}

    def ask(rank: int) -> None:
        answers[rank] = find_lost_ranks(store, rank, world_size, wait_s=wait_s)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(world_size) if rank not in dead]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "_RANK_0_ANSWERS_IN_S", 0.3)
    monkeypatch.setattr(lost, "_POLL_S", 0.01)


@pytest.mark.parametrize(
    ("world_size", "dead", "named"),
    [
        (2, {1}, ["rank 1 (host1)"]),
        (4, {0}, ["rank 0 (host0)"]),
        (4, {3, 1}, ["rank 1 (host1)", "rank 3 (host3)"]),
        (64, {7}, ["rank 7 (host7)"]),
        (16, set(range(4, 16)), [*(f"rank {rank} (host{rank})" for rank in range(4, 12)), "4 more"]),
        (4, set(), []),
    ],
)
def test_one_rank_names_those_that_are_lost_and_the_others_leave_it_to_that_rank(
    world_size: int, dead: set[int], named: list[str]
) -> None:
    store = CountingStore()
    for rank in range(world_size):
        write_host(store, rank, world_size, f"host{rank}")
    store.requests.clear()
    answers = _answers(store, world_size, dead)
    asked = {rank: loss for rank, loss in answers.items() if loss.is_asked}
    assert list(asked.values()) == [LostRanks(absent=tuple(named))]
    assert (0 in asked) or 0 in dead
    # Each lets hear of itself, and one looks a hundred times at most.
    assert sum(store.requests.values()) < 10 * world_size + 400


def test_every_rank_hears_what_the_one_that_failed_has_said() -> None:
    store = CountingStore()
    report_failure(store, 2, "ValueError: bad sample")
    answers = _answers(store, 4, {2})
    assert {loss.failure for loss in answers.values()} == {"rank 2 failed: ValueError: bad sample"}


@pytest.mark.parametrize("how", [{"silent": True}, {"ended": True}])
def test_without_an_answer_of_the_store_no_rank_is_named(how: dict[str, bool]) -> None:
    store = CountingStore(**how)
    assert find_lost_ranks(store, 1, 4, wait_s=0.1) == LostRanks(store_answers=False)


def test_ranks_that_are_late_are_found_by_few_requests_of_one_rank() -> None:
    store = CountingStore()
    for rank in range(600):
        if rank not in (7, 300):
            write_host(store, rank, 600, "host")
    store.requests.clear()
    store.store.set_timeout(timedelta(seconds=1))
    assert not wait_for_hosts(store, timedelta(seconds=0.1))
    absent = [lost._find_absent_hosts(store, 600, phase) for phase in ("waiting", "waiting", "absent", "absent")]
    assert absent == [[7, 300], [], [7, 300], []]
    assert store.requests["check"] < 120


def test_ranks_that_meet_ask_for_a_few_keys_each() -> None:
    store = CountingStore()
    for rank in range(600):
        write_host(store, rank, 600, "host")
    for _ in range(600):
        assert wait_for_hosts(store, timedelta(seconds=0.1))
    # A rank writes its host, counts itself, and waits for one key; the last says that all are here.
    assert store.requests == {"set": 601, "add": 600, "wait": 600}
    assert store.waited_for == {1}


MESSAGES = {
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:4242: Connection reset by peer": True,
    "Application timeout caused pair closure": True,
    "NCCL error in: ProcessGroupNCCL.cpp:2210": True,
    "trainer_cli/direct: a sum of the ranks: Timed out": True,
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)": False,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_of_a_backend_is_that_of_another_rank(message: str) -> None:
    assert is_of_peer(RuntimeError(message)) is MESSAGES[message]
