"""What a fit trains, as labelled rows for its start: run, config, device, model, data and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.config.arguments import list_optimizers
from trainer_cli.config.compose import Composed
from trainer_cli.runs.start import Start
from trainer_cli.terminal import format_count
from trainer_cli.trainer.optimizers import ONLY

if TYPE_CHECKING:
    from trainer_cli.runs.build import Data
    from trainer_cli.trainer.trainer import Trainer

_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/kfd"))
"""Device files of the drivers of NVIDIA and AMD."""


def overview_rows(
    start: Start, trainer: Trainer, data: Data, composed: Composed, fork: Path | None
) -> Iterator[tuple[str, str]]:
    """Label and text of each row.

    Args:
        fork: the checkpoint of `ckpt=` that a new run loads.
    """
    group, settings = trainer.strategy.group, trainer.loop.settings
    yield "run", f"{start.run.path} ({_beginning(start, fork)})"
    if composed.overrides:
        yield "config", " ".join(composed.overrides)
    yield "device", ", ".join(_device(trainer, composed))
    yield "model", _model(trainer, composed.config.model)
    if fused := ", ".join(_fused(trainer, composed.config.optimizer)):
        # The last digits are other ones than those of a plain loop, from which the user may have ported.
        default = "foreach: true" if trainer.device.type == "cuda" else "fused: false"
        yield "fused", f"{fused}; torch's default is another kernel, which `{default}` in the optimizer chooses"
    yield "data", _data(trainer, data)
    batch_size = getattr(data.train, "batch_size", None)
    if batch_size is not None:
        total = group.data_size * batch_size * settings.grad_accum_steps
        factors = f"{format_count(group.data_size, 'process')} x {batch_size:,} x {settings.grad_accum_steps}"
        yield "batch", f"{format_count(total, 'sample')} = {factors} accumulated"


def _beginning(start: Start, fork: Path | None) -> str:
    if start.entry is not None:
        return f"attempt {start.attempt}, resumes at step {start.entry.step:,}"
    weights = "" if fork is None else f", with the weights of {fork}"
    return f"{'new' if start.is_new else f'attempt {start.attempt}, from step 0'}{weights}"


def _device(trainer: Trainer, composed: Composed) -> Iterator[str]:
    config, device, group = composed.config, trainer.device, trainer.strategy.group
    if device.type == "cuda":
        yield f"{device} ({torch.cuda.get_device_name(device)})"
    elif device.type == "cpu":
        yield "cpu"
        yield f"threads: {torch.get_num_threads()}"
    else:
        yield str(device)
    if group.world_size > 1:
        machines = f" on {group.machines} machines" if group.machines > 1 else ""
        yield f"{config.parallel.strategy} of {group.world_size} processes{machines}"
    yield str(config.precision.dtype)
    if config.compile.enabled:
        yield "compiled"
    if config.deterministic:
        yield "deterministic"


def _model(trainer: Trainer, node: Mapping[str, Any]) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
    total, frozen = sum(size for size, _ in sizes), sum(size for size, trained in sizes if not trained)
    name = str(node.get("_target_", "")).rpartition(".")[2]
    trained = f"{total - frozen:,} trained, {frozen:,} frozen" if frozen else "all trained"
    return f"{name + ', ' if name else ''}{format_count(total, 'parameter')}, {trained}"


def _fused(trainer: Trainer, config: Any) -> Iterator[str]:
    """The optimizers that have a fused kernel that the config has not chosen."""
    nodes = {where.rpartition(".")[2]: node for where, node in list_optimizers(config).items()}
    for name, optimizer in trainer.optimizers.items():
        if optimizer.defaults.get("fused") and nodes[name].get("fused") is None:
            yield type(optimizer).__name__ if name == ONLY else f"{name} ({type(optimizer).__name__})"


def _data(trainer: Trainer, data: Data) -> str:
    loop = trainer.loop
    samples, batches = getattr(data.train, "length", None), loop.epoch_batches
    sizes = [format_count(samples, "sample")] if samples is not None else []
    sizes.append(f"{format_count(batches, 'batch')} an epoch" if batches is not None else "an epoch of unknown length")
    for name, loader in data.val.items():
        if (length := getattr(loader, "length", None)) is not None:
            sizes.append(f"{name}: {format_count(length, 'sample')}")
    return ", ".join(sizes)


def why_on_cpu(
    setting: str, device: torch.device, visible: str | None, gpu_devices: Sequence[Path] = _GPU_DEVICES
) -> str | None:
    """Why a machine with a GPU trains on the CPU, although the CPU was not chosen; None otherwise.

    Args:
        setting: the value of `device` in the config.
        visible: value of CUDA_VISIBLE_DEVICES; empty: the user has hidden the GPUs.
        gpu_devices: files of which one exists where there is a GPU.
    """
    if setting != "auto" or device.type != "cpu" or visible in ("", "-1"):
        return None
    if not any(path.exists() for path in gpu_devices):
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch has no CUDA"
    return "torch finds no usable GPU; `nvidia-smi` shows whether the driver works"
