"""Callbacks that log or write tensors: of modules, of `observe`, gradients and weights.

`ActivationStatistics` and `DumpActivations` see what modules return, `TensorListener` what a model passes to `observe`,
`Norms` the gradients and weights. Statistics are computed on the device of their tensors and read together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.batches import tensors_of
from trainer_cli.dtensor import whole_of
from trainer_cli.errors import ConfigError
from trainer_cli.outputs import observing
from trainer_cli.patterns import matches
from trainer_cli.state import clean_name, name_parameters, unwrap
from trainer_cli.torch_compat import foreach_norm
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop

STATISTICS = ("mean", "std", "min", "max", "norm")


class TensorStatistics:
    """Collects the statistics of tensors by name; a later tensor with the same name replaces an earlier one."""

    def __init__(self) -> None:
        self._latest: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Compute the statistics of a tensor of numbers. Nothing is read from the device."""
        values = tensor.detach()
        if values.numel() == 0 or values.is_complex():
            return
        # A sum of many 16-bit numbers would lose digits, or overflow.
        values = values.float()
        spread = values.std(correction=0)
        low, high = values.aminmax()
        self._latest[name] = torch.stack([values.mean(), spread, low, high, torch.linalg.vector_norm(values)])

    def read(self, prefix: str, statistics: Iterable[str] = STATISTICS) -> dict[str, float]:
        """`PREFIX/NAME/STATISTIC` -> value, with one wait for the device. Forgets everything."""
        if not self._latest:
            return {}
        # Stacked, so that the device is waited for once.
        rows = torch.stack(list(self._latest.values())).tolist()
        metrics = {
            f"{prefix}/{name}/{statistic}": row[STATISTICS.index(statistic)]
            for name, row in zip(self._latest, rows, strict=True)
            for statistic in statistics
        }
        self._latest.clear()
        return metrics


class TensorListener(Callback):
    """Logs `train/tensors/NAME/STATISTIC` on log steps for each tensor that the model passes to
    `trainer_cli.observe(NAME, tensor)` in the last batch of the step.

    Args:
        names: globs of the tensors' names.
        statistics: of `mean`, `std`, `min`, `max` and `norm`.
    """

    measures_only = True

    def __init__(self, names: Sequence[str] = ("*",), statistics: Sequence[str] = ("norm",)) -> None:
        self.names = [names] if isinstance(names, str) else list(names)
        self.statistics = check_statistics(statistics)
        self._latest = TensorStatistics()
        self._active = ExitStack()

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        """Stop to listen at the end of the training."""
        # Also after an error in a step, whose end is not called.
        stack.callback(self._active.close)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Listen in a step that is logged."""
        if trainer.progress.step + 1 >= trainer.loop.next_log_step:
            self._active.enter_context(observing(self._look))

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """Stop to listen."""
        self._active.close()

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        trainer.log_metrics(self._latest.read("train/tensors", self.statistics))

    def _look(self, name: str, tensor: Tensor) -> None:
        """Take the statistics of a tensor that the model passed to `observe`, if its name matches."""
        if any(matches(name, pattern) for pattern in self.names):
            self._latest.add(name, tensor)


class ActivationStatistics(Callback):
    """Logs `train/activations/MODULE/STATISTIC` on log steps, of the first tensor that a module returns, in the last
    batch of the step. Modules have forward hooks in such steps alone, or always if they are compiled.

    Args:
        modules: globs of module names.
        statistics: of `mean`, `std`, `min`, `max` and `norm`.
    """

    measures_only = True

    def __init__(self, modules: Sequence[str] = ("*",), statistics: Sequence[str] = ("mean", "std")) -> None:
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        self.statistics = check_statistics(statistics)
        self._latest = TensorStatistics()
        self._hooks = ModuleHooks(self.modules, self._latest.add)

    def setup(self, trainer: Trainer) -> None:
        """Refuse globs that match no module."""
        self._hooks.prepare(trainer.model)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Look at the modules in a step that is logged."""
        if trainer.progress.step + 1 >= trainer.loop.next_log_step:
            self._hooks.begin(model)

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """Remove the hooks."""
        self._hooks.end()

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Remove the hooks: one that stays would be called in every later forward."""
        self.on_train_step_end(trainer, trainer.model, None, None)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        trainer.log_metrics(self._latest.read("train/activations", self.statistics))


def check_statistics(statistics: Sequence[str]) -> list[str]:
    """The statistics; ConfigError for an unknown one."""
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    if unknown := [name for name in names if name not in STATISTICS]:
        raise ConfigError(
            f"'{unknown[0]}' is not a statistic", location="statistics", hint=f"Available: {', '.join(STATISTICS)}."
        )
    return names


def watched(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules whose names match. ConfigError if none does."""
    named = {clean_name(name): module for name, module in unwrap(model).named_modules() if name}
    chosen = {name: module for name, module in named.items() if any(matches(name, pattern) for pattern in patterns)}
    if not chosen:
        raise ConfigError(
            f"no module matches {list(patterns)}", location="modules", hint=f"Available: {', '.join(list(named)[:20])}."
        )
    return chosen


class ModuleHooks:
    """Forward hooks that call a function with a module's name and the first tensor that it returns, in chosen steps.

    Args:
        patterns: globs of the modules' names.
    """

    def __init__(self, patterns: Sequence[str], call: Callable[[str, Tensor], None]) -> None:
        self._patterns, self._call = patterns, call
        self._handles: list[RemovableHandle] = []
        self._active = self._stays = False

    def prepare(self, model: nn.Module) -> None:
        """Check the patterns before the first forward; ConfigError as from `watched`."""
        modules = watched(model, self._patterns)
        # Compiled code calls the hooks that were there when it was compiled, which may be in any step after a resume.
        self._stays = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
        if self._stays:
            self._register(modules)

    def begin(self, model: nn.Module) -> None:
        """Begin a chosen step."""
        self._active = True
        # A hook costs time in each forward, so it is there only in such steps.
        if not self._stays:
            self._register(watched(model, self._patterns))

    def end(self) -> None:
        """End a step, chosen or not."""
        self._active = False
        if not self._stays:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _register(self, modules: Mapping[str, nn.Module]) -> None:
        """Give these modules the hook."""
        self._handles += [module.register_forward_hook(partial(self._look, name)) for name, module in modules.items()]

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """The hook: pass on the first tensor that the module returned."""
        if self._active and (first := next(tensors_of(output), None)) is not None:
            self._call(name, first)


class DumpActivations(Callback):
    """Writes `step{N}.npz` after each `every`-th step: for each module, under its name, the first tensor that it
    returned in the last batch of the step. 16-bit floats are written with 32 bits. Each such step copies the tensors
    to the host. With many processes rank 0 writes its tensors.

    Args:
        modules: globs of module names.
        every: steps from one file to the next, counted from the run's beginning.
        folder: where files are written, relative to the run directory.
    """

    measures_only = True

    writes = ("folder",)

    def __init__(self, modules: Sequence[str], every: int, folder: str = "activations") -> None:
        check_whole("every", every, 1)
        self.modules, self.every = [modules] if isinstance(modules, str) else list(modules), every
        self.folder = Path(folder)
        self._latest: dict[str, Tensor] = {}
        self._hooks = ModuleHooks(self.modules, self._latest.__setitem__)

    def setup(self, trainer: Trainer) -> None:
        """Refuse globs that match no module."""
        self._hooks.prepare(trainer.model)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Look at the modules in a step whose tensors are written."""
        if (trainer.progress.step + 1) % self.every == 0 and trainer.strategy.group.is_main:
            self._hooks.begin(model)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the tensors of a step that is due, and remove the hooks."""
        self._hooks.end()
        if self._latest and trainer.progress.step % self.every == 0:
            folder = self.folder if trainer.run_dir is None else trainer.run_dir / self.folder
            folder.mkdir(parents=True, exist_ok=True)
            arrays = {name: _array(tensor) for name, tensor in self._latest.items()}
            np.savez(folder / f"step{trainer.progress.step}.npz", **arrays)
            self._latest.clear()

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._hooks.end()


def _array(tensor: Tensor) -> Any:
    """The tensor as an array of numpy, which has no bfloat16: floats of 16 bits get 32."""
    values = tensor.detach().cpu()
    return (values.float() if values.is_floating_point() and values.element_size() == 2 else values).numpy()


class Norms(Callback):
    """Logs 2-norms on log steps, of all trained parameters: `train/norm/gradients` before clipping, and
    `train/norm/weights` after the step. With `per_layer` also `train/norm/gradients/MODULE` and
    `train/norm/weights/MODULE`, of each module's own.

    Steps that are not logged cost nothing, if `loop.log_interval` is in steps or epochs.
    """

    measures_only = True

    def __init__(self, gradients: bool = True, weights: bool = False, per_layer: bool = False) -> None:
        self.gradients, self.weights, self.per_layer = gradients, weights, per_layer
        self._latest: dict[str, tuple[list[nn.Parameter], list[Tensor]]] = {}
        """For each optimizer: its parameters with gradients, and the norms of these."""

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Compute the norms of gradients in a step that is logged."""
        if trainer.progress.step + 1 < trainer.loop.next_log_step or not self.gradients:
            return
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        # Now, before they are clipped; read only when all are logged, with one wait for the device.
        self._latest[str(id(optimizer))] = parameters, foreach_norm([parameter.grad for parameter in parameters])

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the norms, with one wait for the device."""
        names = name_parameters(trainer.model)
        logged: list[tuple[str, str, Tensor]] = []
        for parameters, norms in self._latest.values():
            pairs = zip(parameters, norms, strict=True)
            logged += [("gradients", names.get(parameter, ""), norm) for parameter, norm in pairs]
        self._latest.clear()
        if self.weights:
            trained = [parameter for parameter in names if parameter.requires_grad]
            norms = foreach_norm([parameter.detach() for parameter in trained])
            logged += [("weights", names[parameter], norm) for parameter, norm in zip(trained, norms, strict=True)]
        if not logged:
            return
        values = torch.stack([whole_of(norm).float() for _, _, norm in logged]).tolist()
        squares: dict[str, float] = {}
        for (kind, name, _), value in zip(logged, values, strict=True):
            layer = name.rpartition(".")[0]
            for key in (f"train/norm/{kind}", *([f"train/norm/{kind}/{layer}"] if self.per_layer and layer else [])):
                squares[key] = squares.get(key, 0.0) + value * value
        trainer.log_metrics({key: math.sqrt(square) for key, square in squares.items()})
