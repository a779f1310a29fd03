"""Tensors live where saves write them from: nobody can tell but by the time that a save takes."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer_cli.checkpoint.format.home import Home
from trainer_cli.checkpoint.format.leaves import bytes_of, memory_of
from trainer_cli.testing.digests import Digests

COUNT = 1 << 15
"""Elements, of four bytes: large enough to be worth it."""


def home_for(*tensors: torch.Tensor) -> tuple[Home, list[tuple[str, torch.Tensor, int]]]:
    moves, offset = [], 4096
    for number, tensor in enumerate(tensors):
        moves.append((f"t{number}", tensor, offset))
        offset += tensor.nbytes
    return Home(b"header", offset), moves


def test_who_moves_in_is_the_same_tensor_at_its_place_in_the_file() -> None:
    weight = torch.nn.Parameter(torch.randn(COUNT // 2, 2))
    moment = torch.randn(COUNT).add_(1)
    weight.grad = torch.ones_like(weight)
    before, versions = [one.detach().clone() for one in (weight, moment)], (weight._version, moment._version)
    home, moves = home_for(weight, moment)
    home.move_in(moves)
    assert home.tenants == {"t0": weight.data_ptr(), "t1": moment.data_ptr()}
    assert [one.data_ptr() - home.memory.address for one in (weight, moment)] == [4096, 4096 + 4 * COUNT]
    assert torch.equal(weight, before[0])
    assert torch.equal(moment, before[1])
    assert (weight.requires_grad, weight.is_leaf, weight.shape) == (True, True, (COUNT // 2, 2))
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert (weight._version, moment._version) == versions
    with torch.no_grad():
        weight.add_(1)
    assert weight._version == versions[0] + 1
    assert bytes(home.memory.view(4096 + weight.nbytes)[4096:]) == weight.detach().numpy().tobytes()


def test_the_memory_stays_as_long_as_a_tensor_lives_in_it() -> None:
    weight = torch.arange(float(COUNT))
    home, moves = home_for(weight)
    home.move_in(moves)
    home.memory.close()
    del home, moves
    assert torch.equal(weight, torch.arange(float(COUNT)))


def test_a_tensor_that_moved_in_is_saved_elsewhere_by_itself() -> None:
    weights = [torch.ones(COUNT) for _ in range(4)]
    home, moves = home_for(*weights)
    home.move_in(moves)
    file = io.BytesIO()
    torch.save(weights[1], file)
    assert file.tell() < 2 * weights[1].nbytes, "not all that lives beside it"


def test_kernels_go_by_the_same_strides_as_before() -> None:
    weight = torch.randn(COUNT // 4, 4, 1, 1).to(memory_format=torch.channels_last)
    strides = weight.stride()
    assert strides != torch.empty(COUNT // 4, 4, 1, 1).stride()
    home, moves = home_for(weight)
    assert home.may_take(weight, 4096)
    home.move_in(moves)
    assert weight.stride() == strides


def test_what_was_left_stays_for_those_who_read_it_until_it_is_forgotten() -> None:
    weight = torch.ones(COUNT)
    left = weakref.ref(weight.untyped_storage())
    home, moves = home_for(weight)
    home.move_in(moves)
    assert left() is not None
    home.forget()
    assert left() is None


def test_a_sample_tells_of_who_was_written_to() -> None:
    weights = [torch.zeros(COUNT) for _ in range(3)]
    home, moves = home_for(*weights)
    home.move_in(moves)
    since = home.sample()
    assert home.changed(since) == []
    weights[1].numpy()[...] = 2
    weights[2].numpy()[...] = 1.7
    assert home.changed(since) == ["t1", "t2"]
    weights[1].zero_()
    assert home.changed(since) == ["t2"]


def test_a_forked_worker_sees_what_was_there_and_changes_nothing_here() -> None:
    weight = torch.full((COUNT,), 7.0)
    home, moves = home_for(weight)
    home.move_in(moves)
    child = os.fork()
    if child == 0:
        code = 0 if float(weight[-1]) == 7 else 1
        weight.fill_(1)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert float(weight[-1]) == 7


class OfItsOwnKind(torch.Tensor):
    pass


def kept(tensor: torch.Tensor, *others: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    return tensor, others


def with_view() -> tuple[torch.Tensor, Any]:
    weight = torch.ones(COUNT)
    return kept(weight, weight.view(-1, 2))


def with_array() -> tuple[torch.Tensor, Any]:
    weight = torch.ones(COUNT)
    return kept(weight, weight.numpy())


def with_detached() -> tuple[torch.Tensor, Any]:
    weight = torch.nn.Parameter(torch.ones(COUNT))
    return kept(weight, weight.detach())


def in_inference() -> tuple[torch.Tensor, Any]:
    with torch.inference_mode():
        return kept(torch.ones(COUNT))


def of_an_array() -> tuple[torch.Tensor, Any]:
    array = np.ones(COUNT, np.float32)
    return kept(torch.from_numpy(array), array)


def of_other_memory() -> tuple[torch.Tensor, Any]:
    return kept(torch.frombuffer(bytearray(4 * COUNT), dtype=torch.float32))


@pytest.mark.parametrize(
    "made",
    [
        with_view, with_array, with_detached, in_inference, of_an_array, of_other_memory,
        lambda: kept(torch.ones(2 * COUNT)[COUNT:]),
        lambda: kept(torch.ones(2 * COUNT)[:COUNT]),
        lambda: kept(torch.ones(COUNT // 2, 2).T),
        lambda: kept(torch.ones(8)),
        lambda: kept(torch.ones(COUNT).share_memory_()),
        lambda: kept(torch.ones(COUNT).as_subclass(OfItsOwnKind)),
        lambda: kept(torch.complex(torch.ones(COUNT), torch.ones(COUNT)).conj()),
    ],
    ids=["view", "array", "detached", "inference", "of an array", "of a buffer", "end", "beginning", "turned", "small",
         "shared", "subclass", "conj"],
)  # fmt: skip
def test_who_is_known_elsewhere_may_not_move(made: Callable[[], tuple[torch.Tensor, Any]]) -> None:
    home = Home(b"", 16 * COUNT)
    assert home.may_take(torch.ones(COUNT), 4096)
    tensor, others = made()
    assert not home.may_take(tensor, 4096)
    del others


@pytest.mark.parametrize("look", [bytes_of, memory_of, Digests().one])
def test_who_was_looked_at_by_our_own_may_move(look: Callable[[torch.Tensor], object]) -> None:
    weight = torch.ones(COUNT)
    look(weight)
    assert Home.may_take(weight, 4096)


def test_who_would_not_lie_as_torch_has_it_may_not_move() -> None:
    assert not Home(b"", 8 * COUNT).may_take(torch.ones(COUNT), 4096 + 4)


def test_who_lives_in_a_home_may_move_to_the_next_one_though_the_first_is_forgotten() -> None:
    weight = torch.ones(COUNT)
    home, moves = home_for(weight)
    home.move_in(moves)
    home.memory.close()
    del home, moves
    home, moves = home_for(weight)
    assert home.may_take(weight, 4096)
    home.move_in(moves)
    assert weight.data_ptr() == home.memory.address + 4096


def test_where_torch_does_not_tell_who_knows_of_a_tensor_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_cli.checkpoint.format import home as room

    room._owners_of_one.cache_clear()
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    try:
        assert not Home(b"", 8 * COUNT).may_take(torch.ones(COUNT), 4096)
    finally:
        room._owners_of_one.cache_clear()
