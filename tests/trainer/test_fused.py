"""Which optimizers step in one fused kernel without being message to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop

from trainer_cli.trainer.optimizers import can_be_fused


class Own(AdamW):
    """Nothing is known of what a subclass does."""


def _fused(kind: Any, model: nn.Module | None = None, own: dict[str, Any] | None = None, **settings: Any) -> bool:
    model = nn.Linear(2, 1) if model is None else model
    return can_be_fused(kind, settings, [{"params": list(model.parameters()), **(own or {})}], model)


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
def test_where_there_is_a_kernel_it_is_used_and_steps(kind: Any) -> None:
    assert _fused(kind)
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", [RMSprop, LBFGS, Own])
def test_where_there_is_none_it_is_not(kind: Any) -> None:
    assert not _fused(kind)


@pytest.mark.parametrize("chosen", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_who_has_chosen_has_chosen(chosen: dict[str, Any]) -> None:
    assert not _fused(SGD, **chosen)
    assert not _fused(SGD, own=chosen)


def test_null_is_no_choice() -> None:
    assert _fused(SGD, fused=None, foreach=None)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 1, device="meta"),
        nn.Linear(2, 1, dtype=torch.complex64),
        nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)),
    ],
    ids=["no values", "complex", "sparse gradients"],
)
def test_parameters_that_the_kernel_does_not_take(model: nn.Module) -> None:
    assert not _fused(SGD, model)
