"""An error of torch about the tensors of a batch names them, and how to change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainer_cli.errors import UserError
from trainer_cli.trainer.tensor_errors import help_for

X = torch.zeros(2, 3)
NESTED = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("forward", "batch", "parts"),
    [
        (lambda model, batch: model(batch[0]), (X.double(), X), ["batch[0] is float64", ".to(torch.float32)"]),
        (lambda model, batch: model(batch["x"]), {"x": X.double()}, ["batch['x'] is float64", ".astype('float32')"]),
        (lambda model, batch: model(batch[0]), (X.long(), X), ["batch[0] is int64", ".to(torch.float32)"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.zeros(2)),
         ["batch[1] is float32", "must be int64", ".long()"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.zeros(2).int()),
         ["batch[1] is int32", "must be int64"]),
        (lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), (X, torch.zeros(2)), ["must be int64"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.tensor([0, 4])),
         ["the label 4 of batch[1] is no class", "0 to N - 1"]),
        *((lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.tensor([0, 4]), other),
           ["the label 4 of batch[1] is no class"])
          for other in (X.to_sparse(), NESTED, X.to("meta"))),
        (lambda model, batch: F.embedding(batch, torch.zeros(3, 3)), torch.zeros(2), ["batch is float32", "int64"]),
        (lambda model, batch: model(batch[0].to("meta")), (X, X), ["model and batch are on cpu", "device=x.device"]),
        (lambda model, batch: nn.Conv1d(3, 3, 1)(batch), torch.zeros(1, 3, 3).double(), ["batch is float64"]),
    ],
)  # fmt: skip
def test_the_tensor_of_the_batch_is_named_with_what_to_do(forward: Any, batch: Any, parts: list[str]) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises((RuntimeError, IndexError)) as raised:
        forward(model, batch)
    line = help_for(raised.value, model, batch)
    assert line is not None
    assert line.startswith("help: ")
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_an_error_of_another_kind_gets_no_help() -> None:
    model = nn.Linear(3, 4)
    for error in (RuntimeError("the line is broken"), IndexError("list index out of range")):
        assert help_for(error, model, (X.double(), X)) is None


class Sum(nn.Linear):
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch).sum()


class Nothing(nn.Linear):
    def forward(self, batch: Tensor) -> Any:
        super().forward(batch).sum()


def test_the_error_of_a_step_has_the_help_as_a_note() -> None:
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        trainer(Sum(4, 1)).fit(DataLoader([torch.zeros(4).double()] * 4, batch_size=2))
    assert any(note.startswith("help: the model is float32, and batch is float64.") for note in raised.value.__notes__)


def test_a_forward_that_returns_nothing_is_named_with_its_place() -> None:
    line = Nothing.forward.__code__.co_firstlineno
    with pytest.raises(UserError, match=rf"Nothing\.forward, .*test_tensor_errors\.py:{line}, returns nothing"):
        trainer(Nothing(4, 1)).fit(DataLoader([torch.zeros(4)] * 4, batch_size=2))
