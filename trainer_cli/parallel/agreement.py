"""Agreement of the ranks at every step: one sum of a few numbers, started before the last backward to cost no wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer_cli.parallel.process_group import ProcessGroup

Number = int | float

_WEIGHT, _SAMPLES, _REQUESTS, _WRITTEN, _COUNT = range(5)


class Agreement:
    """Sums over the ranks of a step: its weight, its samples, and the flags that ranks request and report.

    `start` and `finish` are collective. Every rank has the same results after the same `finish`, so a decision that
    depends on these alone is the same on every rank. `request` and `report_written` may be called by any thread.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.batch_samples = 0
        """Samples of this rank in the step so far."""
        self.samples = 0
        """Samples of all ranks in the last step; those of a tensor group are counted once."""
        self.interrupt = False
        """Set if a rank had a request, or all writers are done. The caller sets it to False."""
        self.all_written = False
        """Whether every rank has reported that its writer is done, with its part written or not."""
        self._requested = self._written = False
        # In 64 bits sums of samples are exact. Numpy's view of the same memory is faster to read and write.
        self._values = torch.zeros(_COUNT, dtype=torch.float64)
        self._numbers = self._values.numpy()
        self._work: Any = None
        self._device_weight: tuple[Tensor, Any] | None = None
        self._started = False

    def request(self) -> None:
        """Set `interrupt` on every rank after the next `finish`."""
        self._requested = True

    def report_written(self) -> None:
        """Report that this rank's writer of the checkpoint in flight is done."""
        self._written = True

    def saved(self) -> None:
        """Reset the reports: the checkpoint in flight is committed, or has failed."""
        self._written = self.all_written = False

    @property
    def started(self) -> bool:
        """Whether a sum is under way."""
        return self._started

    def start(self, weight: Number | Tensor = 0) -> None:
        """Start the sum, with this rank's part of the step's weight. A weight on a GPU is summed there, because to read
        it would wait for the device."""
        numbers = self._numbers
        if isinstance(weight, Tensor) and weight.is_cuda:
            total = weight.detach().double()
            self._device_weight, weight = (total, self.group.start_sum(total)), 0
        numbers[_WEIGHT], numbers[_SAMPLES] = float(weight), self.batch_samples
        numbers[_REQUESTS] = requested = self._requested
        # Only then: another thread may have requested something since the line above.
        if requested:
            self._requested = False
        numbers[_WRITTEN] = self._written
        self._started, self._work = True, self.group.start_sum(self._values)

    def finish(self) -> float | Tensor:
        """Wait for the sum. Returns the weight of all ranks; within a tensor group each rank adds the same weight."""
        if self._work is not None:
            self._work.wait()
        self._started, self._work = False, None
        numbers = self._numbers
        self.samples = int(numbers[_SAMPLES]) // self.group.tensor_size
        self.all_written = int(numbers[_WRITTEN]) == self.group.world_size
        if numbers[_REQUESTS] > 0 or self.all_written:
            self.interrupt = True
        if self._device_weight is None:
            return float(numbers[_WEIGHT])
        (total, work), self._device_weight = self._device_weight, None
        if work is not None:
            work.wait()
        return total

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers, computed at once; a tensor group counts once. It is 0 only if all are."""
        # A tensor of bool would not be summed directly.
        total = int(self.group.sum(torch.tensor([int(number)]))[0])
        # Rounded up: only one rank of a tensor group may have a number.
        return -(-total // self.group.tensor_size)
