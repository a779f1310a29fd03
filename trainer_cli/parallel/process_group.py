"""The processes that train one model: their ranks, and the plain objects that they exchange.

torchrun or Slurm's srun starts them (`ranks.py`). One process alone (`ALONE`) imports no torch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainer_cli.parallel.rendezvous import (
    LostRankError,
    PeerError,
    find_lost_ranks,
    meet,
    noting,
    report_failure,
)
from trainer_cli.ranks import Ranks, check_tensor_size, has_agent_store, identify_launch, read_rank_and_size, read_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup as TorchGroup
    from torch.distributed import Work

    from trainer_cli.parallel.direct import DirectSum, DirectSums

T = TypeVar("T")

_FAILURES = "trainer_cli/failures"
_REPORTS_IN_S = 5.0
"""How long a rank may take to report a failure after another."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's default."""
_MAX_ERROR_LENGTH = 2000
"""Characters of an error that are sent to other ranks."""


class _Command(NamedTuple):
    """What rank 0 has the other ranks call inside `leading`."""

    method: str
    arguments: tuple[object, ...]


class ProcessGroup:
    """A group of one process, and the interface of larger ones.

    Every rank calls the same methods in the same order, from one thread.
    """

    rank, world_size, local_rank, node_rank = 0, 1, 0, 0
    machines = 1
    """Number of machines that the ranks are on."""
    tensor_size = 1
    """Ranks in a row that train on the same samples, and divide layers between them: a tensor group."""
    data_group: TorchGroup | None = None
    """Torch's group of the ranks that train on different samples, one of each tensor group; None: all ranks do."""
    _leads = False
    """Whether this rank is inside `leading`."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, logs and writes the run's files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of the part of the samples that this rank trains on; the same in a whole tensor group."""
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        """Number of parts that the samples are divided into."""
        return self.world_size // self.tensor_size

    def divide_layers(self, tensor_size: int) -> None:
        """Set `tensor_size`. Collective.

        Raises:
            ConfigError: the ranks cannot be divided into groups of that size.
        """
        check_tensor_size(tensor_size, self.world_size)
        self.tensor_size = tensor_size

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; those of the other ranks are ignored."""
        return value

    def broadcast_number(self, number: float) -> float:
        """Rank 0's number, on every rank, exact as a float of 64 bits. Faster than `broadcast`."""
        return self.broadcast(number)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, by rank."""
        return [value]

    def gather_on_main(self, value: T) -> list[T]:
        """Every rank's value, by rank, on rank 0 alone; the others get an empty list."""
        values = self.gather(value)
        return values if self.is_main else []

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors of one shape, written into this CPU tensor, which is returned."""
        return tensor

    def start_sum(self, tensor: Tensor) -> Work | DirectSum | None:
        """Start `sum` of a tensor on the CPU or the rank's GPU. Returns what to wait for; None: the sum is complete."""
        return None

    def on_main(self, function: Callable[[], T], follower: object = None) -> T:
        """Call `function` on rank 0, and return its result on every rank. If it fails, the others raise PeerError. See
        `leading` for `follower`."""
        value = None
        with self.leading(follower) as leads:
            if leads:
                value = function()
        return self.broadcast(value)  # type: ignore[return-value]

    @contextmanager
    def leading(self, follower: object = None) -> Iterator[bool]:
        """A block in which rank 0 works alone: it gets True there, the others False at the end of rank 0's block.

        Meanwhile the others call the methods of their `follower` that rank 0 names by `have_followers_call`. If the
        block fails on rank 0, the others raise PeerError.
        """
        if not self.is_main:
            self._follow(follower)
            yield False
            return
        self._leads, exit_code = True, None
        try:
            yield True
        except BaseException as error:
            exit_code = int(getattr(error, "exit_code", 1))
            raise
        finally:
            self._leads = False
            # Also after an error, or the others would wait in their broadcast until the timeout.
            self.broadcast(exit_code)

    def _follow(self, follower: object) -> None:
        """Call what rank 0 names by `have_followers_call`, until its block ends."""
        while True:
            command: Any = self.broadcast(None)
            if not isinstance(command, _Command):
                break
            getattr(follower, command.method)(*command.arguments)
        if command is not None:
            raise PeerError("rank 0 failed", command)

    def have_followers_call(self, method: Callable[..., object], *arguments: object) -> None:
        """Inside `leading`: have each other rank call its follower's method of the same name, with these arguments.
        Rank 0 calls its own right after this, because the methods have collectives."""
        if self._leads:
            self.broadcast(_Command(method.__name__, arguments))

    @contextmanager
    def checking(self, phase: str) -> Iterator[None]:
        """A block without collectives, on every rank. If it fails on some, the first of them raises its error and the
        others PeerError."""
        yield

    def claim_failure(self, error: BaseException | None = None) -> bool:
        """Report `error` to the others, for `lost_error`, if no rank has called this before. True for that rank alone:
        it shows the error to the user."""
        return True

    def set_timeout(self, seconds: float) -> None:
        """Set the time after which a collective fails that some rank has not entered."""

    def set_timeout_of(self, groups: Iterable[TorchGroup]) -> None:
        """Set the group's timeout for further groups of torch, such as those of a device mesh."""

    def lost_error(self, activity: str) -> PeerError:
        """After a collective failed: the error with the message of the rank that failed, or with the ranks that are
        missing. Takes some seconds."""
        return LostRankError(f"no rank is missing, {activity}")

    def close(self) -> None:
        """Leave the group."""


ALONE = ProcessGroup()


def imitate_group(world_size: int, tensor_size: int = 1) -> ProcessGroup:
    """A stand-in for the process group on rank 0: it has rank and world size, without the other processes."""
    group = ProcessGroup()
    group.world_size = world_size
    group.divide_layers(tensor_size)
    return group


def find_default_ranks() -> Ranks:
    """The rank in torch's default group; rank 0 of one process where no such group is initialised."""
    # Without an import: if torch.distributed is not loaded, no other code has initialised it.
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())


def describe_lone_rank() -> str | None:
    """The launch of this process and its rank in it, as one text, if it is one of several; None if it is the only one.
    Two ranks of one launch that save without their group are told apart by it."""
    ranks = find_default_ranks()
    rank, size = (ranks.rank, ranks.world_size) if ranks.world_size > 1 else read_rank_and_size(os.environ)
    return None if size == 1 else f"{identify_launch(os.environ) or os.getppid()} rank {rank} of {size}"


def find_default_group() -> ProcessGroup:
    """The processes of torch's default group, if other code has initialised one; else `ALONE`. Collective."""
    ranks = find_default_ranks()
    # No store: it serves the reports of lost ranks, which only `train` makes.
    return ALONE if ranks.world_size == 1 else _DistributedGroup(ranks, None, _DEFAULT_TIMEOUT)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]


class _DistributedGroup(ProcessGroup):
    """Several processes of torch.distributed."""

    def __init__(self, ranks: Ranks, store: Any, timeout: timedelta, store_holder: str = "the store") -> None:
        import torch.distributed as dist

        self._store, self._store_holder = store, store_holder
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.node_rank = ranks.local_rank, ranks.node_rank
        self._dist = dist
        self._timeout = timeout
        # A gloo group of its own for objects, so that they never mix with the collectives of the training.
        self._objects = dist.new_group(backend="gloo", timeout=timeout)
        # Not the node's number alone: it is 0 on all machines where other code has initialised the group.
        self.machines = len(set(self.gather((socket.gethostname(), self.node_rank))))
        self._direct: DirectSums | None = None

    def connect_directly(self) -> None:
        """Connect ranks of one machine for sums of a few numbers, if they can reach one another. Until `close`.
        Collective."""
        # Imported here: one process alone needs no torch.
        from trainer_cli.parallel.direct import connect

        self._direct = connect(self, self._timeout.total_seconds())

    def divide_layers(self, tensor_size: int) -> None:
        before = self.tensor_size
        super().divide_layers(tensor_size)
        if tensor_size != before:
            parts = [list(range(first, self.world_size, tensor_size)) for first in range(tensor_size)]
            # Every rank creates all groups, in the same order, as torch demands.
            new_groups: Any = self._dist.new_subgroups_by_enumeration
            self.data_group = new_groups(parts, timeout=self._timeout)[0] if tensor_size > 1 else None

    def broadcast(self, value: T) -> T:
        values = [value if self.is_main else None]
        self._dist.broadcast_object_list(values, src=0, group=self._objects)
        return values[0]  # type: ignore[return-value]

    def broadcast_number(self, number: float) -> float:
        import torch

        return self.sum(torch.tensor(float(number) if self.is_main else 0.0, dtype=torch.float64)).item()

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(values, value, group=self._objects)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        self._dist.gather_object(value, values, dst=0, group=self._objects)
        return values or []

    def barrier(self) -> None:
        self._dist.barrier(group=self._objects)

    def sum(self, tensor: Tensor) -> Tensor:
        self.start_sum(tensor).wait()
        return tensor

    def start_sum(self, tensor: Tensor) -> Work | DirectSum:
        if self._direct is not None and (started := self._direct.start(tensor)) is not None:
            return started
        # Once a step: `dist.all_reduce` around this call takes longer than the call itself.
        group: Any = self._dist.group.WORLD if tensor.is_cuda else self._objects
        work: Work = group.allreduce([tensor])
        return work

    @contextmanager
    def checking(self, phase: str) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        with noting(phase):
            errors = self.gather(None if error is None else (int(getattr(error, "exit_code", 1)), _in_short(error)))
        failed = [(rank, *failure) for rank, failure in enumerate(errors) if failure is not None]
        # One rank shows its error in full; the same fault often strikes all.
        if error is not None and failed[0][0] == self.rank:
            error.add_note(f"on rank {self.rank} of {self.world_size}, {phase}")
            raise error
        if failed:
            rank, exit_code, reason = failed[0]
            raise PeerError(f"rank {rank} failed: {reason}", exit_code) from None

    def claim_failure(self, error: BaseException | None = None) -> bool:
        try:
            # The store's counter is atomic: exactly one rank gets 1.
            is_first = bool(self._store.add(_FAILURES, 1) == 1)
            if is_first and error is not None:
                report_failure(self._store, self.rank, _in_short(error))
            return is_first
        except RuntimeError:
            # The process that holds the store has ended, and so another rank has failed.
            return False

    def set_timeout(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)
        self.set_timeout_of((self._objects, self._dist.group.WORLD))
        if self._direct is not None:
            self._direct.set_timeout(seconds)

    def set_timeout_of(self, groups: Iterable[Any]) -> None:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in groups:
            _set_pg_timeout(self._timeout, group)

    def lost_error(self, activity: str) -> PeerError:
        lost = find_lost_ranks(self._store, self.rank, self.world_size, wait_s=_REPORTS_IN_S)
        if lost.failure is not None:
            return PeerError(lost.failure)
        if not lost.is_asked:
            return PeerError(f"a rank has ended or hangs; another rank reports which one; this one waited {activity}")
        if not lost.store_answers:
            return LostRankError(
                f"a rank has ended or hangs; it is unknown which one, since {self._store_holder} does not "
                f"answer; this one waited {activity}"
            )
        if not lost.absent:
            return LostRankError(f"the connection between the ranks failed {activity}")
        if len(lost.absent) == 1:
            return LostRankError(f"{lost.absent[0]} has ended or hangs; the others waited {activity}")
        # One of them may only wait for another.
        ranks = ", ".join(lost.absent)
        return LostRankError(f"{ranks} do not answer, or wait for one of them; the others waited {activity}")

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def join_processes(environ: Mapping[str, str], *, timeout_s: float = 1800.0, alone_too: bool = False) -> ProcessGroup:
    """Join the processes that torchrun or srun started; `ALONE` if there is only this one.

    Collectives of tensors on a GPU use NCCL, others gloo.

    Args:
        timeout_s: seconds after which a collective that some rank has not entered fails.
        alone_too: one process joins a group too, as FSDP needs one.

    Raises:
        UserError: the variables are incomplete, or the port of rank 0 is in use.
        PeerError: a rank does not connect in time; on one of the others a LostRankError.
    """
    ranks = read_ranks(environ)
    if ranks.world_size == 1 and not alone_too:
        return ALONE
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    cuda = torch.cuda.is_available()
    # Before any allocation: by default every process would take memory of GPU 0.
    if cuda and ranks.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(ranks.local_rank)
    store = meet(ranks, environ, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    holder = "the launcher" if has_agent_store(environ) else "rank 0"
    group = _DistributedGroup(ranks, store, timeout, f"{holder}, which holds the store,")
    group.connect_directly()
    return group
