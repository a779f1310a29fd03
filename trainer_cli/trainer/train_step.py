"""The training step: forward, backward and optimizer steps of one batch. A subclass defines another step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_cli.core.patterns import did_you_mean
from trainer_cli.core.schema import SchedulerInterval
from trainer_cli.errors import UserError
from trainer_cli.parallel.agreement import Agreement
from trainer_cli.parallel.torch_compat import foreach_div_, local
from trainer_cli.trainer.metrics import Number, batch_weight, is_known_zero, read_outputs
from trainer_cli.trainer.microbatch import Microbatches, joined
from trainer_cli.trainer.model_call import arguments, explained
from trainer_cli.trainer.optimizer_modes import needs_closure

if TYPE_CHECKING:
    from torch import nn

    from trainer_cli.trainer.trainer import Trainer


class _Updated:
    """One optimizer, and the state of its next step."""

    def __init__(self, name: str, optimizer: Optimizer, schedulers: list[Any]) -> None:
        self.name, self.optimizer, self.schedulers = name, optimizer, schedulers
        self.grad_norm: Tensor | None = None
        self.used: list[dict[str, Any]] | None = None
        """The parameter groups as the last step was made with: schedules change them after it."""
        self.clears = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        """Whether the optimizer overrides zero_grad. Torch's takes 7 us more a step than a loop over the gradients."""
        self.needs_closure = needs_closure(optimizer)
        self.pending = False
        """Whether gradients were added since its last step."""
        self.weight: Number | Tensor = 0
        """Sum of the weights of these backwards, in units of the first."""
        self.list_parameters()

    def list_parameters(self) -> None:
        """List the optimizer's parameters: gradients of others are neither divided nor clipped."""
        groups = self.optimizer.param_groups
        self.group_count = len(groups)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self._tensors = [
            (number, key) for number, group in enumerate(groups) for key in group if isinstance(group[key], Tensor)
        ]

    def keep_settings(self) -> None:
        """Copy the groups' settings before a step, without a wait for the device."""
        self.used = [group.copy() for group in self.optimizer.param_groups]
        for number, key in self._tensors:
            self.used[number][key] = self.used[number][key].detach().clone()


class TrainStep:
    """Forward, backward and optimizer step of one batch: one loss, and all optimizers stepped together.

    A subclass overrides `train_batch`, and calls `forward`, `backward` and `optimizer_step` in its own order. These
    call the hooks, scale the loss, weight accumulated batches, clip gradients and step the schedulers. `trainer`,
    `model`, `device` and `batch_size` (samples in this batch) are set before `train_batch` is called.
    """

    trainer: Trainer
    model: nn.Module
    device: torch.device
    batch_size: int = 0
    weight: Number | Tensor = 0
    """Of the loss of the last `backward`. A loss of weight 0 counts for nothing, also if it is NaN."""
    step_idx: int = -1
    """The optimizer step that is being made, or was made last, counted from 0 at the run's beginning; -1: none yet."""
    completes = False
    """Of several ranks: whether this batch is known to be the last of its step."""
    counts = True
    """Of several ranks: whether this batch is not only computed because the others compute one."""
    _updated: tuple[_Updated, ...] = ()
    _unit: Number | Tensor | None = None
    _before_backward: Sequence[Callable[..., Any]]
    _after_backward: Sequence[Callable[..., Any]]
    _has_stepped = False
    _total: Number | Tensor | None = None
    _has_agreed = False
    _has_called = False
    """Whether `forward` was called in this step."""
    evaluates_again = False
    """Whether the optimizer's step evaluates the loss of the whole step again; `batches` are then kept."""
    _objective: Number | Tensor = 0
    """The loss whose gradients there are, if `evaluates_again`."""
    _is_evaluating = False

    def train_batch(self, batch: Any) -> Any:
        """Forward and backward of one batch, which is on the device. Returns what a model may return.

        The result is a loss, `(loss, outputs)`, or a mapping with `loss`; other scalars in it are metrics, and
        `weight` and `tokens` count as from a model. An optimizer may be stepped here if there is no accumulation.
        """
        if self._microbatches is not None:
            return self._in_parts(batch, self._microbatches)
        raw = self.forward(batch)
        loss, outputs = read_outputs(raw)
        self.backward(loss, weight=batch_weight(outputs, self.batch_size) if outputs else self.batch_size)
        return raw

    def _in_parts(self, batch: Any, microbatches: Microbatches) -> Any:
        """As `train_batch`, in parts; means and sums of these are returned. Without a part, it is the whole batch."""
        beginning = {one.name: (one.pending, one.weight) for one in self._updated}, self._unit

        def train_part(part: Any, size: int) -> Any:
            raw = self.forward(part)
            loss, outputs = read_outputs(raw)
            weight = batch_weight(outputs, size)
            self.backward(loss, weight=weight)
            return raw, loss.detach(), outputs, weight

        def begin() -> None:
            pending, self._unit = beginning
            for one in self._updated:
                one.pending, one.weight = pending[one.name]

        found = microbatches.train(self.trainer, batch, self.batch_size, train_part, begin)
        if len(found) == 1:
            return found[0][0]
        return joined([(loss, outputs, weight) for _, loss, outputs, weight in found])

    def update(self) -> None:
        """Called after the last batch of a step: steps each optimizer that has gradients, in their order."""
        for one in self._updated:
            if one.pending:
                self._step(one)

    def forward(self, batch: Any) -> Any:
        """The model's outputs for a batch, under autocast, with the hooks around it. Evaluation calls it too."""
        args, kwargs = arguments(self._model_call, batch)
        for call in self._before_forward:
            call(self.trainer, self.model, batch, args, kwargs)
        try:
            context = self._precision.autocast(self.device)
            if context is None:
                outputs = self._called(*args, **kwargs)
            else:
                with context:
                    outputs = self._called(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if (better := explained(error, self.model, batch, args, kwargs)) is error:
                raise
            raise better from None
        for call in self._after_forward:
            call(self.trainer, self.model, outputs, batch)
        self._has_called = True
        return outputs

    def autocast(self) -> AbstractContextManager[Any]:
        """A new context of the number format of `precision`, for a step that calls parts of the model. It may hold
        calls of `forward` and further contexts."""
        return self._precision.autocast(self.device) or nullcontext()

    def backward(self, loss: Tensor, optimizer: str | None = None, *, weight: Number | Tensor | None = None) -> None:
        """Add the gradients of a loss.

        Args:
            optimizer: its parameters alone receive gradients; not given: all parameters.
            weight: of the batch in an accumulated gradient; not given: its number of samples. With a weight of 0 the
                gradients added are zero; if it is a tensor on a device, or with several processes, only if the backward
                makes no NaN of zeros, as that of a sum divided by zero does.

        Raises:
            UserError: the loss depends on nothing that is trained.
        """
        if not loss.requires_grad:
            raise UserError(
                "the loss depends on no parameter that is trained",
                cure="Compute it without detach(), item() or no_grad(), from what the optimizer has.",
            )
        self.weight = weight = (self.batch_size if weight is None else weight) if self.counts else 0
        for call in self._before_backward:
            call(self.trainer, self.model, loss)
        updated = self._updated if optimizer is None else (self._named(optimizer),)
        share = loss
        if self._weighs:
            # In units of the first weight, so that 16-bit gradients are no larger than those of one batch.
            if self._unit is None:
                self._unit = _not_zero(weight)
            part = weight / self._unit
            share = loss if type(part) is float and part == 1.0 else loss * part
            for one in updated:
                one.weight = one.weight + part
            if self._agreement is not None and self.completes and self._starts_early:
                # Its time is hidden by the backward.
                self._agreement.start(updated[0].weight)
        elif isinstance(weight, Tensor) and weight.device.type != "cpu":
            share = loss * (weight != 0)
        if self.evaluates_again and not is_known_zero(weight):
            self._objective = self._objective + share.detach()
        if self._scaler is not None:
            share = self._scaler.scaled(share)
        if self._agreement is None and is_known_zero(weight):
            _add_zeros(updated)
        elif len(updated) == len(self._updated):
            share.backward()  # type: ignore[no-untyped-call]
        else:
            inputs = [parameter for parameter in updated[0].parameters if parameter.requires_grad]
            share.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        for one in updated:
            one.pending = True
        for call in self._after_backward:
            call(self.trainer, self.model, loss)

    def optimizer_step(self, optimizer: str | None = None) -> None:
        """Step one optimizer, or all: unscale, divide and clip its gradients, step it, clear them, step its schedulers.

        Raises:
            UserError: further batches of an accumulated step are still to come.
        """
        for one in self._updated if optimizer is None else (self._named(optimizer),):
            self._step(one)

    def state_dict(self) -> dict[str, Any]:
        """The step's own state to save in checkpoints. Empty: none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""

    def bind_model(self, trainer: Trainer) -> None:
        """Called by the loops: bind what `forward` needs."""
        hooks = trainer.hooks
        self.trainer, self.model, self.device = trainer, trainer.model, trainer.device
        self._called, self._model_call = trainer.model, trainer.model_call
        self._precision = trainer.precision
        self._before_forward, self._after_forward = hooks["on_before_forward"], hooks["on_after_forward"]

    def bind(self, trainer: Trainer) -> None:
        """Called by the training loop between two steps: bind what the other methods need."""
        self.bind_model(trainer)
        hooks, precision = trainer.hooks, trainer.precision
        before = {one.name: one for one in self._updated}
        self._scaler, self._strategy = trainer.scaler, trainer.strategy
        self._clips = precision.clip_norm is not None or precision.clip_value is not None
        several = trainer.loop.settings.grad_accum_steps != 1
        self._microbatches = self._splitting(trainer)
        self._accumulates = several or self._microbatches is not None
        self._several, self._complete, self._scale_used = several, not several, False
        self._called, self._agreement = trainer.strategy.trained(trainer.model), trainer.agreement
        self._weighs = self._accumulates or self._agreement is not None
        # The same on all ranks: their gradients are averaged before they are divided.
        self._unit = None if self._agreement is None else trainer.loop.batch_size
        self._starts_early = type(self).train_batch is TrainStep.train_batch
        self._total, self._has_agreed = None, False
        self._updated = tuple(
            _Updated(name, optimizer, trainer.schedulers.of(name, SchedulerInterval.step))
            for name, optimizer in trainer.optimizers.items()
        )
        for one in self._updated:
            if (last := before.get(one.name)) is not None:
                one.grad_norm, one.used = last.grad_norm, last.used
        self.batches: list[tuple[Any, int]] = []
        self.evaluates_again, self._objective = any(one.needs_closure for one in self._updated), 0
        if self.evaluates_again:
            self._check_closure(trainer)
        self._before_backward, self._after_backward = hooks["on_before_backward"], hooks["on_after_backward"]
        self._before_step, self._after_step = hooks["on_before_optimizer_step"], hooks["on_after_optimizer_step"]
        self._before_zero = hooks["on_before_optimizer_zero_grad"]
        self._after_zero = hooks["on_after_optimizer_zero_grad"]
        self._before_lr, self._after_lr = hooks["on_before_scheduler_step"], hooks["on_after_scheduler_step"]

    def _splitting(self, trainer: Trainer) -> Microbatches | None:
        """How batches are split; None: not at all.

        Raises:
            UserError: this step, or several processes, cannot do that.
        """
        found: Microbatches | None = trainer.loop.microbatches
        if found is not None and type(self).train_batch is not TrainStep.train_batch:
            raise UserError(
                f"{type(self).__name__} has a train_batch of its own, whose batches cannot be split",
                where="loop.microbatch",
                cure="Set it to null, or split the batch there.",
            )
        if found is not None and trainer.strategy.world_size > 1:
            raise UserError(
                "batches are split by one process alone",
                where="loop.microbatch",
                cure="Set it to null, and use a smaller data.batch_size with loop.grad_accum_steps.",
            )
        return found

    def _check_closure(self, trainer: Trainer) -> None:
        """Refuse settings with which the loss of a step cannot be evaluated again."""
        name = next(type(one.optimizer).__name__ for one in self._updated if one.needs_closure)
        reasons = {
            "it must be the only optimizer": len(self._updated) > 1,
            "the loss cannot be scaled: use fp32 or bf16, without CheckFinite(policy=skip)": self._scaler is not None,
            "there must be one process": trainer.agreement is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UserError(f"a step of {name} evaluates the loss several times, and {reason}", where="optimizer")

    def grad_norms(self) -> dict[str, Tensor]:
        """The norm of each optimizer's gradients at its last step, before clipping, if it was computed."""
        return {one.name: one.grad_norm for one in self._updated if one.grad_norm is not None}

    def settings_used(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups of each optimizer that was stepped, as its last step was made with."""
        return {one.name: one.used for one in self._updated if one.used is not None}

    def end_step(self) -> None:
        """Called by the training loop after the last batch of a step.

        Raises:
            UserError: gradients are left, which checkpoints do not hold; or no optimizer has made a step.
        """
        self._complete = True
        self.update()
        self.batches.clear()
        if self._agreement is not None:
            self._end_agreement(self._agreement)
        if self._scale_used:
            assert self._scaler is not None
            self._scaler.update()
            self._scale_used = False
        for one in self._updated:
            if one.pending:
                raise UserError(
                    f"{type(self).__name__}.update left gradients of the optimizer '{one.name}', which a checkpoint "
                    "does not hold",
                    cure=f"Call self.optimizer_step({one.name!r}) in it.",
                )
        if not self._has_stepped:
            raise UserError(
                f"{type(self).__name__} has stepped no optimizer",
                cure="Call self.backward(loss) in train_batch, not loss.backward().",
            )
        if self._accumulates:
            self._complete = not self._several
            if self._agreement is None:
                self._unit = None

    def _end_agreement(self, agreement: Agreement) -> None:
        """Exchange requests of the ranks, unless that was done for the weight of this step."""
        if agreement.started or not self._has_agreed:
            if not agreement.started:
                agreement.start()
            agreement.finish()
        self._has_agreed, self._has_called, self._total = False, False, None
        agreement.batch_samples = 0

    def _divisor(self, one: _Updated) -> Number | Tensor:
        """What to divide the sum of weighted gradients by; of several ranks they were averaged already."""
        agreement = self._agreement
        if agreement is None:
            return _not_zero(one.weight)
        if self._called is not self.model and not self._has_called:
            raise UserError(
                f"{type(self).__name__} calls the model itself, so the gradients of the processes are not averaged",
                cure="Call self.forward(batch) in train_batch.",
            )
        self._strategy.check_averaged(self.model)
        if agreement.started:
            # Of a step that calls backward once for all optimizers.
            self._total = agreement.finish()
        elif self._total is None or not self._starts_early:
            agreement.start(one.weight)
            self._total = agreement.finish()
        self._has_agreed = True
        return _not_zero(self._total) / agreement.group.world_size

    def _step(self, one: _Updated) -> None:
        if not self._complete:
            raise UserError(
                f"{type(self).__name__}.train_batch steps the optimizer '{one.name}', but batches of this "
                "step are still to come",
                where="loop.grad_accum_steps",
                cure="Step it in update(), which is called after the last batch of a step.",
            )
        if self._is_evaluating:
            raise UserError(
                f"{type(self).__name__}.train_batch steps the optimizer '{one.name}', whose step evaluates the loss "
                "again, by train_batch",
                cure="Step it in update(), which is called after the last batch of a step.",
            )
        trainer, model, optimizer, scaler = self.trainer, self.model, one.optimizer, self._scaler
        if scaler is not None:
            scaler.unscale(optimizer)
        if len(optimizer.param_groups) != one.group_count:
            one.list_parameters()
        self._divide(one)
        for call in self._before_step:
            call(trainer, model, optimizer)
        if self._clips:
            one.grad_norm = self._precision.clip(one.parameters, self._strategy)
        one.keep_settings()
        if one.needs_closure:
            optimizer.step(self._closure(one))
        elif scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            self._scale_used = True
        for call in self._after_step:
            call(trainer, model, optimizer)
        for call in self._before_zero:
            call(trainer, model, optimizer)
        if one.clears:
            optimizer.zero_grad()
        else:
            for parameter in one.parameters:
                parameter.grad = None
        for call in self._after_zero:
            call(trainer, model, optimizer)
        for scheduler in one.schedulers:
            for call in self._before_lr:
                call(trainer, model, optimizer, scheduler)
            scheduler.step()
            for call in self._after_lr:
                call(trainer, model, optimizer, scheduler)
        one.pending, self._objective = False, 0
        self._has_stepped = True

    def _divide(self, one: _Updated) -> None:
        """Divide the sum of weighted gradients by the weights of the step."""
        if not self._weighs:
            return
        divisor = self._divisor(one)
        if self.evaluates_again:
            self._objective = self._objective / divisor
        if type(divisor) is not float or divisor != 1.0:
            gradients = [local(each.grad) for each in one.parameters if each.grad is not None]
            if isinstance(divisor, Tensor) and gradients:
                # With parallel.cpu_offload they are on the host.
                divisor = divisor.to(gradients[0].device)
            foreach_div_(gradients, divisor)
        one.weight = 0

    def _closure(self, one: _Updated) -> Callable[[], Any]:
        """What evaluates the loss of the whole step and its gradients; at its first call both are there already."""
        present: list[Any] = [self._objective]

        def evaluate() -> Any:
            if present:
                return present.pop()
            for parameter in one.parameters:
                parameter.grad = None
            one.weight, self._unit, self._objective = 0, None, 0
            self._is_evaluating = True
            try:
                with torch.enable_grad():
                    for batch, size in self.batches:
                        self.batch_size = size
                        self.train_batch(batch)
            finally:
                self._is_evaluating = False
            self._divide(one)
            if self._clips:
                self._precision.clip(one.parameters, self._strategy)
            return self._objective

        return evaluate

    def _named(self, name: str) -> _Updated:
        for one in self._updated:
            if one.name == name:
                return one
        known = [one.name for one in self._updated]
        raise UserError(
            f"there is no optimizer '{name}'", cure=did_you_mean(name, known).strip() or f"There are: {known}."
        )


def _add_zeros(updated: Iterable[_Updated]) -> None:
    """Add gradients of zero, as a backward does whose loss is multiplied by 0."""
    for one in updated:
        for parameter in one.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _not_zero(weight: Number | Tensor) -> Number | Tensor:
    """The weight, or 1 for a weight of 0; without a wait for the device."""
    return torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
