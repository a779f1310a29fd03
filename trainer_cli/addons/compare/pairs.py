"""Train A and B seed by seed until the answer is clear, and record each pair.

    runs/compare/NAME/
      compare.json            what is compared
      pairs.jsonl             a line for each pair, replaced as a whole
      verdict.json            what `--json` prints, after each pair; `train report` shows it
      a-seed1/  b-seed1/ …    the runs
      .jobs/                  their frozen configs and outputs

A run whose process was killed is resumed. A finished one is not trained again, also if another comparison trained it.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer_cli.addons.compare.confidence import MeanInterval, PairedVerdict, decide_in_order, standard_deviation
from trainer_cli.addons.compare.sides import Side, find_differences, has_same_batches
from trainer_cli.errors import ExitCode, TrainError, UserError, describe_exit
from trainer_cli.files import read_rows, replace
from trainer_cli.fit_parts import RUN_JOBS, JobLimits
from trainer_cli.metric_names import Mode
from trainer_cli.patterns import did_you_mean
from trainer_cli.policy import BestRule
from trainer_cli.processes import FrozenJob
from trainer_cli.runs import BestSettings, RunDir, read_json, write_json
from trainer_cli.steps import RunStatus
from trainer_cli.terminal import format_count, format_first

log = logging.getLogger(__name__)

COMPARE_FOLDER = "compare"
SPEC_FILE = "compare.json"
VERDICT_FILE = "verdict.json"
_RECORDS = "pairs.jsonl"
_SENTENCES = {
    PairedVerdict.better: "B is better than A",
    PairedVerdict.worse: "B is worse than A",
    PairedVerdict.no_difference: "B does not differ from A by more than the margin",
    PairedVerdict.not_decided: "not decided",
}
_ORPHAN_S = 120.0
"""How long a run of a killed comparison may take to save and end."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The values of two runs with the same seed."""

    seed: int
    metric: str
    mode: str
    a: float
    b: float
    a_run: str
    b_run: str
    a_source: Mapping[str, str]
    b_source: Mapping[str, str]
    """Digests of the project's files that each imported."""

    @property
    def difference(self) -> float:
        """By how much B is better."""
        return self.a - self.b if self.mode == Mode.min else self.b - self.a


@dataclass(slots=True)
class PairedRuns:
    """One comparison, in its folder.

    Args:
        seeds: the most pairs.
        metric, mode: which metric decides, and whether less or more of it is better; None: as the runs watch it.
    """

    sides: tuple[Side, Side]
    folder: Path
    seeds: int
    margin: float
    metric: str | None = None
    mode: str | None = None
    stopped: bool = False
    """Whether a signal ended it before the answer."""
    _pairs: dict[int, Pair] = field(default_factory=dict)

    @property
    def pairs(self) -> list[Pair]:
        """The pairs in the order of their seeds, up to the one that decides."""
        first: list[Pair] = []
        while len(first) < self.seeds and len(first) + 1 in self._pairs:
            first.append(self._pairs[len(first) + 1])
        return first[: decide_in_order([pair.difference for pair in first], self.margin)[1]]

    @property
    def verdict(self) -> PairedVerdict:
        """The verdict by these pairs."""
        return decide_in_order([pair.difference for pair in self.pairs], self.margin)[0]

    def run(self, limits: JobLimits, config_dir: Path | None) -> None:
        """Train what is missing for a verdict.

        Raises:
            TrainError: a run failed, or lacks the metric.
        """
        RunDir.make_directory(self.folder)
        # One command at a time works on a comparison: two would start the same runs.
        with RunDir(self.folder).lock() as lock:
            lock.name_holder()
            self._write_spec()
            self._read_records()
            if self._is_decided():
                self._write_verdict()
                return
            if any(self._find_finished(side, 1) is None for side in self.sides):
                # Here, before A is trained: B might be wrong.
                for side in self.sides:
                    # Classes of a kept source are found in the process that trains with it.
                    if side.kept is None:
                        side.composed.check_targets()
                if self.metric is not None:
                    self._find_rule([self.metric])
            a, b = (side.keep_submitted(self.folder / ".jobs") for side in self.sides)
            self.sides = (a, b)
            stopped = RUN_JOBS.need("train compare")(
                self.folder,
                self._queue(),
                self._on_ended,
                users=[(side.composed.config.device, side.processes) for side in self.sides],
                limits=limits,
                config_dir=config_dir,
            )
            self.stopped = not self._is_decided() and (self.stopped or stopped is not None)
            self._write_verdict()

    def _write_spec(self) -> None:
        """Write what is compared, and remove the pairs of another metric.

        Raises:
            UserError: the folder has runs of other configs.
        """
        spec: dict[str, Any] = {side.letter: {"text": side.text, "digest": side.digest} for side in self.sides}
        spec |= {"metric": self.metric, "mode": self.mode}
        earlier = read_json(self.folder / SPEC_FILE) or spec
        if any(earlier[side.letter]["digest"] != side.digest for side in self.sides) and (
            (self.folder / _RECORDS).exists() or any(self.folder.glob("?-seed*/checkpoints/*"))
        ):
            raise UserError(f"{self.folder} compares other configs", where="--name", cure="Take another --name.")
        if any(earlier.get(key) != spec[key] for key in ("metric", "mode")):
            # First: after a kill the next command would take them for its own.
            for name in (_RECORDS, VERDICT_FILE):
                (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / SPEC_FILE, spec)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        a, b = self.sides
        differs, pairs, values = find_differences(a, b), self.pairs, [pair.a for pair in self.pairs]
        differences = [pair.difference for pair in pairs]
        decisive = pairs[0] if pairs else self
        sources = [{*pairs[0].a_source.items()}, {*pairs[0].b_source.items()}] if pairs else [set(), set()]
        interval = MeanInterval.of(differences)
        return {
            "verdict": self.verdict.value,
            "sentence": self._describe(interval),
            # Until there is an answer a program that reads the file sees that there is none.
            "exit_code": self.verdict.exit_code if self._is_decided() else ExitCode.STOPPED_EARLY.value,
            "stopped": self.stopped,
            "error": None,
            "folder": str(self.folder),
            "a": a.text,
            "b": b.text,
            "length": " and ".join(dict.fromkeys([a.length, b.length])),
            "metric": decisive.metric,
            "mode": decisive.mode,
            "margin": self.margin,
            "seeds": self.seeds,
            **interval.as_dict(),
            "a_mean": sum(values) / len(values) if values else None,
            "noise": standard_deviation(values) if len(values) > 1 else None,
            "source_differs": sorted({name for name, _ in sources[0] ^ sources[1]}),
            "same_batches": has_same_batches(differs),
            "differs": {key: {"a": old, "b": new} for key, (old, new) in differs.items()},
            "pairs": [
                {**asdict(pair), "difference": pair.difference, **MeanInterval.of(differences[: pair.seed]).as_dict()}
                for pair in pairs
            ],
        }

    def _describe(self, interval: MeanInterval) -> str:
        """The verdict in words."""
        sentence = _SENTENCES[self.verdict] if self._is_decided() else "no answer yet"
        if math.isfinite(interval.low):
            sentence += (
                f": mean difference {interval.mean:.4g}, 95 % interval {interval.low:.4g} to {interval.high:.4g}"
            )
        todo = "" if self._is_decided() else "; next: the same command goes on"
        return f"{sentence}, after {format_count(len(self.pairs), 'pair')}{todo}."

    def _write_verdict(self) -> None:
        write_json(self.folder / VERDICT_FILE, self.as_dict())

    def _is_decided(self) -> bool:
        return self.verdict is not PairedVerdict.not_decided or len(self.pairs) == self.seeds

    def _queue(self) -> Iterator[FrozenJob]:
        """The runs that are missing, in order, as long as there is no answer."""
        for seed in range(1, self.seeds + 1):
            for side in self.sides if seed not in self._pairs else ():
                if self._find_finished(side, seed) is None:
                    key, frozen = side.freeze(self.folder, seed)
                    self._prepare(side, RunDir(self.folder / key))
                    yield FrozenJob(key, frozen, side.composed.overrides, side.processes, side.kept, self.metric)
            self._complete(seed)
            if self._is_decided():
                return

    def _on_ended(self, key: str, code: int, error: str) -> bool:
        """Take over the end of a run; whether the answer is clear."""
        if code == ExitCode.DONE:
            self._complete(int(key.partition("-seed")[2]))
        elif code in (ExitCode.STOPPED_EARLY, ExitCode.INTERRUPTED):
            self.stopped = True
        else:
            error = error.replace("callbacks.NeededMetric.metric", "--metric")
            failed = f"{key} failed: {(error if code > 0 else '') or describe_exit(code)}"
            output = self.folder / ".jobs" / f"{key}.log"
            is_mistake = code == ExitCode.USER
            cure = f"{output} says what to do." if is_mistake else f"Its output: {output}. The same command goes on."
            failure = TrainError(failed, cure=cure)
            failure.exit_code = ExitCode.USER if is_mistake else ExitCode.FAILED
            raise failure
        return self.stopped or self._is_decided()

    def _complete(self, seed: int) -> None:
        """Record the pair of a seed, if both of its runs are finished."""
        runs = [self._find_finished(side, seed) for side in self.sides]
        if seed in self._pairs or runs[0] is None or runs[1] is None:
            return
        rule = self._find_rule([*runs[0].read_summary().get("last_metrics", ())])
        a, b = (_read_value(run, rule) for run in runs if run is not None)
        paths = (str(runs[0].path), str(runs[1].path))
        pair = Pair(seed, rule.metric, rule.mode.value, a, b, *paths, runs[0].read_source(), runs[1].read_source())
        self._pairs[seed] = pair
        # As a whole: a reader never sees half a line, and a kill leaves all earlier pairs.
        lines = [json.dumps(asdict(pair)) + "\n" for pair in self.pairs]
        replace(self.folder / _RECORDS, ["".join(lines).encode()])
        self._write_verdict()
        mean, low, high = MeanInterval.of([pair.difference for pair in self.pairs])
        known = f", {low:.4g} to {high:.4g}" if math.isfinite(low) else ""
        log.info("seed %d: A %.4g, B %.4g; mean difference %.4g%s", seed, a, b, mean, known)

    def _read_records(self) -> None:
        """Take the pairs that were recorded of the present source."""
        for row in read_rows(self.folder / _RECORDS):
            try:
                pair = Pair(**row)
            except TypeError:
                continue
            if not any(map(Side.find_changes, self.sides, (pair.a_source, pair.b_source))):
                self._pairs[pair.seed] = pair

    def _find_finished(self, side: Side, seed: int) -> RunDir | None:
        """The finished run of a side with a seed, made by the present source, here or in another comparison."""
        here = [RunDir(self.folder / f"{side.letter}-seed{seed}")]
        specs = {file.parent: read_json(file) or {} for file in sorted(self.folder.parent.glob(f"*/{SPEC_FILE}"))}
        # A run with the same config that was trained outside of comparisons is to be looked for here, too.
        elsewhere = [
            RunDir(folder / f"{letter}-seed{seed}")
            for folder, spec in specs.items()
            for letter in "ab"
            if folder != self.folder and spec.get(letter, {}).get("digest") == side.digest
        ]
        for run in (*here, *elsewhere):
            is_finished = run.read_summary().get("status") == RunStatus.finished
            if is_finished and not side.find_changes(run.read_source()):
                return run
        return None

    def _prepare(self, side: Side, run: RunDir) -> None:
        """Wait for the process of a killed comparison, and move away a run that was made by other source."""
        end = time.monotonic() + _ORPHAN_S
        # After that the run itself reports who uses its directory.
        while run.is_locked() and time.monotonic() < end:
            time.sleep(0.05)
        if run.exists_as_run() and (changed := side.find_changes(run.read_source())):
            moved = RunDir.describe_moved(run.move_to_trash())
            log.info("%s has changed: %s is trained again, and moved to %s", format_first([*changed]), run.path, moved)

    def _find_rule(self, measured: Sequence[str]) -> BestRule:
        """The metric that decides, of those that a run has measured, and its direction."""
        settings = BestSettings.common(BestSettings.of(asdict(side.composed.config)) for side in self.sides)
        rule = settings.rule(measured)
        if (metric := self.metric or (rule.metric if rule else None)) is None:
            cure = f"Name one by --metric: {format_first(measured) or 'none is measured'}."
            raise UserError("no metric of the runs decides which is better", cure=cure)
        mode = self.mode or (rule.mode if rule and rule.metric == metric else settings.mode_of(metric))
        if mode is None:
            raise UserError(
                f"--metric {metric}: its name does not say what is better", cure="Add --mode min or --mode max."
            )
        return BestRule(metric, Mode(mode))


def _read_value(run: RunDir, rule: BestRule) -> float:
    """The best value of the metric in a run.

    Raises:
        UserError: it was not measured.
        TrainError: it was never finite.
    """
    rows: Sequence[Mapping[str, Any]] = read_rows(run.metrics_file)
    measured = [row.get(rule.metric) for row in rows]
    values = [float(value) for value in measured if isinstance(value, int | float) and math.isfinite(value)]
    if not values and any(value is not None for value in measured):
        raise TrainError(
            f"{run.path} has no finite value of {rule.metric}",
            cure=f"`train tail {shlex.quote(str(run.path))}` shows its values.",
        )
    if not values:
        names = {name for row in rows for name in row} - {"step", "epoch", "time"}
        cure = did_you_mean(rule.metric, names).strip() or f"Measured: {format_first(sorted(names))}."
        raise UserError(f"{run.path} has no value of {rule.metric}", where="--metric", cure=cure)
    return min(values) if rule.mode is Mode.min else max(values)
