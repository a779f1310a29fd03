"""The training loss for displays: as it was at most a second ago, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LiveLoss:
    """A thread requests the mean loss; the thread of the training copies it when it counts the next batch.

    On CUDA the copy is queued like any kernel, and read at a later request, once it has ended. The display thread
    makes no CUDA call, which would break the capture of a CUDA graph.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the next batch must call `answer`; read at each batch, so a plain attribute."""
        self._value: float | None = None
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def request(self) -> float | None:
        """Request the loss, and return that of an earlier request; None before the first is answered."""
        self.requested = True
        return self._value

    def answer(self, total: Tensor, weight: float | Tensor) -> None:
        """Take over an earlier copy that has ended, and begin a copy of the mean, `total / weight`.

        Until an earlier copy has ended, it does nothing more.
        """
        self.requested = False
        if self._copy is not None:
            host, copied = self._copy
            if not copied.query():  # type: ignore[no-untyped-call]
                return
            self._value, self._copy = float(host), None
        if not isinstance(weight, Tensor) and weight == 0:
            return
        if total.device.type == "cpu":
            self._value = float(total / weight)
        elif total.device.type == "cuda":
            # Into pinned memory: a copy to other memory would wait for the device.
            host = (total / weight).to("cpu", non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copy = host, copied
