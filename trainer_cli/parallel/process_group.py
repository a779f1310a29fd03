"""The processes that train one model: their ranks, and the plain objects that they exchange.

torchrun or Slurm's srun starts them (`core/ranks.py`). One process alone (`ALONE`) imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_cli.core.ranks import Ranks, check_tensor_size, ranks_in
from trainer_cli.parallel.rendezvous import (
    LostRankError,
    PeerError,
    has_agent_store,
    meet,
    noting,
    report_failure,
    what_happened,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup as TorchGroup
    from torch.distributed import Work

T = TypeVar("T")

_TOGETHER, _DONE = "together", "done"
_FAILURES = "trainer_cli/failures"
_COMES_IN_S = 5.0
"""How long a rank may take to report a failure after another."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As torch's own."""
_LONGEST = 2000
"""Characters of an error for other ranks."""


def _nothing() -> None:
    """Do nothing."""


class ProcessGroup:
    """One process alone; the base of several. Every rank calls the same methods in the same order, from one thread."""

    rank, world_size, local_rank, node_rank = 0, 1, 0, 0
    tensor_size = 1
    """Ranks in a row that train on the same samples, and divide layers between them: a tensor group."""
    data_group: TorchGroup | None = None
    """Torch's group of the ranks that train on different samples, one of each tensor group; None: all ranks do."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides, logs and writes the run's files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which part of the samples this rank trains on; the same in all of a tensor group."""
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        """Into how many parts the samples are divided."""
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

    def fails_first(self, error: BaseException | None = None) -> bool:
        """Whether this is the first rank to call this: of the ranks that fail, the one that says why. The others hear
        its `error` by `lost`."""
        return True

    def limit(self, seconds: float) -> None:
        """From now on a collective fails that some rank does not enter within so many seconds."""

    def limit_also(self, groups: Iterable[TorchGroup]) -> None:
        """The same for further groups of torch's."""

    def lost(self, doing: str) -> PeerError:
        """After a collective failed: an error with what the rank that failed has said, or with the ranks that are
        missing. Takes some seconds."""
        return LostRankError(f"no rank is missing, {doing}")

    def close(self) -> None:
        """Leave the group."""


ALONE = ProcessGroup()


def default_ranks() -> Ranks:
    """Which rank of torch's default group this is; that of one process where no such group is initialised."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())


def default_group() -> ProcessGroup:
    """The ranks of torch's default group, which another program has initialised; `ALONE` without one. Collective."""
    ranks = default_ranks()
    # The store serves reports of lost ranks, which are those of `train` alone.
    return ALONE if ranks.world_size == 1 else _Several(ranks, None, _DEFAULT_TIMEOUT)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


class _Several(ProcessGroup):
    """A gloo group of its own for objects, so that they never mix with the collectives of the training."""

    def __init__(self, ranks: Ranks, store: Any, timeout: timedelta, store_holder: str = "the store") -> None:
        import torch.distributed as dist

        self._store, self._store_holder = store, store_holder
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.local_rank, self.node_rank = ranks.local_rank, ranks.node_rank
        self._dist = dist
        self._leads = False
        self._timeout = timeout
        self._objects = dist.new_group(backend="gloo", timeout=timeout)

    def divide_layers(self, tensor_size: int) -> None:
        before = self.tensor_size
        super().divide_layers(tensor_size)
        if tensor_size != before:
            parts = [list(range(first, self.world_size, tensor_size)) for first in range(tensor_size)]
            new_groups: Any = self._dist.new_subgroups_by_enumeration
            self.data_group = new_groups(parts, timeout=self._timeout)[0] if tensor_size > 1 else None

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
        with noting(phase):
            errors = self.gather(None if error is None else (int(getattr(error, "exit_code", 1)), _in_short(error)))
        failed = [(rank, *one) for rank, one in enumerate(errors) if one is not None]
        if error is not None and failed[0][0] == self.rank:
            error.add_note(f"on rank {self.rank} of {self.world_size}, {phase}")
            raise error
        if failed:
            rank, code, why = failed[0]
            raise PeerError(f"rank {rank} failed: {why}", code)
        return value

    def fails_first(self, error: BaseException | None = None) -> bool:
        try:
            first = bool(self._store.add(_FAILURES, 1) == 1)
            if first and error is not None:
                report_failure(self._store, self.rank, _in_short(error))
            return first
        except RuntimeError:
            # The process that holds the store has ended, and so another rank has failed.
            return False

    def limit(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=seconds)
        self.limit_also((self._objects, self._dist.group.WORLD))

    def limit_also(self, groups: Iterable[Any]) -> None:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in groups:
            _set_pg_timeout(self._timeout, group)

    def lost(self, doing: str) -> PeerError:
        loss = what_happened(self._store, self.rank, self.world_size, wait_s=_COMES_IN_S)
        if loss.failure is not None:
            return PeerError(loss.failure)
        if not loss.is_asked:
            return PeerError(f"a rank has ended or hangs; another rank finds out which; this one waited {doing}")
        if not loss.store_answers:
            return LostRankError(
                f"a rank has ended or hangs; which one could not be found out, as {self._store_holder} does not "
                f"answer; this one waited {doing}"
            )
        if not loss.absent:
            return LostRankError(f"the connection between the ranks failed {doing}")
        if len(loss.absent) == 1:
            return LostRankError(f"{loss.absent[0]} has ended or hangs; the others waited {doing}")
        # One of them may only wait for another.
        named = ", ".join(loss.absent)
        return LostRankError(f"{named} do not answer, or wait for one of them; the others waited {doing}")

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
        UserError: the variables are incomplete, or the port of rank 0 is in use.
        PeerError: a rank does not come; on one of the others a LostRankError.
    """
    ranks = ranks_in(environ)
    if ranks.world_size == 1 and not alone_too:
        return ALONE
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    cuda = torch.cuda.is_available()
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
    holder = "torchrun's agent" if has_agent_store(environ) else "rank 0"
    return _Several(ranks, store, timeout, f"{holder}, which holds the store,")
