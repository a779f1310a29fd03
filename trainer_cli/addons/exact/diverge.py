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
from typing import Any

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
from trainer_cli.addons.exact.replay_plan import config_of, split_steps
from trainer_cli.addons.exact.replay_process import replay_in_process
from trainer_cli.addons.exact.replay_records import group_by_step, is_clocked
from trainer_cli.catalog import Catalog, Entry
from trainer_cli.errors import CheckpointError, NotFiniteError, TrainError, UserError
from trainer_cli.keys import WITHOUT_EFFECT
from trainer_cli.layout import parse_step
from trainer_cli.manifest import Manifest
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.runs import Run, RunDir, split_attempt
from trainer_cli.selection import StoredCheckpoint, select_one, suggest_selector
from trainer_cli.terminal import format_count, format_first

_FACTS = ("device", "threads", "processes", "python", "platform")
_ENDS_OF_EPOCHS = 0.1
"""How much the mean size of equal steps may differ, by smaller batches at the ends of epochs."""


@dataclass(frozen=True, slots=True)
class Replays:
    """What `train replay` gave for one run."""

    rows: Sequence[StepRow]
    problem: str | None
    """The first record or state that is not that of the run."""


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
    def config(self) -> Path | str:
        """Its config: the file, or the text itself."""
        return config_of(self.history, int(self.last_attempt.get("attempt") or 1))

    @property
    def environment(self) -> Mapping[str, Any]:
        """Of the attempt of its newest checkpoint; of the last one without any."""
        attempt = self.last_attempt.get("attempt") or 1 if self.manifest is None else self.manifest.attempt
        return self.history.directory.environment_of(int(attempt))

    @property
    def manifest(self) -> Manifest | None:
        """Of the newest checkpoint; None without any."""
        return self.history.entries[-1][0].manifest if self.history.entries else None

    @property
    def last_step(self) -> int:
        """The last step that can be replayed."""
        # The step at which a loss that is not finite ended the run ends its replay, too, before anything is returned.
        is_without_last = str(self.last_attempt.get("reason") or "").startswith(NotFiniteError.__name__)
        reached = self.history.reached - is_without_last
        return reached if self.until is None else min(reached, self.until)

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

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.runs[0].path, self.runs[1].path

    def report(self, until: int | None) -> DivergenceReport:
        first, second = self.runs
        last = min(step for step in (first.last_step, second.last_step, until) if step is not None)
        if first.path.resolve() == second.path.resolve():
            return _compare_itself(first, second, last)
        facts = list(_facts(first, second))
        if last < 1:
            raise UserError("no step was made by both runs", where=str(second.path))
        report = DivergenceReport(runs=self.paths, facts=facts, last=last)
        sizes = first.samples_per_step, second.samples_per_step
        if _step_sizes_differ(first, second, facts) and not math.isclose(*sizes, rel_tol=_ENDS_OF_EPOCHS):
            return self._compare_uneven(report, sizes)
        records_of = [group_by_step(run.history.records) for run in self.runs]
        records, states = _compare_records(records_of[0], records_of[1], last), _compare_states(first, second, last)
        notes = [*report.notes, *_no_step_of_both(first, second, last)]
        report = replace(report, records=records, states=states, notes=notes)
        if records.step is None and states.differs is None and states.equal == last:
            return report
        return self._compare_steps(report, records, states)

    def _compare_steps(self, report: DivergenceReport, records: Records, states: States) -> DivergenceReport:
        """Replay both runs from where they are known to be equal to the first difference that is recorded."""
        equal = states.equal or 0
        # A difference at step 0 is seen before step 1.
        last = max(1, min(step for step in (records.step, states.differs, report.last) if step is not None))
        # Most runs part where their records do; the steps before are replayed only if these do not.
        is_recorded = records.step is not None or states.differs is not None
        begin = min(max(equal, records.last_equal), last - 1) if is_recorded else equal
        replays = self._replay_both((begin + 1, last), (begin + 1, last))
        divergence = find_first_divergence(replays[0].rows, replays[1].rows)
        if divergence is not None and divergence.is_older and begin > equal:
            earlier = self._replay_both((equal + 1, begin + 1), (equal + 1, begin + 1))
            divergence = find_first_divergence(earlier[0].rows, earlier[1].rows) or divergence
        notes = list(self._not_reproducible(replays))
        if divergence is None and records.step is not None and not notes:
            notes.append("the steps are equal, so that the difference is in the evaluation or in what callbacks log")
        return self._explain(replace(report, notes=[*report.notes, *notes], divergence=divergence))

    def _compare_uneven(self, report: DivergenceReport, sizes: tuple[float, float]) -> DivergenceReport:
        """Compare runs whose steps have different numbers of samples: twice up to where both have seen as many."""
        samples = 2 * math.lcm(*(max(1, round(size)) for size in sizes))
        lasts = [min(report.last, math.ceil(samples / size)) for size in sizes]
        samples_of_first = f"{sizes[0]:g} {'sample' if sizes[0] == 1 else 'samples'}"
        note = (
            f"a step has {samples_of_first} in {report.runs[0]} and {sizes[1]:g} in {report.runs[1]}: aligned by the "
            "samples seen, so that records and checkpoints are not compared"
        )
        replays = self._replay_both((1, lasts[0]), (1, lasts[1]))
        divergence = find_first_divergence(replays[0].rows, replays[1].rows)
        notes = [*self._not_reproducible(replays), note]
        return self._explain(replace(report, notes=notes, divergence=divergence, last=lasts[0]))

    def _explain(self, report: DivergenceReport) -> DivergenceReport:
        divergence = report.divergence
        if divergence is not None and divergence.stage is Stage.samples:
            report = replace(report, samples=list(self._sample_lines(divergence)))
        return explain(report)

    def _replay_both(self, *steps: tuple[int, int]) -> list[Replays]:
        """Replay the steps of the first run, and those of the second."""
        replays = []
        for run, (begin, last) in zip(self.runs, steps, strict=True):
            rows: dict[int, StepRow] = {}
            problem = None
            for first, end in split_steps(run.history, begin, last):
                self.show(f"replays steps {first:,} to {end:,} of {run.path}")
                outcome = self.replay(run.path, first, end)
                # The state after the last step is replaced by that step of a later attempt.
                rows |= {row.step: row for row in read_rows(outcome)}
                problem = problem or (None if outcome["equal"] else str(outcome["result"]))
            replays.append(Replays([rows[step] for step in sorted(rows)], problem))
        return replays

    def _not_reproducible(self, replays: Sequence[Replays]) -> Iterator[str]:
        for run, outcome in zip(self.paths, replays, strict=True):
            if outcome.problem is not None:
                yield (
                    f"{run} is not reproducible here ({outcome.problem}), so that what its replay shows may not be "
                    "what it had: see the source and versions, and `train check resume`"
                )

    def _sample_lines(self, divergence: Divergence) -> Iterator[str]:
        """The samples that differ, with their indices where the order of the data is known."""
        positions = divergence.rows
        orders = [self._indices(run, step) for run, step in zip(self.paths, divergence.steps, strict=True)]
        if not positions or any(len(order) <= max(positions) for order in orders):
            yield f"positions in the step: {format_first(positions)}"
            return
        first, second = ([order[position] for position in positions] for order in orders)
        if first != second:
            yield f"another order: {format_first(first)} -> {format_first(second)}"
        else:
            yield f"the content of sample{'s' * (len(first) > 1)} {format_first(first)} differs"

    def _indices(self, run: Path, step: int) -> list[Any]:
        """The indices of the samples of a step; empty if they are not known."""
        from trainer_cli.addons.exact.step_samples import read_step_samples, select_data_overrides

        overrides = select_data_overrides(self.overrides)
        try:
            steps = list(read_step_samples(run, step, overrides=overrides, config_dir=self.config_dir))
        except TrainError:
            return []
        # In the order of the digests: all batches of one rank after another.
        batches = sorted((batch for samples in steps for batch in samples.batches), key=lambda batch: batch.rank)
        return [sample.index for batch in batches for sample in batch.samples]


def _open_run(path: Path) -> _ComparedRun:
    """The run at a path, that of the checkpoint there, or what `RUN@attempt2` and `RUN@step437` name.

    Raises:
        UserError: it has none of these forms.
    """
    if (named := _named_step(path)) is not None:
        run, step = named
        if step > (history := Run.open(run)).reached:
            raise UserError(f"{run} has made {format_count(history.reached, 'step')}, so there is no step {step}")
        return _ComparedRun(history, until=step)
    if RunDir(split_attempt(path)[0]).exists_as_run():
        return _ComparedRun(Run.open(path))
    if path.is_dir() and RunDir(path.parent.parent).exists_as_run():
        return _ComparedRun(Run.open(path.parent.parent))
    raise UserError(f"{path} is not a run's directory", cure=suggest_selector(str(path)) or RunDir.advise(path))


def _named_step(path: Path) -> tuple[Path, int] | None:
    """The run and the step that `RUN@step437`, `RUN@latest` or `RUN@best` names."""
    run, _, selector = str(path).rpartition("@")
    if path.exists() or not RunDir(run).exists_as_run():
        return None
    if selector in ("latest", "best"):
        manifest = StoredCheckpoint(select_one(str(path))).manifest
        return None if manifest is None else (Path(run), manifest.step)
    step = parse_step(selector)
    return None if step is None else (Path(run), step)


def _no_step_of_both(first: _ComparedRun, second: _ComparedRun, last: int) -> Iterator[str]:
    """A note on two attempts of one run of which the later one began where the earlier one ended."""
    if first.history.directory.path.resolve() == second.history.directory.path.resolve():
        starts = [int(run.last_attempt.get("start_step") or 0) for run in (first, second)]
        if max(starts) >= last:
            yield f"no step was made by both: the later attempt began at step {max(starts)}, where the other ended"


def _compare_itself(first: _ComparedRun, second: _ComparedRun, last: int) -> DivergenceReport:
    """The report on a run that is named twice.

    Raises:
        UserError: two steps of it are named.
    """
    path = first.path
    if None not in (first.until, second.until) and first.until != second.until:
        names = [f"{path}@step{run.until}" for run in (first, second)]
        raise UserError(
            f"{names[0]} and {names[1]} are two steps of one run, between which it was trained",
            cure=f"`train ckpt diff {shlex.join(names)}` compares their states; `train replay {shlex.quote(str(path))} "
            f"{last + 1}` shows what the next step changes.",
        )
    return DivergenceReport(runs=(path, second.path), notes=["both are the same run"], last=last)


def _facts(first: _ComparedRun, second: _ComparedRun) -> Iterator[Fact]:
    """What differs in what the runs were made from.

    Raises:
        UserError: they train different models.
    """
    from trainer_cli.config import diff, from_yaml

    configs = [from_yaml(run.config, trusted=True, missing_ok=True).raw for run in (first, second)]
    lengths = [_lengths(run) for run in (first, second)]
    if lengths[0] != lengths[1]:
        yield Fact("config", f"{LENGTH}: {lengths[0]} -> {lengths[1]}")
    for change in diff(*configs):
        if change.key == "model._target_":
            raise UserError(
                f"the runs train different models: {change.values}",
                cure="Steps can be compared of runs with the same model; `train report` compares their curves.",
            )
        if change.path[0] not in WITHOUT_EFFECT and change.key != LENGTH:
            yield Fact("config", str(change))
    manifests = [run.manifest for run in (first, second) if run.manifest is not None]
    if len(manifests) == 2:
        yield from _other_source(manifests[0].source, manifests[1].source)
        from trainer_cli.data import other_samples

        yield from (Fact("data", name) for name in other_samples(manifests[1].samples, manifests[0].samples))
    versions = [run.environment.get("versions") or {} for run in (first, second)]
    for name, version in versions[0].items():
        if version != versions[1].get(name):
            yield Fact("version", f"{name} {version} -> {versions[1].get(name)}")
    values = [
        {**{name: run.environment.get(name) for name in _FACTS}, "attempts": len(run.history.attempts)}
        for run in (first, second)
    ]
    yield from (
        Fact(name, f"{value} -> {values[1][name]}") for name, value in values[0].items() if value != values[1][name]
    )


def _lengths(run: _ComparedRun) -> str:
    """The `loop.max_duration` of the attempts, as far as their configs are left: `20, then 40`."""
    from trainer_cli.config import from_yaml

    history = run.history
    earlier = [config_of(history, int(entry.get("attempt") or 1)) for entry in history.attempts[:-1]]
    # The config of an attempt without a checkpoint is not left, and that of the run stands for it.
    sources = [*(source for source in earlier if source != history.directory.config_file), run.config]
    configs = [from_yaml(source, trusted=True, missing_ok=True).config for source in dict.fromkeys(sources)]
    return ", then ".join(dict.fromkeys(str(config.loop.max_duration) for config in configs))


def _other_source(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Fact]:
    for file in sorted({*first, *second}):
        if first.get(file) != second.get(file):
            only = f"only in the {'first' if file in first else 'second'}"
            yield Fact("source", f"{file}: {'changed' if file in first and file in second else only}")


def _compare_records(first: Mapping[int, Any], second: Mapping[int, Any], last: int) -> Records:
    """Compare the values that both runs have logged at the same steps, and of means those over the same steps."""
    steps = [step for step in sorted(first.keys() & second.keys()) if step <= last]
    lacking = {
        run: dict.fromkeys(key for step in steps for key in has[step] if key not in other[step] and not is_clocked(key))
        for run, has, other in (("first", first, second), ("second", second, first))
    }
    only = {run: tuple(names) for run, names in lacking.items() if names}
    begins = [_begins_of_means(records) for records in (first, second)]
    # Only what both have logged has a begin in both.
    differing = {name for name in begins[0].keys() & begins[1].keys() if begins[0][name] != begins[1][name]}
    windows = tuple(step for step in steps if any((step, key) in differing for key in first[step]))
    equal = last_equal = 0
    for step in steps:
        for key in first[step]:
            if key not in second[step] or is_clocked(key) or (step, key) in differing:
                continue
            values = first[step][key], second[step][key]
            # NaN, which JSON cannot hold, is a text here.
            if values[0] != values[1]:
                return Records(equal, last_equal, step, key, values, only, windows)
        if step not in windows:
            equal, last_equal = equal + 1, step
    return Records(equal, last_equal, only=only, windows=windows)


def _begins_of_means(records: Mapping[int, Any]) -> dict[tuple[int, str], int]:
    """(step, name) of each mean over the steps since the record before -> the step of that record; 0: the start."""
    begins: dict[tuple[int, str], int] = {}
    last: dict[str, int] = {}
    for step in sorted(records):
        for key in records[step]:
            if key.startswith(TRAIN_PREFIX) and not is_clocked(key):
                begins[step, key], last[key] = last.get(key, 0), step
    return begins


def _compare_states(first: _ComparedRun, second: _ComparedRun, last: int) -> States:
    """Compare kept checkpoints of the same steps, from the first to one that differs."""
    second_entries = {entry.step: (entry, path) for entry, path in second.history.entries}
    equal: int | None = None
    for entry, path in first.history.entries:
        if entry.step > last or entry.step not in second_entries:
            continue
        name = _first_difference((entry, path), second_entries[entry.step])
        if name is not None:
            return States(equal, entry.step, name)
        equal = entry.step
    return States(equal)


def _first_difference(first: tuple[Entry, Path], second: tuple[Entry, Path]) -> str | None:
    """The first leaf of two checkpoints that differs, or why they cannot be compared; None if all is equal."""
    from trainer_cli.addons.exact.replay_saver import find_differences
    from trainer_cli.addons.exact.step_trace import NOT_COMPARED
    from trainer_cli.format import RANKS, CheckpointReader

    states = []
    for entry, path in (first, second):
        assert entry.manifest is not None
        with Catalog.of(path.parent).storage.reading(path.name) as folder:
            states.append(CheckpointReader().read(folder, entry.manifest))
    # Counts, and means that are logged, depend on the intervals of evaluations and logs.
    skipped = set(NOT_COMPARED)
    if len({entry.manifest.world_size for entry, _ in (first, second) if entry.manifest is not None}) > 1:
        skipped.add(RANKS)
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
    raise UserError(
        f"{run} was trained in the project {roots[-1]}, which is not the current one, and does not hold the run",
        cure="Run the command there, or move the run into that project.",
    )
