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
RUINED = ", since step "
"""Between a parameter that was not finite before a step, and the step that made it so."""
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
            "steps": self.steps,
            "moment": self.moment,
            "stage": self.stage,
            "values": [{"name": value.name, "values": [value.straight, value.other]} for value in self.values],
            "also": self.also,
            "by_design": self.by_design,
        }


def read_rows(replayed: Mapping[str, Any]) -> list[StepRow]:
    """The rows in the JSON of `train replay --digests`."""
    return [StepRow(**{name: entry[name] for name in StepRow.__dataclass_fields__}) for entry in replayed["steps"]]


def find_first_divergence(first: Sequence[StepRow], second: Sequence[StepRow]) -> Divergence | None:
    """The first difference of the rows of two runs; None if none differs."""
    is_uneven = False
    for number, (steps, other_steps) in enumerate(_divide(first, second)):
        left, right = steps[0], other_steps[0]
        is_final = not left.batches or not right.batches
        is_step = len(steps) == len(other_steps) == 1
        is_same_division = is_step and len(left.batches) == len(right.batches)
        differing: dict[Stage, tuple[Value, ...]] = {}
        if not is_final:
            compare = _compare_leaves if is_same_division else _compare_sets
            differing[Stage.samples] = tuple(compare(steps, other_steps))
        stages: tuple[Stage, ...] = (Stage.random, *STATE)
        if is_step and not is_final:
            stages = tuple(Stage)[1:] if is_same_division else _OF_STEP
        for stage in stages:
            differing[stage] = tuple(
                differing_values(_select_comparable(left, right, stage), _select_comparable(right, left, stage))
            )
        if differing_stages := [stage for stage in Stage if differing.get(stage)]:
            stage, *also = differing_stages
            return Divergence(
                steps=(left.step, right.step),
                stage=stage,
                values=differing[stage],
                also=tuple(also),
                rows=_find_differing_rows(left, right) if stage is Stage.samples else (),
                is_first=number == 0,
                by_design=is_uneven,
            )
        is_uneven = is_uneven or len(steps) != len(other_steps)
    return None


def _divide(
    first: Sequence[StepRow], second: Sequence[StepRow]
) -> Iterator[tuple[Sequence[StepRow], Sequence[StepRow]]]:
    """The rows of both from one point at which equally many samples had been seen to the next."""
    points: list[tuple[int, int]] = []
    index = other = 0
    while index < len(first) and other < len(second):
        # A step without samples, as with a batch of weight 0, has a successor with the same number.
        ahead = first[index].seen - second[other].seen
        if ahead == 0:
            points.append((index, other))
        index, other = index + (ahead <= 0), other + (ahead >= 0)
    for number, (index, other) in enumerate(points):
        end, other_end = points[number + 1] if number + 1 < len(points) else (index + 1, other + 1)
        yield first[index:end], second[other:other_end]


def _select_comparable(row: StepRow, other: StepRow, stage: Stage) -> Mapping[str, str]:
    """The values of a stage; those of rank 0 alone if the other run has another number of ranks."""
    values = row.values.get(stage, {})
    if row.ranks == other.ranks:
        return values
    return {name: digest for name, digest in values.items() if OF_RANK not in name}


def _compare_leaves(steps: Sequence[StepRow], other_steps: Sequence[StepRow]) -> Iterator[Value]:
    """For each leaf of the batch of one step its first sample that differs."""
    left, right = steps[0].rows, other_steps[0].rows
    for name in {**left, **right}:
        rows, others = left.get(name, []), right.get(name, [])
        if len(rows) != len(others):
            yield Value(name, *(format_count(len(samples), "sample") for samples in (rows, others)))
        elif pair := next((pair for pair in zip(rows, others, strict=True) if pair[0] != pair[1]), None):
            yield Value(name, *pair)


def _compare_sets(steps: Sequence[StepRow], other_steps: Sequence[StepRow]) -> Iterator[Value]:
    """Compare the samples of several steps in any order: batches of another size divide them differently."""
    samples, others = sorted(_list_samples(steps)), sorted(_list_samples(other_steps))
    if samples != others:
        yield Value("the set of samples", format_count(len(samples), "sample"), format_count(len(others), "sample"))


def _find_differing_rows(left: StepRow, right: StepRow) -> tuple[int, ...]:
    pairs = zip(_list_samples([left]), _list_samples([right]), strict=False)
    return tuple(position for position, (sample, other) in enumerate(pairs) if sample != other)


def _list_samples(steps: Sequence[StepRow]) -> list[tuple[str, ...]]:
    """For each sample its digests in all leaves."""
    return [sample for step in steps for sample in zip(*step.rows.values(), strict=False)]
