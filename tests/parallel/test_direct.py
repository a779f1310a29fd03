"""Ranks of one machine add a few numbers by messages to one another: the same sums on all, in order, or an error."""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.parallel.direct import DirectSums, connect
from trainer_cli.parallel.peer_errors import is_of_peer


def _connect(group: ThreadGroup, timeout_s: float = 20.0) -> DirectSums:
    sums = connect(group, timeout_s)
    assert sums is not None
    return sums


def _start(sums: DirectSums, tensor: torch.Tensor) -> Any:
    started = sums.start(tensor)
    assert started is not None
    return started


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_have_the_same_sums_in_whatever_order_these_are_waited_for(world_size: int) -> None:
    # Added in another order these round to something else.
    terms = [1e16, 1.0, -1e16, 3.0]

    def act(group: ThreadGroup) -> list[Any]:
        sums = _connect(group)
        numbers = torch.tensor([terms[group.rank], group.rank], dtype=torch.float64)
        counts = torch.full((2, 3), group.rank + 1)
        scalar = torch.tensor(0.5 * group.rank, requires_grad=True)
        first, second, third = (_start(sums, tensor) for tensor in (numbers, counts, scalar))
        # What is written into a tensor after the start is not part of its sum.
        numbers.fill_(9)
        for started in (third, first, second):
            started.wait()
        first.wait()
        sums.close()
        return [numbers.tolist(), counts.tolist(), scalar.item()]

    ranks = range(world_size)
    total = float(sum(terms[:world_size]))
    expected = [[total, sum(ranks)], [[sum(ranks) + world_size] * 3] * 2, 0.5 * sum(ranks)]
    assert on_ranks(world_size, act) == [expected] * world_size


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_ends_or_sends_nothing_within_the_limit_is_a_lost_one(ends: bool) -> None:
    def act(group: ThreadGroup) -> None:
        sums = _connect(group)
        if not ends:
            sums.set_timeout(0.05)
        elif group.rank == 1:
            sums.close()
        group.barrier()
        try:
            if group.rank == 0:
                _start(sums, torch.zeros(6)).wait()
        finally:
            group.barrier()
            sums.close()

    error, nothing = on_ranks(2, act)
    assert isinstance(error, RuntimeError)
    assert is_of_peer(error)
    assert re.search("Broken pipe|Connection closed by peer" if ends else "Timed out", str(error))
    assert nothing is None


@pytest.mark.parametrize(
    "other",
    [torch.zeros(6), torch.zeros(2), torch.zeros(0), torch.zeros(2, dtype=torch.int64)],
    ids=["longer", "shorter", "empty", "int64"],
)
def test_tensors_of_other_sizes_or_types_are_refused_on_both_ranks_at_once(other: torch.Tensor) -> None:
    tensors = [torch.zeros(4), other]

    def act(group: ThreadGroup) -> None:
        sums = _connect(group)
        try:
            _start(sums, tensors[group.rank].clone()).wait()
        finally:
            group.barrier()
            sums.close()

    here, there = "16 bytes of torch.float32", f"{other.nbytes} bytes of {other.dtype}"
    assert list(map(str, on_ranks(2, act))) == [
        f"the ranks add different tensors: {first} on this rank, {second} on another"
        for first, second in ((here, there), (there, here))
    ]


def test_after_a_sum_that_was_cut_short_no_later_sum_gets_its_numbers() -> None:
    def act(group: ThreadGroup) -> None:
        sums = _connect(group, 0.05)
        if group.rank == 0:
            first = _start(sums, torch.tensor([1.0]))
            with pytest.raises(RuntimeError, match="Timed out"):
                first.wait()
        group.barrier()
        if group.rank == 1:
            _start(sums, torch.tensor([10.0]))
        group.barrier()
        if group.rank == 0:
            for act_again in (lambda: _start(sums, torch.tensor([2.0])).wait(), first.wait):
                with pytest.raises(RuntimeError, match="An earlier sum was cut short") as raised:
                    act_again()
                assert is_of_peer(raised.value)
        group.barrier()
        sums.close()

    assert on_ranks(2, act) == [None, None]


def test_a_limit_of_weeks_does_not_overflow_into_milliseconds() -> None:
    connection, other = socket.socketpair()
    with connection, other:
        # 2**32 + 704 milliseconds.
        DirectSums([None, connection], 4_294_968.0)
        assert connection.gettimeout() == 2e6


def test_ranks_that_are_many_or_cannot_reach_one_another_are_not_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Apart(ThreadGroup):
        """Rank 2 is on another machine, where no file is."""

        def gather(self, value: Any) -> list[Any]:
            values = super().gather(value)
            return [f"{value}.elsewhere" if self.rank == 2 and type(value) is str else value for value in values]

    assert on_ranks(9, lambda group: connect(group, 1.0)) == [None] * 9
    assert on_ranks(3, lambda group: connect(Apart(group.rank, 3, group._shared), 1.0)) == [None] * 3
    # Longer than the address of a socket may be.
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for folder in (long, tmp_path / "missing"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert on_ranks(2, lambda group: connect(group, 1.0)) == [None] * 2
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(513, dtype=torch.float64),
        torch.zeros(1, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2).to_sparse(),
    ],
    ids=["large", "bfloat16", "bool", "sparse"],
)
def test_a_tensor_that_is_large_or_of_another_type_is_left_to_torch(tensor: torch.Tensor) -> None:
    assert DirectSums([None], 1.0).start(tensor) is None
