"""MemoryMonitor: log how much memory the training uses."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

_GIB = 2**30


class MemoryMonitor(Callback):
    """Logs on log steps, in GiB: `train/memory/host_peak`, the most that this process has had; on CUDA also
    `train/memory/device_peak` and `train/memory/device_reserved`, the most since the last log, and of the allocator.
    """

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {"train/memory/host_peak": peak * (1 if sys.platform == "darwin" else 1024) / _GIB}
        if trainer.device.type == "cuda":
            found["train/memory/device_peak"] = torch.cuda.max_memory_allocated(trainer.device) / _GIB
            found["train/memory/device_reserved"] = torch.cuda.max_memory_reserved(trainer.device) / _GIB
            torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.log_metrics(found)
