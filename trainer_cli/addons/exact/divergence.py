"""Where the steps of two runs first differ. Pure.

A row is one step: the state before it, its samples, and all that was computed from them; or the state after the last
step. Rows of two runs belong together if both had seen equally many samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainer_cli.addons.exact.trace import Value, differing_values
from trainer_cli.terminal import format_count, format_first

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


@dataclass(slots=True)
class BlamedSamples:
    """What of a step and the evaluation after it is to blame."""

    failed: dict[str, Any] | None = None
    """The batch of the step whose computation raised an exception: its rank, its number in the step, its number of
    samples, and `raised`: row -> the exception of each sample that alone raises one."""
    metrics: list[str] = field(default_factory=list)
    """Metrics of the evaluation that are not finite."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches of the evaluation with an output that is not finite, or that failed: the rank, the name of the loader,
    the number of samples, their names if they are known, and `not_finite` and `sample_losses`, or `raised`."""


@dataclass(slots=True)
class StepRow:
    """One optimizer step; without batches the state after the last step."""

    step: int
    seen: int
    """Number of samples seen before it."""
    epoch: int = 0
    """The epoch of its first batch, from 0."""
    batch_idx: int = 0
    """Index of its first batch in the epoch, from 0."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Of each batch: its rank, its number in the step, its number of samples, its structure, the loss and the other
    outputs that are numbers; `not_finite`: name -> rows with NaN in the batch, if there are any; and
    `sample_losses`, or why there are none, if they were asked for or the loss is not finite."""
    lr: dict[str, list[float]] = field(default_factory=dict)
    """Optimizer -> learning rate of each of its parameter groups."""
    grad_norm: float | None = None
    """Norm of all gradients before clipping; None: no optimizer has stepped."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """The largest norms by parameter, the largest first."""
    not_finite: str | None = None
    """The first parameter, activation or gradient that holds NaN or infinity."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Leaf of the batch -> the digest of each sample in it, over all batches of the step."""
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    """Stage -> name -> digest on rank 0, and, under a name with the rank, on every other rank where it is another."""
    ranks: int = 1
    blamed: BlamedSamples | None = None


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
        return self.is_first and not {Stage.random, *STATE}.isdisjoint((self.stage, *self.also))

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "steps": list(self.steps),
            "moment": self.moment,
            "stage": str(self.stage),
            "values": [{"name": value.name, "values": [value.straight, value.other]} for value in self.values],
            "also": list(map(str, self.also)),
            "by_design": self.by_design,
        }


def read_rows(replayed: Mapping[str, Any]) -> list[StepRow]:
    """The rows in the JSON of `train replay --digests`."""
    return [StepRow(**{name: entry[name] for name in StepRow.__dataclass_fields__}) for entry in replayed["steps"]]


def find_first_divergence(first: Sequence[StepRow], second: Sequence[StepRow]) -> Divergence | None:
    """The first difference of the rows of two runs; None if none differs."""
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
        elif len(left.batches) != len(right.batches):
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


def _aligned(first: Sequence[StepRow], second: Sequence[StepRow]) -> Iterator[tuple[int, int]]:
    """Indices of the rows of both at which equally many samples had been seen."""
    index = other = 0
    while index < len(first) and other < len(second):
        if first[index].seen == second[other].seen:
            yield index, other
        # A step without samples, as with a batch of weight 0, has a successor with the same number.
        ahead = first[index].seen - second[other].seen
        index, other = index + (ahead <= 0), other + (ahead >= 0)


def _differing(left: StepRow, right: StepRow, stages: Sequence[Stage]) -> dict[Stage, tuple[Value, ...]]:
    differing: dict[Stage, tuple[Value, ...]] = {
        stage: tuple(differing_values(_shared(left, right, stage), _shared(right, left, stage)))
        for stage in stages
        if stage is not Stage.samples
    }
    if Stage.samples in stages and left.rows != right.rows:
        differing[Stage.samples] = tuple(_values_of_rows(left.rows, right.rows))
    return {stage: values for stage, values in differing.items() if values}


def _shared(row: StepRow, other: StepRow, stage: Stage) -> Mapping[str, str]:
    """The values of a stage; those of rank 0 alone if the other run has another number of ranks."""
    values = row.values.get(stage, {})
    if row.ranks == other.ranks:
        return values
    return {name: digest for name, digest in values.items() if OF_RANK not in name}


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


def _differing_rows(left: StepRow, right: StepRow) -> tuple[int, ...]:
    rows, other_rows = _transposed([left]), _transposed([right])
    return tuple(position for position, pair in enumerate(zip(rows, other_rows, strict=False)) if pair[0] != pair[1])


def _differing_samples(steps: Sequence[StepRow], other_steps: Sequence[StepRow]) -> dict[Stage, tuple[Value, ...]]:
    """Compare the samples of several steps in any order: batches of another size divide them differently."""
    rows, other_rows = sorted(_transposed(steps)), sorted(_transposed(other_steps))
    if rows == other_rows:
        return {}
    value = Value("the set of samples", *(format_count(len(samples), "sample") for samples in (rows, other_rows)))
    return {Stage.samples: (value,)}


def _transposed(steps: Sequence[StepRow]) -> list[tuple[str, ...]]:
    """For each sample its digests in all leaves."""
    return [row for step in steps for row in zip(*step.rows.values(), strict=False)]
