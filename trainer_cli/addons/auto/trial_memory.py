"""How much memory short trials of a training take, and how much they may take."""

from __future__ import annotations

import torch

from trainer_cli.memory import available_bytes, peak_resident_bytes, resident_bytes
from trainer_cli.terminal import format_bytes

MARGIN = 0.1
"""Fraction of the free memory that a trial must leave: fragmentation, longer samples and evaluation need some."""


class TrialMemory:
    """The memory of a device that is free now, and the peak of what is taken from it later.

    On a GPU the peak is that of torch's allocator. On the CPU it is the growth of the resident memory of this process;
    because the system kills a process that takes too much, a trial is made only if it is expected to fit. On other
    devices nothing is measured, and only an out-of-memory error shows that a trial does not fit.

    Args:
        processes: number of processes that share the memory.
    """

    def __init__(self, device: torch.device, *, processes: int = 1) -> None:
        self._device = device
        self.is_cuda, self.is_cpu = device.type == "cuda", device.type == "cpu"
        free: int | None = None
        if self.is_cuda:
            torch.cuda.empty_cache()
            free, self._before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        elif self.is_cpu:
            available, self._before = available_bytes(), resident_bytes() or peak_resident_bytes()
            free = None if available is None else available // processes
        self.limit_bytes = None if free is None else int((1 - MARGIN) * free)
        """Largest peak of a trial that fits; None if unknown."""

    def start_trial(self) -> None:
        """Begin to measure the peak of a trial."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end_trial(self) -> int | None:
        """The peak since `start_trial` in bytes, None if unknown. Frees the cache of the allocator."""
        if self.is_cuda:
            peak = torch.cuda.max_memory_reserved(self._device) - self._before
            # Cached blocks of this trial would be missing for the next one.
            torch.cuda.empty_cache()
            return max(0, peak)
        # The peak of the whole process: trials grow, so the last one has the largest.
        return max(0, peak_resident_bytes() - self._before) if self.is_cpu else None

    def exceeds(self, peak_bytes: float | None) -> bool:
        """Whether a peak is above the limit."""
        return None not in (peak_bytes, self.limit_bytes) and peak_bytes > self.limit_bytes  # type: ignore[operator]

    def __str__(self) -> str:
        """The limit, as the object of "does not fit into"."""
        if self.limit_bytes is None:
            return "the memory, whose size is unknown,"
        return f"{format_bytes(self.limit_bytes)}, which is {1 - MARGIN:.0%} of the free memory"
