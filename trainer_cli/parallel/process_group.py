"""The processes that train one model: their ranks, and the plain objects that they exchange.

torchrun starts the processes, or Slurm's srun; both say in environment variables which one this is. One process alone
(`ALONE`) imports no torch.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_cli.errors import UserError
from trainer_cli.parallel.lost import introduce, missing

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

T = TypeVar("T")

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables of the number of processes, the rank, the rank on its node, and the node's rank."""
_FIRST_PORT, _PORTS = 20000, 20000
_TOGETHER, _DONE = "together", "done"
_FAILURES = "trainer_cli/failures"
_COMES_IN_S = 5.0
"""How long a rank may take to report a failure after another."""
_BACKENDS = ("gloo/", "NCCL", "nccl")
"""One of these is in every error of torch's that says that another rank has ended, or does not answer."""


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


def _nothing() -> None:
    """Do nothing."""


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

    def start_sum(self, tensor: Tensor) -> Work | None:
        """Start `sum`, of a tensor on the CPU or the rank's GPU. Wait for the result; None: it is there already."""
        return None

    def on_main(self, function: Callable[[], T], joined: Callable[[], object] = _nothing) -> T:
        """What rank 0 gets from `function`, on every rank; if it fails, its error there and PeerError on the others.
        `joined` is that of `lead`."""
        return function()

    def lead(self, function: Callable[[], object], joined: Callable[[], object]) -> None:
        """Rank 0 calls `function`; the others call `joined` each time that it calls `together(joined)`. If it fails,
        the others raise PeerError."""
        function()

    def together(self, joined: Callable[[], T]) -> T:
        """Call a function that has collectives; inside `lead` the other ranks call it too."""
        return joined()

    def checked(self, function: Callable[[], T], phase: str) -> T:
        """Call a function without collectives on every rank. If it fails on some, the first of them raises its error
        and the others PeerError."""
        return function()

    def fails_first(self) -> bool:
        """Whether this is the first rank to call this: of the ranks that fail, the one that says why."""
        return True

    def limit(self, seconds: float) -> None:
        """From now on a collective fails that some rank does not enter within so many seconds."""

    def lost(self, doing: str) -> LostRankError:
        """After a collective failed: an error with the ranks that are missing. Takes some seconds."""
        return LostRankError(f"no rank is missing, {doing}")

    def close(self) -> None:
        """Leave the group."""


ALONE = ProcessGroup()


class PeerError(Exception):
    """Another rank failed, and says why; this one only ends, with the same exit code if that is known."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostRankError(PeerError):
    """A rank has ended without a word, is stopped, or hangs; the message names it."""


def is_of_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has failed or ended."""
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)
    )


class _Several(ProcessGroup):
    """A gloo group of its own for objects, so that they never mix with the collectives of the training."""

    def __init__(self, ranks: Ranks, store: Any, timeout: timedelta) -> None:
        import torch.distributed as dist

        self._store = store
        introduce(store, ranks.rank, socket.gethostname())
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.node_rank = ranks.local_rank, ranks.node_rank
        self._dist = dist
        self._leads = False
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

    def start_sum(self, tensor: Tensor) -> Work | None:
        # Once a step: torch's function around it takes longer than the call.
        group: Any = self._dist.group.WORLD if tensor.is_cuda else self._objects
        work: Work = group.allreduce([tensor])
        return work

    def on_main(self, function: Callable[[], T], joined: Callable[[], object] = _nothing) -> T:
        values: list[T] = []
        self.lead(lambda: values.append(function()), joined)
        return self.broadcast(values[0] if self.is_main else None)  # type: ignore[return-value]

    def lead(self, function: Callable[[], object], joined: Callable[[], object]) -> None:
        word: str | int = _DONE
        if not self.is_main:
            while (word := self.broadcast(word)) == _TOGETHER:
                joined()
            if isinstance(word, int):
                raise PeerError("rank 0 failed", word)
            return
        self._leads = True
        try:
            function()
        except BaseException as error:
            word = int(getattr(error, "exit_code", 1))
            raise
        finally:
            self._leads = False
            self.broadcast(word)

    def together(self, joined: Callable[[], T]) -> T:
        if self._leads:
            self.broadcast(_TOGETHER)
        return joined()

    def checked(self, function: Callable[[], T], phase: str) -> T:
        error: Exception | None = None
        try:
            value = function()
        except Exception as raised:
            error = raised
        codes = self.gather(None if error is None else int(getattr(error, "exit_code", 1)))
        failed = [(rank, code) for rank, code in enumerate(codes) if code is not None]
        if error is not None and failed[0][0] == self.rank:
            error.add_note(f"on rank {self.rank} of {self.world_size}, {phase}")
            raise error
        if failed:
            raise PeerError(f"rank {failed[0][0]} failed", failed[0][1])
        return value

    def fails_first(self) -> bool:
        try:
            return bool(self._store.add(_FAILURES, 1) == 1)
        except RuntimeError:
            # The process that holds the store has ended, and so another rank has failed.
            return False

    def limit(self, seconds: float) -> None:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in (self._objects, self._dist.group.WORLD):
            _set_pg_timeout(timedelta(seconds=seconds), group)

    def lost(self, doing: str) -> LostRankError:
        absent = missing(self._store, self.rank, self.world_size, wait_s=_COMES_IN_S)
        if not absent:
            return LostRankError(f"the connection between the ranks failed {doing}")
        have = "has ended or hangs" if len(absent) == 1 else "have ended or hang"
        return LostRankError(f"{', '.join(absent)} {have}; the others waited {doing}")

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def from_environment(environ: Mapping[str, str], *, timeout_s: float = 1800.0, alone_too: bool = False) -> ProcessGroup:
    """Join the processes that torchrun or srun started; `ALONE` if there is only this one.

    Collectives of tensors on a GPU use NCCL, others gloo.

    Args:
        timeout_s: seconds after which a collective that some rank has not entered fails.
        alone_too: also one process joins a group, as FSDP needs one.

    Raises:
        UserError: the variables are incomplete.
    """
    ranks = ranks_in(environ)
    if ranks.world_size == 1 and not alone_too:
        return ALONE
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    cuda = torch.cuda.is_available()
    if cuda and ranks.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(ranks.local_rank)
    if ranks.init_method is None:
        store: Any = torch._C._distributed_c10d.HashStore()
    else:
        served, _, _ = next(rendezvous(ranks.init_method, ranks.rank, ranks.world_size, timeout=timeout))
        # The store of torchrun's agent still has the addresses of processes from before a restart.
        store = torch._C._distributed_c10d.PrefixStore(
            f"attempt{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", served
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    return _Several(ranks, store, timeout)
