"""Copies from GPUs: on a stream of their own beside the compute stream, which waits before it writes again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from trainer_cli.checkpoint.format.codec import Leaf


class Devices:
    """The GPUs that the tensors of a state are on, as far as there are any."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._events: list[tuple[torch.device, Any]] = []

    @property
    def any(self) -> bool:
        """Whether there are GPUs."""
        return bool(self._streams)

    def see(self, leaves: Collection[Leaf]) -> bool:
        """Get ready for the GPUs that these are on; True where there are any. What they hold now is what is copied."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        for device in devices:
            stream = self._streams.setdefault(device, None) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
            stream.wait_stream(torch.cuda.current_stream(device))
        return bool(devices)

    def copy(self, leaf: torch.Tensor, into: torch.Tensor) -> None:
        """Have a tensor copied; nobody waits for it here."""
        stream = self._streams[leaf.device]
        with torch.cuda.stream(stream):
            raw = raw_bytes(leaf)
            into.copy_(raw, non_blocking=True)
            # Its memory must not be given to another tensor before the copy is made.
            raw.record_stream(stream)

    def boundary(self) -> None:
        """What was copied at the boundary may change from here on: the compute streams wait for these copies."""
        self.copied()
        self.hold()

    def copied(self) -> None:
        """All copies are asked for: mark their end."""
        self._events = [(device, stream.record_event()) for device, stream in self._streams.items()]

    def hold(self) -> None:
        """The compute streams go on once the copies asked for are made; the host does not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """The host waits for every copy."""
        for _, event in self._events:
            event.synchronize()


def raw_bytes(leaf: torch.Tensor) -> torch.Tensor:
    """Its bytes, on its device."""
    return leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
