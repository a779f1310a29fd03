"""Look at a model with one batch: evaluate it whole and in halves, then train on it alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from trainer_cli.addons.precheck.findings import PrecheckReport, Sureness, Suspicion
from trainer_cli.batches import sample_count, split_batch, to_device
from trainer_cli.callbacks import RunIdentity
from trainer_cli.config import Composed, batches_of_step
from trainer_cli.errors import UserError
from trainer_cli.leaves import walk
from trainer_cli.outputs import read_evaluation, read_outputs
from trainer_cli.running import Builder
from trainer_cli.schema import CheckpointConfig, ParallelConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE
from trainer_cli.terminal import format_count, format_first
from trainer_cli.trainer import Trainer, seed_everything

_CLOSE = 1e-3
"""Relative difference that the order of sums may make."""
_LEAST_STEPS = 20
"""Steps on one batch after which its loss must have fallen."""
_CONSTANT: dict[Any, Callable[[Tensor, Tensor], float]] = {
    functional.cross_entropy: lambda answers, targets: math.log(answers.shape[answers.ndim > 1]),
    functional.binary_cross_entropy_with_logits: lambda answers, targets: math.log(2),
    functional.mse_loss: lambda answers, targets: float(targets.float().var(correction=0)),
}
"""A loss of torch -> that of a constant answer: equal probabilities, or the mean of the targets."""


def check_model(composed: Composed, steps: int, seconds: float) -> PrecheckReport:
    """Look at the model of an experiment with the first batch of its training.

    Args:
        steps, seconds: how long it is trained on that batch, whichever ends first.
    """
    trainer, batch, size = _build(composed)
    check = _ModelCheck(trainer, batch, size, composed.config.step is not None)
    check.report.looked_at.append(f"a batch of {format_count(size, 'sample')}")
    modules = trainer.model.named_modules()
    if norms := [name for name, module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]:
        check.report.notes.append(f"in training BatchNorm mixes samples of a batch by design: {format_first(norms)}")
    with trainer.hooks.silenced(), trainer.freezing.applied(trainer):
        check.evaluate()
        check.fit_batch(steps, seconds)
    return check.report


def _build(composed: Composed) -> tuple[Trainer, Any, int]:
    """What trains, without callbacks, loggers, schedules, compiler and checkpoints; a batch; its number of samples."""
    config = composed.config
    builder = Builder(
        replace(
            config,
            data={**config.data, "batch_size": batches_of_step(config, 1)[0], GLOBAL_BATCH_SIZE: None},
            loop=replace(config.loop, grad_accum_steps=1, microbatch=None),
            compile=replace(config.compile, enabled=False),
            checkpoint=CheckpointConfig(enabled=False, save_interval=None),
            parallel=ParallelConfig(),
            scheduler=None,
            callbacks={},
        ),
        composed.trust,
    )
    data = builder.data()
    trainer = builder.trainer(data, identity=RunIdentity(), run_dir=Path(config.run_dir), loggers={})
    batches = data.train.iterate(0)
    try:
        batch = to_device(next(batches), trainer.device)
        return trainer, batch, sample_count(batch, data.train.batch_samples)
    finally:
        batches.close()
        data.train.close()


class _Losses(TorchFunctionMode):
    """Notes calls of torch's losses: the loss of a constant answer, and what the call returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _CONSTANT:
            answers, targets = (*args, *(kwargs[name] for name in ("input", "target") if name in kwargs))[:2]
            self.calls.append((_CONSTANT[function](answers, targets), result))
        return result


class _ModelCheck:
    """Looks at a model with one batch of `size` samples."""

    def __init__(self, trainer: Trainer, batch: Any, size: int, has_own_step: bool) -> None:
        self.trainer, self.batch, self.size, self.has_own_step = trainer, batch, size, has_own_step
        self.step, self.model, self.report = trainer.step, trainer.model, PrecheckReport()

    def _find(self, sureness: Sureness, where: str, what: str, cure: str) -> None:
        self.report.findings.append(Suspicion(where, sureness, what, cure))

    def evaluate(self) -> None:
        """Evaluate the batch twice with different seeds, and in halves: every sample must have the same values."""
        before = {name: tensor.clone() for name, tensor in self._tensors().items()}
        with _Losses() as losses:
            whole, weight = self._forward(self.batch, self.size)
        again, _ = self._forward(self.batch, self.size, seed=1)
        self._judge_first_loss(whole.get("loss"), losses)
        now = self._tensors()
        changed = [name for name in now if name not in before or not _is_close(now[name], before[name], 0.0)]
        drawn = [name for name in whole if not _is_close(whole[name], again[name])]
        if changed:
            cure = "Change it only `if self.training`: results must not depend on how often is evaluated"
            self._find(Sureness.certain, format_first(changed), "an evaluation changes it", cure)
        if drawn:
            cure = "Give functional.dropout `training=self.training`; a model that draws samples does so by design"
            self._find(Sureness.likely, format_first(drawn), "each evaluation of a batch gives other values", cure)
        elif self.size > 1:
            self._compare_halves(whole, weight)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())}

    def _forward(self, batch: Any, size: int, seed: int = 0) -> tuple[dict[str, Tensor], float]:
        """The tensors with values for each sample, and the `loss`; and the weight of the batch."""
        seed_everything(seed)
        self.step.bind_model(self.trainer)
        self.model.eval()
        with torch.no_grad():
            outputs = self.step.forward(batch)
        loss, named = read_evaluation(outputs)
        leaves = [(name, leaf) for name, leaf in walk(outputs) if isinstance(leaf, Tensor) and leaf is not loss]
        tensors = {name: leaf.float() for name, leaf in leaves if leaf.shape[:1] == (size,)}
        return tensors if loss is None else {**tensors, "loss": loss.float()}, float(self.step.weigh(named, size))

    def _compare_halves(self, whole: dict[str, Tensor], weight: float) -> None:
        try:
            halves = [self._forward(*half) for half in split_batch(self.batch, self.size, -(-self.size // 2))]
        except UserError as error:
            self.report.notes.append(f"whether samples of a batch mix is unknown: {error}")
            return
        mixed: list[str] = []
        for name, values in whole.items():
            parts = [tensors[name] for tensors, _ in halves]
            if name == "loss":
                mean = sum(part * size / weight for part, (_, size) in zip(parts, halves, strict=True))
                if not mixed and not _is_close(values, torch.as_tensor(mean)):
                    cure = (
                        "Return a mean over samples, and `weight` where not each counts 1; contrastive losses are none"
                    )
                    self._find(Sureness.hint, name, "it is not the mean of the losses of two halves of a batch", cure)
            # Of other shapes if samples are padded to the longest of a batch.
            elif all(part.shape[1:] == values.shape[1:] for part in parts) and not _is_close(values, torch.cat(parts)):
                mixed.append(name)
        if mixed:
            cure = "Look for mean(0), softmax(dim=0), and views and norms over dimension 0"
            self._find(
                Sureness.certain, format_first(mixed), "a sample's value depends on the others of its batch", cure
            )

    def _judge_first_loss(self, loss: Tensor | None, losses: _Losses) -> None:
        """Compare the loss with that of a constant answer, if it is one of torch's losses."""
        if loss is None or len(losses.calls) != 1 or not _is_close(loss, losses.calls[0][1].float()):
            self.report.notes.append("the loss is none of torch's, so that of a constant answer is unknown")
            return
        constant, first = losses.calls[0][0], float(loss)
        text = f"first loss {first:.4g}, that of a constant answer {constant:.4g}"
        self.report.looked_at.append(text)
        if first > 2 * constant + 0.5:
            cure = "Normalise inputs and targets, or make the weights of the last layer smaller"
            self._find(Sureness.likely, "loss", text, cure)
        elif first < constant / 2:
            self._find(Sureness.hint, "loss", text, "Look whether inputs contain the label, unless it is pretrained")

    def fit_batch(self, steps: int, seconds: float) -> None:
        """Train on the batch alone, and look at the losses and the gradients."""
        reached, moved, called = set[str](), set[str](), set[nn.Module]()
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        for name, parameter in trained.items():

            def note(parameter: Tensor, name: str = name) -> None:
                reached.add(name)
                if name not in moved and parameter.grad is not None and parameter.grad.count_nonzero():
                    moved.add(name)

            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        handle = register_module_forward_hook(lambda module, args, output: called.add(module))
        losses = self._train(steps, time.monotonic() + seconds)
        handle.remove()
        self._judge_losses(losses, steps)
        modules = dict(self.model.named_modules())
        for name in trained.keys() - moved:
            is_called = modules[name.rpartition(".")[0]] in called
            why = "its output does not reach the loss" if is_called else "its module is never called"
            what = f"gradient 0 in {format_count(len(losses), 'step')}" if name in reached else f"no gradient: {why}"
            cure = "Use it in the loss, without `detach` and `no_grad` on the way; or freeze or remove it"
            self._find(Sureness.likely if name in reached else Sureness.certain, name, what, cure)

    def _train(self, steps: int, until: float) -> list[float]:
        """The losses of steps on the batch, up to the first that is not finite."""
        step, losses = self.step, list[float]()
        self.trainer.train_mode()
        self.trainer.modes.train()
        step.bind(self.trainer)
        while not losses or (len(losses) < steps and time.monotonic() < until and math.isfinite(losses[-1])):
            step.begin_batch(self.size)
            if step.evaluates_again:
                step.batches.append((self.batch, self.size))
            losses.append(read_outputs(step.train_batch(self.batch))[0].item())
            step.end_step()
        return losses

    def _judge_losses(self, losses: list[float], steps: int) -> None:
        first, last = losses[0], sum(losses[-5:]) / len(losses[-5:])
        text = f"on one batch alone the loss goes from {first:.4g} to {last:.4g} in {format_count(len(losses), 'step')}"
        self.report.looked_at.append(text)
        if not math.isfinite(last):
            cure = "Lower optimizer.lr, and look for log(0), sqrt(0) and a division by 0"
            self._find(Sureness.certain, "loss", text, cure)
        elif len(losses) < min(steps, _LEAST_STEPS):
            self.report.notes.append("too few steps to say whether a batch can be fitted: give --seconds")
        elif last > 0.9 * first > 1e-3:
            cure = "Raise optimizer.lr, and look whether inputs belong to their labels"
            self._find(Sureness.hint if self.has_own_step else Sureness.likely, "loss", text, cure)


def _is_close(first: Tensor, second: Tensor, tolerance: float = _CLOSE) -> bool:
    """Whether tensors are equal, but for differences relative to the largest value."""
    if first.shape != second.shape:
        return first.numel() == second.numel() == 1 and _is_close(first.reshape(()), second.reshape(()), tolerance)
    scale = float(first.abs().max()) if tolerance and first.numel() else 0.0
    return torch.allclose(first, second, tolerance, tolerance * scale, equal_nan=True)
