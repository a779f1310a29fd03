"""The callback of a resume check: records digests of all state, and stops its process where the plan says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_cli.addons.exact.digests import Digests
from trainer_cli.addons.exact.trace import OWN_FAILURE, ProbePlan, StopPlace, TraceKind, TraceWriter
from trainer_cli.callbacks import CheckpointerCallback
from trainer_cli.data import StreamLoader
from trainer_cli.errors import TrainError
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop, ValidationLoop

_OURS = "trainer_cli"
_START_HOOKS = ("on_load_checkpoint", "on_fit_start", "on_enter_train", "on_train_start")
"""Hooks between the load of a checkpoint and the first batch."""
_NOT_COMPARED = ("progress.seconds", "progress.last_", "loop.owed_")
"""Times, and counts that are copied from others when a step begins, so that a save has those of the step before."""


@cache
def _attributes_of_torch() -> frozenset[str]:
    """Attributes that every optimizer has, or gets from a schedule."""
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    return frozenset({*vars(plain), "_opt_called", "_step_count"})


def _users_start_hooks(trainer: Trainer) -> Iterator[str]:
    """The methods of the user's callbacks that are called between the load of a checkpoint and the first batch."""
    for name, callback in trainer.callbacks.items():
        for hook in _START_HOOKS:
            method = getattr(type(callback), hook)
            if method is not getattr(Callback, hook) and method.__module__.partition(".")[0] != _OURS:
                yield f"callbacks.{name}.{hook}"


class Recorder(Callback):
    """The first of the callbacks, so that it records state before any other changes it.

    Args:
        plan: the file that says where to write the trace, and where to stop.
    """

    def __init__(self, plan: str) -> None:
        self._plan = ProbePlan.read(plan)
        self._trace = TraceWriter(self._plan.trace)
        self._digests = Digests()
        self._step = -1
        self._batch = 0
        self._first_step = 0
        self._loaders: dict[str, Any] = {}
        self._evaluated = "val"
        self._seen = 0
        """Moments of the evaluation of a loader that were recorded."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._loaders = {"train": train_loader, **val_loaders}
        self._first_evaluated = next(iter(val_loaders), None)
        self._first_step = trainer.progress.step
        users_loader = getattr(train_loader, "loader", None)
        stream = train_loader.source if isinstance(train_loader, StreamLoader) else None
        self._trace.write(
            facts={
                "device": str(trainer.device),
                "threads": torch.get_num_threads(),
                "steps_per_epoch": loop.steps_per_epoch,
                "loader": None if users_loader is None else type(users_loader).__name__,
                "persistent": bool(getattr(users_loader, "persistent_workers", False)),
                "stream": None if stream is None else type(stream.dataset).__name__,
                "stateful": stream is not None and stream.stateful,
                "starts": list(_users_start_hooks(trainer)),
            }
        )
        if self._plan.stop is not None and self._plan.stop.when is StopPlace.at_once:
            self._send(trainer, signal.SIGTERM)

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        # A step of several batches has one state before it.
        if trainer.progress.step != self._step:
            self._step, self._batch = trainer.progress.step, 0
            self._record_state(trainer)
        self._batch += 1
        self._record(TraceKind.batch, self._step, self._batch, self._digests.tree(batch, "batch"))

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._record(TraceKind.loss, self._step, self._batch, self._digests.tree(loss, "loss"))

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        stop, step = self._plan.stop, trainer.progress.step
        if stop is not None and stop.when is StopPlace.accumulating and step >= stop.after:
            accumulates = trainer.loop.settings.grad_accum_steps > 1
            # Where batches are accumulated, a kill before the first says nothing of gradients that are lost.
            if self._batch > 1 or not accumulates or step >= stop.by:
                self._send(trainer, signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        gradients = (
            (f"gradient of {name}", str(self._digests.digest(value.grad))) for name, value in model.named_parameters()
        )
        self._record(TraceKind.gradients, self._step, self._batch, gradients)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        progress, stop = trainer.progress, self._plan.stop
        # Within an accumulation no step has ended.
        if stop is None or progress.step == self._step or stop.when in (StopPlace.accumulating, StopPlace.at_once):
            return
        inside = progress.batch > 0
        is_there = {
            StopPlace.mid_epoch: inside,
            StopPlace.second_epoch: inside and progress.epoch > 0,
            StopPlace.epoch_end: not inside,
        }.get(stop.when, False)
        made = progress.step - self._first_step
        if (is_there and made >= stop.after) or (made > 0 and progress.step >= stop.by):
            self._send(trainer, signal.SIGTERM)

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        if trainer.sanity_checking:
            # Only resumed processes make a sanity check, so there is nothing to compare.
            return
        self._evaluated = next((name for name, loader in self._loaders.items() if loader is val_loader), "val")
        self._seen = 0
        # Before the first of several loaders: the state is the same before all of them.
        if self._evaluated == self._first_evaluated:
            self._record_state(trainer, moment=1)

    def on_validate_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        self._record_evaluation(trainer, batch, f"batch of {self._evaluated}")

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        self._record_evaluation(trainer, loop.metrics, self._evaluated)

    def run_validation(self, trainer: Trainer, is_last: bool) -> None:
        stop = self._plan.stop
        if is_last or trainer.sanity_checking or stop is None or stop.when is not StopPlace.evaluated:
            return
        if trainer.progress.step - self._first_step >= stop.after:
            self._send(trainer, signal.SIGTERM)

    def on_save_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        # What differs here has differed before the stop: loading is not to blame.
        leaves = chain(self._state(trainer), self._hidden(trainer))
        self._record(TraceKind.saved, trainer.progress.step, 0, leaves)

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        # A difference here was not restored; one that only comes later was made after the load.
        leaves = self._state(trainer)
        self._record(TraceKind.loaded, trainer.progress.step, 0, leaves)

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        # A stopped process ends elsewhere than the straight run, which has no such moment.
        if trainer.stop_request is None:
            self._record_state(trainer)

    def finalize(self) -> None:
        self._trace.close()

    def _record(self, kind: TraceKind, step: int, batch: int, leaves: Iterable[tuple[str, str]]) -> None:
        """Record a moment. An error here is named as one of the recorder, and not of the training that it looks at."""
        try:
            self._trace.record(kind, step, batch, dict(leaves))
        except Exception as error:
            raise TrainError(
                f"{OWN_FAILURE} while it recorded the {kind} of step {step}: {type(error).__name__}: {error}",
                cure="The training is not at fault: please report this.",
            ) from error

    def _record_state(self, trainer: Trainer, moment: int = 0) -> None:
        """Record all state between two steps: before the next one, or before the evaluation."""
        step = trainer.progress.step
        # First what explains a difference, then what may differ.
        self._record(TraceKind.hidden, step, moment, self._hidden(trainer))
        self._record(TraceKind.state, step, moment, self._state(trainer))

    def _record_evaluation(self, trainer: Trainer, value: Any, name: str) -> None:
        if not trainer.sanity_checking:
            self._seen += 1
            leaves = self._digests.tree(value, name)
            self._record(TraceKind.evaluation, trainer.progress.step, self._seen, leaves)

    def _state(self, trainer: Trainer) -> Iterator[tuple[str, str]]:
        """The state that a checkpoint holds, and buffers that are not persistent."""
        # A pending evaluation is recorded when it is made.
        yield from (leaf for leaf in self._digests.of_state(trainer) if not leaf[0].startswith(_NOT_COMPARED))

    def _hidden(self, trainer: Trainer) -> Iterator[tuple[str, str]]:
        """State that no checkpoint holds."""
        digests = self._digests
        yield from digests.of_model(trainer.model)
        for name, optimizer in trainer.optimizers.items():
            prefix = "optimizer" if len(trainer.optimizers) == 1 else f"optimizer.{name}"
            yield from digests.of_object(optimizer, prefix, _attributes_of_torch())
        for name, callback in trainer.callbacks.items():
            if type(callback).__module__.partition(".")[0] != _OURS and not isinstance(callback, CheckpointerCallback):
                yield from digests.of_object(callback, f"callbacks.{name}")
        # Shared: a dataset of two loaders is recorded once.
        seen: set[int] = set()
        for name, loader in self._loaders.items():
            yield from digests.of_data(loader, f"data.{name}", seen)
        yield from digests.of_modules()

    def _send(self, trainer: Trainer, number: signal.Signals) -> None:
        progress = trainer.progress
        # Before the signal, after which nothing is sure to run.
        self._trace.write(stopped={"step": progress.step, "epoch": progress.epoch, "batch": progress.batch})
        if number is signal.SIGKILL and isinstance(trainer.checkpoint, CheckpointerCallback):
            # The checkpoint that is resumed must not depend on the speed of the disk.
            trainer.checkpoint.drain()
        os.kill(os.getpid(), number)
