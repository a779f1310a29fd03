"""Samples are counted in a replay as in the training, and a sample with NaN is named by one function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_parts import data_loader
from torch import Tensor, nn

from trainer_cli import Trainer, TrainingLoop
from trainer_cli.addons.exact.sample_losses import read_numbers
from trainer_cli.addons.exact.step_trace import StepTrace
from trainer_cli.batches.nan_rows import rows_with_nan
from trainer_cli.schema.sections import LoopConfig

NAN, INF = float("nan"), float("inf")
NOT_DENSE = [
    torch.full((2, 3), NAN).to_sparse(),
    torch.nested.nested_tensor([torch.full((2,), NAN), torch.zeros(3)], layout=torch.jagged),
    torch.zeros(2, device="meta"),
    torch.tensor([1.0, NAN]),
]


def _time_first(samples: list[Any]) -> Tensor:
    return torch.stack(samples, dim=1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.factor * batch.mean()


def test_a_batch_that_is_time_first_has_as_many_samples_as_its_loader_states() -> None:
    trace = StepTrace(range(1, 2), per_sample=True)
    data = data_loader([torch.ones(7) for _ in range(4)], 4, collate_fn=_time_first)
    loop = TrainingLoop(config=LoopConfig(max_duration=1))
    Trainer(model=Mean(), optimizer=_sgd, loop=loop, callbacks=[trace]).fit(data)
    [entry] = trace.rows[0].batches
    assert entry["samples"] == 4
    assert entry["sample_losses"].startswith("a batch of 4 samples has a tensor of shape (7, 4)")


def test_outputs_that_are_no_single_number_are_left_out_of_the_numbers_of_a_step() -> None:
    outputs = {"loss": torch.ones(()), "weight": None, "tokens": [3, 4], "one": torch.ones(1), "share": 0.5, "ok": True}
    assert read_numbers(outputs) == {"one": 1.0, "share": 0.5}
    assert read_numbers({"weight": torch.tensor(2), "tokens": torch.ones(2)}) == {"weight": 2.0}


@pytest.mark.parametrize(
    ("batch", "size", "rows"),
    [
        ([torch.tensor([[1.0], [NAN]]), torch.zeros(2)], 2, {"[0]": [1]}),
        ({"x": torch.tensor([1.0, NAN, NAN]), "y": torch.arange(3), "scale": torch.ones(2)}, 3, {"x": [1, 2]}),
        ([torch.full((2, 3), NAN), torch.zeros(3)], 3, {"[0]": []}),
        (torch.zeros(3), 3, {}),
        ({"mask": torch.tensor([[0.0], [-INF]]), "x": torch.tensor([[NAN], [INF]])}, 2, {"x": [0]}),
        ([torch.tensor([[1.0], [NAN]]), torch.full((2, 3), NAN)], 2, {"[0]": [1], "[1]": []}),
        (NOT_DENSE, 2, {"[3]": [1]}),
    ],
    ids=["one sample", "a tensor of another length", "samples second", "none", "a mask", "padding", "not dense"],
)
def test_rows_with_nan_are_samples_only_where_the_leading_size_is_their_number(
    batch: Any, size: int, rows: dict[str, list[int]]
) -> None:
    assert rows_with_nan(batch, size) == rows
