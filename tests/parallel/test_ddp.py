"""The buckets in which DDP averages gradients: several, the same at every step, averaged during the backward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_cli.models.cnn import CNN
from trainer_cli.parallel.process_group import ALONE
from trainer_cli.strategies import strategy
from trainer_cli.strategies.strategy import DDP

NEWER, OLDER = "torch with bucket_cap_mb_list", "torch without"
dist: Any = torch.distributed
FIRST_LAYER = "backward of the first layer"


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _events_of_steps(
    model: nn.Module, first_layer: nn.Module, loss: Callable[[nn.Module], Any], *, find_unused: bool = False
) -> list[list[str | float]]:
    """For each of two steps the size in MB of each bucket whose all-reduce starts, and when the backward reaches the
    first layer, the last of which it computes gradients."""
    strategy = DDP(ALONE, find_unused_parameters=find_unused)
    trained = strategy.trained(strategy.place(model, torch.device("cpu")))
    assert isinstance(trained, DistributedDataParallel)
    events: list[str | float] = []

    def start_all_reduce(state: Any, bucket: Any) -> Any:
        events.append(round(bucket.buffer().numel() * 4 / 1e6, 1))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # Torch compares them with its classes, and these are strings.
    start_all_reduce.__annotations__.clear()
    trained.register_comm_hook(None, start_all_reduce)

    def note_backward(layer: nn.Module, args: Any, output: Any) -> None:
        output.register_hook(lambda gradient: events.append(FIRST_LAYER))

    first_layer.register_forward_hook(note_backward)
    steps = []
    for _ in range(2):
        events.clear()
        loss(trained).backward()
        steps.append(list(events))
    return steps


def _use_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    if version == OLDER:
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters.values()
        older = inspect.Signature([one for one in parameters if one.name != "bucket_cap_mb_list"])
        monkeypatch.setattr(DistributedDataParallel.__init__, "__signature__", older, raising=False)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("version", [NEWER, OLDER])
def test_all_reduces_of_five_buckets_start_during_the_backward_of_every_step(
    monkeypatch: pytest.MonkeyPatch, version: str, find_unused: bool
) -> None:
    _use_torch(monkeypatch, version)
    assign = dist._compute_bucket_assignment_by_size
    # 100.8 MB.
    model = nn.Sequential(*[nn.Linear(1024, 1024, device="meta") for _ in range(24)]).to_empty(device="cpu")
    first, second = _events_of_steps(
        model, model[0], lambda trained: trained(torch.ones(1, 1024)).sum(), find_unused=find_unused
    )
    # The fourth is complete with the weight of the second layer, at about the same time.
    assert [event for event in first if event != FIRST_LAYER] == [8.4, 29.4, 29.4, 29.4, 4.2]
    assert first.index(FIRST_LAYER) in (3, 4)
    assert second == first
    assert dist._compute_bucket_assignment_by_size is assign


def test_the_model_by_which_two_ranks_show_exact_resumes_has_two_buckets() -> None:
    model = CNN(channels=[8, 32, 1024, 8])
    batch = torch.ones(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    first, _ = _events_of_steps(model, model.features[0], lambda trained: trained(batch)["loss"])
    assert first == [0.3, FIRST_LAYER, 1.2]


@pytest.mark.parametrize(
    ("widths", "buckets"),
    [
        ([64, 64], [0.0]),
        # 1.3 MB, of which the last layer alone would be a bucket of 18 kB.
        ([256, 448, 448, 10], [1.3]),
        ([256, 448, 448, 200], [0.4, 1.3]),
        ([2560, 2560, 2560, 10], [26.3, 26.2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", [NEWER, OLDER])
def test_a_small_last_bucket_joins_the_one_before(
    monkeypatch: pytest.MonkeyPatch, version: str, widths: list[int], buckets: list[float]
) -> None:
    _use_torch(monkeypatch, version)
    layers = [nn.Linear(inputs, outputs, device="meta") for inputs, outputs in itertools.pairwise(widths)]
    model = nn.Sequential(*layers).to_empty(device="cpu")
    first, second = _events_of_steps(model, model[0], lambda trained: trained(torch.ones(1, widths[0])).sum())
    assert [event for event in first if event != FIRST_LAYER] == buckets
    assert second == first


@pytest.mark.parametrize("checksum", [strategy._checksum, strategy._sum_bits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_a_checksum_differs_where_one_element_does_or_two_are_exchanged(
    checksum: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "_CHUNK", 4)
    values = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1]).to(dtype)
    changed, exchanged = values.clone(), values.clone()
    changed[8] = 0
    exchanged[[0, 1]] = values[[1, 0]]
    sums = {int(checksum(tensor)) for tensor in (values, changed, exchanged)}
    assert len(sums) == 3
    assert checksum(values.clone()) == checksum(values)
    assert checksum(values[:0]).shape == ()
