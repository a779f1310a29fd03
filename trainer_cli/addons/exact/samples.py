"""The samples of a step, by rank and batch, and the uses of a sample: as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from trainer_cli.terminal import format_count


def _known(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of a document in a packed row."""

    index: int
    """Index of the document in the dataset that is packed."""
    first_token: int
    """Its first token in the row."""
    targets: int
    """Its number of tokens."""


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

    @property
    def name(self) -> str:
        """The name that `train data --find` takes: the index, in a mixture after its source."""
        return f"{f'{self.source}:' if self.source else ''}{self.index}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        documents = [asdict(document) for document in self.documents]
        return _known(source=self.source, index=self.index, position=self.position, documents=documents or None)

    def __str__(self) -> str:
        if not self.documents:
            return str(self.index)
        pieces = [
            f"{document.index}" + (f" from token {document.first_token:,}" if document.first_token else "")
            for document in self.documents
        ]
        return f"row {self.index}: {'documents' if len(pieces) > 1 else 'document'} {', '.join(pieces)}"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one rank."""

    rank: int
    number: int
    """Which of the batches of its step it is, from 1."""
    size: int
    """Number of samples; 0: a padding batch, which does not count."""
    samples: Sequence[Sample] = ()
    """Empty if the loader does not tell the indices."""
    digest: str | None = None
    """Digest of the batch, if the loader does not tell the indices."""
    content: Any = None
    """The batch itself, if it was made."""

    def weight_in(self, step: StepSamples) -> float:
        """Its share of the samples of the step, by which gradients are weighted unless the model gives weights."""
        return self.size / step.size if step.size else 0.0

    def as_dict(self, step: StepSamples) -> dict[str, Any]:
        """Plain values, for JSON."""
        weight, samples = self.weight_in(step), [sample.as_dict() for sample in self.samples]
        return _known(
            rank=self.rank, batch=self.number, size=self.size, weight=weight, digest=self.digest, samples=samples
        )


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one optimizer step."""

    step: int
    epoch: int
    attempt: int
    batches: Sequence[Batch]
    uncertainty: str | None = None
    """Why they are not certain."""
    position: int | None = None
    """Batches of the epoch before the step, if the loader does not tell the indices."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return sum(batch.size for batch in self.batches)

    def names(self, rank: int, number: int) -> list[str] | None:
        """The names of the samples of a batch, row by row; None if the loader does not tell them."""
        for batch in self.batches:
            if (batch.rank, batch.number) == (rank, number) and batch.samples:
                return [sample.name for sample in batch.samples]
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return _known(
            step=self.step,
            epoch=self.epoch,
            attempt=self.attempt,
            batches_before=self.position,
            doubt=self.uncertainty,
            samples=self.size,
            batches=[batch.as_dict(self) for batch in self.batches],
        )

    def lines(self) -> Iterator[str]:
        """The lines that show them."""
        position = "" if self.position is None else f", after {format_count(self.position, 'batch')}"
        many = "" if len(self.batches) == 1 else f" in {format_count(len(self.batches), 'batch')}"
        samples = format_count(self.size, "sample")
        yield f"step {self.step:,}: {samples}{many}, epoch {self.epoch}{position} (attempt {self.attempt})"
        if self.uncertainty is not None:
            yield f"  not certain: {self.uncertainty}"
        for batch in self.batches:
            yield from self._lines_of_batch(batch)

    def _lines_of_batch(self, batch: Batch) -> Iterator[str]:
        ranks, count = len({batch.rank for batch in self.batches}), len(self.batches)
        facts = [f"rank {batch.rank}"] * (ranks > 1) + [f"batch {batch.number}"] * (count > ranks)
        if not batch.size:
            facts.append("no samples: a padding batch, which does not count")
        else:
            facts += [f"weight {batch.weight_in(self):.4g}"] * (count > 1)
            positions = [sample.position for sample in batch.samples if sample.position is not None]
            if positions:
                facts.append(f"positions {positions[0]:,} to {positions[-1]:,} of the epoch")
            if batch.digest is not None:
                facts += [format_count(batch.size, "sample"), f"digest {batch.digest}"]
        yield f"  {', '.join(facts)}".rstrip()
        for source, group in groupby(batch.samples, lambda sample: sample.source):
            # Rows of documents have a line each.
            samples = list(group)
            listed = map(str, samples) if samples[0].documents else [" ".join(map(str, samples))]
            yield from (f"    {'' if source is None else f'{source}: '}{text}" for text in listed)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a sample."""

    step: int
    epoch: int
    rank: int
    batch: int
    """Which of the batches of its step, from 1."""
    attempt: int
    past: bool
    """Whether the step was trained; otherwise it will be."""

    def __str__(self) -> str:
        origin = "" if self.rank == 0 and self.batch == 1 else f", rank {self.rank}, batch {self.batch}"
        return f"step {self.step:,}: epoch {self.epoch}{origin}{'' if self.past else ' (to come)'}"


def lines_of_uses(name: str, uses: Sequence[Use]) -> Iterator[str]:
    """The lines that show the uses of a sample."""
    past = sum(use.past for use in uses)
    later = len(uses) - past
    to_come = f", and will be {format_count(later, 'more time')}" if later else ""
    yield f"sample {name} was used {format_count(past, 'time')}{to_come}"
    yield from (f"  {use}" for use in uses)
