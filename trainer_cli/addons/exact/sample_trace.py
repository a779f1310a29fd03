"""A callback that finds the samples to blame in evaluations that are not finite, and in steps and evaluations that
raise an exception."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_cli.addons.exact.epoch_orders import names_in_batch
from trainer_cli.addons.exact.sample_losses import errors_of_samples, losses_or_reason, numbers_in, samples_in
from trainer_cli.batches import rows_with_nan
from trainer_cli.errors import TrainError
from trainer_cli.outputs import read_evaluation
from trainer_cli.state import capture_rng, restore_rng
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.validation_loop import ValidationLoop

_MOST_COMPUTED = 4
"""Batches of a validation set whose samples are computed alone."""


@dataclass(slots=True)
class BlamedSamples:
    """What of a step and the evaluation after it is to blame."""

    failed: dict[str, Any] | None = None
    """The batch of the step whose computation raised an exception: its rank, its number in the step, its number of
    samples, and `raised`: row -> the exception of each sample that alone raises one."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of the evaluation that are not finite."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches of the evaluation with an output that is not finite, or that failed: the rank, the name of the loader,
    the number of samples, their names if they are known, and `not_finite` and `sample_losses`, or `raised`."""


class SampleTrace(Callback):
    """Looks at some steps of a training, and at the evaluations after them, and changes nothing. Collective: each rank
    has one.

    Args:
        steps: the numbers of the steps, counted from 1.
    """

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self.blamed: dict[int, BlamedSamples] = {}
        """Step -> the samples to blame; without steps that have none."""
        self._batch: Any = None
        self._size = 1
        """Number of samples in that batch."""
        self._number = 0
        """Which of the batches of its step the present one is, from 1."""
        self._evaluated: tuple[Any, ValidationLoop] | None = None
        """The loader and the loop of an evaluation after one of the steps."""
        self._rows: dict[str, list[int]] = {}
        self._found: list[dict[str, Any]] = []

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        self._batch, self._number = batch, self._number + 1
        self._size = samples_in(batch, trainer.loop.batch_samples)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batch = None
        if trainer.is_step_complete:
            self._number = 0

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        step = trainer.progress.step + 1
        if step in self._steps and self._batch is not None and _is_of_user(exception):
            entry = self._entry(trainer, {"raised": errors_of_samples(trainer, self._batch, self._size)})
            self.blamed.setdefault(step, BlamedSamples()).failed = {**entry, "number": self._number}

    def on_enter_validate(self, trainer: Trainer, stack: ExitStack, val_loader: Any, loop: ValidationLoop) -> None:
        if trainer.progress.step in self._steps and not trainer.sanity_checking:
            self._evaluated = val_loader, loop
            stack.push(partial(self._end_evaluation, trainer))

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if self._evaluated is not None:
            # Before the model, which may change the batch in place.
            self._batch, self._size = batch, samples_in(batch, self._evaluated[0].batch_samples)
            self._rows = rows_with_nan(batch, self._size)

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._evaluated is None:
            return
        loader, loop = self._evaluated
        loss, named = read_evaluation(outputs)
        numbers = [*([] if loss is None else [float(loss.detach())]), *numbers_in(named).values()]
        if loop.counts and not all(map(math.isfinite, numbers)):
            facts: dict[str, Any] = {"not_finite": self._rows}
            if sum(entry["loader"] == loop.name for entry in self._found) < _MOST_COMPUTED:
                facts["sample_losses"] = losses_or_reason(trainer, batch, self._size, None)
            self._found.append(self._entry_of_evaluation(trainer, loader, loop, facts))
        self._batch = None

    def logged_metrics(self) -> Iterable[str]:
        # It states that `on_after_evaluation` logs none.
        return ()

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step not in self._steps:
            return
        found = [*chain.from_iterable(trainer.strategy.group.gather(self._found))]
        self._found = []
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            blamed = self.blamed.setdefault(trainer.progress.step, BlamedSamples())
            blamed.metrics, blamed.batches = bad, found

    def _end_evaluation(
        self,
        trainer: Trainer,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._evaluated is not None
        if error is not None and self._batch is not None and _is_of_user(error):
            facts = {"raised": errors_of_samples(trainer, self._batch, self._size)}
            blamed = self.blamed.setdefault(trainer.progress.step, BlamedSamples())
            blamed.batches = [self._entry_of_evaluation(trainer, *self._evaluated, facts)]
        self._evaluated = self._batch = None

    def _entry_of_evaluation(
        self, trainer: Trainer, loader: Any, loop: ValidationLoop, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        rng = capture_rng()
        try:
            names = names_in_batch(loader, loop.batch_idx)
        finally:
            restore_rng(rng)
        entry = self._entry(trainer, facts)
        # A `collate_fn` may drop samples.
        is_whole = names is not None and len(names) == entry["samples"]
        return {**entry, "loader": loop.name, "names": names if is_whole else None}

    def _entry(self, trainer: Trainer, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {"rank": trainer.strategy.group.rank, "samples": self._size, **facts}


def _is_of_user(error: BaseException) -> bool:
    """Whether an error may be that of a sample: not one of this package, nor a stop."""
    return isinstance(error, Exception) and not isinstance(error, TrainError)
