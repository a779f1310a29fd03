"""Save a step: its batches, the state before and after, and a script that makes it without this program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer_cli.checkpoint.model_state import unwrapped
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metrics import leading_size, read_outputs
from trainer_cli.trainer.train_step import TrainStep

if TYPE_CHECKING:
    from trainer_cli.runs.build import Builder, Data
    from trainer_cli.trainer.trainer import Trainer

SCRIPT = Path(__file__).with_name("step_script.py")


class StepSaver(Callback):
    """Writes one step of a training by one process into a folder, and changes nothing.

        batch1.safetensors …            tensors of each batch; step.json has the rest of it
        before.safetensors              weights, buffers, state of the optimizer and of torch's generator
        after.safetensors               the same after the step
        step.json                       how the model is made and called, losses, settings
        step.py                         makes the step and compares it with `after`

    Args:
        step: its number, counted from 1.
        run: the run, for the script's first line.

    Raises:
        UserError: the folder has files, or the training has several optimizers or a step of its own.
    """

    def __init__(self, step: int, folder: Path, run: str) -> None:
        self._step, self._folder, self._run = step, folder, run
        self._model: Mapping[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", where="--save", cure="Name a new folder.")

    def keep_model(self, builder: Builder, data: Data) -> None:
        """Keep how the model is made."""
        self._model = builder.model_node(data.source)

    def setup(self, trainer: Trainer) -> None:
        why = None
        if len(trainer.optimizers) != 1:
            why = format_count(len(trainer.optimizers), "optimizer")
        elif type(trainer.step) is not TrainStep:
            why = f"a step of its own, {type(trainer.step).__name__}"
        elif trainer.scaler is not None:
            why = "a loss scale"
        if why is not None:
            raise UserError(f"the run has {why}, which a small script cannot reproduce", where="--save")

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if trainer.progress.step + 1 != self._step:
            return
        if not self._batches:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write_state(trainer, "before")
        number = len(self._batches) + 1
        tensors: dict[str, Tensor] = {}
        structure = _without_tensors(batch, tensors)
        _write(self._folder / f"batch{number}.safetensors", tensors)
        self._batches.append({"structure": structure, "samples": leading_size(batch) or 1})

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if not self._batches or trainer.step.step_idx + 1 != self._step:
            return
        loss, named = read_outputs(outputs)
        weight = trainer.step.weigh(named)
        self._batches[-1] |= {"loss": float(loss.detach()), "weight": float(weight)}
        if trainer.progress.step != self._step:
            return
        self._write_state(trainer, "after")
        kind = type(next(iter(trainer.optimizers.values())))
        facts = {
            "run": self._run,
            "step": self._step,
            "model": self._model,
            "model_call": trainer.model_call.value,
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "dtype": trainer.precision.dtype.value,
            "clip_norm": trainer.precision.clip_norm,
            "clip_value": trainer.precision.clip_value,
            "frozen": [name for name, value in model.named_parameters() if not value.requires_grad],
            "evaluating": [name for name, module in unwrapped(model).named_modules() if not module.training],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            "groups": self._groups,
            "batches": self._batches,
        }
        (self._folder / "step.json").write_text(json.dumps(facts, indent=2, default=str))
        (self._folder / "step.py").write_text(SCRIPT.read_text())

    def _write_state(self, trainer: Trainer, name: str) -> None:
        model = unwrapped(trainer.model)
        tensors = {f"model/{key}": value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
        names = {value: key for key, value in model.named_parameters()}
        (optimizer,) = trainer.optimizers.values()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if value is None:
                        continue
                    tensors[f"optimizer/{names[parameter]}/{key}"] = torch.as_tensor(value)
        if name == "before":
            self._groups = [
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": [names[parameter] for parameter in group["params"]],
                }
                for group in optimizer.param_groups
            ]
            tensors["rng"] = torch.get_rng_state()
        _write(self._folder / f"{name}.safetensors", tensors)


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Copies: safetensors refuses tensors that share memory.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, str(path))


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A batch as JSON, with each tensor replaced by its name in `tensors`."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"mapping": {str(key): _without_tensors(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_without_tensors(item, tensors) for item in value]}
    if value is None or isinstance(value, str | int | float | bool):
        return {"value": value}
    raise UserError(f"a batch with a {type(value).__name__} cannot be saved", where="--save")
