"""The group of the processes that torchrun or Slurm's srun started, by torch.distributed."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainer_cli.parallel.peer_errors import LostRankError, PeerError, noting
from trainer_cli.parallel.process_group import ALONE, ProcessGroup, T, find_default_ranks
from trainer_cli.parallel.rendezvous import find_lost_ranks, meet, report_failure
from trainer_cli.ranks import Ranks, has_agent_store, read_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

    from trainer_cli.parallel.direct import DirectSum, DirectSums

_FAILURES = "trainer_cli/failures"
_REPORTS_IN_S = 5.0
"""How long a rank may take to report a failure after another."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's default."""
_MAX_ERROR_LENGTH = 2000
"""Characters of an error that are sent to other ranks."""


def _in_short(error: BaseException) -> str:
    """The type and the message of an error, as other ranks get it."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]


class DistributedGroup(ProcessGroup):
    """Several processes of torch.distributed.

    Args:
        store: torch's store, by which lost ranks are found; None if other code has initialised the group.
        timeout: after which a collective fails that some rank has not entered.
        store_holder: the process that holds the store, for messages.
    """

    def __init__(
        self, ranks: Ranks, store: Any, timeout: timedelta = _DEFAULT_TIMEOUT, store_holder: str = "the store"
    ) -> None:
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
        """Set `tensor_size`, and make the groups of the ranks that train on different samples."""
        earlier_size = self.tensor_size
        super().divide_layers(tensor_size)
        if tensor_size != earlier_size:
            # In each the ranks with the same index in their tensor groups.
            parts = [list(range(index, self.world_size, tensor_size)) for index in range(tensor_size)]
            # Every rank creates all groups, in the same order, as torch demands.
            new_groups: Any = self._dist.new_subgroups_by_enumeration
            self.data_group = new_groups(parts, timeout=self._timeout)[0] if tensor_size > 1 else None

    def broadcast(self, value: T) -> T:
        """Send rank 0's value, pickled, over the group of gloo."""
        values = [value if self.is_main else None]
        self._dist.broadcast_object_list(values, src=0, group=self._objects)
        return values[0]  # type: ignore[return-value]

    def broadcast_number(self, number: float) -> float:
        """Send rank 0's number as a sum, to which the others add 0: nothing is pickled."""
        import torch

        return self.sum(torch.tensor(float(number) if self.is_main else 0.0, dtype=torch.float64)).item()

    def gather(self, value: T) -> list[T]:
        """Send every rank's value, pickled, to all others."""
        values: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(values, value, group=self._objects)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        """Send every rank's value, pickled, to rank 0."""
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        self._dist.gather_object(value, values, dst=0, group=self._objects)
        return values or []

    def barrier(self) -> None:
        """Wait for all ranks, in the group of gloo."""
        self._dist.barrier(group=self._objects)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum, and wait for the result."""
        self.start_sum(tensor).wait()
        return tensor

    def start_sum(self, tensor: Tensor) -> Work | DirectSum:
        """Start a sum: over sockets if the tensor is short and all ranks are on one machine, else by torch."""
        if self._direct is not None and (started := self._direct.start(tensor)) is not None:
            return started
        # Once a step: `dist.all_reduce` around this call takes longer than the call itself.
        group: Any = self._dist.group.WORLD if tensor.is_cuda else self._objects
        work: Work = group.allreduce([tensor])
        return work

    @contextmanager
    def checking(self, phase: str) -> Iterator[None]:
        """Gather the errors of all ranks after the block, and raise the first of them on every rank."""
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
        """Count in the store: the rank that is first reports its error there."""
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
        """Set the time for the groups of objects and of tensors, and for direct sums."""
        self._timeout = timedelta(seconds=seconds)
        self.set_timeout_of((self._objects, self._dist.group.WORLD))
        if self._direct is not None:
            self._direct.set_timeout(seconds)

    def set_timeout_of(self, groups: Iterable[Any]) -> None:
        """Set the time of these groups, by a private function of torch: there is no public one."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in groups:
            _set_pg_timeout(self._timeout, group)

    def lost_error(self, activity: str) -> PeerError:
        """Ask the store which rank failed or does not answer; each case has a message of its own."""
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
        """Close the direct connections, and leave torch's group."""
        if self._direct is not None:
            self._direct.close()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def find_default_group() -> ProcessGroup:
    """The processes of torch's default group, if other code has initialised one; else `ALONE`. Collective."""
    ranks = find_default_ranks()
    # No store: it serves the reports of lost ranks, which only `train` makes.
    return ALONE if ranks.world_size == 1 else DistributedGroup(ranks, store=None)


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
    group = DistributedGroup(ranks, store, timeout, f"{holder}, which holds the store,")
    group.connect_directly()
    return group
