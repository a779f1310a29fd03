"""A sharded tensor that no checkpoint can have is refused with the cure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from trainer_cli import dtensor
from trainer_cli.manifest import UnsavableState


def sharded(placement: Any, *boxes: int) -> Any:
    chunks = [SimpleNamespace(offsets=(0,), sizes=(size,)) for size in boxes]
    mesh = SimpleNamespace(mesh=torch.tensor([0, 1]), get_coordinate=lambda: (0,))
    return SimpleNamespace(placements=(placement,), shape=(4,), device_mesh=mesh, __create_chunk_list__=lambda: chunks)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (sharded(Partial()), "x is a tensor whose ranks hold partial sums"),
        (sharded(Shard(0), 1, 1), "x is sharded in pieces"),
    ],
)
def test_what_no_checkpoint_can_have_says_how_to_distribute_it(
    leaf: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtensor, "local_of", lambda _: torch.zeros(2))
    with pytest.raises(UnsavableState, match=message) as caught:
        dtensor.part_of("x", leaf)
    assert "tensor.redistribute(placements=[…])" in str(caught.value)


def test_a_part_in_a_format_of_whole_tensors_names_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor, "local_of", lambda _: torch.zeros(2))
    monkeypatch.setattr(dtensor, "is_dtensor", lambda _: True)
    with pytest.raises(UnsavableState, match="only the formats tensors and archive save parts") as caught:
        dtensor.undistributed({"x": sharded(Shard(0), 2)})
    assert caught.value.cure == "Set checkpoint.format=tensors."
