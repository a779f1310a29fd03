"""Look at a model with one batch: evaluate it whole and in halves, then train on it alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from trainer_cli.addons.precheck.findings import PrecheckReport, Sureness
from trainer_cli.batches import sample_count, split_batch, to_device
from trainer_cli.config import Composed, batches_of_step
from trainer_cli.errors import UserError
from trainer_cli.leaves import walk
from trainer_cli.outputs import ForwardState, read_evaluation
from trainer_cli.running import Builder
from trainer_cli.schema import ParallelConfig
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
    config = composed.config
    trial = replace(
        config,
        data={**config.data, "batch_size": batches_of_step(config, 1)[0], GLOBAL_BATCH_SIZE: None},
        loop=replace(config.loop, grad_accum_steps=1, microbatch=None),
        compile=replace(config.compile, enabled=False),
        parallel=ParallelConfig(),
    )
    trainer, data = Builder(trial, composed.trust).trial()
    with closing(data.train), closing(data.train.iterate(0)) as batches:
        batch = to_device(next(batches), trainer.device)
        check = _ModelCheck(trainer, batch, sample_count(batch, data.train.batch_samples))
    with trainer.hooks.silenced(), trainer.freezing.applied(trainer):
        check.evaluate()
        losses = check.fit_batch(steps, seconds)
        # An adapter on weights that are frozen, and perhaps not loaded yet, falls slowly.
        is_whole = all(parameter.requires_grad for parameter in trainer.model.parameters())
    _judge_losses(check.report, losses, steps, "likely" if is_whole and not config.step else "hint")
    return check.report


class _Losses(TorchFunctionMode):
    """Notes calls of torch's losses: the loss of a constant answer, and what the call returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _CONSTANT:
            values = signature(function).bind(*args, **(kwargs or {})).arguments
            self.calls.append((_CONSTANT[function](values["input"], values["target"]), result))
        return result


class _ModelCheck:
    """Looks at a model with one batch of `size` samples."""

    def __init__(self, trainer: Trainer, batch: Any, size: int) -> None:
        self.trainer, self.batch, self.size = trainer, batch, size
        self.model, self.report = trainer.model, PrecheckReport([f"a batch of {format_count(size, 'sample')}"])
        modules = trainer.model.named_modules()
        if norms := [name for name, module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]:
            self.report.notes.append(f"in training BatchNorm mixes samples of a batch by design: {format_first(norms)}")

    def evaluate(self) -> None:
        """Evaluate the batch twice with different seeds, and in halves: every sample must have the same values."""
        state = ForwardState(self.model, parameters=True)
        with _Losses() as losses:
            whole, loss = self._forward(self.batch, self.size)
        again, _ = self._forward(self.batch, self.size, seed=1)
        self._judge_first_loss(loss, losses)
        if changed := state.restore():
            cure = "Change it only `if self.training`: results must not depend on how often is evaluated"
            self.report.add("certain", format_first(changed), "an evaluation changes it", cure)
        if drawn := [name for name in whole if not _is_close(whole[name], again[name])]:
            cure = "Give functional.dropout `training=self.training`; a model that draws samples does so by design"
            self.report.add("likely", format_first(drawn), "each evaluation of a batch gives other values", cure)
        elif self.size > 1:
            self._compare_halves(whole)

    def _forward(self, batch: Any, size: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor | None]:
        """The tensors with a row for each sample, with the sum of the `loss` over samples; and the loss."""
        step = self.trainer.step
        seed_everything(seed)
        step.bind_model(self.trainer)
        self.model.eval()
        with torch.no_grad():
            outputs = step.forward(batch)
        loss, named = read_evaluation(outputs)
        leaves = [(name, leaf) for name, leaf in walk(outputs) if isinstance(leaf, Tensor) and leaf is not loss]
        tensors = {name: leaf.float() for name, leaf in leaves if leaf.shape[:1] == (size,)}
        if loss is not None:
            tensors["loss"] = (loss * step.weigh(named, size)).float().reshape(())
        return tensors, loss

    def _compare_halves(self, whole: dict[str, Tensor]) -> None:
        try:
            halves = [self._forward(*half)[0] for half in split_batch(self.batch, self.size, -(-self.size // 2))]
        except UserError as error:
            self.report.notes.append(f"whether samples of a batch mix is unknown: {error}")
            return
        mixed = []
        for name, values in whole.items():
            parts = [half[name] for half in halves]
            joined = torch.cat(parts) if values.ndim else torch.stack(parts).sum()
            # Of other shapes if samples are padded to the longest of a batch.
            if joined.shape == values.shape and not _is_close(values, joined):
                mixed.append(name)
        if mixed == ["loss"]:
            cure = "Return a mean over samples, and `weight` where not each counts 1; contrastive losses are none"
            self.report.add("hint", "loss", "it is not the mean of the losses of two halves of a batch", cure)
        elif mixed:
            what = "a sample's value depends on the others of its batch"
            cure = "Look for mean(0), softmax(dim=0), and views and norms over dimension 0"
            self.report.add("certain", format_first([name for name in mixed if name != "loss"]), what, cure)

    def _judge_first_loss(self, loss: Tensor | None, losses: _Losses) -> None:
        """Compare the loss with that of a constant answer, if it is one of torch's losses."""
        if loss is None or len(losses.calls) != 1 or not _is_close(loss.float(), losses.calls[0][1].float()):
            self.report.notes.append("the loss is none of torch's, so that of a constant answer is unknown")
            return
        constant, first = losses.calls[0][0], float(loss)
        text = f"first loss {first:.4g}, that of a constant answer {constant:.4g}"
        self.report.looked_at.append(text)
        if first > 2 * constant + 0.5:
            cure = "Normalise inputs and targets, or make the weights of the last layer smaller"
            self.report.add("likely", "loss", text, cure)
        elif first < constant / 2:
            self.report.add("hint", "loss", text, "Look whether inputs contain the label, unless it is pretrained")

    def fit_batch(self, steps: int, seconds: float) -> list[float]:
        """Train on the batch alone, and look at the gradients. Returns the losses, up to the first not finite one."""
        until, losses, called = time.monotonic() + seconds, list[float](), set[nn.Module]()
        gradients: dict[Tensor, bool] = {}
        """Each parameter that gets a gradient -> whether one was not 0."""

        def note(parameter: Tensor) -> None:
            is_zero = parameter.grad is None or not parameter.grad.count_nonzero()
            gradients[parameter] = gradients.get(parameter, False) or not is_zero

        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        for parameter in trained.values():
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        self.trainer.train_mode()
        self.trainer.modes.train()
        step = self.trainer.step
        step.bind(self.trainer)
        with register_module_forward_hook(lambda module, args, output: called.add(module)):
            while not losses or (len(losses) < steps and time.monotonic() < until and math.isfinite(losses[-1])):
                losses.append(step.train_batches([(self.batch, self.size)]).item())
        cure = "Use it in the loss, without `detach` and `no_grad` on the way; or freeze or remove it"
        for name, parameter in trained.items():
            if parameter not in gradients:
                is_called = self.model.get_submodule(name.rpartition(".")[0]) in called
                why = "its output does not reach the loss" if is_called else "its module is never called"
                self.report.add("certain", name, f"no gradient: {why}", cure)
            elif not gradients[parameter]:
                self.report.add("likely", name, f"gradient 0 in {format_count(len(losses), 'step')}", cure)
        return losses


def _judge_losses(report: PrecheckReport, losses: list[float], steps: int, unfitted: Sureness) -> None:
    """Report whether the batch was fitted.

    Args:
        unfitted: how sure it is that a loss that does not fall is a fault.
    """
    first, last = losses[0], sum(losses[-5:]) / len(losses[-5:])
    text = f"on one batch alone the loss goes from {first:.4g} to {last:.4g} in {format_count(len(losses), 'step')}"
    report.looked_at.append(text)
    if not math.isfinite(last):
        report.add("certain", "loss", text, "Lower optimizer.lr, and look for log(0), sqrt(0) and a division by 0")
    elif len(losses) < min(steps, _LEAST_STEPS):
        report.notes.append("too few steps to say whether a batch can be fitted: give --seconds")
    elif last > 0.9 * first > 1e-3:
        report.add(unfitted, "loss", text, "Raise optimizer.lr, and look whether inputs belong to their labels")


def _is_close(first: Tensor, second: Tensor) -> bool:
    """Whether tensors are equal, but for differences relative to the largest value."""
    scale = float(first.abs().max()) if first.numel() else 0.0
    return first.shape == second.shape and torch.allclose(first, second, _CLOSE, _CLOSE * scale, equal_nan=True)
