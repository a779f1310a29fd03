"""Optimizers that train other weights than they evaluate, and those whose step evaluates the loss again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class OptimizerModes:
    """Calls `train()` and `eval()` of the optimizers that have both, as schedule-free ones do.

    Between the two modes such an optimizer computes the weights of one from those of the other, with rounding. So an
    evaluation and a save take copies, and training goes on with exactly the weights that it had.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._switched = [one for one in optimizers if all(callable(getattr(one, m, None)) for m in ("train", "eval"))]
        self._training: dict[int, bool] = {}
        """By optimizer: the mode that it was put into here."""

    def train(self) -> None:
        """Before the first step."""
        for optimizer in self._switched:
            if not self._trains(optimizer):
                self._put(optimizer, training=True)

    def eval(self) -> None:
        """After the last step."""
        for optimizer in self._switched:
            if self._trains(optimizer):
                self._put(optimizer, training=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The weights to evaluate; afterwards those of the training again."""
        switched = [optimizer for optimizer in self._switched if self._trains(optimizer)]
        before = {one: one.detach().clone() for optimizer in switched for one in _parameters(optimizer)}
        for optimizer in switched:
            self._put(optimizer, training=False)
        try:
            yield
        finally:
            for optimizer in switched:
                self._put(optimizer, training=True)
            with torch.no_grad():
                for parameter, weights in before.items():
                    parameter.copy_(weights)

    def evaluation_weights(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the weights to evaluate while others are trained; empty if they are the same."""
        switched = [optimizer for optimizer in self._switched if self._trains(optimizer)]
        if not switched:
            return {}
        with self.evaluating():
            return {one: one.detach().clone() for optimizer in switched for one in _parameters(optimizer)}

    def _put(self, optimizer: Optimizer, *, training: bool) -> None:
        self._training[id(optimizer)] = training
        (optimizer.train if training else optimizer.eval)()  # type: ignore[attr-defined]

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer is in the mode of training. A callback of the user may have called its methods."""
        known = self._training.get(id(optimizer), False)
        return bool(optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", known)))


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step demands a function that evaluates the loss, as that of LBFGS does."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (ValueError, TypeError):
        return False
    return closure is not None and closure.default is closure.empty
