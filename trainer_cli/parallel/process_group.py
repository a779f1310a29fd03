"""The processes that train one model: what each knows of the others, and what a group of one process does.

`distributed_group.py` has the group of more than one. One process alone (`ALONE`) imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainer_cli.parallel.peer_errors import LostRankError, PeerError
from trainer_cli.ranks import Ranks, check_tensor_size, identify_launch, read_rank_and_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup as TorchGroup, Work

    from trainer_cli.parallel.direct import DirectSum

T = TypeVar("T")


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
    """A text that no other process of this launch has: the launch and the rank in it. None for a process alone.

    Ranks that save without their group tell their folders apart by it.
    """
    ranks = find_default_ranks()
    rank, size = (ranks.rank, ranks.world_size) if ranks.world_size > 1 else read_rank_and_size(os.environ)
    return None if size == 1 else f"{identify_launch(os.environ) or os.getppid()} rank {rank} of {size}"
