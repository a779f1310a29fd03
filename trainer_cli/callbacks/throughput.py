"""Throughput: log steps, tokens and floating-point operations per second, and how much of the chip they use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)

PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "A100": 312, "A800": 312, "L40S": 362,
    "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "A6000": 155, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 3090": 71,
    "V100": 125, "T4": 65, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
"""Part of a device's name -> dense 16-bit TFLOP/s of its makers' data sheets; the first that is found counts."""


class Throughput(Callback):
    """Logs on log steps, of all processes together, over the time since the last one without evaluations and saves:
    `train/throughput/steps_per_s`, `train/throughput/tokens_per_s` if the model counts tokens, and with `flops` also
    `train/throughput/tflops_per_s` and `train/throughput/mfu`, the share of the chips' peak (model FLOPs utilization;
    Chowdhery et al., 2022, arXiv:2204.02311).

    Args:
        flops: count the operations of the first batch in this process, by torch's FlopCounterMode, forward and
            backward. Others are taken to have as many for each sample. Not for a compiled model.
        peak_tflops: of the device; None: from the table of this module, by the name of a CUDA device.
    """

    def __init__(self, flops: bool = False, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigError(f"peak_tflops is {peak_tflops}, but it must be above 0", location="peak_tflops")
        self.flops, self.peak_tflops = flops, peak_tflops
        self.flops_per_sample: float | None = None
        self._last = (0, 0, 0)
        """Steps, samples and tokens at the last log."""
        self._counter: FlopCounterMode | None = None

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._count_from(trainer)
        if self.peak_tflops is None and trainer.device.type == "cuda":
            self.peak_tflops = peak_tflops(torch.cuda.get_device_name(trainer.device))

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        stack.callback(self._stop)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if self.flops and self.flops_per_sample is None and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._counter is not None:
            self.flops_per_sample = self._counter.get_total_flops() / max(1, trainer.step.batch_size)
            self._stop()
            log.info("%.4g floating-point operations a sample", self.flops_per_sample)

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        # The training goes back to it.
        self._count_from(trainer)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        progress, seconds = trainer.progress, max(trainer.metric_logger.rate_seconds, 1e-9)
        now = progress.step, progress.samples, progress.tokens
        steps, samples, tokens = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        found = {"train/throughput/steps_per_s": steps / seconds}
        if tokens:
            found["train/throughput/tokens_per_s"] = tokens / seconds
        if self.flops_per_sample is not None:
            tflops = self.flops_per_sample * samples / seconds / 1e12
            found["train/throughput/tflops_per_s"] = tflops
            if self.peak_tflops is not None:
                found["train/throughput/mfu"] = tflops / self.peak_tflops / trainer.strategy.world_size
        trainer.log_metrics(found)

    def _count_from(self, trainer: Trainer) -> None:
        progress = trainer.progress
        self._last = progress.step, progress.samples, progress.tokens

    def _stop(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def peak_tflops(device: str) -> float | None:
    """The dense 16-bit TFLOP/s of a device by its name, or None."""
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if name in device), None)
