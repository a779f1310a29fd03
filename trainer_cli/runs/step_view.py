"""What happens in a step: losses, learning rates, norms of gradients, and the first tensor that is not finite."""

from __future__ import annotations

import math
import pdb
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.checkpoint.format.dtensor import is_dtensor
from trainer_cli.checkpoint.model_state import capture_rng, parameter_names, restore_rng, unwrapped
from trainer_cli.errors import UserError
from trainer_cli.parallel.torch_compat import foreach_norm, local, whole
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metrics import leading_size, named_leaves, read_outputs, tensors_of
from trainer_cli.trainer.microbatch import split_batch
from trainer_cli.trainer.model_call import ForwardState, describe_batch, make_arguments
from trainer_cli.trainer.module_modes import modes_kept

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer

_MOST_NORMS = 10


@dataclass(slots=True)
class StepView:
    """One optimizer step."""

    step: int
    epoch: int
    """The epoch of its first batch, from 0."""
    batch_idx: int
    """Index of its first batch in the epoch, from 0."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Of each batch: its rank, its number in the step, its number of samples, its structure, the loss and the other
    outputs that are numbers; `not_finite`: name -> rows with NaN or infinity in the batch, if there are any; and
    `sample_losses`, or why there are none, if they were asked for or the loss is not finite."""
    lr: dict[str, list[float]] = field(default_factory=dict)
    """Optimizer -> learning rate of each of its parameter groups."""
    grad_norm: float | None = None
    """Norm of all gradients before clipping; None: no optimizer has stepped."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """The largest norms by parameter, the largest first."""
    not_finite: str | None = None
    """The first parameter, activation or gradient that holds NaN or infinity."""


class StepObserver(Callback):
    """Looks at some steps of a training and changes nothing. Collective: each rank has one.

    Args:
        steps: the numbers of the steps, counted from 1.
        per_sample: also take the loss of each sample, see `losses_of_samples`; without it only where the loss of the
            batch is not finite.
        debugs: stop in the debugger before each batch, with `trainer`, `model` and `batch`.
    """

    def __init__(self, steps: Collection[int], *, per_sample: bool = False, debugs: bool = False) -> None:
        self._steps = frozenset(steps)
        self._per_sample, self._debugs = per_sample, debugs
        self._sample_losses: list[float] | str | None = None
        self._rows: dict[str, list[int]] = {}
        self._batch: Any = None
        self._before: ForwardState | None = None
        self.views: dict[int, StepView] = {}
        """The steps that have been made."""
        self._view: StepView | None = None
        self._norms: dict[str, Tensor] = {}
        self._watched = ExitStack()

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        progress = trainer.progress
        if progress.step + 1 not in self._steps:
            return
        if self._view is None:
            self._view = StepView(progress.step + 1, progress.epoch, progress.batch)
            self._before = ForwardState(unwrapped(model))
            self._note_first(("parameter", name, value) for value, name in parameter_names(model).items())
            watch_modules(model, self._note_outputs, self._watched)
        # Before the model, which may change the batch in place.
        self._rows = rows_not_finite(batch)
        self._sample_losses = _losses_or_reason(trainer, batch, self._before) if self._per_sample else None
        self._batch = batch
        if self._debugs:
            # It shows this frame, with trainer, model and batch.
            pdb.Pdb(skip=["torch.*"]).set_trace()

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        # After it, because it needs the buffers of the forward; and before the weights change. With weights that are
        # not finite, no sample is to blame.
        if self._view is None or self._sample_losses is not None or bool(loss.detach().isfinite()):
            return
        if not (self._view.not_finite or "").startswith("parameter"):
            self._sample_losses = _losses_or_reason(trainer, self._batch, self._before)

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._view is None:
            return
        loss, named = read_outputs(outputs)
        entry = {
            "rank": trainer.strategy.group.rank,
            "number": len(self._view.batches) // trainer.strategy.group.world_size + 1,
            "samples": trainer.step.batch_size,
            "batch": describe_batch(batch),
            "loss": float(loss.detach()),
            **_numbers_in(named),
            **({"not_finite": self._rows} if self._rows else {}),
        }
        losses = self._sample_losses
        if (given := _given_losses(named, trainer.step.batch_size)) is not None and losses is not None:
            losses = given
        if losses is not None:
            entry["sample_losses"] = losses
        self._batch = None
        self._view.batches += trainer.strategy.group.gather(entry)

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        if self._view is None:
            return
        names = parameter_names(model)
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        labels = [names.get(parameter, f"parameter {index}") for index, parameter in enumerate(parameters)]
        gradients = [parameter.grad for parameter in parameters]
        self._note_first(("gradient of", name, value) for name, value in zip(labels, gradients, strict=True))
        self._norms |= dict(zip(labels, map(whole, foreach_norm(gradients)), strict=True))

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        view = self._view
        if view is None or not trainer.is_step_complete:
            return
        self._watched.close()
        norms = {name: float(value) for name, value in self._norms.items()}
        self._norms.clear()
        view.grad_norm = math.sqrt(sum(value * value for value in norms.values())) if norms else None
        # NaN first, which no comparison orders.
        largest = sorted(norms, key=lambda name: (math.isnan(norms[name]), norms[name]), reverse=True)
        view.grad_norms = {name: norms[name] for name in largest[:_MOST_NORMS]}
        self._before = None
        view.lr = {
            name: [float(group["lr"]) for group in groups if group.get("lr") is not None]
            for name, groups in trainer.step.settings_used().items()
        }
        # The first rank that met one: the same step may be finite on others.
        view.not_finite = next(filter(None, trainer.strategy.group.gather(view.not_finite)), None)
        self.views[view.step] = view
        self._view = None

    def finalize(self) -> None:
        # After an error inside a step.
        self._watched.close()
        if self._view is not None:
            self.views[self._view.step] = self._view
            self._view = None

    def _note_outputs(self, name: str, outputs: Any) -> None:
        self._note_first(("activation of", name, value) for value in tensors_of(outputs))

    def _note_first(self, tensors: Iterator[tuple[str, str, Any]]) -> None:
        """Note the first tensor that is not finite, unless one was found before."""
        if self._view is None or self._view.not_finite is not None:
            return
        for kind, name, value in tensors:
            values = local(value).detach()
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                self._view.not_finite = f"{kind} {name}"
                return


def watch_modules(model: nn.Module, look: Callable[[str, Any], None], watched: ExitStack) -> None:
    """Call `look` with the name and the outputs of each module after its forward, until `watched` is closed."""
    for name, module in unwrapped(model).named_modules():
        handle = module.register_forward_hook(partial(_look, look, name or type(module).__name__))
        watched.callback(handle.remove)


def _look(look: Callable[[str, Any], None], name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
    # Returns nothing: a value would replace the outputs.
    look(name, outputs)


def rows_not_finite(batch: Any) -> dict[str, list[int]]:
    """The names of the tensors in a batch that hold NaN or infinity, each with the rows that do; without rows, if its
    leading size is not the number of samples."""
    size, rows = leading_size(batch), {}
    for name, leaf in named_leaves(batch):
        for value in tensors_of(leaf):
            values = local(value).detach()
            if (values.is_floating_point() or values.is_complex()) and not bool((finite := values.isfinite()).all()):
                has_rows = values.ndim > 0 and values.shape[0] == size
                rows[name] = (~finite).reshape(len(finite), -1).any(1).nonzero().flatten().tolist() if has_rows else []
    return rows


def _losses_or_reason(trainer: Trainer, batch: Any, before: ForwardState | None) -> list[float] | str:
    try:
        return losses_of_samples(trainer, batch, before)
    except UserError as error:
        return error.what
    except Exception as error:
        # The user's model may take whole batches alone.
        return f"a sample alone is no batch for the model: {type(error).__name__}: {error}"


def _given_losses(outputs: Mapping[str, Any], size: int) -> list[float] | None:
    """The loss of each sample that the model returns: an output with `loss` in its name and a value for each."""
    for name, value in outputs.items():
        if "loss" in str(name) and isinstance(value, Tensor) and value.shape == (size,) and size > 1:
            return [float(loss) for loss in value.detach()]
    return None


def losses_of_samples(trainer: Trainer, batch: Any, before: ForwardState | None = None) -> list[float]:
    """The loss of each sample of a batch alone, at the present weights in evaluation mode. Nothing is changed.

    Args:
        before: the buffers to use instead of the present ones, such as those of before a batch with NaN, which its
            forward puts into the statistics of batch norm.

    Raises:
        UserError: the batch cannot be split, or parameters are sharded.
    """
    if trainer.strategy.world_size > 1 and any(is_dtensor(parameter) for parameter in trainer.model.parameters()):
        raise UserError("--per-sample needs the whole model in each process", cure="Leave it out with parallel=fsdp.")
    model = unwrapped(trainer.model)
    state, rng = ForwardState(model, parameters=True), capture_rng()
    losses: list[float] = []
    try:
        if before is not None:
            before.restore()
        with modes_kept(model), torch.no_grad():
            model.eval()
            for sample, _ in split_batch(batch, leading_size(batch) or 1, 1):
                args, kwargs = make_arguments(trainer.model_call, sample)
                with trainer.precision.autocast(trainer.device) or nullcontext():
                    losses.append(float(read_outputs(model(*args, **kwargs))[0]))
    finally:
        state.restore()
        restore_rng(rng)
    return losses


def _numbers_in(outputs: Mapping[str, Any]) -> dict[str, float]:
    """The outputs besides the loss that are single numbers."""
    numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    return {str(name): float(value) for name, value in numbers.items() if name != "loss" and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
