"""Share the batches of one loader among ranks, without a batch lost or seen twice."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Filler:
    """The batch of a rank for which no samples are left: it is computed as every rank computes one, but counts
    nothing."""

    batch: Any


class SharedLoader:
    """Every rank iterates the same loader, and takes of each `world_size` batches in turn that of its rank.

    So the ranks have equally many batches, and the loader's order and position are those of one process. Where batches
    are left over at the end of an epoch, the other ranks have a `Filler`.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        per_batch = getattr(loader, "samples_per_batch", None)
        self.samples_per_batch: int | None = None if per_batch is None else per_batch * world_size
        """Samples of all ranks by which a batch advances the position; None if the loader does not count samples."""
        self.batch_samples: int | None = None
        """Samples of the batch that `iterate` gave last; None if the loader does not say."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    @property
    def promise(self) -> str:
        """What each rank reads, and how exact the loader's resume is, for the log."""
        own = getattr(self.loader, "promise", "")
        return (
            f"Each of {self.world_size} ranks reads all batches, and trains on one in {self.world_size}. If the loader "
            f"or its dataset shares samples out among ranks itself, give it an attribute per_rank = True. {own}"
        ).rstrip()

    def __len__(self) -> int:
        """Batches of an epoch, on each rank; TypeError where the loader has no length."""
        return -(-len(self.loader) // self.world_size)

    def batches_after(self, samples: int) -> int:
        """Batches that are left of an epoch, on each rank, after its first `samples` samples."""
        left: int = self.loader.batches_after(samples)
        return -(-left // self.world_size)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """This rank's batches of an epoch after the first `batch` of each rank."""
        batches = self.loader.iterate(epoch, batch=batch * self.world_size, samples=samples)
        try:
            turn: list[Any] = []
            for batch in batches:
                if len(turn) == self.rank:
                    self.batch_samples = self.loader.batch_samples
                turn.append(batch)
                if len(turn) == self.world_size:
                    own = turn[self.rank]
                    turn.clear()
                    yield own
            if turn:
                yield turn[self.rank] if self.rank < len(turn) else Filler(turn[0])
        finally:
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The loader's position, after the batches of all ranks."""
        state: dict[str, Any] = self.loader.state_dict(epoch, samples=samples, batch=batch * self.world_size)
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position that does not fit the loader; one that has a position keeps it."""
        self.loader.check_state(state)

    def close(self) -> None:
        """End the loader's workers."""
        if (close := getattr(self.loader, "close", None)) is not None:
            close()
