"""What a comparison of two runs found: facts that differ, the first difference, and the facts that can explain it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.divergence import Divergence, Stage
from trainer_cli.terminal import format_first

LENGTH = "loop.max_duration"
"""The key of the length of a training, which a schedule may depend on."""
STEP_SIZES = ("data.batch_size", "data.global_batch_size", "loop.grad_accum_steps", "loop.microbatch")
_CAUSES: Mapping[Stage, tuple[str, ...]] = {
    Stage.samples: ("data", "seed", "parallel"),
    Stage.random: ("seed", "ckpt", "load", "model", "data", "callbacks"),
    Stage.inputs: ("model_call", "callbacks", "data"),
    Stage.settings: ("optimizer", "scheduler", "param_groups", "callbacks", LENGTH),
    Stage.optimizer: ("optimizer", "load", "ckpt", "step"),
    Stage.weights: ("model", "seed", "ckpt", "load", "optimizer", "step", "callbacks"),
    Stage.buffers: ("model", "ckpt"),
    Stage.callbacks: ("callbacks",),
    Stage.other: ("scheduler", "precision", "step", LENGTH),
    Stage.outputs: ("model", "precision", "compile", "callbacks"),
    Stage.drawn: ("model",),
    Stage.loss: ("model", "precision", "compile", "step"),
    Stage.gradients: (*STEP_SIZES, "precision.dtype", "compile", "parallel", "model", "step"),
    Stage.clipped: ("precision", "callbacks"),
}
"""Keys of a config, or sections, that decide a stage where all stages before it are equal."""
_WITHOUT_CODE = (Stage.settings, Stage.clipped, Stage.other)
_EXACT = (Stage.samples, Stage.random, Stage.settings, Stage.drawn, Stage.other)
"""Stages in which no floating-point number is computed, so that libraries and threads do not matter."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the runs were made from and that differs."""

    kind: str
    """`config`, `source`, `data`, `version`, or the name of a fact such as `threads`."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind} {self.text}" if self.kind in ("config", "source", "data") else f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Records:
    """The records that both runs have: how many are equal, and the first value that is not."""

    equal: int = 0
    last_equal: int = 0
    """The last step before the difference whose records are equal; 0: none is."""
    step: int | None = None
    key: str = ""
    values: tuple[Any, Any] = (None, None)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """first, second -> the names of values that only this run has at a step of both."""
    windows: Sequence[int] = ()
    """Steps with means over other steps in the two runs, which are not compared."""

    def __str__(self) -> str:
        only = "".join(f"; only in the {run}: {format_first(names, 6)}" for run, names in self.only.items())
        if self.windows:
            only += f"; means over other steps, not compared: steps {format_first([f'{at:,}' for at in self.windows])}"
        if self.step is None:
            return (f"{self.equal:,} equal, none differs" if self.equal else "none to compare") + only
        first, second = self.values
        return f"{self.equal:,} equal, step {self.step:,} differs first: {self.key} {first} -> {second}{only}"


@dataclass(frozen=True, slots=True)
class States:
    """Kept checkpoints of the same step: the last that are equal, the first that are not."""

    equal: int | None = None
    differs: int | None = None
    name: str = ""
    """The first leaf that differs."""

    def __str__(self) -> str:
        equal = "none equal" if self.equal is None else f"equal up to step {self.equal:,}"
        return equal if self.differs is None else f"{equal}, step {self.differs:,} differs: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceReport:
    """The outcome of a comparison."""

    runs: tuple[Path, Path]
    facts: Sequence[Fact] = ()
    records: Records | None = None
    states: States | None = None
    notes: Sequence[str] = ()
    divergence: Divergence | None = None
    samples: Sequence[str] = ()
    """Lines about the samples that differ."""
    causes: Sequence[Fact] = ()
    """The facts that can explain the first difference."""
    last: int = 0
    """The last step that was compared."""

    @property
    def equal(self) -> bool:
        """Whether nothing that was computed differs."""
        records, states = self.records, self.states
        return self.divergence is None and not (
            (records is not None and records.step is not None) or (states is not None and states.differs is not None)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "runs": self.runs,
            "equal": self.equal,
            "differs": list(map(asdict, self.facts)),
            "records": self.records and asdict(self.records),
            "checkpoints": self.states and asdict(self.states),
            "notes": self.notes,
            "first": self.divergence and self.divergence.as_dict(),
            "samples": self.samples,
            "causes": list(map(str, self.causes)),
            "last": self.last,
        }

    def __str__(self) -> str:
        rows = [(fact.kind, fact.text) for fact in self.facts]
        rows += [("records", str(self.records))] * (self.records is not None)
        rows += [("checkpoints", str(self.states))] * (self.states is not None)
        rows += [("note", note) for note in self.notes]
        lines = [f"{self.runs[0]} -> {self.runs[1]}", *(f"  {title:<11} {text}" for title, text in rows)]
        return "\n".join([*lines, *self._result()])

    def _result(self) -> Iterator[str]:
        divergence = self.divergence
        if divergence is None:
            if self.equal:
                yield f"equal up to step {self.last:,}"
            else:
                yield "not equal, though every replayed step is: see the records, checkpoints and notes above"
            return
        yield f"diverge {divergence.moment}: {divergence.stage} {divergence.shown}"
        for line in self.samples:
            yield f"  {line}"
        if divergence.also:
            yield f"  also        {', '.join(divergence.also)}"
        if divergence.by_design:
            yield "  by design   both have seen the same samples until here, in steps of other sizes"
        for cause in self.causes:
            yield f"  likely      {cause}"
        if not self.causes and not divergence.by_design:
            yield "  likely      nothing that the runs recorded explains it: a file, a library or chance"
        step = divergence.steps[0] if not divergence.is_state or divergence.is_first else divergence.steps[0] - 1
        words = f"{shlex.quote(str(self.runs[0]))} {max(step, 1)}"
        yield from ("next:", f"  train replay {words}", f"  train data {words} --show")


def explain(report: DivergenceReport) -> DivergenceReport:
    """The report with the facts that can explain its first difference."""
    divergence = report.divergence
    if divergence is None:
        # Only what is not here any more can have made the records differ.
        source = [fact for fact in report.facts if fact.kind == "source"]
        return report if report.equal else replace(report, causes=source)
    stage = divergence.stage
    if divergence.by_design:
        return replace(report, causes=[fact for fact in report.facts if is_below(fact, STEP_SIZES)])
    causes = [fact for fact in report.facts if is_below(fact, _CAUSES[stage])]
    if stage is Stage.samples:
        causes += [fact for fact in report.facts if fact.kind == "data"]
    if stage not in _WITHOUT_CODE:
        # A file that only one run has imported is named, but explains nothing by itself.
        causes += [fact for fact in report.facts if fact.kind == "source" and fact.text.endswith(": changed")]
    if stage not in _EXACT:
        causes += [fact for fact in report.facts if fact.kind not in ("config", "data", "source")]
    return replace(report, causes=causes)


def is_below(fact: Fact, keys: Sequence[str]) -> bool:
    """Whether a fact is a change of one of these keys of the config, or below one."""
    changed = fact.text.partition(":")[0]
    return fact.kind == "config" and any(changed == key or changed.startswith(f"{key}.") for key in keys)
