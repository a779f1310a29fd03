"""Where the digests of the steps of two runs first differ. Pure.

A moment is one step: the state before it, its samples, and all that was computed from them; or the state after the last
step. Moments of two runs belong together if both had seen equally many samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainer_cli.terminal import format_count, format_first
from trainer_cli.testing.trace import Value

ABSENT = "absent"
OF_RANK = " (rank "
"""Begins the end of the name of a value that a rank other than 0 has."""
_MOST_NAMES = 3


class Stage(StrEnum):
    """What is compared of a step, in the order in which a cause precedes its effects."""

    samples = "samples"
    random = "random state"
    inputs = "input of the model"
    settings = "settings of the optimizer"
    optimizer = "state of the optimizer"
    weights = "weights"
    buffers = "buffers"
    callbacks = "state of a callback"
    other = "state of schedules and loss scale"
    outputs = "outputs of modules"
    drawn = "random numbers drawn in the forward"
    loss = "loss"
    gradients = "gradients"
    clipped = "gradients after clipping"


STATE = (Stage.settings, Stage.optimizer, Stage.weights, Stage.buffers, Stage.callbacks, Stage.other)
"""What a step begins with, besides random numbers."""
_OF_STEP = (Stage.random, *STATE, Stage.gradients, Stage.clipped)
"""What does not depend on how the samples of a step are divided into batches."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Digests of one step; without batches those of the state after the last step."""

    step: int
    samples: int
    """Number of samples seen before it."""
    batches: int
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Leaf of the batch -> the digest of each sample in it, over all batches of the step."""
    values: Mapping[Stage, Mapping[str, str]] = field(default_factory=dict)
    """Name -> digest on rank 0, and, under a name with the rank, on every other rank where it is another."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference."""

    steps: tuple[int, int]
    """The step of each run that shows it."""
    stage: Stage
    values: tuple[Value, ...]
    """What differs at this stage, in the order of the computation."""
    also: tuple[Stage, ...] = ()
    """Later stages of the same step that differ too."""
    rows: tuple[int, ...] = ()
    """Positions in the step of the samples that differ, if `stage` is `samples`."""
    is_first: bool = False
    """It is in the first step that was compared."""
    is_final: bool = False
    """It is in the state after the last step."""
    by_design: bool = False
    """Both runs have seen the same samples until then, in steps of other sizes."""

    @property
    def is_state(self) -> bool:
        """Whether it was there before the step."""
        return self.stage is Stage.random or self.stage in STATE

    @property
    def is_older(self) -> bool:
        """Whether the first step that was compared began with a difference, which an earlier step may have made."""
        return self.is_first and any(stage is Stage.random or stage in STATE for stage in (self.stage, *self.also))

    @property
    def moment(self) -> str:
        """When, in words."""
        if self.is_state:
            return f"before step {self.steps[0]}" if self.is_first else f"after step {self.steps[0] - 1}"
        return f"in step {self.steps[0]}"

    @property
    def shown(self) -> str:
        """The names that differ, the first with its values if they are short."""
        first = self.values[0]
        short = all(len(text) <= 24 and " " not in text for text in (first.straight, first.other))
        names = [value.name for value in self.values]
        if short:
            names[0] += f" ({first.straight} -> {first.other})"
        return format_first(names, _MOST_NAMES)


def read_moments(file: Path) -> list[Moment]:
    """The moments in a file of `StepDigests`, by step."""
    moments: dict[int, Moment] = {}
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        entry["values"] = {Stage(stage): values for stage, values in entry["values"].items()}
        # The state after the last step is replaced by that step of a later attempt.
        moments[entry["step"]] = Moment(**entry)
    return [moments[step] for step in sorted(moments)]


def first_divergence(first: Sequence[Moment], second: Sequence[Moment]) -> Divergence | None:
    """The first difference of the moments of two runs; None if none differs."""
    positions = list(_aligned(first, second))
    uneven = False
    for number, (index, other_index) in enumerate(positions):
        left, right = first[index], second[other_index]
        ends = positions[number + 1] if number + 1 < len(positions) else (index + 1, other_index + 1)
        steps, other_steps = first[index : ends[0]], second[other_index : ends[1]]
        if not left.batches or not right.batches:
            differing = _differing(left, right, (Stage.random, *STATE))
        elif len(steps) > 1 or len(other_steps) > 1:
            differing = _differing_samples(steps, other_steps) | _differing(left, right, (Stage.random, *STATE))
        elif left.batches != right.batches:
            differing = _differing_samples(steps, other_steps) | _differing(left, right, _OF_STEP)
        else:
            differing = _differing(left, right, tuple(Stage))
        if differing:
            stages = [stage for stage in Stage if stage in differing]
            return Divergence(
                (left.step, right.step),
                stages[0],
                differing[stages[0]],
                also=tuple(stages[1:]),
                rows=_differing_rows(left, right) if stages[0] is Stage.samples else (),
                is_first=number == 0,
                is_final=not left.batches,
                by_design=uneven,
            )
        uneven = uneven or len(steps) != len(other_steps)
    return None


def _aligned(first: Sequence[Moment], second: Sequence[Moment]) -> Iterator[tuple[int, int]]:
    """Indices of the moments of both at which equally many samples had been seen."""
    index = other = 0
    while index < len(first) and other < len(second):
        if first[index].samples == second[other].samples:
            yield index, other
        # A step without samples, as with a batch of weight 0, has a successor with the same number.
        ahead = first[index].samples - second[other].samples
        index, other = index + (ahead <= 0), other + (ahead >= 0)


def _differing(left: Moment, right: Moment, stages: Sequence[Stage]) -> dict[Stage, tuple[Value, ...]]:
    differing: dict[Stage, tuple[Value, ...]] = {
        stage: tuple(_values(_shared(left, right, stage), _shared(right, left, stage)))
        for stage in stages
        if stage is not Stage.samples
    }
    if Stage.samples in stages and left.rows != right.rows:
        differing[Stage.samples] = tuple(_values_of_rows(left.rows, right.rows))
    return {stage: values for stage, values in differing.items() if values}


def _shared(moment: Moment, other: Moment, stage: Stage) -> Mapping[str, str]:
    """The values of a stage; those of rank 0 alone if the other run has another number of ranks."""
    values = moment.values.get(stage, {})
    if moment.ranks == other.ranks:
        return values
    return {name: digest for name, digest in values.items() if OF_RANK not in name}


def _values(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[Value]:
    for name in {**left, **right}:
        value = Value(name, left.get(name, ABSENT), right.get(name, ABSENT))
        if value.straight != value.other:
            yield value


def _values_of_rows(left: Mapping[str, Sequence[str]], right: Mapping[str, Sequence[str]]) -> Iterator[Value]:
    """For each leaf its first sample that differs."""
    for name in {**left, **right}:
        rows, others = left.get(name, ()), right.get(name, ())
        if len(rows) != len(others):
            yield Value(name, *(format_count(len(samples), "sample") for samples in (rows, others)))
            continue
        for row, other in zip(rows, others, strict=True):
            if row != other:
                yield Value(name, row, other)
                break


def _differing_rows(left: Moment, right: Moment) -> tuple[int, ...]:
    rows, other_rows = _transposed([left]), _transposed([right])
    return tuple(position for position, pair in enumerate(zip(rows, other_rows, strict=False)) if pair[0] != pair[1])


def _differing_samples(steps: Sequence[Moment], other_steps: Sequence[Moment]) -> dict[Stage, tuple[Value, ...]]:
    """Compare the samples of several steps in any order: batches of another size divide them differently."""
    rows, other_rows = sorted(_transposed(steps)), sorted(_transposed(other_steps))
    if rows == other_rows:
        return {}
    value = Value("the set of samples", *(format_count(len(samples), "sample") for samples in (rows, other_rows)))
    return {Stage.samples: (value,)}


def _transposed(steps: Sequence[Moment]) -> list[tuple[str, ...]]:
    """For each sample its digests in all leaves."""
    return [row for step in steps for row in zip(*step.rows.values(), strict=False)]


def as_dict(divergence: Divergence) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "steps": list(divergence.steps),
        "moment": divergence.moment,
        "stage": str(divergence.stage),
        "values": [{"name": value.name, "values": [value.straight, value.other]} for value in divergence.values],
        "also": [str(stage) for stage in divergence.also],
        "by_design": divergence.by_design,
    }
