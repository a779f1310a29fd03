"""Find the first step of a run at which a condition holds: in its records, its kept checkpoints, then replayed steps.

    the first record with the metric at which the condition holds, and the record before it
    the kept checkpoints between these two, by bisection
    the steps between two of these, by bisection: each is replayed from the step before that is known

Each evaluated step is written into `RUN/replayed/bisect`, so that an interrupted search continues. Of the
checkpoints that a search replays only those around the step stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import re
import shlex
import subprocess
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.replay_plan import find_step, split_steps
from trainer_cli.addons.exact.replay_process import read_json_of, replay_in_process
from trainer_cli.addons.exact.step_positions import read_records
from trainer_cli.catalog import Catalog
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.files import read_rows
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.origin import use_kept_source
from trainer_cli.patterns import did_you_mean
from trainer_cli.runs import Run, RunDir, write_json
from trainer_cli.selection import provide_steps
from trainer_cli.steps import RunStatus

if TYPE_CHECKING:
    from trainer_cli.running import Results

log = logging.getLogger(__name__)

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_COMPARISON = re.compile(r"\s*([^\s<>=!]+)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
_NOT_FINITE = re.compile(r"\s*(\S+)\s+is\s+not\s+finite\s*")
_SKIPPED, _ABORTED = 125, 128
"""Exit codes of a command that cannot test a step, and from which on it has failed, as in `git bisect run`."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a metric: `val/loss > 2`, or `val/loss is not finite`."""

    metric: str
    sign: str | None
    """None: the metric is not finite."""
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            UserError: it is not a condition.
        """
        if (match := _NOT_FINITE.fullmatch(text)) is not None:
            return cls(match[1], None)
        match, number = _COMPARISON.fullmatch(text), 0.0
        try:
            if match is not None and not math.isnan(number := float(match[3])):
                return cls(match[1], match[2], number)
        except ValueError:
            pass
        forms = "'val/loss > 2', or 'val/loss is not finite'"
        if match is not None and math.isnan(number):
            # It would never hold: NaN equals nothing.
            forms = f"'{match[1]} is not finite'"
        raise UserError(f"{text!r} is not a condition", cure=f"Write it as {forms}.")

    def holds(self, value: float) -> bool:
        """Whether the condition holds for a value of the metric."""
        return not math.isfinite(value) if self.sign is None else _OPERATORS[self.sign](value, self.number)


@dataclass(frozen=True, slots=True)
class TestedStep:
    """A step at which the condition was tested."""

    step: int
    holds: bool
    value: float | None
    """The metric's value; None: a command was run."""
    recorded: bool = False
    """Whether the value is that of a record, so that nothing was evaluated."""


@dataclass(frozen=True, slots=True)
class FoundStep:
    """The end of a search."""

    step: int
    """The condition holds at this step, and not at the one before."""
    evaluations: int
    """Number of steps that were evaluated, in this search and in those before that were interrupted."""
    batches: Sequence[Mapping[str, Any]] = ()
    """Its batches, if the step was replayed for its own loss; see `StepRow.batches`."""


def search(low: int, high: int, kept: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The step at which a condition holds that does not hold at the step before, between `low` and `high`.

    It does not hold at `low`, and holds at `high`. Kept steps are tested first.
    """
    between = [step for step in kept if low < step < high]
    first = bisect_left(between, True, key=holds)
    low, high = [low, *between, high][first : first + 2]
    return low + 1 + bisect_left(range(low + 1, high), True, key=holds)


class Bisection:
    """A search in one run.

    Args:
        condition: tested by an evaluation of each checkpoint; None: by `command`.
        overrides: of the config with which steps are replayed and evaluated.
        command: run with `{checkpoint}` and `{step}` replaced; exit code 0: the condition does not hold.
        show: called with each step that was tested.
    """

    def __init__(
        self,
        run: Path,
        condition: Condition | None,
        command: str | None = None,
        *,
        overrides: Sequence[str] = (),
        config_dir: Path | None = None,
        show: Callable[[TestedStep], None] = lambda tested: None,
    ) -> None:
        self.records = read_records(run)
        RunDir.open(run)  # `RUN@attempt1` names records, but no run.
        # The value of a command is 0 where the checkpoint is good.
        self.run, self.condition = RunDir(run), condition or Condition("", "!=")
        self._words = _read_command(command)
        self._overrides, self._config_dir, self._show = list(overrides), config_dir, show
        self._flags = [] if config_dir is None else ["--config-dir", str(config_dir)]
        self._metric = self._read_metric()
        # A later attempt may have made steps again, with other values.
        facts = repr((condition, command, _versions_of(self._words), self._overrides, len(self.records.attempts)))
        name = hashlib.sha256(facts.encode()).hexdigest()[:12]
        self._file = self.run.searches_folder / f"{name}.json"
        self._values: dict[int, float] = {}
        """Step -> the metric, or 1 if the command says that the condition holds."""
        self._replayed: set[int] = set()
        """Steps whose checkpoints the search has replayed."""
        self._read_state()

    def find(self, first: int | None = None, last: int | None = None) -> FoundStep:
        """The first step of a crossing between `first` and `last`, by default in the whole run.

        Raises:
            UserError: the condition holds at the first step, or does not at the last.
        """
        newest = self.records.newest_step
        may_fail = last is None and self.run.read_summary().get("status") == RunStatus.failed
        is_given = first is not None or last is not None
        first, last = 0 if first is None else first, newest if last is None else last
        if not 0 <= first < last <= newest:
            raise UserError(f"there is nothing between step {first} and step {last}: the run has steps 1 to {newest}")
        low, high = self._bracket(first, last)
        if self.condition.metric.startswith(TRAIN_PREFIX):
            if not any(self.condition.holds(value) for step, value in self._metric.items() if low < step <= high):
                # A run that failed may have made steps after its last record.
                low, high = first if is_given else max(self._metric, default=first), last
                if low == high or not (is_given or may_fail):
                    raise UserError(
                        f"the condition holds at no record of {self.condition.metric}",
                        cure="A record is a mean over several steps; --first and --last choose those to replay.",
                    )
            return self._find_in_training(low, high)
        try:
            holds = self._test(high)
        except CheckpointError:
            # The step that ended the run with an error ends its replay, too.
            if not may_fail or high != newest or high - 1 <= low:
                raise
            high -= 1
            holds = self._test(high)
        if not holds:
            self._forget_command()
            raise UserError(
                f"the condition does not hold at step {high}, the last one of the search",
                cure="A condition that holds only in between needs --first and --last around it.",
            )
        if self._test(low):
            self._forget_command()
            raise UserError(
                f"the condition holds at step {low} already, the first one of the search", cure=self._suggest(low)
            )
        step = search(low, high, list(self.records.checkpoints), self._test)
        self._remove_replayed({step - 1, step})
        return FoundStep(step, len(self._values))

    def _suggest(self, low: int) -> str:
        """What to do where the condition holds from the beginning."""
        step = next((step for step in sorted(self._metric) if step > low), None)
        if self.condition.sign is not None or step is None:
            return f"--first chooses a later step than {low} at which it does not hold."
        # Trained weights are not the cause, so a sample of the set is.
        replayed = f"train replay {shlex.quote(str(self.run.path))} {step}"
        return f"No step began it, so look at the samples that are evaluated: `{replayed}` names them."

    def _find_in_training(self, low: int, high: int) -> FoundStep:
        """The first of the steps after `low` in whose batches the condition holds: a record is a mean over several."""
        words = [*self._overrides, *self._flags]
        name = self.condition.metric.removeprefix(TRAIN_PREFIX)
        for first, last in split_steps(Run.open(self.run.path), low + 1, high):
            for row in replay_in_process(self.run.path, first, last, words, quiet=False)["steps"]:
                step, sizes = row["step"], [batch["samples"] for batch in row["batches"]]
                try:
                    # JSON holds NaN as text.
                    values = [float(batch[name]) for batch in row["batches"]]
                except (KeyError, TypeError, ValueError):
                    cure = "Name train/loss, or a number that the model returns."
                    raise UserError(f"no step measures {self.condition.metric!r}", cure=cure) from None
                value = sum(map(operator.mul, values, sizes)) / max(1, sum(sizes))
                if self._report(step, value):
                    return FoundStep(step, step - low, row["batches"])
        raise UserError(
            f"the condition holds at none of the steps {low + 1} to {high}",
            cure="A record is a mean over several steps; --first and --last choose other steps.",
        )

    def _bracket(self, first: int, last: int) -> tuple[int, int]:
        """The narrowest steps around the first crossing that the records of the run tell."""
        low = first
        for step, value in sorted(self._metric.items()):
            if not first <= step <= last:
                continue
            if self.condition.holds(value):
                return (low, step) if step > low else (first, last)
            low = step
        return first if low == last else low, last

    def _read_metric(self) -> dict[int, float]:
        """Step -> the metric of the condition, as the run recorded it."""
        name = self.condition.metric
        return {
            int(record["step"]): float(record[name])
            for record in read_rows(self.run.metrics_file)
            if name in record and "step" in record
        }

    def _test(self, step: int) -> bool:
        """Whether the condition holds at a step."""
        if (recorded := self._metric.get(step)) is not None:
            return self._report(step, recorded, recorded=True)
        if step not in self._values:
            self._values[step] = self._evaluate(step)
            self._write_state()
        return self._report(step, self._values[step])

    def _report(self, step: int, value: float, *, recorded: bool = False) -> bool:
        tested = TestedStep(step, self.condition.holds(value), None if self._words else value, recorded=recorded)
        self._show(tested)
        return tested.holds

    def _evaluate(self, step: int) -> float:
        """The metric at a step, or 1 if the command says that the condition holds there."""
        path = find_step(self.run.path, step)
        # Before a replay, which then uses the same view.
        use_kept_source(self.run, self.records.attempt_of(max(step, 1)).number, self._overrides, self._config_dir)
        if path is None:
            provide_steps([f"{self.run.path}@step{step}"], overrides=self._overrides, config_dir=self._config_dir)
            path = find_step(self.run.path, step)
            self._replayed.add(step)
        assert path is not None, "a step that was replayed has a checkpoint"
        return self._run_command(path, step) if self._words else self._validate(path)

    def _validate(self, path: Path) -> float:
        # Imported here: it loads torch.
        from trainer_cli.running import validate

        metric = self.condition.metric
        values: dict[str, float] = {}

        def collect(results: Results) -> None:
            for row in results.rows:
                values.update({f"{row.loader}/{name}": value for name, value in row.metrics.items()})

        folder = self._file.parent / "validation"
        settings = [f"validate.folder={json.dumps(str(folder))}", "logging.level=warning"]
        words = [f"ckpt={path}", *settings, *self._overrides]
        if len({attempt.get("source") for attempt in self.run.attempts}) > 1:
            # Of several sources, each is imported in a process of its own.
            rows = read_json_of(["validate", *words, *self._flags, "--json"])["rows"]
            values = {f"{row['loader']}/{name}": float(value) for row in rows for name, value in row["metrics"].items()}
        else:
            validate(words, config_dir=self._config_dir, show=collect)
        if metric not in values:
            measured = ", ".join(sorted(values)) or "none"
            raise UserError(
                f"no evaluation measures {metric!r}",
                cure=f"There are {measured}.{did_you_mean(metric, values)}",
            )
        return values[metric]

    def _run_command(self, path: Path, step: int) -> float:
        words = [word.replace("{checkpoint}", str(path)).replace("{step}", str(step)) for word in self._words]
        try:
            code = subprocess.run(words, check=False).returncode
        except OSError as error:
            raise UserError(f"{words[0]} cannot be run: {error.strerror}", where="--command") from None
        if code == _SKIPPED or not 0 <= code < _ABORTED:
            raise UserError(
                f"the command ended with {code} at step {step}, so the search stops there",
                cure="0: the condition does not hold. 1 to 124: it holds. The same command continues the search.",
            )
        return float(code != 0)

    def _forget_command(self) -> None:
        """Forget what the command said: one that gives the same everywhere may be corrected before it runs again."""
        if self._words:
            self._values.clear()
            self._write_state()

    def _read_state(self) -> None:
        try:
            state = json.loads(self._file.read_bytes())
            values = {int(step): float(value) for step, value in state["values"].items()}
            self._values, self._replayed = values, set(map(int, state["replayed"]))
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            # Without a state the search begins.
            return

    def _write_state(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # As text, because JSON has no NaN.
        values = {str(step): str(value) for step, value in self._values.items()}
        write_json(self._file, {"values": values, "replayed": sorted(self._replayed)})

    def _remove_replayed(self, around: set[int]) -> None:
        """Remove the checkpoints that this search replayed, but those around the step."""
        storage = Catalog.of(self.run.replayed_folder).storage
        for step in sorted(self._replayed - around):
            if (path := find_step(self.run.path, step)) is not None and path.parent == self.run.replayed_folder:
                storage.remove(path.name)
        self._replayed &= around
        self._write_state()


def _read_command(command: str | None) -> list[str]:
    """The words of a command.

    Raises:
        UserError: there is no word, or a quote is not closed.
    """
    try:
        words = [] if command is None else shlex.split(command)
    except ValueError as error:
        raise UserError(f"{command!r} is not a command: {error}", where="--command") from None
    if command is not None and not words:
        raise UserError("the command is empty", where="--command", cure="For example: 'python probe.py {checkpoint}'.")
    return words


def _versions_of(files: Sequence[str]) -> list[tuple[int, int]]:
    """Size and time of each word that is a file: a program that has changed since begins another search."""
    states = [Path(file).stat() for file in files if Path(file).is_file()]
    return [(state.st_size, state.st_mtime_ns) for state in states]
