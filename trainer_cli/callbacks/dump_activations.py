"""DumpActivations: write what modules return to files of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.callbacks.activation_statistics import hooked, watched
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


class DumpActivations(Callback):
    """Writes `step{N}.npz` after each `every`-th step: for each module, under its name, the first tensor that it
    returned in the last batch of the step. 16-bit floats are written with 32 bits. Each such step copies the tensors
    to the host. Of several processes rank 0 writes its own.

    Args:
        modules: globs of module names.
        every: steps from one file to the next, counted from the run's beginning.
        folder: where files are written, relative to the run directory.
    """

    def __init__(self, modules: Sequence[str], every: int, folder: str = "activations") -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every is {every!r}, but it is a whole number of steps, at least 1", location="every")
        self.modules, self.every = [modules] if isinstance(modules, str) else list(modules), every
        self.folder = Path(folder)
        self._found: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def setup(self, trainer: Trainer) -> None:
        watched(trainer.model, self.modules)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if (trainer.progress.step + 1) % self.every == 0 and trainer.strategy.group.is_main:
            self._handles = hooked(watched(model, self.modules), self._found.__setitem__)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._unhook()
        if self._found and trainer.progress.step % self.every == 0:
            folder = self.folder if trainer.run_dir is None else trainer.run_dir / self.folder
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / f"step{trainer.progress.step}.npz", **{n: _array(t) for n, t in self._found.items()})
            self._found.clear()

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _array(tensor: Tensor) -> Any:
    values = tensor.detach().cpu()
    return (values.float() if values.is_floating_point() and values.element_size() == 2 else values).numpy()
