"""Batches in an order that can be resumed at any sample, from this process or from workers.

`Loader` owns the order and the random numbers of each sample, so its resume is exact, and it leaves the random
state of the training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from trainer_cli.data.order import ORDER_VERSION, sample_indices, sample_seed
from trainer_cli.data.position import STATE_VERSION, check_counts, check_same
from trainer_cli.data.randomness import kept_random_state, seed_random
from trainer_cli.data.workers import worker_batches
from trainer_cli.errors import UserError


class MapDataset(Protocol):
    """Anything with a length and samples by number.

    It may also have `deterministic = True` (its samples use no random numbers, so none are seeded),
    `fingerprint` (a digest of its content, checked at a resume) and `__getitems__` (samples by a list of
    numbers, used where it is deterministic).
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Batches of a map-style dataset; which samples, in what order and with what randomness is a pure
    function of (seed, epoch), the same with any number of workers and from any sample on.

    Before each `dataset[index]` python's, numpy's and torch's CPU generators are seeded from (seed, epoch,
    index); `collate_fn` goes on with what the last sample left. In this process their states are put back
    after each batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 32,
        *,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        check_counts(batch_size=batch_size, num_workers=num_workers)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.length = len(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.source = KeyedSource(dataset, seed, collate_fn)
        whole = self.length // batch_size if drop_last else -(-self.length // batch_size)
        if whole == 0:
            raise UserError(
                f"there are {self.length} samples, not enough for one batch of {batch_size}",
                where="data",
                cure="Use a smaller batch_size." if self.length else None,
            )
        self._batches = whole

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._batches

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """The batches of an epoch after its first `samples` samples. `batch` is not needed here.

        Closing the iterator ends its workers.
        """
        if samples < 0:
            raise ValueError(f"an epoch cannot be entered {-samples} samples before its start")
        if self.num_workers == 0:
            return self._here(epoch, samples)
        return worker_batches(
            self.source,
            ((epoch, indices) for indices in self._index_batches(epoch, samples)),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            seed=sample_seed(self.seed, epoch, self.length),
        )

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """Where the data stands, and of which data and order that is a position."""
        return {
            "version": STATE_VERSION,
            "order": ORDER_VERSION if self.shuffle else "sequential",
            "seed": self.seed,
            "epoch": epoch,
            "sample_offset": samples,
            "length": self.length,
            "fingerprint": self.fingerprint,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a position in other data or another order. The batch size may differ.

        Raises:
            UserError: naming everything that differs.
        """
        check_same(self.state_dict(0), state, ("version", "order", "seed", "length", "fingerprint"))

    def _here(self, epoch: int, samples: int) -> Generator[Any, None, None]:
        for indices in self._index_batches(epoch, samples):
            if self.source.draws:
                with kept_random_state():
                    batch = self.source.fetch(epoch, indices)
            else:
                batch = self.source.fetch(epoch, indices)
            yield _pinned(batch) if self.pin_memory else batch

    def _index_batches(self, epoch: int, samples: int) -> Iterator[Sequence[int]]:
        for start in range(samples, self.length, self.batch_size):
            stop = min(start + self.batch_size, self.length)
            if self.drop_last and stop - start < self.batch_size:
                return
            if self.shuffle:
                yield sample_indices(self.seed, epoch, start, stop, self.length)
            else:
                yield range(start, stop)


class KeyedSource:
    """Makes one batch of a dataset from its key, the same wherever it runs. Workers get a copy."""

    def __init__(self, dataset: MapDataset, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate_fn or default_collate
        self.deterministic = bool(getattr(dataset, "deterministic", False))
        self.draws = not self.deterministic or collate_fn is not None
        self.many = getattr(dataset, "__getitems__", None) if self.deterministic else None

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> Any:
        return self.fetch(*key)

    def fetch(self, epoch: int, indices: Sequence[int]) -> Any:
        """The batch of these samples. An error of the dataset keeps its type and says which sample it was."""
        if self.many is not None:
            try:
                samples = self.many(indices)
            except Exception as error:
                error.add_note(f"while loading samples {list(indices)} of epoch {epoch}")
                raise
        else:
            samples = []
            for index in indices:
                if not self.deterministic:
                    seed_random(sample_seed(self.seed, epoch, index))
                try:
                    samples.append(self.dataset[index])
                except Exception as error:
                    error.add_note(f"while loading sample {index} of epoch {epoch}")
                    raise
        if self.deterministic and self.draws:
            seed_random(sample_seed(self.seed, epoch, indices[0]))
        try:
            return self.collate(samples)
        except Exception as error:
            error.add_note(f"while collating samples {list(indices)} of epoch {epoch}")
            raise


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]
