"""The processes that train one model: their ranks, and the plain objects that they exchange.

torchrun starts the processes, or Slurm's srun; both say in environment variables which one this is. One process alone
(`ALONE`) imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

T = TypeVar("T")

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables of the number of processes, the rank, the rank on its node, and the node's rank."""
_FIRST_PORT, _PORTS = 20000, 20000


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process this is, and where rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    init_method: str | None = None
    """How torch finds rank 0; None for one process."""


def ranks_in(environ: Mapping[str, str]) -> Ranks:
    """The ranks that torchrun (`WORLD_SIZE`, `RANK`) or srun (`SLURM_STEP_NUM_TASKS`, `SLURM_PROCID`) has set.

    Raises:
        UserError: a variable is missing, or no number.
    """
    for names in (_TORCHRUN, _SLURM):
        size, rank = (_number(environ, name) for name in names[:2])
        if size is None or size <= 1 or rank is None:
            continue
        if not 0 <= rank < size:
            raise UserError(f"{names[1]} is {rank}, but there are {size} processes", where=names[1])
        local, node = (_number(environ, name) or 0 for name in names[2:])
        slurm = names is _SLURM
        address = environ.get("MASTER_ADDR") or (first_host(environ.get("SLURM_STEP_NODELIST", "")) if slurm else None)
        port = _number(environ, "MASTER_PORT")
        if port is None and slurm:
            port = _FIRST_PORT + (_number(environ, "SLURM_JOB_ID") or 0) % _PORTS
        if not address or port is None:
            missing = "MASTER_PORT" if address else "MASTER_ADDR"
            cure = "Start the processes by torchrun or srun, or set the address and the port of rank 0."
            raise UserError(f"{names[0]} is {size}, but {missing} is not set", where=missing, cure=cure)
        # By env:// torch uses the store of torchrun's agent, which outlives a restart of the processes.
        return Ranks(rank, size, local, node, f"tcp://{address}:{port}" if slurm else "env://")
    return Ranks()


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    if not value:
        return None
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}, expected a number", where=name)
    return int(value)


def first_host(nodes: str) -> str | None:
    """The first host of Slurm's compressed list, such as `a[03-05,9],b`: a03. None for an empty list."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return None if found is None else found[1] + (found[2] or "")


class ProcessGroup:
    """One process alone; the base of several. Every rank calls the same methods in the same order, from one thread."""

    rank, world_size, local_rank, node_rank = 0, 1, 0, 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, logs and writes the run's files."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; those of the other ranks are ignored."""
        return value

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, by rank."""
        return [value]

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors of one shape, written into this CPU tensor, which is returned."""
        return tensor

    def start_max(self, tensor: Tensor) -> Work | None:
        """Start writing the ranks' maximum into this CPU tensor. Wait for the result; None: it is there already."""
        return None

    def on_main(self, function: Callable[[], T]) -> T:
        """What rank 0 gets from `function`, on every rank; or its error, raised on every rank."""
        return function()

    def close(self) -> None:
        """Leave the group."""


ALONE = ProcessGroup()


class PeerError(Exception):
    """Another rank failed, and says why; this one only ends."""


class _Several(ProcessGroup):
    """A gloo group of its own for objects, so that they never mix with the collectives of the training."""

    def __init__(self, ranks: Ranks, timeout: timedelta) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.node_rank = ranks.local_rank, ranks.node_rank
        self._dist = dist
        self._objects = dist.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, value: T) -> T:
        values = [value if self.is_main else None]
        self._dist.broadcast_object_list(values, src=0, group=self._objects)
        return values[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(values, value, group=self._objects)
        return values

    def barrier(self) -> None:
        self._dist.barrier(group=self._objects)

    def sum(self, tensor: Tensor) -> Tensor:
        self._dist.all_reduce(tensor, group=self._objects)
        return tensor

    def start_max(self, tensor: Tensor) -> Work | None:
        work: Work = self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MAX, group=self._objects, async_op=True)
        return work

    def on_main(self, function: Callable[[], T]) -> T:
        value, error = None, None
        if self.is_main:
            try:
                value = function()
            except BaseException as raised:
                error = raised
        value, failed = self.broadcast((value, error is not None))
        if error is not None:
            raise error
        if failed:
            raise PeerError("rank 0 failed")
        return value  # type: ignore[return-value]

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def from_environment(
    environ: Mapping[str, str], *, cuda: bool = False, timeout_s: float = 1800.0, alone_too: bool = False
) -> ProcessGroup:
    """Join the processes that torchrun or srun started; `ALONE` if there is only this one.

    Args:
        cuda: the model is on a GPU, the one of the local rank: collectives of its tensors use NCCL.
        timeout_s: seconds after which a collective that some rank has not entered fails.
        alone_too: also one process joins a group, as FSDP needs one.

    Raises:
        UserError: the variables are incomplete, or there are more local processes than GPUs.
    """
    ranks = ranks_in(environ)
    if ranks.world_size == 1 and not alone_too:
        return ALONE
    import torch
    import torch.distributed as dist

    if cuda:
        if ranks.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {ranks.local_rank} has no GPU: this machine has {torch.cuda.device_count()}",
                cure="Start as many processes on each machine as it has GPUs.",
            )
        torch.cuda.set_device(ranks.local_rank)
    timeout = timedelta(seconds=timeout_s)
    alone = ranks.world_size == 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=ranks.init_method,
        store=torch._C._distributed_c10d.HashStore() if alone else None,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    return _Several(ranks, timeout)
