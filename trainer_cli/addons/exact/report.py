"""What a resume check found: the traces of stopped runs against the straight one, as rows, differences and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer_cli.addons.exact.attempts import Chain, ProbeAttempt
from trainer_cli.addons.exact.causes import Cause, is_used_again
from trainer_cli.addons.exact.trace import (
    ProbeStop,
    StopPlace,
    Trace,
    TraceDifference,
    TraceKind,
    Value,
    before_the_stop,
    differences,
    first_difference,
)
from trainer_cli.terminal import format_count, table


@dataclass(frozen=True, slots=True)
class StopRow:
    """One stop: where it was, which steps after it were compared, and the result."""

    stop: str
    at: str
    compared: str
    result: str
    exact: bool | None
    """None: it was not reached, so nothing was compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that differs, and why."""

    after: str
    """The stop after which it differs."""
    step: int
    moment: str
    shows: str
    """The values that differ at that moment."""
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """The outcome of a check."""

    name: str
    steps: int
    steps_per_epoch: int | None
    device: str
    rows: Sequence[StopRow]
    finding: Finding | None
    remarks: Sequence[str]
    processes: int = 0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every stop that was reached was resumed exactly."""
        return self.finding is None and all(row.exact is not False for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"exact": self.exact, **asdict(self)}

    def __str__(self) -> str:
        epoch = f", {self.steps_per_epoch} an epoch" if self.steps_per_epoch else ""
        lines = [f"{self.name}: {format_count(self.steps, 'step')}{epoch}, on {self.device}", ""]
        rows = [(row.stop, row.at, row.compared, row.result) for row in self.rows]
        lines.append(table(("stop", "at", "compared", "result"), rows))
        lines.append("")
        if self.finding is not None:
            lines += self._describe(self.finding)
        else:
            count = sum(row.exact is True for row in self.rows)
            lines.append(
                f"exact: {format_count(count, 'stop')} resumed, bit for bit as without a stop "
                f"({format_count(self.processes, 'process')}, {self.seconds:g}s)"
            )
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    @staticmethod
    def _describe(finding: Finding) -> list[str]:
        rows = {
            "first": f"{finding.moment} ({finding.after})",
            "shows": finding.shows,
            "state": finding.cause.state,
            "cause": finding.cause.cause,
            "cure": finding.cause.cure,
        }
        return ["not exact", *(f"  {key:<6} {text}" for key, text in rows.items() if text)]


_TITLES = {
    StopPlace.mid_epoch: "stopped mid-epoch",
    StopPlace.second_epoch: "stopped in a later epoch, and again at once",
    StopPlace.epoch_end: "stopped at the end of an epoch",
    StopPlace.evaluated: "stopped after an evaluation",
    StopPlace.accumulating: "killed between backward and step",
}


@dataclass(frozen=True, slots=True)
class FoundDifference:
    """A difference, the run that showed it, and the stop before; without a stop the process was its first."""

    difference: TraceDifference
    chain: Chain
    stop: ProbeStop | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Traces beside the straight one. `noise`: what differs between two straight runs too, and changes nothing."""

    straight: Trace
    noise: frozenset[str] = frozenset()

    @classmethod
    def with_noise(cls, straight: Trace, repeat: Trace) -> Comparison:
        """Ignore hidden state, and times in callbacks' states, that differ between two straight runs too."""
        noise = {
            value.name
            for difference in differences(straight, repeat, resumed=False)
            for value in difference.values
            if difference.kind is TraceKind.hidden or _may_be_a_time(value)
        }
        return cls(straight, frozenset(noise))

    def first(self, other: Trace, *, resumed: bool, with_noise: bool = False) -> TraceDifference | None:
        """The first difference of a process that counts."""
        ignored = self._ignored(hidden=not with_noise)
        return first_difference(differences(self.straight, other, resumed=resumed, ignored=ignored))

    def found(self, chain: Chain) -> list[FoundDifference]:
        """The first difference of each process of a run, with the stop after which it arose."""
        result: list[FoundDifference] = []
        before: ProbeAttempt | None = None
        for attempt in chain.trained:
            difference, stop = self.first(attempt.trace, resumed=attempt.after is not None), attempt.after
            if difference is not None:
                if before is not None and difference.restored and difference.kind is TraceKind.state:
                    # Loading is not to blame where the checkpoint was saved with the difference.
                    arose = before_the_stop(self.straight, before.trace, difference, self._ignored())
                    if arose is not None:
                        difference, stop = arose, before.after
                result.append(FoundDifference(difference, chain, stop))
            before = attempt
        return result

    def can_continue(self, chain: Chain) -> bool:
        """False once a process has differed, but by what may be a time: all that follows would differ as well."""
        return all(all(map(_may_be_a_time, shown.difference.values)) for shown in self.found(chain))

    def lasting(self, chain: Chain) -> list[Value]:
        """Hidden things that still differ at the end of a resumed process: what no checkpoint brought back."""
        lost: dict[str, Value] = {}
        for attempt in chain.trained:
            if attempt.after is None:
                continue
            hidden_steps = [record.step for record in attempt.trace.records if record.kind is TraceKind.hidden]
            for difference in differences(self.straight, attempt.trace, resumed=True, ignored=self._ignored()):
                if difference.kind is TraceKind.hidden and difference.step == hidden_steps[-1]:
                    lost.update({value.name: value for value in difference.values if is_used_again(value)})
        return list(lost.values())

    def rows(self, chain: Chain) -> list[StopRow]:
        """A row for each stop of a run."""
        return [self._row(chain, stop) for stop in chain.stops]

    def _row(self, chain: Chain, stop: ProbeStop) -> StopRow:
        title, around = title_of(stop), chain.around(stop)
        if not around:
            return StopRow(title, "-", "-", "not tried", None)
        position = around[0].trace.stopped
        at = "step {step}, epoch {epoch}, batch {batch}".format(**position) if position else "-"
        failed = next((attempt for attempt in around if attempt.failed), None)
        if failed is not None:
            return StopRow(title, at, "-", "fails", False)
        # The runner gave the run up after an earlier difference.
        if around[0].ended_as_planned and len(around) < 2 + stop.twice:
            return StopRow(title, at, "-", "not tried", None)
        if not around[0].ended_as_planned:
            return StopRow(title, at, "-", "not reached: the run ended before", None)
        after = around[-1].trace
        if not after.records:
            return StopRow(title, at, "-", "nothing to compare", None)
        difference = self.first(after, resumed=True)
        result = "exact" if difference is None else f"differs from step {difference.at_step} on"
        return StopRow(title, at, f"steps {after.records[0].step + 1} to {after.last_step}", result, difference is None)

    def _ignored(self, *, hidden: bool = True) -> frozenset[str]:
        return self.noise if hidden else frozenset(name for name in self.noise if name.startswith("callbacks."))


def find_failure(chains: Sequence[Chain]) -> Finding | None:
    """The first process that ended by an error that a run without a stop does not raise."""
    attempt = next((attempt for chain in chains for attempt in chain.attempts if attempt.failed), None)
    if attempt is None:
        return None
    who, after = "stopped", "before any resume"
    cure = "Look at what is done when a checkpoint is saved."
    if attempt.after is not None:
        who, after = "resumed", title_of(attempt.after)
        cure = "What load_state_dict and on_load_checkpoint take must be what state_dict and on_save_checkpoint give."
    step = attempt.trace.last_step
    moment = f"after step {step}" if attempt.trace.records else "at the start"
    return Finding(after, step, moment, "", Cause("", f"the {who} training fails: {attempt.message}", cure))


def title_of(stop: ProbeStop) -> str:
    """The words for a stop in the report."""
    return _TITLES[stop.when]


def _may_be_a_time(value: Value) -> bool:
    """A single number in a callback's state, such as the seconds that something took."""
    return value.name.startswith("callbacks.") and "[" not in value.straight + value.other
