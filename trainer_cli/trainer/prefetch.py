"""Batches onto the device: on CUDA the next one is on its way while this one is trained on."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from trainer_cli.trainer.batch import tensors_of, to_device


class DevicePrefetcher(Protocol):
    """Brings batches to where the model is."""

    ahead: bool
    """True where it pays to send a batch before it is needed."""

    def send(self, batch: Any) -> Any:
        """Begin to bring a batch; `receive` takes what this returns."""

    def receive(self, sent: Any) -> Any:
        """The batch, ready for kernels that are launched from now on."""


class Direct:
    """Brings a batch when it is needed; on the CPU it is there already."""

    ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moves = device.type != "cpu"

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return to_device(sent, self._device) if self._moves else sent


class SideStream:
    """Copies on a stream of their own, beside the kernels of the step before; the host waits for neither.

    What is copied from pageable memory is copied all the same, only not beside anything.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors_of(batch)):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device)
            return moved, self._stream.record_event()

    def receive(self, sent: Any) -> Any:
        moved, arrived = sent
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for tensor in tensors_of(moved):
            # Its memory is of the side stream: it may be given to the next batch only after this step's kernels.
            if tensor.is_cuda:
                tensor.record_stream(current)
        return moved


def device_prefetcher(device: torch.device) -> DevicePrefetcher:
    """What brings batches to this device."""
    return SideStream(device) if device.type == "cuda" else Direct(device)
