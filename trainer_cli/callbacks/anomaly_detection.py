"""torch's anomaly detection for a fit: which operation of the forward made a gradient NaN."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from trainer_cli.trainer.hooks import Callback


class AnomalyDetection(Callback):
    """Ends a fit with the traceback of the operation whose backward gives NaN, by `torch.autograd.set_detect_anomaly`.
    Steps take several times as long.
    """

    def on_enter_fit(self, trainer: Any, stack: ExitStack, *args: Any) -> None:
        stack.enter_context(torch.autograd.set_detect_anomaly(True))
