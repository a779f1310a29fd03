"""The samples of a step: by rank and batch, with their sources and documents, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from trainer_cli.addons.exact.course import Course, Stretch
from trainer_cli.data import sample_indices, sample_position
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of a document in a packed row."""

    index: int
    """Index of the document in the dataset that is packed."""
    first: int
    """Its first token in the row."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a step."""

    index: Any
    """The argument of `dataset[index]`; of a mixture, that of its source."""
    position: int | None = None
    """Position in the order of the epoch."""
    source: str | None = None
    """Name of the source of a mixture."""
    documents: tuple[Document, ...] = ()
    key: Any = None
    """The argument of the train dataset's `[]`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one rank."""

    rank: int
    number: int
    """Which of the batches of its step it is, from 1."""
    size: int
    """Number of samples; 0: a padding batch, which does not count."""
    weight: float
    """Its share of the step's samples, by which gradients are weighted unless the model gives weights of its own."""
    samples: Sequence[Sample] = ()
    """Empty if the loader does not tell the indices."""
    digest: str | None = None
    """Digest of the batch, if the loader does not tell the indices."""
    content: Any = None
    """The batch itself, if it was made."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one optimizer step."""

    step: int
    epoch: int
    attempt: int
    batches: Sequence[Batch]
    doubt: str | None = None
    """Why they are not certain."""
    position: int | None = None
    """Batches of the epoch before the step, if the loader does not tell the indices."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(batch.size for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a sample."""

    step: int
    epoch: int
    rank: int
    batch: int
    """Which of the batches of its step, from 1."""
    attempt: int
    is_past: bool
    """Whether the step was trained; otherwise it will be."""


class SampleReader(Protocol):
    """The order of the samples of an epoch. Positions count samples, or batches if the loader counts only these."""

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        """The samples of a rank's batch at these positions; or of each batch, where positions count batches."""
        ...

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """The positions of a sample, named by its index or by `SOURCE:INDEX`."""
        ...


class ComputedReader:
    """The order of `Loader`, for a dataset without an order of its own."""

    def __init__(self, seed: int, length: int, *, shuffle: bool) -> None:
        self._seed, self._length, self._shuffle = seed, length, shuffle

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        """See `SampleReader`."""
        positions = range(first, end)
        shuffled = sample_indices(self._seed, epoch, first, end, self._length) if self._shuffle else positions
        return [[Sample(index, position, key=index) for index, position in zip(shuffled, positions, strict=True)]]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `SampleReader`."""
        index = int(name) if name.isdecimal() else -1
        if not 0 <= index < self._length:
            raise no_sample(name, self._length)
        return [sample_position(self._seed, epoch, index, self._length) if self._shuffle else index]


def no_sample(name: str, length: int) -> UserError:
    """The error for a name of no sample."""
    return UserError(
        f"there is no sample {name!r}", cure=f"The train data has {format_count(length, 'sample')}, from 0 on."
    )


def has_name(sample: Sample, name: str) -> bool:
    """Whether a sample is the one that `INDEX` or `SOURCE:INDEX` names."""
    return name == str(sample.index) or (sample.source is not None and name == f"{sample.source}:{sample.index}")


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The course of a run with the order of its samples."""

    course: Course
    reader: SampleReader

    def steps(self, first: int, last: int) -> Iterator[StepSamples]:
        """The samples of the steps from `first` to `last`."""
        for step in range(first, last + 1):
            yield self._step(self.course.stretch_of(step), step)

    def find(self, name: str) -> Iterator[Use]:
        """All uses of a sample up to the end of the run; up to the last step that was trained if the end is unknown."""
        records = self.course.records
        end = records.newest_step if records.end is None else records.end
        for stretch in self.course.stretches:
            last = end if stretch.last_step is None else min(end, stretch.last_step)
            if last <= stretch.start.step:
                continue
            last_epoch, _ = stretch.layout.batches_of(stretch.start, last)
            for epoch in range(stretch.start.epoch, last_epoch + 1):
                for position in self.reader.find(epoch, name):
                    if (use := self._use(stretch, epoch, position)) is not None and use.step <= last:
                        yield use

    def _use(self, stretch: Stretch, epoch: int, position: int) -> Use | None:
        layout = stretch.layout
        step = layout.step_of(stretch.start, epoch, position)
        if step is None:
            return None
        _, begins = layout.batches_of(stretch.start, step)
        number = (position - begins[0]) // layout.per_batch
        shares = [layout.share(begins[number], rank) for rank in range(layout.world_size)]
        rank = next(rank for rank, (first, end) in enumerate(shares) if first <= position < end)
        return Use(step, epoch, rank, number + 1, stretch.attempt, step <= self.course.records.newest_step)

    def _step(self, stretch: Stretch, step: int) -> StepSamples:
        layout = stretch.layout
        epoch, begins = layout.batches_of(stretch.start, step)
        parts = []
        for number, begin in enumerate(begins, 1):
            for rank in range(layout.world_size):
                samples = list(chain.from_iterable(self.reader.read(epoch, *layout.share(begin, rank))))
                parts.append((rank, number, samples))
        total = sum(len(samples) for _, _, samples in parts)
        batches = [
            Batch(rank, number, len(samples), len(samples) / total if total else 0.0, samples)
            for rank, number, samples in parts
        ]
        return StepSamples(step, epoch, stretch.attempt, batches, stretch.doubt)
