"""What the ranks tell one another at every step: one sum of a few numbers, started before the last backward."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_cli.parallel.process_group import ProcessGroup

Number = int | float

_WEIGHT, _SAMPLES, _REQUESTS, _WRITTEN, _FAILED, _COUNT = range(6)


class Agreement:
    """The sums over the ranks of a step's weights and samples, and of what the ranks ask for or report.

    `start` and `finish` are collective. Every rank has the same results after the same `finish`, so a decision that
    depends on these alone is the same on every rank. `request` and `report` may be called by any thread.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.batch_samples = 0
        """Samples of this rank in the step so far."""
        self.samples = 0
        """Samples of all ranks in the last step, those of a tensor group once."""
        self.interrupt = False
        """Whether some rank had a request, or all writers are done, or one has failed; until it is set to False."""
        self.all_written = False
        """Whether every rank has reported that its checkpoint is written."""
        self.any_failed = False
        """Whether a rank has reported that its checkpoint could not be written."""
        self._requested = self._written = self._has_failed = False
        self._values = torch.zeros(_COUNT, dtype=torch.float64)
        self._numbers = self._values.numpy()
        self._work: torch.distributed.Work | None = None
        self._device_weight: tuple[Tensor, torch.distributed.Work | None] | None = None
        self._started = False

    def request(self) -> None:
        """Ask every rank to handle requests after the step that is next agreed on."""
        self._requested = True

    def report(self, *, written: bool = False, failed: bool = False) -> None:
        """What this rank's writer of the checkpoint in flight has done so far; both False: nothing yet. It holds
        until the next report."""
        self._written, self._has_failed = written, failed

    def saved(self) -> None:
        """The checkpoint in flight is committed, or has failed."""
        self.report()
        self.all_written = self.any_failed = False

    @property
    def started(self) -> bool:
        """Whether a sum is under way."""
        return self._started

    def start(self, weight: Number | Tensor = 0) -> None:
        """Start the sum, with this rank's part of the step's weight. One on a GPU is summed there, without a wait."""
        numbers = self._numbers
        if isinstance(weight, Tensor) and weight.is_cuda:
            total = weight.detach().double()
            self._device_weight, weight = (total, self.group.start_sum(total)), 0
        numbers[_WEIGHT], numbers[_SAMPLES] = float(weight), self.batch_samples
        numbers[_REQUESTS], self._requested = self._requested, False
        numbers[_WRITTEN], numbers[_FAILED] = self._written, self._has_failed
        self._started, self._work = True, self.group.start_sum(self._values)

    def finish(self) -> float | Tensor:
        """Wait for the sum, and return the weight of all ranks, which in a tensor group is that of each."""
        if self._work is not None:
            self._work.wait()
        self._started, self._work = False, None
        numbers = self._numbers
        self.samples = int(numbers[_SAMPLES]) // self.group.tensor_size
        self.all_written = int(numbers[_WRITTEN]) == self.group.world_size
        self.any_failed = numbers[_FAILED] > 0
        if numbers[_REQUESTS] > 0 or self.all_written or self.any_failed:
            self.interrupt = True
        if self._device_weight is None:
            return float(numbers[_WEIGHT])
        (total, work), self._device_weight = self._device_weight, None
        if work is not None:
            work.wait()
        return total

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers, at once; those that a tensor group has together are counted once. It is 0 only
        if all are."""
        return -(-int(self.group.sum(torch.tensor([number]))[0]) // self.group.tensor_size)
