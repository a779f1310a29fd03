"""The samples of steps, and the uses of a sample, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from trainer_cli.addons.exact.samples import Batch, Sample, StepSamples, Use
from trainer_cli.terminal import format_count


def lines_of(step: StepSamples) -> Iterator[str]:
    """The lines that show the samples of a step."""
    position = "" if step.position is None else f", after {format_count(step.position, 'batch')}"
    many = "" if len(step.batches) == 1 else f" in {len(step.batches)} batches"
    samples = format_count(step.size, "sample")
    yield f"step {step.step:,}: {samples}{many}, epoch {step.epoch}{position} (attempt {step.attempt})"
    if step.doubt is not None:
        yield f"  not certain: {step.doubt}"
    ranks = len({batch.rank for batch in step.batches})
    for batch in step.batches:
        yield from _lines_of_batch(batch, ranks, len(step.batches))


def _lines_of_batch(batch: Batch, ranks: int, count: int) -> Iterator[str]:
    names = [f"rank {batch.rank}"] * (ranks > 1) + [f"batch {batch.number}"] * (count > ranks)
    facts = [f"weight {batch.weight:.4g}"] * (count > 1)
    positions = [sample.position for sample in batch.samples if sample.position is not None]
    if positions:
        facts.append(f"positions {positions[0]:,} to {positions[-1]:,} of the epoch")
    if batch.digest is not None:
        facts += [format_count(batch.size, "sample"), f"digest {batch.digest}"]
    if not batch.size:
        facts = ["no samples: a padding batch, which does not count"]
    yield f"  {', '.join([*names, *facts])}".rstrip()
    for source, samples in groupby(batch.samples, lambda sample: sample.source):
        if not any(sample.documents for sample in batch.samples):
            listed = " ".join(str(sample.index) for sample in samples)
            yield f"    {'' if source is None else f'{source}: '}{listed}"
            continue
        for sample in samples:
            yield f"    {'' if source is None else f'{source}: '}row {sample.index}: {_documents(sample)}"


def names_of(step: StepSamples | None, rank: int, number: int) -> list[str] | None:
    """The names of the samples of a batch, row by row; None if the loader does not tell them."""
    for batch in () if step is None else step.batches:
        if (batch.rank, batch.number) == (rank, number) and batch.samples:
            return [name_of(sample) for sample in batch.samples]
    return None


def name_of(sample: Sample) -> str:
    """The name that `train data --find` takes: the index, in a mixture after its source."""
    return f"{f'{sample.source}:' if sample.source else ''}{sample.index}"


def _documents(sample: Sample) -> str:
    pieces = [
        f"{document.index}" + (f" from token {document.first:,}" if document.first else "")
        for document in sample.documents
    ]
    return f"documents {', '.join(pieces)}" if len(pieces) > 1 else f"document {', '.join(pieces)}"


def lines_of_uses(name: str, uses: Sequence[Use]) -> Iterator[str]:
    """The lines that show the uses of a sample."""
    past = sum(use.is_past for use in uses)
    later = len(uses) - past
    to_come = f", and will be {format_count(later, 'more time')}" if later else ""
    yield f"sample {name} was used {format_count(past, 'time')}{to_come}"
    for use in uses:
        origin = "" if use.rank == 0 and use.batch == 1 else f", rank {use.rank}, batch {use.batch}"
        yield f"  step {use.step:,}: epoch {use.epoch}{origin}{'' if use.is_past else ' (to come)'}"


def use_as_dict(use: Use) -> dict[str, Any]:
    """A use of a sample for JSON."""
    return {
        "step": use.step,
        "epoch": use.epoch,
        "rank": use.rank,
        "batch": use.batch,
        "attempt": use.attempt,
        "past": use.is_past,
    }


def as_dict(step: StepSamples) -> dict[str, Any]:
    """The samples of a step for JSON."""
    return {
        "step": step.step,
        "epoch": step.epoch,
        "attempt": step.attempt,
        **({} if step.position is None else {"batches_before": step.position}),
        **({} if step.doubt is None else {"doubt": step.doubt}),
        "samples": step.size,
        "batches": [_batch_as_dict(batch) for batch in step.batches],
    }


def _batch_as_dict(batch: Batch) -> dict[str, Any]:
    return {
        "rank": batch.rank,
        "batch": batch.number,
        "size": batch.size,
        "weight": batch.weight,
        **({} if batch.digest is None else {"digest": batch.digest}),
        "samples": [_sample_as_dict(sample) for sample in batch.samples],
    }


def _sample_as_dict(sample: Sample) -> dict[str, Any]:
    documents = [
        {"index": document.index, "first_token": document.first, "targets": document.tokens}
        for document in sample.documents
    ]
    return {
        **({} if sample.source is None else {"source": sample.source}),
        "index": sample.index,
        "position": sample.position,
        **({"documents": documents} if documents else {}),
    }
