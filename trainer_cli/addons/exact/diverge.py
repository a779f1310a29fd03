"""Where two runs part: what they were made from, the first record that differs, and the first step that does, and why.

    what differs        configs, source, samples, versions, device, threads
    records             the first line of `metrics.jsonl` that differs
    checkpoints         the last step at which kept checkpoints of both are equal, the first at which they are not
    replay              both runs are replayed between these, with digests of each step; the first that differs is named

If the replays begin to differ at once, the difference is older than the records show: the steps before are replayed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.addons.exact.divergence import Divergence, Stage, StepRow, find_first_divergence, read_rows
from trainer_cli.addons.exact.divergence_report import (
    LENGTH,
    STEP_SIZES,
    DivergenceReport,
    Fact,
    Records,
    States,
    explain,
    is_below,
)
from trainer_cli.addons.exact.replay_plan import config_of, read_config, split_steps
from trainer_cli.addons.exact.replay_process import replay_in_process
from trainer_cli.addons.exact.replay_records import group_by_step, is_clocked
from trainer_cli.addons.exact.step_samples import find_known_samples
from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.keys import WITHOUT_EFFECT
from trainer_cli.layout import parse_step
from trainer_cli.manifest import Manifest
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.origin import KeptSource
from trainer_cli.runs import Run, RunDir, split_attempt
from trainer_cli.selection import StoredCheckpoint, select_one, suggest_selector
from trainer_cli.terminal import format_count, format_first

_FACTS = ("device", "threads", "processes", "python", "platform")
_ENDS_OF_EPOCHS = 0.1
"""How much the mean size of equal steps may differ, by smaller batches at the ends of epochs."""

Replayer = Callable[[Path, int, int], Mapping[str, Any]]
"""Makes steps of a run, and returns the JSON of `train replay --digests`."""


@dataclass(frozen=True, slots=True)
class _ComparedRun:
    """One of the two runs."""

    history: Run
    until: int | None = None
    """The step of the checkpoint that names the run, as `RUN@step437`."""

    @property
    def path(self) -> Path:
        """How a command names it."""
        return self.history.path

    @property
    def last_attempt(self) -> Mapping[str, Any]:
        return self.history.attempts[-1] if self.history.attempts else {}

    @property
    def manifest(self) -> Manifest | None:
        """Of the newest checkpoint; None without any."""
        return self.history.entries[-1][0].manifest if self.history.entries else None

    @property
    def environment(self) -> Mapping[str, Any]:
        """Of the attempt of its newest checkpoint; of the last one without any."""
        attempt = self.last_attempt.get("attempt") or 1 if self.manifest is None else self.manifest.attempt
        return self.history.directory.environment_of(int(attempt))

    @property
    def last_step(self) -> int:
        """The last step that can be replayed."""
        return self.history.reached if self.until is None else min(self.history.reached, self.until)

    @property
    def samples_per_step(self) -> float:
        """The mean number of samples in a step; 1 if no checkpoint tells it."""
        progress = {} if self.manifest is None else self.manifest.progress
        step = int(progress.get("step") or 0)
        return int(progress.get("samples") or 0) / step if step else 1.0


def find_divergence(
    first: Path,
    second: Path,
    *,
    until: int | None = None,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
    replay: Replayer | None = None,
) -> DivergenceReport:
    """Compare two runs.

    Args:
        first, second: directories of runs, or checkpoints in them; `RUN@attempt2`, the run as that attempt left it;
            `RUN@step437`, the run up to that step.
        until: the last step to compare, counted in the first run.
        overrides: of the configs of both runs when they are replayed: where their data is, `trust=[PACKAGE]`.
        config_dir: the `configs/` of the project, if the default is another.
        show: called with a line before steps are replayed.
        replay: makes the steps; by default in a process of its own, in the project of the run.

    Raises:
        UserError: one is no run, or they train different models.
        CheckpointError: their steps cannot be replayed.
    """
    if replay is None:
        flags = [] if config_dir is None else ["--config-dir", str(config_dir.absolute())]
        replay = partial(_replay_in_process, [*overrides, *flags])
    search = _Search((_open_run(first), _open_run(second)), overrides, config_dir, show, replay)
    return search.report(until)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the first difference of two runs. The fields are as in `find_divergence`."""

    runs: tuple[_ComparedRun, _ComparedRun]
    overrides: Sequence[str]
    config_dir: Path | None
    show: Callable[[str], None]
    replay: Replayer

    def report(self, until: int | None) -> DivergenceReport:
        first, second = self.runs
        last = min(step for step in (first.last_step, second.last_step, until) if step is not None)
        report = DivergenceReport(runs=(first.path, second.path), last=last)
        if first.path.resolve() == second.path.resolve():
            _refuse_two_steps(first, second, last)
            return replace(report, notes=["both are the same run"])
        facts = list(_find_facts(first, second))
        if last < 1:
            raise UserError("no step was made by both runs", where=str(second.path))
        report = replace(report, facts=facts)
        sizes = first.samples_per_step, second.samples_per_step
        if _step_sizes_differ(first, second, facts) and not math.isclose(*sizes, rel_tol=_ENDS_OF_EPOCHS):
            return self._compare_uneven(report, sizes)
        report = replace(
            report,
            records=_compare_records(first, second, last),
            states=_compare_states(first, second, last),
        )
        if report.equal and report.states is not None and report.states.equal == last:
            return replace(report, notes=list(_note_no_common_step(first, second, last)))
        return self._compare_steps(report)

    def _compare_steps(self, report: DivergenceReport) -> DivergenceReport:
        """Replay both runs from where they are known to be equal to the first difference that is recorded."""
        records, states = report.records, report.states
        assert records is not None and states is not None
        equal = states.equal or 0
        differing = [step for step in (records.step, states.differs) if step is not None]
        # A difference at step 0 is seen before step 1.
        last = max(1, min([*differing, report.last]))
        # Most runs part where their records do; the steps before are replayed only if these do not.
        begin = min(max(equal, records.last_equal), last - 1) if differing else equal
        divergence, notes = self._replay_both((begin + 1, last), (begin + 1, last))
        if divergence is not None and divergence.is_older and begin > equal:
            earlier, _ = self._replay_both((equal + 1, begin + 1), (equal + 1, begin + 1))
            divergence = earlier or divergence
        if divergence is None and records.step is not None and not notes:
            notes = ["the steps are equal, so that the difference is in the evaluation or in what callbacks log"]
        return self._explain(report, divergence, [*_note_no_common_step(*self.runs, report.last), *notes])

    def _compare_uneven(self, report: DivergenceReport, sizes: tuple[float, float]) -> DivergenceReport:
        """Compare runs whose steps have different numbers of samples: twice up to where both have seen as many."""
        samples = 2 * math.lcm(*(max(1, round(size)) for size in sizes))
        lasts = [min(report.last, math.ceil(samples / size)) for size in sizes]
        divergence, notes = self._replay_both((1, lasts[0]), (1, lasts[1]))
        samples_of_first = f"{sizes[0]:g} {'sample' if sizes[0] == 1 else 'samples'}"
        note = (
            f"a step has {samples_of_first} in {report.runs[0]} and {sizes[1]:g} in {report.runs[1]}: aligned by the "
            "samples seen, so that records and checkpoints are not compared"
        )
        return self._explain(replace(report, last=lasts[0]), divergence, [*notes, note])

    def _explain(
        self, report: DivergenceReport, divergence: Divergence | None, notes: Sequence[str]
    ) -> DivergenceReport:
        samples: Sequence[str] = ()
        if divergence is not None and divergence.stage is Stage.samples:
            samples = [self._describe_samples(divergence)]
        return explain(replace(report, divergence=divergence, notes=notes, samples=samples))

    def _replay_both(self, *steps: tuple[int, int]) -> tuple[Divergence | None, list[str]]:
        """Replay steps of the first run, and of the second: their first difference, and a note on each run whose
        replay is not equal to its own records and checkpoints."""
        rows_of_runs, notes = [], []
        for run, (begin, last) in zip(self.runs, steps, strict=True):
            rows: dict[int, StepRow] = {}
            problems = []
            for first, end in split_steps(run.history, begin, last):
                self.show(f"replays steps {first:,} to {end:,} of {run.path}")
                outcome = self.replay(run.path, first, end)
                # The state after the last step is replaced by that step of a later attempt.
                rows |= {row.step: row for row in read_rows(outcome)}
                if not outcome["equal"]:
                    problems.append(outcome["result"])
            rows_of_runs.append([rows[step] for step in sorted(rows)])
            if problems:
                notes.append(
                    f"{run.path} is not reproducible here ({problems[0]}), so that what its replay shows may not be "
                    "what it had: see the source and versions, and `train check resume`"
                )
        return find_first_divergence(*rows_of_runs), notes

    def _describe_samples(self, divergence: Divergence) -> str:
        """A line on the samples that differ, with their indices where the order of the data is known."""
        positions = divergence.rows
        orders = []
        for run, step in zip(self.runs, divergence.steps, strict=True):
            known = find_known_samples(run.path, step, step, overrides=self.overrides, config_dir=self.config_dir)
            batches = known[step].batches if known else ()
            # In the order of the digests: all batches of one rank after another.
            batches = sorted(batches, key=lambda batch: batch.rank)
            orders.append([sample.index for batch in batches for sample in batch.samples])
        if not positions or any(len(order) <= max(positions) for order in orders):
            return f"positions in the step: {format_first(positions)}"
        first, second = ([order[position] for position in positions] for order in orders)
        if first != second:
            return f"another order: {format_first(first)} -> {format_first(second)}"
        return f"the content of sample{'s' * (len(first) > 1)} {format_first(first)} differs"


def _open_run(path: Path) -> _ComparedRun:
    """The run at a path, that of the checkpoint there, or what `RUN@attempt2` and `RUN@step437` name.

    Raises:
        UserError: it has none of these forms.
    """
    run, _, selector = str(path).rpartition("@")
    if not path.exists() and RunDir(run).exists_as_run():
        step = parse_step(selector)
        if selector in ("latest", "best") and (manifest := StoredCheckpoint(select_one(str(path))).manifest):
            step = manifest.step
        if step is not None:
            if step > (history := Run.open(Path(run))).reached:
                raise UserError(f"{run} has made {format_count(history.reached, 'step')}, so there is no step {step}")
            return _ComparedRun(history, until=step)
    for directory in (path, path.parent.parent):
        if RunDir(split_attempt(directory)[0]).exists_as_run() and (directory == path or path.is_dir()):
            return _ComparedRun(Run.open(directory))
    raise UserError(f"{path} is not a run's directory", cure=suggest_selector(str(path)) or RunDir.advise(path))


def _note_no_common_step(first: _ComparedRun, second: _ComparedRun, last: int) -> Iterator[str]:
    """A note on two attempts of one run of which the later one began where the earlier one ended."""
    if first.history.directory.path.resolve() == second.history.directory.path.resolve():
        begin = max(int(run.last_attempt.get("start_step") or 0) for run in (first, second))
        if begin >= last:
            yield f"no step was made by both: the later attempt began at step {begin}, where the other ended"


def _refuse_two_steps(first: _ComparedRun, second: _ComparedRun, last: int) -> None:
    """Refuse two steps of one run."""
    if None not in (first.until, second.until) and first.until != second.until:
        names = [f"{first.path}@step{run.until}" for run in (first, second)]
        raise UserError(
            f"{names[0]} and {names[1]} are two steps of one run, between which it was trained",
            cure=f"`train ckpt diff {shlex.join(names)}` compares their states; "
            f"`train replay {shlex.quote(str(first.path))} {last + 1}` shows what the next step changes.",
        )


def _find_facts(first: _ComparedRun, second: _ComparedRun) -> Iterator[Fact]:
    """What differs in what the runs were made from.

    Raises:
        UserError: they train different models.
    """
    from trainer_cli.config import diff
    from trainer_cli.data import other_samples

    configs = [[read_config(source) for source in _list_configs(run)] for run in (first, second)]
    # The lengths of all attempts, as far as their configs are left: `20, then 40`.
    lengths = [", then ".join(dict.fromkeys(str(config.config.loop.max_duration) for config in of)) for of in configs]
    if lengths[0] != lengths[1]:
        yield Fact("config", f"{LENGTH}: {lengths[0]} -> {lengths[1]}")
    for change in diff(*(of[-1].raw for of in configs)):
        if change.key == "model._target_":
            raise UserError(
                f"the runs train different models: {change.values}",
                cure="Steps can be compared of runs with the same model; `train report` compares their curves.",
            )
        if change.path[0] not in WITHOUT_EFFECT and change.key != LENGTH:
            yield Fact("config", str(change))
    manifests = [run.manifest for run in (first, second) if run.manifest is not None]
    if len(manifests) == 2:
        sources = [manifest.source for manifest in manifests]
        for file in sorted({*sources[0], *sources[1]}):
            holders = [name for name, source in zip(("first", "second"), sources, strict=True) if file in source]
            if sources[0].get(file) != sources[1].get(file):
                how = "changed" if len(holders) == 2 else f"only in the {holders[0]}"
                yield Fact("source", f"{file}: {how}")
        for name in other_samples(manifests[1].samples, manifests[0].samples):
            yield Fact("data", name)
    environments = [run.environment for run in (first, second)]
    versions, other_versions = (environment.get("versions") or {} for environment in environments)
    for name, version in versions.items():
        if version != other_versions.get(name):
            yield Fact("version", f"{name} {version} -> {other_versions.get(name)}")
    pairs = {name: [environment.get(name) for environment in environments] for name in _FACTS}
    pairs["attempts"] = [len(run.history.attempts) for run in (first, second)]
    for name, (value, other) in pairs.items():
        if value != other:
            yield Fact(name, f"{value} -> {other}")


def _list_configs(run: _ComparedRun) -> list[Path | str]:
    """The configs of the attempts that are left, each once; the last is that of the run."""
    attempts = [config_of(run.history, int(entry.get("attempt") or 1)) for entry in run.history.attempts]
    *earlier, last = attempts or [run.history.directory.config_file]
    # The config of an attempt without a checkpoint is not left, and that of the run stands for it.
    return [*dict.fromkeys(source for source in earlier if source != run.history.directory.config_file), last]


def _compare_records(first: _ComparedRun, second: _ComparedRun, last: int) -> Records:
    """Compare the values that both runs have logged at the same steps, and of means those over the same steps."""
    values, other_values = _read_values(first), _read_values(second)
    steps = [step for step in values if step in other_values and step <= last]
    lacking = {
        run: dict.fromkeys(key for step in steps for key in has[step] if key not in other[step])
        for run, has, other in (("first", values, other_values), ("second", other_values, values))
    }
    shared = {
        step: [(key, values[step][key], other_values[step][key]) for key in values[step] if key in other_values[step]]
        for step in steps
    }
    windows = [step for step in steps if any(value.begin != other.begin for _, value, other in shared[step])]
    records = Records(only={run: tuple(names) for run, names in lacking.items() if names}, windows=tuple(windows))
    for step in steps:
        for key, value, other in shared[step]:
            # NaN, which JSON cannot hold, is a text here.
            if value.begin == other.begin and value.value != other.value:
                return replace(records, step=step, key=key, values=(value.value, other.value))
        if step not in windows:
            records = replace(records, equal=records.equal + 1, last_equal=step)
    return records


class _Logged(NamedTuple):
    """A value of a record."""

    value: Any
    begin: int
    """The step after which the steps begin of which it is a mean; 0 for what is no mean."""


def _read_values(run: _ComparedRun) -> dict[int, dict[str, _Logged]]:
    """The values in the records that do not depend on the clock, by step in ascending order and by name."""
    records = group_by_step(run.history.records)
    values: dict[int, dict[str, _Logged]] = {}
    last_steps: dict[str, int] = {}
    for step in sorted(records):
        values[step] = {}
        for key, value in records[step].items():
            if not is_clocked(key):
                # A value of the training is a mean over the steps since the record before.
                begin = last_steps.get(key, 0) if key.startswith(TRAIN_PREFIX) else 0
                values[step][key], last_steps[key] = _Logged(value, begin), step
    return values


def _compare_states(first: _ComparedRun, second: _ComparedRun, last: int) -> States:
    """Compare kept checkpoints of the same steps, from the first to one that differs."""
    others = {entry.step: (entry, path) for entry, path in second.history.entries}
    equal: int | None = None
    for entry, path in first.history.entries:
        if entry.step <= last and entry.step in others:
            if (name := _first_difference((entry, path), others[entry.step])) is not None:
                return States(equal, entry.step, name)
            equal = entry.step
    return States(equal)


def _first_difference(*checkpoints: tuple[Entry, Path]) -> str | None:
    """The first leaf of two checkpoints that differs; None if all is equal."""
    from trainer_cli.addons.exact.replay_saver import find_differences
    from trainer_cli.addons.exact.step_trace import NOT_COMPARED
    from trainer_cli.format import RANKS, CheckpointReader

    states = []
    world_sizes = set()
    for entry, path in checkpoints:
        assert entry.manifest is not None
        world_sizes.add(entry.manifest.world_size)
        with Catalog.of(path.parent).storage.reading(path.name) as folder:
            states.append(CheckpointReader().read(folder, entry.manifest))
    # Counts, and means that are logged, depend on the intervals of evaluations and logs.
    skipped = {*NOT_COMPARED, *([RANKS] if len(world_sizes) > 1 else [])}
    keys = [key for key in {**states[0], **states[1]} if key not in skipped]
    return next((name for key in keys for name in find_differences(states[0].get(key), states[1].get(key), key)), None)


def _step_sizes_differ(first: _ComparedRun, second: _ComparedRun, facts: Sequence[Fact]) -> bool:
    """Whether steps differ in size by the config or the number of processes."""
    processes = [run.environment.get("processes") for run in (first, second)]
    return processes[0] != processes[1] or any(is_below(fact, STEP_SIZES) for fact in facts)


def _replay_in_process(words: Sequence[str], run: Path, first: int, last: int) -> Mapping[str, Any]:
    """Make the steps in a process of its own, in the project of the run if it is another than the current one.

    Raises:
        UserError, CheckpointError: they cannot be made.
    """
    # A folder of configs that the command names is that of the project to use.
    folder = None if "--config-dir" in words else project_of(run)
    try:
        return replay_in_process(run.absolute(), first, last, ["--digests", *words], folder=folder)
    except (UserError, CheckpointError) as error:
        raise type(error)(
            f"steps {first} to {last} of {run} cannot be replayed: {error.what}",
            cure=f"`train replay {shlex.quote(str(run))} {first}..{last}` shows more.",
        ) from None


def project_of(run: Path) -> Path | None:
    """The project whose code replays the run; None: the current folder.

    Raises:
        UserError: it was trained in a project that is neither the current one nor holds the run. The files of a run
            may come from anybody, and do not choose which code is imported.
    """
    roots = [root for root in RunDir(split_attempt(run)[0]).project_roots if root.is_dir()]
    if not roots or Path.cwd() in roots:
        return None
    for root in reversed(roots):
        # Not the run itself, nor a path that depends on the current folder: files of the run may come from anybody.
        if root.is_absolute() and root.resolve() in run.resolve().parents:
            return root
    directory = RunDir(split_attempt(run)[0])
    source = KeptSource.of_attempt(directory, max((entry.get("attempt", 1) for entry in directory.attempts), default=1))
    if source is not None and source.is_own:
        return None
    raise UserError(
        f"{run} was trained in the project {roots[-1]}, which is not the current one, and does not hold the run",
        cure="Run the command there, or move the run into that project.",
    )
