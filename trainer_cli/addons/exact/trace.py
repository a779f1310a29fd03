"""The plan of a probe, what the probe records at each point of a training, and where two such traces first differ.

A trace is a file of JSON lines in causal order, so the first line that differs is where it began:

    before each step   hidden (what no checkpoint holds), then state (all that it holds)
    for each batch     batch, loss
    then               gradients, and the state before the next step
    at an evaluation   its batches and its metrics
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

OWN_FAILURE = "train check resume itself failed"
"""Begins the message of an error of the check, which the training did not make."""


class StopPlace(StrEnum):
    """The places at which a probe can be stopped."""

    mid_epoch = "mid_epoch"
    second_epoch = "second_epoch"
    """In the middle of an epoch that is not the first."""
    epoch_end = "epoch_end"
    evaluated = "evaluated"
    """After an evaluation, before its checkpoint."""
    at_once = "at_once"
    """Started, and stopped before it makes a step."""
    accumulating = "accumulating"
    """Killed after backward, before the optimizer step."""


@dataclass(frozen=True, slots=True)
class ProbeStop:
    """Where a process is stopped: at the first such place after `after` of its steps, at the latest at step `by`."""

    when: StopPlace
    after: int = 0
    by: int = 0
    twice: bool = False
    """After the restart it is stopped again at once, and restarted."""


def plan_chains(steps: int) -> tuple[tuple[ProbeStop, ...], ...]:
    """Independent runs with several stops each, which together cover every place."""
    signalled = (
        ProbeStop(StopPlace.mid_epoch, after=3, by=steps // 3),
        ProbeStop(StopPlace.second_epoch, after=2, by=2 * steps // 3, twice=True),
    )
    killed = (
        ProbeStop(StopPlace.accumulating, after=SAVED_STEP + 1, by=SAVED_STEP + 4),
        ProbeStop(StopPlace.epoch_end, after=1, by=steps // 2),
        ProbeStop(StopPlace.evaluated, after=2, by=steps - 1),
    )
    return signalled, killed


SAVED_STEP = 1
"""The step of the checkpoint that a killed run resumes."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The work of one process, passed to it as a file."""

    config: Path
    """The whole config, composed once for all processes."""
    trace: Path
    config_dir: Path | None = None
    stop: ProbeStop | None = None
    calls: Path | None = None
    """The file for calls of clocks and unseeded generators; None: they are not recorded."""

    def write(self, path: Path) -> None:
        """Put it into a file."""
        path.write_text(json.dumps(asdict(self), default=str), "utf-8")

    @classmethod
    def read(cls, path: str | Path) -> ProbePlan:
        """Take it from a file."""
        content = json.loads(Path(path).read_text("utf-8"))
        stop = content.pop("stop")
        paths = {key: value and Path(value) for key, value in content.items()}
        return cls(**paths, stop=stop and ProbeStop(**{**stop, "when": StopPlace(stop["when"])}))


class TraceKind(StrEnum):
    """What a record is of."""

    saved = "saved"
    """The state that goes into a checkpoint, and what is hidden then; not part of the order of the others."""
    loaded = "loaded"
    """The state right after a checkpoint was loaded; not part of the order either."""
    hidden = "hidden"
    """Python attributes, generators and other things that are in no checkpoint. Evidence, never a verdict."""
    state = "state"
    batch = "batch"
    loss = "loss"
    gradients = "gradients"
    evaluation = "evaluation"


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Digests by name, at one moment. `step` counts the steps made; `batch` those of the step, or the evaluation."""

    kind: TraceKind
    step: int
    batch: int
    values: Mapping[str, str]

    @property
    def key(self) -> tuple[TraceKind, int, int]:
        """Which moment it is: the same in every run of the training."""
        return self.kind, self.step, self.batch


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a process wrote down. `facts` are of its start, `stopped` of the place where it was stopped."""

    records: list[TraceRecord] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)
    saved: dict[int, dict[str, str]] = field(default_factory=dict)
    """By step: all state, and what is hidden, when it was last saved."""
    loaded: dict[str, str] = field(default_factory=dict)
    """All state right after a checkpoint was loaded, before callbacks could change it; empty if none was."""

    def values_at(self, step: int) -> Mapping[str, str]:
        """All state, and what is hidden, between a step and the next; empty if that was not recorded."""
        last = {record.kind: record.values for record in self.records if record.step == step}
        return {**last.get(TraceKind.state, {}), **last.get(TraceKind.hidden, {})}

    @property
    def last_step(self) -> int:
        """The last step that it records."""
        after = (TraceKind.state, TraceKind.hidden, TraceKind.evaluation)
        return max((record.step + (record.kind not in after) for record in self.records), default=0)


@dataclass(frozen=True, slots=True)
class Value:
    """One thing that differs. Numbers and short texts are shown as they are, all else as digests."""

    name: str
    straight: str
    other: str


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """What differs at one moment, and what of the hidden had differed just before."""

    kind: TraceKind
    step: int
    batch: int
    restored: bool
    """It is there at the very first moment after a resume."""
    values: tuple[Value, ...]
    hidden: tuple[Value, ...] = ()
    came_back: bool = False
    """The first value was as in the straight run when the checkpoint was loaded, and changed before the first step."""

    @property
    def at_step(self) -> int:
        """The step, counted from 1, that shows it first."""
        is_after = self.kind is TraceKind.evaluation or (self.kind is TraceKind.state and not self.restored)
        return self.step if is_after else self.step + 1

    @property
    def moment(self) -> str:
        """StopPlace, in words."""
        if self.kind is TraceKind.evaluation:
            return f"the evaluation after step {self.step}"
        if self.kind is TraceKind.state:
            return f"as restored, before step {self.step + 1}" if self.restored else f"after step {self.step}"
        return f"step {self.step + 1}, {self.kind}"


class TraceWriter:
    """Writes a trace, each line whole before anything else happens: the process may be killed at any time."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: a kill loses at most the line that is being written.
        self._file = path.open("ab", buffering=0)
        self.close = self._file.close

    def record(self, kind: TraceKind, step: int, batch: int, values: Mapping[str, str]) -> None:
        """Write one moment."""
        self.write(kind=kind, step=step, batch=batch, values=values)

    def write(self, **line: Any) -> None:
        """Write `facts` of this process, the position at which it is about to be `stopped`, or a moment."""
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def read_trace(path: Path) -> Trace:
    """The trace in a file; what a kill cut short is left out."""
    trace = Trace()
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            # Cut short by a kill.
            continue
        trace.facts.update(entry.get("facts", {}))
        trace.stopped.update(entry.get("stopped", {}))
        match entry.get("kind"):
            case None:
                pass
            case TraceKind.saved:
                # Several savers at one step each add what they hold.
                trace.saved.setdefault(entry["step"], {}).update(entry["values"])
            case TraceKind.loaded:
                trace.loaded.clear()
                trace.loaded.update(entry["values"])
            case kind:
                trace.records.append(TraceRecord(TraceKind(kind), entry["step"], entry["batch"], entry["values"]))
    return trace


def differences(
    straight: Trace, other: Trace, *, resumed: bool, ignored: Collection[str] = ()
) -> Iterator[TraceDifference]:
    """Each moment at which another process's trace differs from the straight one's, from its beginning on.

    Where a moment is missing or too many, that is the last difference listed.
    """
    keys = [record.key for record in straight.records]
    if not other.records:
        return
    first = other.records[0].key
    # A resumed process begins in the middle of the straight run.
    begin = keys.index(first) if first in keys else len(keys)
    hidden: tuple[Value, ...] = ()
    restored = resumed
    for expected, record in zip([*straight.records[begin:], None], other.records, strict=False):
        if expected is None or expected.key != record.key:
            # The traces are out of step from here on, so a comparison of what follows would mean nothing.
            event = "nothing more" if expected is None else f"{expected.kind} at step {expected.step}"
            moment = Value("what happens", event, f"{record.kind} at step {record.step}")
            yield TraceDifference(record.kind, record.step, record.batch, restored, (moment,))
            return
        values = tuple(differing_values(expected.values, record.values, ignored))
        if record.kind is TraceKind.hidden:
            hidden = values
        if values:
            came_back = restored and other.loaded.get(values[0].name) == values[0].straight
            yield TraceDifference(record.kind, record.step, record.batch, restored, values, hidden, came_back)
        # The first batch ends what was restored: from there on it was computed.
        if record.kind not in (TraceKind.state, TraceKind.hidden):
            restored = False


def first_difference(candidates: Iterator[TraceDifference]) -> TraceDifference | None:
    """The first difference of recorded state or results, with the hidden state that differed at that moment.

    A difference of hidden state alone does not count: it may never be used.
    """
    return next((difference for difference in candidates if difference.kind is not TraceKind.hidden), None)


def before_the_stop(
    straight: Trace, stopped: Trace, difference: TraceDifference, ignored: Collection[str] = ()
) -> TraceDifference | None:
    """The difference that a resumed process began with, if its checkpoint was saved with it: it arose before the stop.

    Args:
        difference: at the first moment of the resumed process.
        stopped: trace of the process that saved the checkpoint.
    """
    expected, saved = straight.values_at(difference.step), stopped.saved.get(difference.step)
    if saved is None or not expected:
        return None
    names = {value.name for value in difference.values}
    # Values that only one of them has were recorded at another moment, and prove nothing.
    candidates = [value for value in differing_values(expected, saved, ignored) if value.name in {*expected} & {*saved}]
    values = tuple(value for value in candidates if value.name in names)
    if not values:
        return None
    state = {name for record in straight.records if record.kind is TraceKind.state for name in record.values}
    hidden = tuple(value for value in candidates if value.name not in state)
    return replace(difference, restored=False, values=values, hidden=hidden)


def differing_values(
    straight: Mapping[str, str], other: Mapping[str, str], ignored: Collection[str] = ()
) -> Iterator[Value]:
    """The values of two trainings at one moment that differ, in their order."""
    for name in {**straight, **other}:
        value = Value(name, straight.get(name, "absent"), other.get(name, "absent"))
        if value.straight != value.other and name not in ignored:
            yield value
