"""What a fit trains, as at most eight labelled rows for its start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.callbacks import CheckpointerCallback
from trainer_cli.components import SAVER, is_node, list_optimizers, list_schedules
from trainer_cli.config import Composed
from trainer_cli.leaves import walk
from trainer_cli.optim import ONLY
from trainer_cli.running.start import Start
from trainer_cli.runs import BestSettings
from trainer_cli.terminal import format_count, format_first
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.running.build import Data
    from trainer_cli.schema import TrainConfig
    from trainer_cli.trainer import Trainer

_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/kfd"))
"""Device files of the drivers of NVIDIA and AMD."""


def overview_rows(
    start: Start, trainer: Trainer, data: Data, composed: Composed, fork: Path | None, plan: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Label and text of each row, at most eight.

    Args:
        fork: the checkpoint of `ckpt=` that a new run loads.
        plan: `steps`, `evaluations` and `saves`, as far as they are known.
    """
    config, checkpoint = composed.config, trainer.checkpoint
    steps = f", steps {plan['steps']}" if "steps" in plan else ""
    yield "run", f"{start.run.path} ({_describe_start(start, fork)}){steps}"
    yield "model", _describe_model(trainer, config.model)
    yield "optimizer", ", ".join([*_describe_optimizers(trainer, config), *_list_schedule_names(config.scheduler)])
    yield "data", ", ".join([*_describe_data(trainer, data, config.data), *_describe_step(trainer, data)])
    yield "device", ", ".join(_describe_device(trainer, composed))
    yield "evaluates", _describe_evaluations(trainer, data, plan.get("evaluations", ""))
    if callbacks := ", ".join(_list_callbacks(trainer, config.callbacks)):
        yield "callbacks", callbacks
    if isinstance(checkpoint, CheckpointerCallback):
        yield "saves", ", ".join(_describe_saves(start, data, composed, checkpoint, plan.get("saves", "checkpoints")))


def _describe_start(start: Start, fork: Path | None) -> str:
    """Whether the run is new or resumed, and from which weights."""
    if start.entry is not None:
        return f"attempt {start.attempt}, resumes at step {start.entry.step:,}"
    weights = "" if fork is None else f", with the weights of {fork}"
    return f"{'new' if start.is_new else f'attempt {start.attempt}, from step 0'}{weights}"


def _describe_device(trainer: Trainer, composed: Composed) -> Iterator[str]:
    """The device, the processes, and the settings of how it computes."""
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


def _describe_model(trainer: Trainer, node: Mapping[str, Any]) -> str:
    """The class of the model, and how many of its parameters are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
    total, frozen = sum(size for size, _ in sizes), sum(size for size, trained in sizes if not trained)
    name = str(node.get("_target_", "")).rpartition(".")[2]
    trained = f"{total - frozen:,} trained, {frozen:,} frozen" if frozen else "all trained"
    return f"{name + ', ' if name else ''}{format_count(total, 'parameter')}, {trained}"


def _describe_optimizers(trainer: Trainer, config: TrainConfig) -> Iterator[str]:
    """Each optimizer with its rate, and whether it has a fused kernel that the config has not chosen."""
    nodes = {where.rpartition(".")[2]: node for where, node in list_optimizers(config.optimizer).items()}
    for name, optimizer in trainer.optimizers.items():
        kind = type(optimizer).__name__
        if optimizer.defaults.get("fused") and nodes[name].get("fused") is None:
            # Its last digits differ from those of the plain loop in torch, with which a user may compare.
            kind += f" (fused; `{'foreach: true' if trainer.device.type == 'cuda' else 'fused: false'}` as torch)"
        rates = [f"{rate:.4g}" for rate in sorted(set(_rates(optimizer)))]
        yield f"{'' if name == ONLY else f'{name}: '}{kind}"
        if rates:
            yield f"lr {rates[0]}" if len(rates) == 1 else f"lr {rates[0]} to {rates[-1]}"


def _rates(optimizer: Optimizer) -> Iterator[float]:
    """The rate of each group before its schedule. A rate on a GPU is left out: to read it would wait for the device."""
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group.get("lr"))
        if isinstance(rate, int | float) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu"):
            yield float(rate)


def _list_schedule_names(node: Any) -> Iterator[str]:
    """The class of each schedule of the config."""
    for _, schedule in list_schedules(node):
        name = str(schedule.get("_target_", "")).rpartition(".")[2] if is_node(schedule) else "a schedule"
        if is_node(schedule) and str(schedule.get("warmup")) == "0":
            # A name must not promise it.
            name = f"{name.removeprefix('Warmup')} (no warmup)"
        yield name


def _describe_step(trainer: Trainer, data: Data) -> Iterator[str]:
    """The samples of an optimizer step."""
    if (batch_size := getattr(data.train, "batch_size", None)) is None:
        return
    group, accumulated = trainer.strategy.group, trainer.loop.settings.grad_accum_steps
    factors = [f"{batch_size:,}"]
    if group.data_size > 1:
        factors.insert(0, format_count(group.data_size, "process"))
    if accumulated > 1:
        factors.append(f"{accumulated} accumulated")
    total = format_count(group.data_size * batch_size * accumulated, "sample")
    yield f"{total} a step" if len(factors) == 1 else f"{total} a step = {' x '.join(factors)}"


def _describe_data(trainer: Trainer, data: Data, node: Any) -> Iterator[str]:
    """The class of the data with the files that its node names, its samples, and the batches of an epoch."""
    samples, batches = getattr(data.train, "length", None), trainer.loop.epoch_batches
    name = type(data.source).__name__
    texts = (text for key, text in walk(node) if isinstance(text, str) and key.rpartition(".")[2] != "_target_")
    paths = [text for text in texts if text and os.path.exists(text)]
    yield f"{name} of {format_first(paths, 2)}" if paths else name
    if samples is not None:
        yield format_count(samples, "sample")
    yield f"{format_count(batches, 'batch')} an epoch" if batches is not None else "an epoch of unknown length"


def _describe_evaluations(trainer: Trainer, data: Data, when: str) -> str:
    """The validation sets, when they are evaluated, and with which weights."""
    sets = list(data.val)
    # The size of a single set; several have only their names, so that the row is one line.
    if len(sets) == 1 and (length := getattr(data.val[sets[0]], "length", None)) is not None:
        sets = [f"{sets[0]} ({format_count(length, 'sample')})"]
    if trainer.hooks["run_validation"]:
        sets.append("callbacks")
    if not sets:
        return "nothing"
    averages = [name for name, callback in trainer.callbacks.items() if callback.evaluates]
    average = f", with the average of {averages[-1]}" if averages else ""
    return f"{', '.join(sets)} {when}".rstrip() + average


def _describe_saves(
    start: Start, data: Data, composed: Composed, checkpoint: CheckpointerCallback, planned: str
) -> Iterator[str]:
    """What is saved; with several validation sets, the metric that decides which checkpoint is best; another folder."""
    yield planned
    settings = BestSettings.of(asdict(composed.config))
    # A metric that the config names and no evaluation logs is refused at the start of the fit.
    metrics = [*filter(None, [settings.metric]), *(name for name, _ in settings.watched)]
    rule = settings.rule([*metrics, *(f"{name}/loss" for name in data.val)])
    if len(data.val) > 1 and rule is not None and rule.metric not in planned:
        yield f"best by {rule.metric}"
    if checkpoint.folder != start.run.checkpoints_folder:
        yield f"in {checkpoint.folder}"


def _list_callbacks(trainer: Trainer, nodes: Mapping[str, Any]) -> Iterator[str]:
    """The callbacks of the config that may change the run; first those that may end it."""
    kinds = {name: type(trainer.callbacks[name]) for name in nodes if name != SAVER and name in trainer.callbacks}
    names = [name for name, kind in kinds.items() if not kind.measures_only]
    ending = [name for name in names if kinds[name].end_rule is not Callback.end_rule]
    if ending:
        yield f"{' and '.join(ending)} may end the run"
    yield from (name for name in names if name not in ending)


def why_on_cpu(
    setting: str, device: torch.device, visible: str | None, gpu_devices: Sequence[Path] = _GPU_DEVICES
) -> str | None:
    """Why a machine with a GPU trains on the CPU, although the CPU was not chosen; None otherwise.

    Args:
        setting: the value of `device` in the config.
        visible: value of CUDA_VISIBLE_DEVICES; empty: the user has hidden the GPUs.
        gpu_devices: device files; a machine with a GPU has at least one of them.
    """
    if setting != "auto" or device.type != "cpu" or visible in ("", "-1"):
        return None
    if not any(path.exists() for path in gpu_devices):
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch has no CUDA"
    return "torch finds no usable GPU; `nvidia-smi` shows whether the driver works"
