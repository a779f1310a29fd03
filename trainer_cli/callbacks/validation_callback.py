"""Base of callbacks that evaluate by code of their own: after every n-th evaluation of the loaders, and the last."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_cli.outputs import modes_kept
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer


class ValidationCallback(Callback):
    """Calls `evaluate` after every n-th evaluation of the loaders, and always after the last of a fit or of a
    checkpoint. The model is in evaluation mode and needs no gradients meanwhile; random generators are as before
    afterwards. The count survives a resume.

    A subclass overrides `evaluate`, and `scope`, which its metrics' names begin with.

    Args:
        every: evaluations of the loaders from one call to the next.
    """

    scope = "validation"

    def __init__(self, every: int = 1) -> None:
        check_whole("every", every, 1)
        self.every = every
        self.val_loaders: Mapping[str, Any] = {}
        self._count = 0
        self._evaluated_step: int | None = None

    def evaluate(self, trainer: Trainer) -> Mapping[str, float | Tensor] | None:
        """Evaluate `trainer.model`, and return metrics; `self.val_loaders` are those just evaluated."""
        raise NotImplementedError

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        """Note the loaders that are evaluated."""
        # Loaders with an interval of their own may not be evaluated this time.
        self.val_loaders = {**self.val_loaders, **val_loaders}

    def run_validation(self, trainer: Trainer, is_last: bool) -> None:
        """Call `evaluate` if it is due, and log the metrics that it returns."""
        # An evaluation that ends the run is followed by a last one, of the same step.
        is_repeated = self._evaluated_step == trainer.progress.step and trainer.stop_request is not None
        if is_repeated:
            return
        self._count += 1
        is_due = is_last or trainer.sanity_checking or self._count % self.every == 0
        if not is_due:
            return
        self._evaluated_step = trainer.progress.step
        model = trainer.model
        with modes_kept(model), torch.no_grad(), trainer.name_scope(self.scope), trainer.strategy.evaluation(model):
            model.eval()
            trainer.log_metrics(self.evaluate(trainer) or {})

    def state_dict(self) -> dict[str, Any]:
        """The number of evaluations so far."""
        return {"evaluations": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._evaluated_step = int(state["evaluations"]), None
