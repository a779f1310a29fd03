"""Load batches of an iterable dataset. A dataset that saves its position is resumed there, in every worker.

Each batch comes with the state of the dataset after it, so that the saved position is that of the training, and not of
the prefetching workers. A dataset without a state is read again up to that position.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from trainer_cli.data.loader import EpochParts
from trainer_cli.data.order import sample_seed
from trainer_cli.data.position import (
    STATE_VERSION,
    PositionedLoader,
    check_batch_size,
    check_same,
)
from trainer_cli.data.random_state import kept_random_state, seed_random
from trainer_cli.data.repeats import STATE_STAYS, WORKERS_READ_THE_SAME, RepeatWatch
from trainer_cli.data.workers import Workers, pinned
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name
from trainer_cli.terminal import format_count
from trainer_cli.values import check_whole

log = logging.getLogger(__name__)

_LONG_S, _LONG_COPIES = 0.001, 3
"""Number of copies of the dataset's state in a row that take longer than this before they are reported, because one is
made for every batch. A single one may have been slow because of the machine."""


class Request(NamedTuple):
    """Request for the next batch of a pass over an epoch.

    `start` of a worker's first request is the state that its dataset loads.
    """

    turn: int
    epoch: int
    number: int
    start: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """A batch and its number of samples (0: no batch), the dataset's state after it, and whether the dataset ended."""

    batch: Any
    samples: int
    state: Any
    ended: bool

    def pin_memory(self) -> Answer:
        """Pin the batch. Torch calls this in the main process; the state stays as it is."""
        return replace(self, batch=pinned(self.batch)) if self.samples else self


@dataclass(slots=True)
class WorkerPosition:
    """The position of one worker's dataset."""

    state: Any
    batches: int = 0
    ended: bool = False


class StreamLoader(PositionedLoader):
    """Load batches of an IterableDataset, from this process or from workers in turn.

    A resume loads the state of a dataset with `state_dict` and `load_state_dict`. For other datasets it replays the
    batches of the epoch that were already seen. Every epoch begins with the dataset in its initial state; `set_epoch`,
    if it has one, is called first. Before each batch the random generators are seeded from (seed, epoch, number of the
    batch). The dataset divides its samples among workers, by `torch.utils.data.get_worker_info()`.

    Args:
        persistent_workers: keep workers between epochs; None: if the dataset has a state, which can be reset. Otherwise
            each epoch begins with new copies of the dataset.
    """

    stateful = True
    """A caller that fetches a batch ahead must save the state before."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 32,
        *,
        seed: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool | None = None,
        worker_timeout_s: float | None = None,
    ) -> None:
        check_whole("data.batch_size", batch_size, 1)
        check_whole("data.num_workers", num_workers, 0)
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        self.per_rank = bool(getattr(dataset, "per_rank", False))
        """See `UserLoader.per_rank`."""
        self.batch_samples: int | None = None
        """Number of samples in the last batch."""
        self.source = StreamSource(dataset, seed, batch_size, collate_fn, drop_last=drop_last)
        self.workers = Workers(
            self.source,
            num_workers,
            seed=sample_seed(seed, 0, 0),
            # Without a state a worker's dataset cannot be put back to its beginning.
            persistent=self.source.stateful if persistent_workers is None else persistent_workers,
            timeout_s=worker_timeout_s,
            pin_memory=pin_memory,
        )
        self._states = RepeatWatch(STATE_STAYS, dataset, watches=self.source.stateful)
        self._firsts = RepeatWatch(WORKERS_READ_THE_SAME, dataset, watches=num_workers > 1)
        self._turn = 0
        self._position = 0, 0
        self._next = 0
        self._worker_positions = self._beginning()
        self._reported = False

    @property
    def promise(self) -> str:
        """A sentence for the log: how exact a resume is."""
        if not self.source.stateful:
            return (
                f"{class_name(self.source.dataset)} does not save its position, so a resume replays the batches of the "
                "epoch that were already seen and drops them; it is exact if the dataset gives the same samples each "
                "time it is started with the same random seeds, and has no memory of earlier epochs."
            )
        in_workers = f", in each of its {self.num_workers} workers" if self.num_workers > 1 else ""
        return (
            f"{class_name(self.source.dataset)} saves and loads its own position, so a resume continues from "
            f"it{in_workers}; it is exact if that position is all that its samples depend on."
        )

    def __len__(self) -> int:
        """Number of batches in an epoch. Raises TypeError without a length, or with several workers."""
        if self.num_workers > 1:
            raise TypeError("how many batches several workers make of an iterable dataset is known at its end")
        full, remainder = divmod(len(self.source.dataset), self.batch_size)
        return full + (remainder > 0 and not self.drop_last)

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Any, None, None]:
        """Yield the batches of an epoch after its first `batch` batches. `samples` is not used."""
        if batch < 0:
            raise ValueError(f"an epoch cannot be entered {format_count(-batch, 'batch')} before its start")
        skip = 0
        if batch == 0 or not self.source.stateful or (epoch, batch) != self._position:
            # There is no state of this position, so the epoch is read from its beginning.
            skip = batch
            self._position, self._next, self._worker_positions = (epoch, 0), 0, self._beginning()
        # A new number makes every worker restart its dataset, also where a pass was left early.
        self._turn += 1
        self._states.begin()
        self._firsts.begin()
        return self._batches(epoch, skip)

    def close(self) -> None:
        """End the persistent workers. A later `iterate` starts new ones."""
        self.workers.close()

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, Any]:
        """The state of the dataset in each worker, after the last batch or at the beginning of an epoch.

        A dataset without a state is replayed, so any batch can be named.
        """
        positions, following = self._worker_positions, self._next
        if batch == 0 or not self.source.stateful:
            positions, following = self._beginning(), 0
        elif (epoch, batch) != self._position:
            raise ValueError(f"the position is {self._position}, not at {(epoch, batch)}")
        return {
            "version": STATE_VERSION,
            "order": "stream" if self.source.stateful else "stream, replayed",
            "seed": self.seed,
            "epoch": epoch,
            "batch": batch,
            "batch_size": self.batch_size,
            "fingerprint": self.fingerprint,
            "next": following,
            "workers": [asdict(position) for position in positions],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Keep a saved position for `iterate`.

        Raises:
            UserError: it is in other data, or inside an epoch with another number of workers.
        """
        check_same(self.state_dict(0), state, ("version", "order", "seed", "fingerprint"))
        check_batch_size(self.batch_size, state)
        epoch, batch, count = state["epoch"], state["batch"], len(state["workers"])
        name = class_name(self.source.dataset)
        if count != len(self._worker_positions):
            if batch:
                raise UserError(
                    f"the checkpoint is from the middle of an epoch of {name} read by "
                    f"{format_count(count, 'worker')} in an order of their own, but "
                    f"data.num_workers is {self.num_workers}: continue with data.num_workers={count} "
                    "(at the end of an epoch it may change)",
                    where="data.num_workers",
                )
            if not self._reported:
                self._reported = True
                log.warning(
                    "data.num_workers was %d and is %d: %s divides its samples differently from here on, so the "
                    "results differ from those with %d",
                    count, self.num_workers, name, count,
                )  # fmt: skip
        elif batch and self.source.stateful:
            self._position, self._next = (epoch, batch), state["next"]
            self._worker_positions = [WorkerPosition(**position) for position in state["workers"]]

    def _beginning(self) -> list[WorkerPosition]:
        """The position of each worker at the beginning of an epoch."""
        return [WorkerPosition(self.source.initial) for _ in range(max(1, self.num_workers))]

    def _batches(self, epoch: int, skip: int) -> Generator[Any, None, None]:
        """Yield the batches of an epoch after its first `skip`, which are read and dropped. Keeps the positions of the
        workers after each batch."""
        answers = self._answers(epoch)
        try:
            for number in count():
                if all(position.ended for position in self._worker_positions):
                    return
                answer = next(answers)
                worker = number % len(self._worker_positions)
                position = self._worker_positions[worker]
                # A worker may have been asked ahead of the answer that its dataset has ended.
                if answer is None or position.ended:
                    continue
                # Before the yield, so that a save during this batch has the position after it.
                self._next = (worker + 1) % len(self._worker_positions)
                self._worker_positions[worker] = WorkerPosition(
                    answer.state, position.batches + bool(answer.samples), answer.ended
                )
                if answer.samples:
                    self._position = epoch, self._position[1] + 1
                    if worker == 0 and not answer.ended:
                        self._states.see(answer.state)
                    self._firsts.see(answer.batch)
                    if self._position[1] > skip:
                        self.batch_samples = answer.samples
                        yield answer.batch
        finally:
            answers.close()

    def _answers(self, epoch: int) -> Generator[Answer | None, None, None]:
        """Yield the answers of the workers, or of the dataset in this process; None to a request of None."""
        requests = self._requests(epoch)
        if self.num_workers:
            yield from self.workers.answers(requests)
            return
        # Not around the yield: the training draws its own random numbers between batches.
        for request in requests:
            with kept_random_state():
                answer = self.source.fetch(request)
            yield answer.pin_memory() if self.pin_memory and answer is not None else answer

    def _requests(self, epoch: int) -> Generator[Request | None, None, None]:
        """Yield requests for the workers in turn, without end; None for a worker that is skipped or has ended."""
        positions, first, turn = self._worker_positions, self._next, self._turn
        requested: list[int] = [position.batches for position in positions]
        starts: list[Any] = [position.state for position in positions]
        for number in count():
            worker = number % len(positions)
            if number < first or self._worker_positions[worker].ended:
                yield None
                continue
            # Only the first request of a worker carries the state, which may be large.
            start, starts[worker] = starts[worker], None
            yield Request(turn, epoch, requested[worker] * len(positions) + worker, start)
            requested[worker] += 1


class StreamSource:
    """Make the batches of an iterable dataset from a position. Each worker has a copy."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self.collate = collate_fn or default_collate
        self.drop_last = drop_last
        self.stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._reported, self._long_copies = False, 0
        # Before anything is read: each epoch begins from this state.
        self.initial = self._state()
        self.epochs = EpochParts(dataset, seed)
        self._turn = 0
        self._ended = False
        self._iterator: Iterator[Any] = iter(())

    def fetch(self, request: Request | None) -> Answer | None:
        """Make the next batch. An error of the dataset keeps its type, and gets a note that names the batch."""
        if request is None:
            return None
        # Number 0 seeds `set_epoch`, so the first batch is number 1.
        seed_random(sample_seed(self.seed, request.epoch, request.number + 1))
        samples: list[Any] = []
        try:
            if request.turn != self._turn:
                self._start(request)
            while len(samples) < self.batch_size and not self._ended:
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    self._ended = True
            is_full = len(samples) == self.batch_size
            has_batch = is_full or (bool(samples) and not self.drop_last)
            batch = self.collate(samples) if has_batch else None
        except Exception as error:
            error.add_note(f"while loading sample {len(samples)} of batch {request.number} of epoch {request.epoch}")
            raise
        return Answer(batch, len(samples) if has_batch else 0, self._state(), self._ended)

    def _state(self) -> Any:
        """A copy of the dataset's state. Called for every batch, because each may be followed by a save."""
        if not self.stateful:
            return None
        # The processor time of this thread: on a busy machine a copy may wait longer than it takes.
        began = time.thread_time()
        state = copy.deepcopy(self.dataset.state_dict())
        took_s = time.thread_time() - began
        self._long_copies = self._long_copies + 1 if took_s > _LONG_S else 0
        if self._long_copies == _LONG_COPIES and not self._reported:
            self._reported = True
            log.warning(
                "the state of %s takes %.1f ms to copy, for every batch: keep its state_dict() small",
                class_name(self.dataset),
                took_s * 1e3,
            )
        return state

    def _start(self, request: Request) -> None:
        """Begin a pass: put the dataset at the beginning of the epoch, or into the state in the request."""
        self._turn, self._ended = request.turn, False
        if self.epochs:
            self.epochs.set(request.epoch)
        if self.stateful:
            # A copy, because the dataset may continue to use the loaded objects.
            self.dataset.load_state_dict(copy.deepcopy(request.start))
        self._iterator = iter(self.dataset)
