"""The training step: forward, backward and optimizer steps of one batch. A subclass defines another step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer_cli.dtensor import local_of
from trainer_cli.errors import UserError
from trainer_cli.optim import OptimizerEntry
from trainer_cli.outputs import (
    explain_error,
    is_known_zero,
    join_outputs,
    make_arguments,
    read_outputs,
    returned_nothing,
    returned_weight,
)
from trainer_cli.parallel import Agreement
from trainer_cli.patterns import check_name
from trainer_cli.torch_compat import foreach_div_

if TYPE_CHECKING:
    from torch import nn

    from trainer_cli.trainer.microbatch import Microbatches
    from trainer_cli.trainer.trainer import Trainer


class TrainStep:
    """Forward, backward and optimizer step of one batch: one loss, and all optimizers stepped together.

    A subclass overrides `train_batch`, and calls `forward`, `backward` and `optimizer_step` in its own order. These
    call the hooks, scale the loss, weight accumulated batches and clip gradients. `trainer`, `model`, `device` and
    `batch_size` (samples in this batch) are set before `train_batch` is called.
    """

    trainer: Trainer
    model: nn.Module
    device: torch.device
    batch_size: int = 0
    weight: float | Tensor = 0
    """Weight of the loss of the last `backward`. A loss of weight 0 is ignored, even if it is NaN."""
    step_idx: int = -1
    """Index of the current or last optimizer step, counted from 0 at the beginning of the run; -1: none yet."""
    completes = False
    """Whether this batch is known to be the last of its step. Set if there are several ranks."""
    counts = True
    """False for a padding batch, which only keeps the collectives of the ranks in step."""
    model_weight: float | Tensor | None = None
    """Weight of the batch of the last `forward`: `weight` of its outputs, or the labels that count in the loss of a
    model of Hugging Face; None: neither."""
    skips_update = False
    """Set by a callback in `on_before_optimizer_step` to leave out the update of this step, by all its optimizers."""
    _batch_count = 0
    """Batches and microbatches begun. By it an optimizer counts the weight of a batch once, however many losses."""
    _took_samples = False
    """Whether a `backward` of the present batch was weighted by the number of samples, because no weight was given."""
    _entries: tuple[OptimizerEntry, ...] = ()
    _unit: float | Tensor | None = None
    """Weight that others are divided by: the first of the step, or with several ranks the batch size."""
    _before_backward: Sequence[Callable[..., Any]]
    _after_backward: Sequence[Callable[..., Any]]
    _has_stepped = False
    _total: float | Tensor | None = None
    """Sum of the step's weights over all ranks."""
    _has_agreed = False
    _has_called = False
    """Whether `forward` has been called in this step."""
    _averages = False
    """Whether the gradients of the next `backward` are averaged over processes: not before a further `forward`."""
    _has_unaveraged = False
    """Whether this process has added gradients that were not averaged over processes since."""
    evaluates_again = False
    """Whether the optimizer calls a closure that evaluates the loss of the whole step. `batches` are then kept."""
    _objective: float | Tensor = 0
    """The loss of the accumulated gradients, if `evaluates_again`."""
    _is_evaluating = False

    def train_batch(self, batch: Any) -> Any:
        """Run forward and backward of one batch, which is on the device.

        Returns a loss, `(loss, outputs)`, or a mapping with `loss`, as a model does. Other scalars in it are metrics;
        `weight` and `tokens` have the same meaning as in a model's outputs. Without accumulation an optimizer may be
        stepped here.
        """
        if self._microbatches is not None:
            return self._train_microbatches(batch, self._microbatches)
        raw = self.forward(batch)
        loss, outputs = read_outputs(raw)
        self.backward(loss, weight=self.weigh(outputs))
        return raw

    def begin_batch(self, size: int) -> None:
        """Prepare for `train_batch` with a batch of `size` samples. Called by the training loop."""
        self.batch_size, self.model_weight, self._took_samples = size, None, False
        self._batch_count += 1

    def train_batches(self, batches: Iterable[tuple[Any, int]]) -> Tensor:
        """Make an optimizer step with batches and their numbers of samples, outside of a training loop.

        Returns the mean of the losses before the step.
        """
        losses = []
        for batch, size in batches:
            self.begin_batch(size)
            if self.evaluates_again:
                self.batches.append((batch, size))
            losses.append(read_outputs(self.train_batch(batch))[0].detach())
        self.end_step()
        return torch.stack(losses).mean()

    def weigh(self, outputs: Mapping[str, Any], size: int | None = None) -> float | Tensor:
        """The weight of the present batch: `weight` of the outputs, else `model_weight`, else its number of samples.

        Args:
            size: samples; None: those of the whole batch.

        Raises:
            UserError: the outputs of `train_batch` have another weight than the gradients were accumulated with.
        """
        size = self.batch_size if size is None else size
        weight = returned_weight(outputs)
        if weight is None:
            return size if self.model_weight is None else self.model_weight
        # A weight on a device is not compared, because the host would wait for it.
        is_on_host = not isinstance(weight, Tensor) or weight.device.type == "cpu"
        if self._took_samples and self._weighs and not (is_on_host and weight == size):
            raise UserError(
                f"{type(self).__name__}.train_batch returns a weight, but its gradients were weighted by the number of "
                f"samples, {size}",
                cure="Call self.backward(loss, weight=weight).",
            )
        return weight

    def _train_microbatches(self, batch: Any, microbatches: Microbatches) -> Any:
        """Train a batch in microbatches. Returns their means and sums; for a single one, the outputs as they are."""

        def train_one(microbatch: Any, size: int) -> Any:
            self._batch_count += 1
            raw = self.forward(microbatch)
            loss, outputs = read_outputs(raw)
            weight = self.weigh(outputs, size)
            self.backward(loss, weight=weight)
            return raw, loss.detach(), outputs, weight

        def reset_weights() -> None:
            # Only `auto` trains a batch again, and its batches are whole steps: there are none before this one.
            self._unit = None
            for entry in self._entries:
                entry.reset_weight()

        results = microbatches.train(self.trainer, batch, self.batch_size, train_one, reset_weights)
        if len(results) == 1:
            raw, *_ = results[0]
            return raw
        if self.model_weight is not None:
            self.model_weight = sum(weight for *_, weight in results)
        return join_outputs([(loss, outputs, weight) for _, loss, outputs, weight in results])

    def update(self) -> None:
        """Step each optimizer that has gradients, in their order. Called after the last batch of a step."""
        for entry in self._entries:
            if entry.pending:
                self._step(entry)

    def forward(self, batch: Any) -> Any:
        """Call the model with a batch, under autocast, between the hooks. Evaluation calls it too."""
        args, kwargs = make_arguments(self._model_call, batch)
        for call in self._before_forward:
            call(self.trainer, self.model, batch, args, kwargs)
        try:
            context = self._precision.autocast(self.device)
            if context is None:
                outputs = self._called(*args, **kwargs)
            else:
                with context:
                    outputs = self._called(*args, **kwargs)
        except (TypeError, AttributeError, NotImplementedError) as error:
            explained = explain_error(error, self.model, batch, args, kwargs)
            if explained is error:
                raise
            raise explained from None
        except (RuntimeError, IndexError) as error:
            from trainer_cli.trainer.tensor_errors import help_for

            if (advice := help_for(error, self.model, batch)) is not None:
                error.add_note(advice)
            raise
        if outputs is None:
            raise returned_nothing(self.model)
        for call in self._after_forward:
            call(self.trainer, self.model, outputs, batch)
        self._has_called = self._averages = True
        self.model_weight = returned_weight(outputs) if self._count_labels is None else self._count_labels(kwargs)
        return outputs

    def autocast(self) -> AbstractContextManager[Any]:
        """A new autocast context of `precision`, for a step that calls modules of the model itself.

        `forward` and further contexts may be used inside.
        """
        return self._precision.autocast(self.device) or nullcontext()

    def backward(
        self,
        loss: Tensor,
        optimizer: str | None = None,
        *,
        weight: float | Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss, as `loss.backward()` does: several calls for a batch add up.

        Args:
            optimizer: name of the optimizer whose parameters alone receive gradients; None: all parameters do.
            weight: weight of the batch in an accumulated gradient, the same in all calls for a batch; None: that of the
                last `forward` (`model_weight`), or else its number of samples. A weight of 0 adds gradients of zero. If
                it is a tensor on a device, or with several processes, this holds only if the backward of a zero
                gradient is finite, unlike that of a sum divided by zero.
            retain_graph, create_graph: as in `torch.Tensor.backward`: for a further loss of the same graph, and for an
                optimizer that needs the graph of the gradients.

        Raises:
            UserError: the loss depends on no trained parameter, or the batch had another weight.
        """
        if not loss.requires_grad:
            raise UserError(
                "the loss depends on no parameter that is trained",
                cure="Compute it without detach(), item() or no_grad(), from what the optimizer has.",
            )
        if weight is None:
            self._took_samples = self._took_samples or self.model_weight is None
            weight = self.batch_size if self.model_weight is None else self.model_weight
        self.weight = weight = weight if self.counts else 0
        for call in self._before_backward:
            call(self.trainer, self.model, loss)
        entries = self._entries if optimizer is None else (self._entry_of(optimizer),)
        weighted_loss = loss
        if self._weighs:
            # In units of the first weight, so that 16-bit gradients are no larger than those of one batch.
            if self._unit is None:
                self._unit = _not_zero(weight)
            relative_weight = weight / self._unit
            is_unit = type(relative_weight) is float and relative_weight == 1.0
            weighted_loss = loss if is_unit else loss * relative_weight
            for entry in entries:
                entry.count(weight, relative_weight, self._batch_count)
            if self._agreement is not None and self.completes and self._starts_early:
                # Started before the backward, which hides the time of the exchange.
                self._agreement.start(entries[0].weight)
        elif isinstance(weight, Tensor) and weight.device.type != "cpu":
            # A test for 0 on the host would wait for the device.
            weighted_loss = loss * (weight != 0)
        if self.evaluates_again and not is_known_zero(weight):
            self._objective = self._objective + weighted_loss.detach()
        if self._scaler is not None:
            weighted_loss = self._scaler.scaled(weighted_loss)
        if self._agreement is None and is_known_zero(weight):
            # A loss of NaN times 0 has gradients of NaN. With several ranks the backward runs for its collectives.
            _add_zeros(entries)
        else:
            inputs = None
            if len(entries) != len(self._entries):
                inputs = [parameter for parameter in entries[0].parameters if parameter.requires_grad]
            weighted_loss.backward(None, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]
        if self._called is not self.model:
            # An average over processes is of all gradients so far, also of those that earlier calls have added.
            self._has_unaveraged = not self._averages
            self._averages = self._averages and not self._strategy.has_averaged()
        for entry in entries:
            entry.pending = True
        for call in self._after_backward:
            call(self.trainer, self.model, loss)

    def optimizer_step(self, optimizer: str | None = None) -> None:
        """Step an optimizer, or all: unscale, divide and clip the gradients, step, clear them.

        Raises:
            UserError: more batches of an accumulated step are to come.
        """
        for entry in self._entries if optimizer is None else (self._entry_of(optimizer),):
            self._step(entry)

    def state_dict(self) -> dict[str, Any]:
        """State of a subclass to save in checkpoints; empty by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""

    def bind_model(self, trainer: Trainer) -> None:
        """Bind what `forward` needs. Called by the loops."""
        hooks = trainer.hooks
        self.trainer, self.model, self.device = trainer, trainer.model, trainer.device
        self._called, self._model_call = trainer.model, trainer.model_call
        self._count_labels: Callable[[Mapping[str, Any]], Tensor | None] | None = None
        if "transformers" in sys.modules:
            # Not above: no other models need it.
            from trainer_cli.outputs import label_counter

            self._count_labels = label_counter(trainer.model)
        # Of a batch that was trained before an evaluation.
        self.model_weight, self._took_samples = None, False
        self._precision = trainer.precision
        self._before_forward, self._after_forward = hooks["on_before_forward"], hooks["on_after_forward"]

    def bind(self, trainer: Trainer) -> None:
        """Bind what the other methods need. Called by the training loop between two steps."""
        # Looked up here, so that a step does not.
        self.bind_model(trainer)
        hooks, precision = trainer.hooks, trainer.precision
        previous_entries = {entry.name: entry for entry in self._entries}
        self._scaler, self._strategy = trainer.scaler, trainer.strategy
        self._clips = precision.clip_norm is not None or precision.clip_value is not None
        self._has_many_batches = trainer.loop.settings.grad_accum_steps != 1
        self._microbatches: Microbatches | None = trainer.loop.microbatches
        if self._microbatches is not None:
            self._check_microbatches(trainer)
        self._accumulates = self._has_many_batches or self._microbatches is not None
        self._complete, self._scale_used = not self._has_many_batches, False
        self._called, self._agreement = trainer.strategy.trained(trainer.model), trainer.agreement
        self._weighs = self._accumulates or self._agreement is not None
        # The same on all ranks, because their gradients are averaged before they are divided.
        self._unit = None if self._agreement is None else trainer.loop.batch_size
        self._starts_early = type(self).train_batch is TrainStep.train_batch
        self._total, self._has_agreed = None, False
        # An evaluation may have called `forward`.
        self._has_called = self._averages = self._has_unaveraged = self.skips_update = False
        # Made again each time: a callback may have changed parameter groups or schedules.
        self._entries = tuple(
            OptimizerEntry(name, optimizer, trainer.schedulers.functions_of_steps(name))
            for name, optimizer in trainer.optimizers.items()
        )
        for entry in self._entries:
            if entry.group_count > len(trainer.first_settings[entry.name]):
                # A callback has added parameter groups.
                entry.check_parameters(trainer.model)
            # Loggers may still read the values of the last step.
            if (previous := previous_entries.get(entry.name)) is not None:
                entry.grad_norm, entry.settings = previous.grad_norm, previous.settings
        self.batches: list[tuple[Any, int]] = []
        self.evaluates_again, self._objective = any(entry.needs_closure for entry in self._entries), 0
        if self.evaluates_again:
            self._check_closure(trainer)
        self._before_backward, self._after_backward = hooks["on_before_backward"], hooks["on_after_backward"]
        self._before_step, self._after_step = hooks["on_before_optimizer_step"], hooks["on_after_optimizer_step"]
        self._before_zero = hooks["on_before_optimizer_zero_grad"]
        self._after_zero = hooks["on_after_optimizer_zero_grad"]
        self._before_lr, self._after_lr = hooks["on_before_scheduler_step"], hooks["on_after_scheduler_step"]

    def _check_microbatches(self, trainer: Trainer) -> None:
        """Raise UserError if this step, or several processes, cannot split batches."""
        if type(self).train_batch is not TrainStep.train_batch:
            raise UserError(
                f"{type(self).__name__} has a train_batch of its own, whose batches cannot be split",
                where="loop.microbatch",
                cure="Set it to null, or split the batch there.",
            )
        if trainer.strategy.world_size > 1:
            raise UserError(
                "batches are split by one process alone",
                where="loop.microbatch",
                cure="Set it to null, and use a smaller data.batch_size with loop.grad_accum_steps.",
            )

    def _check_closure(self, trainer: Trainer) -> None:
        """Raise UserError for settings with which the loss of a step cannot be evaluated again."""
        name = next(type(entry.optimizer).__name__ for entry in self._entries if entry.needs_closure)
        is_refused = {
            "it must be the only optimizer": len(self._entries) > 1,
            "the loss cannot be scaled: use fp32 or bf16, without CheckFinite(policy=skip)": self._scaler is not None,
            "there must be one process": trainer.agreement is not None,
        }
        for reason, applies in is_refused.items():
            if applies:
                raise UserError(f"a step of {name} evaluates the loss several times, and {reason}", where="optimizer")

    def grad_norms(self) -> dict[str, Tensor]:
        """Optimizer -> norm of its gradients at the last step before clipping, where it was computed."""
        return {entry.name: entry.grad_norm for entry in self._entries if entry.grad_norm is not None}

    def settings_used(self) -> dict[str, list[dict[str, Any]]]:
        """Optimizer -> its parameter groups as the last step used them, for those that have made a step."""
        return {entry.name: entry.settings for entry in self._entries if entry.settings is not None}

    def end_step(self) -> None:
        """Step the optimizers, adapt the loss scale, step the schedules. Called after the last batch of a step.

        Raises:
            UserError: gradients remain, which checkpoints do not hold; or no optimizer has made a step.
        """
        self._complete = True
        self.update()
        self.skips_update = False
        self.batches.clear()
        if self._agreement is not None:
            self._end_agreement(self._agreement)
        if self._scale_used:
            # Once for all optimizers, after each has read its overflows.
            assert self._scaler is not None
            self._scaler.update()
            self._scale_used = False
        for entry in self._entries:
            if entry.pending:
                raise UserError(
                    f"{type(self).__name__}.update left gradients of the optimizer '{entry.name}', which a checkpoint "
                    "does not hold",
                    cure=f"Call self.optimizer_step({entry.name!r}) in it.",
                )
        if not self._has_stepped:
            raise UserError(
                f"{type(self).__name__} has stepped no optimizer",
                cure="Call self.backward(loss) in train_batch, not loss.backward().",
            )
        for entry in self._entries:
            if entry.has_stepped:
                self._step_schedules(entry)
        if self._accumulates:
            self._complete = not self._has_many_batches
            if self._agreement is None:
                self._unit = None

    def _step_schedules(self, entry: OptimizerEntry) -> None:
        """Step the schedules of an optimizer once, however often it was stepped in this step of the run."""
        entry.has_stepped = False
        for schedule, step_schedule in entry.schedules:
            for call in self._before_lr:
                call(self.trainer, self.model, entry.optimizer, schedule)
            step_schedule(self.step_idx + 1)
            for call in self._after_lr:
                call(self.trainer, self.model, entry.optimizer, schedule)

    def _end_agreement(self, agreement: Agreement) -> None:
        """Exchange the requests of the ranks, unless they were sent with the weight of this step. Collective."""
        if agreement.started or not self._has_agreed:
            if not agreement.started:
                agreement.start()
            agreement.finish()
        self._has_agreed, self._total = False, None
        self._has_called = self._averages = self._has_unaveraged = False
        agreement.batch_samples = 0

    def _divisor(self, entry: OptimizerEntry) -> float | Tensor:
        """The divisor of the sum of weighted gradients: the sum of weights, or its mean over the ranks."""
        agreement = self._agreement
        if agreement is None:
            return _not_zero(entry.weight)
        if self._called is not self.model and not self._has_called:
            raise UserError(
                f"{type(self).__name__} calls the model itself, so the gradients of the processes are not averaged",
                cure="Call self.forward(batch) in train_batch.",
            )
        if self._has_unaveraged:
            raise UserError(
                f"{type(self).__name__} adds a loss after the gradients of the processes were averaged",
                cure="Call self.forward(batch) before each self.backward(loss), or add the losses.",
            )
        self._strategy.check_averaged(self.model)
        if agreement.started:
            # `backward` has started it, which then runs once for all optimizers.
            self._total = agreement.finish()
        elif self._total is None or not self._starts_early:
            agreement.start(entry.weight)
            self._total = agreement.finish()
        self._has_agreed = True
        # The gradients are already means over the ranks.
        return _not_zero(self._total) / agreement.group.world_size

    def _step(self, entry: OptimizerEntry) -> None:
        """Unscale, divide and clip the gradients of an optimizer, step it and clear them, between the hooks.

        Raises:
            UserError: `train_batch` steps it, but more batches of the step follow, or its closure calls `train_batch`.
        """
        if not self._complete:
            raise UserError(
                f"{type(self).__name__}.train_batch steps the optimizer '{entry.name}', but more batches "
                "of this step follow",
                where="loop.grad_accum_steps",
                cure="Step it in update(), which is called after the last batch of a step.",
            )
        if self._is_evaluating:
            raise UserError(
                f"{type(self).__name__}.train_batch steps the optimizer '{entry.name}', whose step evaluates the loss "
                "again, by train_batch",
                cure="Step it in update(), which is called after the last batch of a step.",
            )
        trainer, model, optimizer, scaler = self.trainer, self.model, entry.optimizer, self._scaler
        if scaler is not None:
            # Before division, hooks and clipping, which all need the true gradients.
            scaler.unscale(optimizer)
        if len(optimizer.param_groups) != entry.group_count:
            # A callback has added parameter groups.
            entry.check_parameters(trainer.model)
            entry.list_parameters()
        self._divide(entry)
        for call in self._before_step:
            call(trainer, model, optimizer)
        if self._clips:
            entry.grad_norm = self._precision.clip(entry.parameters, self._strategy)
        entry.keep_settings()
        if self.skips_update:
            # A scaler has unscaled the gradients, and refuses to do so again before its update.
            self._scale_used = scaler is not None
        elif entry.needs_closure:
            optimizer.step(self._closure(entry))
        elif scaler is None:
            try:
                optimizer.step()
            except Exception as error:
                explained = entry.explain(error)
                if explained is error:
                    raise
                raise explained from error
        else:
            scaler.step(optimizer)
            self._scale_used = True
        for call in self._after_step:
            call(trainer, model, optimizer)
        for call in self._before_zero:
            call(trainer, model, optimizer)
        if entry.overrides_zero_grad:
            optimizer.zero_grad()
        else:
            for parameter in entry.parameters:
                parameter.grad = None
        for call in self._after_zero:
            call(trainer, model, optimizer)
        entry.pending, self._objective = False, 0
        entry.has_stepped = self._has_stepped = True

    def _divide(self, entry: OptimizerEntry) -> None:
        """Divide the sum of weighted gradients by the sum of weights of the step."""
        if not self._weighs:
            return
        divisor = self._divisor(entry)
        if self.evaluates_again:
            self._objective = self._objective / divisor
        if type(divisor) is not float or divisor != 1.0:
            gradients = [local_of(parameter.grad) for parameter in entry.parameters if parameter.grad is not None]
            if isinstance(divisor, Tensor) and gradients:
                # With parallel.cpu_offload the gradients are on the host.
                divisor = divisor.to(gradients[0].device)
            foreach_div_(gradients, divisor)
        entry.reset_weight()

    def _closure(self, entry: OptimizerEntry) -> Callable[[], Any]:
        """A closure for the optimizer, which computes the loss of the whole step and its gradients.

        The first call returns the loss of the batches just trained on, without computing it again, if weights and
        gradients have not changed since.
        """
        trained = _Evaluated(self._objective, entry.parameters)

        def evaluate() -> Any:
            if (loss := trained.take()) is not None:
                return loss
            for parameter in entry.parameters:
                parameter.grad = None
            entry.reset_weight()
            self._objective, self._is_evaluating = 0, True
            try:
                with torch.enable_grad():
                    for batch, size in self.batches:
                        self.begin_batch(size)
                        self.train_batch(batch)
            finally:
                self._is_evaluating = False
            self._divide(entry)
            if self._clips:
                self._precision.clip(entry.parameters, self._strategy)
            return self._objective

        return evaluate

    def _entry_of(self, name: str) -> OptimizerEntry:
        """The entry of the optimizer with this name. Raises UserError with the nearest name for an unknown one."""
        entries = {entry.name: entry for entry in self._entries}
        check_name("optimizer", name, entries)
        return entries[name]


class _Evaluated:
    """The loss of the batches just trained on, as long as the weights and gradients it belongs to have not changed."""

    def __init__(self, loss: float | Tensor, parameters: Sequence[Tensor]) -> None:
        self._loss, self._parameters = loss, parameters
        self._gradients = [parameter.grad for parameter in parameters]
        self._versions = [_version(gradient) for gradient in self._gradients]
        # An optimizer may write to `parameter.data`, which changes no version: so values are compared.
        self._weights: list[Tensor] | None = [parameter.detach().clone() for parameter in parameters]

    def take(self) -> float | Tensor | None:
        """The loss; None if it was taken, or the weights have moved, or the gradients have changed."""
        weights, self._weights = self._weights, None
        if weights is None:
            return None
        gradients = [parameter.grad for parameter in self._parameters]
        are_same_tensors = all(present is kept for present, kept in zip(gradients, self._gradients, strict=True))
        if not are_same_tensors or [_version(gradient) for gradient in gradients] != self._versions:
            return None
        has_same_weights = all(map(torch.equal, self._parameters, weights))
        return self._loss if has_same_weights else None


def _version(gradient: Tensor | None) -> int | None:
    """Torch's count of in-place changes of a gradient; None without one."""
    return None if gradient is None else gradient._version


def _add_zeros(entries: Iterable[OptimizerEntry]) -> None:
    """Give each parameter without a gradient one of zeros, as the backward of a loss times 0 does."""
    for entry in entries:
        for parameter in entry.parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _not_zero(weight: float | Tensor) -> float | Tensor:
    """The weight, or 1 if it is 0."""
    if isinstance(weight, Tensor):
        # torch.where, because a test on the host would wait for the device.
        return torch.where(weight == 0, 1, weight)
    return weight or 1
