"""What the ranks tell one another at every step: one sum of a few numbers, started before the last backward.

At the start of a training by several ranks: whether all see rank 0's files, and train the same.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer_cli.errors import UserError
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


_LOOK_AFTER_S = 0.2
_ROUNDING = 0.01
"""How far losses of one tensor group may differ, relatively: copies of a weight may drift apart by the last digits."""
APPEARS_IN_S = 60.0
"""A network file system may remember for a minute that a file was not there, or what was in it."""


def check_same_file(group: ProcessGroup, file: Path) -> None:
    """Check that every rank sees what rank 0 has just written into a file. Collective.

    Raises:
        UserError: on every rank, with the ranks and machines that do not see it.
    """
    digest = group.broadcast(_digest(file))
    until = time.monotonic() + APPEARS_IN_S
    while not (seen := _digest(file) == digest) and time.monotonic() < until:
        time.sleep(_LOOK_AFTER_S)
    answers = group.gather((seen, socket.gethostname()))
    blind = [f"rank {rank} ({host})" for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        where = group.broadcast(str(file.parent.absolute()))
        raise UserError(
            f"{', '.join(blind)} cannot see {where}, the run directory of rank 0 ({answers[0][1]})",
            where="run_dir",
            cure="Choose a run_dir= on a file system that all machines share.",
        )


def check_same(
    group: ProcessGroup, facts: Mapping[str, object], *, where: str | None = None, cure: str | None = None
) -> None:
    """Check that every rank has rank 0's values of some facts. Collective.

    Raises:
        UserError: on every rank, with the first fact that differs, and the ranks where it does.
    """
    first, *others = group.gather(dict(facts))
    for name, value in first.items():
        others_have = [f"{own[name]} on rank {rank}" for rank, own in enumerate(others, 1) if own[name] != value]
        if others_have:
            raise UserError(
                f"the ranks do not have the same {name}: {value} on rank 0, {', '.join(others_have)}",
                where=where,
                cure=cure,
            )


def check_same_samples(group: ProcessGroup, tensors: Iterable[Tensor]) -> None:
    """Check that all ranks of each tensor group have the same tensors of a batch. Collective.

    Raises:
        UserError: on every rank, with the first rank that has others than the first of its group.
    """
    import torch

    own = hashlib.sha256()
    for tensor in tensors:
        if tensor.layout is torch.strided:
            own.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digests = group.gather(own.hexdigest())
    for rank, digest in enumerate(digests):
        first = rank - rank % group.tensor_size
        if digest != digests[first]:
            raise UserError(
                f"ranks {first} and {rank} divide layers between them, and have different samples",
                where="parallel.tensor_size",
                cure="A loader or sampler that takes a part of the samples must take part "
                "trainer.strategy.group.data_rank of data_size.",
            )


def check_same_losses(group: ProcessGroup, losses: Sequence[float]) -> None:
    """Check that the losses of the ranks are the same in each tensor group, but for rounding.

    Raises:
        UserError: with the first rank that has another loss than the first of its group.
    """
    for rank, loss in enumerate(losses):
        first = rank - rank % group.tensor_size
        if abs(loss - losses[first]) > _ROUNDING * abs(losses[first]):
            raise UserError(
                f"ranks {first} and {rank} divide layers between them, and have different losses",
                where="parallel.tensor_size",
                cure="Check the model's plan: after a colwise layer a process has only its part of the features, until "
                "a rowwise layer.",
            )


def _digest(file: Path) -> str | None:
    """The digest of a file's bytes; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
