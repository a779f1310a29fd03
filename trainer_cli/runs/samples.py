"""The samples of a step: by rank and batch, with their sources and documents, as far as they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_cli.runs.course import Course, Stretch


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


SampleReader = Callable[[int, int, int], Sequence[Sequence[Sample]]]
"""Returns, for (epoch, first, end), the samples of a rank's batch; or of each batch, where positions count these."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The course of a run with the order of its samples."""

    course: Course
    read: SampleReader

    def steps(self, first: int, last: int) -> Iterator[StepSamples]:
        """The samples of the steps from `first` to `last`."""
        for step in range(first, last + 1):
            yield self._step(self.course.stretch_of(step), step)

    def _step(self, stretch: Stretch, step: int) -> StepSamples:
        layout = stretch.layout
        epoch, begins = layout.batches_of(stretch.start, step)
        parts = []
        for number, begin in enumerate(begins, 1):
            for rank in range(layout.world_size):
                samples = [sample for batch in self.read(epoch, *layout.share(begin, rank)) for sample in batch]
                parts.append((rank, number, samples))
        total = sum(len(samples) for _, _, samples in parts)
        batches = [
            Batch(rank, number, len(samples), len(samples) / total if total else 0.0, samples)
            for rank, number, samples in parts
        ]
        return StepSamples(step, epoch, stretch.attempt, batches, stretch.doubt)
