"""ActivationStatistics: log mean, spread, range and norm of what modules return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.callbacks.tensor_statistics import STATISTICS, TensorStatistics
from trainer_cli.checkpoint.model_state import clean_name, unwrapped
from trainer_cli.config.globs import matches
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.batch import tensors_of
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


class ActivationStatistics(Callback):
    """Logs `train/activations/MODULE/STATISTIC` on log steps, of the first tensor that a module returns, in the last
    batch of the step. Modules have forward hooks in such steps alone; those inside a compiled model have none.

    Args:
        modules: globs of module names.
        statistics: of `mean`, `std`, `min`, `max` and `norm`.
    """

    def __init__(self, modules: Sequence[str] = ("*",), statistics: Sequence[str] = ("mean", "std")) -> None:
        self.modules = [modules] if isinstance(modules, str) else list(modules)
        self.statistics = check_statistics(statistics)
        self._found = TensorStatistics()
        self._handles: list[RemovableHandle] = []

    def setup(self, trainer: Trainer) -> None:
        watched(trainer.model, self.modules)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if trainer.progress.step + 1 >= trainer.loop.next_log_step:
            self._handles = hooked(watched(model, self.modules), self._found.add)

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self.on_train_step_end(trainer, trainer.model, None, None)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        trainer.log_metrics(self._found.read("train/activations", self.statistics))


def check_statistics(wanted: Sequence[str]) -> list[str]:
    """The statistics; ConfigError for an unknown one."""
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if unknown := [name for name in names if name not in STATISTICS]:
        raise ConfigError(
            f"'{unknown[0]}' is no statistic", location="statistics", hint=f"There are: {', '.join(STATISTICS)}."
        )
    return names


def watched(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules whose names match. ConfigError if none does."""
    named = {clean_name(name): module for name, module in unwrapped(model).named_modules() if name}
    found = {name: module for name, module in named.items() if any(matches(name, pattern) for pattern in patterns)}
    if not found:
        raise ConfigError(
            f"no module matches {list(patterns)}", location="modules", hint=f"There are: {', '.join(list(named)[:20])}."
        )
    return found


def hooked(modules: Mapping[str, nn.Module], call: Callable[[str, Any], None]) -> list[RemovableHandle]:
    """Forward hooks that call a function with a module's name and the first tensor that it returns."""

    def hook(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if (first := next(tensors_of(output), None)) is not None:
            call(name, first)

    return [module.register_forward_hook(partial(hook, name)) for name, module in modules.items()]
