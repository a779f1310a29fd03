"""Optimizers that evaluate other weights than they train, and optimizers whose step needs a closure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_cli.errors import UserError


class OptimizerModes:
    """Call `train()` and `eval()` of the optimizers that have both, as schedule-free ones do.

    A change of mode computes the weights of one mode from those of the other, with rounding. So the training weights
    are copied before an evaluation or a save, and restored exactly after it.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._with_modes = [
            optimizer
            for optimizer in optimizers
            if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
        ]
        self._training: dict[int, bool] = {}
        """id of an optimizer -> whether `_put` has set it to training."""

    def train(self) -> None:
        """Switch to the training weights, before the first step."""
        for optimizer in self._with_modes:
            if not self._trains(optimizer):
                self._put(optimizer, training=True)

    def eval(self) -> None:
        """Switch to the evaluation weights, after the last step."""
        for optimizer in self._with_modes:
            if self._trains(optimizer):
                self._put(optimizer, training=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to the evaluation weights inside the block, and back to the same training weights after it."""
        switched = [optimizer for optimizer in self._with_modes if self._trains(optimizer)]
        training_weights = _copy_weights(switched)
        for optimizer in switched:
            self._put(optimizer, training=False)
        try:
            yield
        finally:
            for optimizer in switched:
                self._put(optimizer, training=True)
            # Exactly: the optimizer has computed them with rounding.
            with torch.no_grad():
                for parameter, weights in training_weights.items():
                    parameter.copy_(weights)

    def evaluation_weights(self) -> dict[nn.Parameter, Tensor]:
        """Copies of the evaluation weights; empty if they are the trained ones."""
        switched = [optimizer for optimizer in self._with_modes if self._trains(optimizer)]
        if not switched:
            return {}
        with self.evaluating():
            return _copy_weights(switched)

    def _put(self, optimizer: Optimizer, *, training: bool) -> None:
        """Switch an optimizer to one of its modes."""
        self._training[id(optimizer)] = training
        (optimizer.train if training else optimizer.eval)()  # type: ignore[attr-defined]

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer is in training mode."""
        last_set = self._training.get(id(optimizer), False)
        # The optimizer's own flag first: a user's callback may have called its methods.
        return bool(optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", last_set)))


def _copy_weights(optimizers: Iterable[Optimizer]) -> dict[nn.Parameter, Tensor]:
    """Copies of the optimizers' parameters."""
    return {
        parameter: parameter.detach().clone()
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer requires a closure that evaluates the loss, as the step of LBFGS does."""
    closure = _closure_parameter(optimizer)
    return closure is not None and closure.default is closure.empty


def explain_missing_closure(optimizer: Optimizer, error: Exception) -> Exception:
    """Explain an error of a step that needs its optional `closure`, as in many sharpness-aware optimizers.

    Returns a UserError, or the error itself if it has another cause.
    """
    name = type(optimizer).__name__
    if _closure_parameter(optimizer) is None or "closure" not in f"{type(error).__name__} {error}".lower():
        return error
    return UserError(
        f"{name}.step needs a closure, but its signature has a default for it",
        where="optimizer",
        cure=f"Use a subclass of {name} with `def step(self, closure): return super().step(closure)`.",
    )


def _closure_parameter(optimizer: Optimizer) -> inspect.Parameter | None:
    """The parameter `closure` of the optimizer's step; None if the step has no such parameter, or no signature."""
    try:
        return inspect.signature(type(optimizer).step).parameters.get("closure")
    except (ValueError, TypeError):
        return None
