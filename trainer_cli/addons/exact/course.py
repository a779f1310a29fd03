"""The course of a run: from which position of its data each attempt has trained which steps, and with which settings.

It is computed from the stored configs, the attempts and the manifests of checkpoints, without torch. Checkpoints hold
the position after their step, so they confirm the arithmetic, and show where data was skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.epoch_layout import EpochLayout
from trainer_cli.addons.exact.replayed import is_on_course
from trainer_cli.bounds import read_yaml
from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.history import lives
from trainer_cli.errors import CheckpointError, RunDirectoryError, TrainError, UserError
from trainer_cli.files import is_url, read_last_row, read_rows
from trainer_cli.format.header import state_file
from trainer_cli.loads import LoadOptions
from trainer_cli.runs.attempts import RunHistory, environment_of, kept_entries, split_attempt
from trainer_cli.runs.folders import advise_run, config_of, manifest_of, read_small_file, run_config
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.select import select_one
from trainer_cli.schema.checkpoint_config import CheckpointFormat
from trainer_cli.steps import Progress, divide_step

log = logging.getLogger(__name__)

_SKIP_SAMPLES = ("trainer_cli.SkipSamples", "trainer_cli.callbacks.SkipSamples")
_DEFAULT_BATCH_SIZE = 32
_ASSUMED = "no checkpoint of attempt {} is left, so its settings are assumed to be those of the next"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one attempt that decide which samples a step uses."""

    seed: int
    batch_size: int
    grad_accum_steps: int
    world_size: int
    """Number of ranks among which samples are divided."""
    limit_train_batches: int | float | None = None
    skip_samples: int = 0
    """`samples` of the callback SkipSamples."""
    drop_last: bool = False
    """Whether samples that do not fill a batch are left out, if the config makes the loader."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the train loader of a run is like, from a checkpoint or from the loader itself."""

    length: int
    """Samples of an epoch, or batches of a loader whose positions count batches."""
    batch_size: int | None = None
    """Batch size of the loader itself; None: that of the config."""
    drop_last: bool | None = None
    """Whether the loader itself leaves out samples that do not fill a batch; None: as the config says."""
    counts_batches: bool = False
    whole_batches: bool = False
    """See `EpochLayout`."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a run."""

    number: int
    start_step: int
    processes: int
    config: Mapping[str, Any]
    is_config_known: bool = True
    """False: no checkpoint of the attempt is left, and `config` is that of a later attempt."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps that were trained with the same settings, from one position on."""

    attempt: int
    start: Progress
    """The position before its first step, in batches of `layout`."""
    last_step: int | None
    """None: the course continues after the last step of the run."""
    settings: Settings
    layout: EpochLayout
    doubt: str | None = None
    """Why its samples are not certain."""

    def holds(self, step: int) -> bool:
        """Whether the stretch has trained a step, or will."""
        return self.start.step < step and (self.last_step is None or step <= self.last_step)


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the files of a run tell about its steps."""

    run: RunDir
    config: Mapping[str, Any]
    attempts: Sequence[Attempt]
    checkpoints: Sequence[Entry]
    """The valid ones of the run, by step."""
    paths: Mapping[int, Path]
    """Step -> path of its checkpoint, which may be that of a copy."""
    saved_steps: frozenset[int]
    """Steps of all checkpoints that were ever saved."""
    newest_step: int
    """The last step that was trained."""
    end: int | None
    """The last step of the run, trained or not; None if it is unknown."""
    data_state: Mapping[str, Any] = field(default_factory=dict)
    """The state of the train loader in the newest checkpoint, without tensors; empty if there is none."""
    fork: Progress | None = None
    """The position of another run's checkpoint at which this run began with `load.states=[all]`."""
    last_record: tuple[int, float] | None = None
    """Step and epochs of the last line of metrics.jsonl."""

    def attempt_of(self, step: int) -> Attempt:
        """The attempt that has trained a step, or will."""
        return [attempt for attempt in self.attempts if attempt.start_step < step][-1]

    def checkpoint_before(self, step: int) -> Entry | None:
        """The newest checkpoint that lies on the course of a step and before it."""
        on_course = [entry for entry in self.checkpoints if entry.step < step and self.is_on_course(entry)]
        return on_course[-1] if on_course else None

    def is_on_course(self, entry: Entry) -> bool:
        """Whether no later attempt has begun before the step of a checkpoint."""
        return is_on_course(entry, [(attempt.number, attempt.start_step) for attempt in self.attempts])


def read_records(path: Path) -> RunRecords:
    """Read what is known of the steps of a run, or of `RUN@attempt2`: the run as that attempt left it.

    Raises:
        UserError: the folder holds no run, or the run has no such attempt.
    """
    path, number = split_attempt(path)
    run = RunDir(path)
    if not run.exists_as_run():
        raise UserError(f"{path} holds no run", cure=advise_run(path))
    config = run_config(path)
    if not config:
        raise RunDirectoryError(f"{run.config_file} cannot be read")
    try:
        kept = [(entry, folder) for entry, folder in kept_entries(run) if _progress(entry) is not None]
    except (OSError, CheckpointError) as error:
        log.warning("the checkpoints of %s cannot be listed: %s", path, error)
        kept = []
    history = RunHistory(run, run.attempts, kept)
    # Before later attempts are left out: an attempt without a checkpoint has the config of the next.
    attempts = _attempts(history, config)
    if number is not None:
        history, attempts = history.until(number), [attempt for attempt in attempts if attempt.number <= number]
    checkpoints, paths = [entry for entry, _ in history.kept], {entry.step: folder for entry, folder in history.kept}
    # Later attempts have replaced the last records of an earlier one.
    record = _last_record(run) if history.is_whole else None
    reached, total = history.end.get("step"), history.end.get("total_steps")
    newest = max([reached or 0, 0 if record is None else record[0], *(entry.step for entry in checkpoints)])
    end = reached if history.is_finished else total
    return RunRecords(
        run,
        config,
        attempts,
        checkpoints,
        paths,
        frozenset(life.step for life in lives(read_rows(run.history_file)) if life.step is not None),
        newest,
        max(end, newest) if isinstance(end, int) else None,
        _data_state(checkpoints, paths),
        _fork(config),
        record,
    )


def _fork(config: Mapping[str, Any]) -> Progress | None:
    states = _section(config, "load").get("states")
    if not isinstance(ckpt := config.get("ckpt"), str) or not isinstance(states, list):
        return None
    if not LoadOptions(states=states).resumes:
        return None
    try:
        manifest = manifest_of(select_one(ckpt))
    except (TrainError, OSError):
        return None
    return None if manifest is None else Progress.of(manifest.progress)


def _last_record(run: RunDir) -> tuple[int, float] | None:
    record = read_last_row(run.metrics_file)
    return (record["step"], float(record["epoch"])) if "step" in record and "epoch" in record else None


def _progress(entry: Entry) -> Progress | None:
    return None if entry.manifest is None else Progress.of(entry.manifest.progress)


def _attempts(history: RunHistory, config: Mapping[str, Any]) -> list[Attempt]:
    """The attempts in their order, each with the config that it trained with, as far as it is known."""
    recorded = [attempt for attempt in history.attempts if isinstance(attempt.get("attempt"), int)]
    saved = {
        entry.manifest.attempt: (entry.manifest, path) for entry, path in history.kept if entry.manifest is not None
    }
    if not recorded:
        recorded = [{"attempt": 1, "start_step": 0}]
    attempts: list[Attempt] = []
    # From the last one, whose config is that of the run: an attempt without a checkpoint has that of the next.
    for facts in reversed(recorded):
        number, start_step = facts["attempt"], facts.get("start_step")
        is_last = not attempts
        if not is_last and number in saved and len(recorded) > 1:
            config = _config_of(saved[number][1]) or config
        count = environment_of(history.run, number).get("processes")
        if number in saved:
            count = saved[number][0].world_size
        attempts.append(
            Attempt(
                number,
                start_step if isinstance(start_step, int) else 0,
                count if isinstance(count, int) and count > 0 else 1,
                config,
                is_last or number in saved,
            )
        )
    return attempts[::-1]


def _config_of(checkpoint: Path) -> Mapping[str, Any] | None:
    try:
        config = read_yaml(config_of(checkpoint)[1])
    except (TrainError, OSError, UnicodeDecodeError):
        return None
    return config if isinstance(config, dict) else None


def _data_state(checkpoints: Sequence[Entry], paths: Mapping[int, Path]) -> Mapping[str, Any]:
    """The loader's state in the newest checkpoint whose small states are JSON, read without torch."""
    for entry in reversed(checkpoints):
        if entry.manifest is None or entry.manifest.format != CheckpointFormat.tensors or is_url(paths[entry.step]):
            continue
        try:
            state = json.loads(read_small_file(paths[entry.step], state_file(0)) or b"{}")["state"]["data"]
        except (TrainError, OSError, ValueError, KeyError):
            continue
        if isinstance(state, dict):
            return state
    return {}


def settings_of(config: Mapping[str, Any], processes: int) -> Settings:
    """The settings of an attempt with this config.

    Raises:
        ConfigError: its global batch size cannot be divided among the processes.
    """
    data, loop, parallel = (_section(config, name) for name in ("data", "loop", "parallel"))
    world_size = max(1, processes // int(parallel.get("tensor_size") or 1))
    batch_size, accumulated = divide_step(data, int(loop.get("grad_accum_steps") or 1), world_size)
    skips = [
        int(node.get("samples") or 0)
        for node in _section(config, "callbacks").values()
        if isinstance(node, Mapping) and str(node.get("_target_")) in _SKIP_SAMPLES
    ]
    return Settings(
        int(config.get("seed") or 0),
        int(batch_size or _DEFAULT_BATCH_SIZE),
        accumulated,
        world_size,
        loop.get("limit_train_batches"),
        sum(skips),
        bool(data.get("drop_last")),
    )


def needs_resolving(config: Mapping[str, Any]) -> bool:
    """Whether a value that `settings_of` reads is an interpolation, which only OmegaConf resolves."""
    values = [config.get("seed"), *_section(config, "callbacks").values()]
    for name in ("data", "loop", "parallel"):
        section = _section(config, name)
        values += [section.get(key) for key in ("batch_size", "global_batch_size", "grad_accum_steps",
                                                "limit_train_batches", "tensor_size", "overfit_batches",
                                                "drop_last")]  # fmt: skip
    return any("${" in str(value) for value in values if value is not None)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


class Course:
    """The stretches of a run, in the order of their steps.

    Args:
        facts: what the train loader is like.
    """

    def __init__(self, records: RunRecords, facts: DataFacts) -> None:
        self.records, self.facts = records, facts
        self.confirmed = False
        """Whether the position of a checkpoint is the one that was computed from an earlier step."""
        self._agreeing: set[int] = set()
        """Attempts whose first checkpoint has the position that was computed from the attempt before."""
        self.stretches = list(self._compute())
        self._trust_assumed_settings()

    def stretch_of(self, step: int) -> Stretch:
        """The stretch that has trained a step, or will.

        Raises:
            UserError: there is no such step.
        """
        check_step(self.records, step)
        return next(stretch for stretch in reversed(self.stretches) if stretch.holds(step))

    def is_doubtful(self, first: int, last: int) -> bool:
        """Whether the samples of one of these steps are not certain."""
        return any(
            stretch.doubt is not None
            for stretch in self.stretches
            if stretch.start.step < last and (stretch.last_step is None or stretch.last_step >= first)
        )

    def _layout(self, settings: Settings) -> EpochLayout:
        facts = self.facts
        return EpochLayout(
            length=facts.length,
            batch_size=1 if facts.counts_batches else facts.batch_size or settings.batch_size,
            world_size=settings.world_size,
            grad_accum_steps=settings.grad_accum_steps,
            limit_train_batches=settings.limit_train_batches,
            drop_last=settings.drop_last if facts.drop_last is None else facts.drop_last,
            whole_batches=facts.whole_batches,
        )

    def _compute(self) -> Iterator[Stretch]:
        attempts, skipped = self.records.attempts, 0
        previous: Stretch | None = None
        for number, attempt in enumerate(attempts):
            later = [other.start_step for other in attempts[number + 1 :]]
            last_step = min(later, default=None)
            # Later attempts began before its first step, so nothing of it is left.
            if last_step is not None and last_step <= attempt.start_step:
                continue
            settings = settings_of(attempt.config, attempt.processes)
            layout = self._layout(settings)
            start = layout.enter(self._start(attempt, previous))
            if (more := settings.skip_samples - skipped) > 0 and not self.facts.counts_batches:
                start, skipped = layout.pass_over(start, more), settings.skip_samples
            doubt = None if attempt.is_config_known else _ASSUMED.format(attempt.number)
            first = Stretch(attempt.number, start, last_step, settings, layout, doubt)
            for previous in self._split(first):
                yield previous

    def _trust_assumed_settings(self) -> None:
        """Remove the doubt about an attempt of unknown settings if the next one continues at the computed position."""
        following = dict(pairwise(dict.fromkeys(stretch.attempt for stretch in self.stretches)))
        self.stretches = [
            replace(stretch, doubt=None)
            if stretch.doubt == _ASSUMED.format(stretch.attempt) and following.get(stretch.attempt) in self._agreeing
            else stretch
            for stretch in self.stretches
        ]

    def _start(self, attempt: Attempt, previous: Stretch | None) -> Progress:
        """The position at which an attempt began."""
        at = [entry for entry in self.records.checkpoints if entry.step == attempt.start_step]
        saved = [progress for entry in at if (progress := self._position(entry)) is not None]
        if saved and attempt.start_step:
            # Of several with this step, the newest attempt's.
            return saved[-1]
        if previous is None or attempt.start_step == 0:
            return self.records.fork or Progress(step=attempt.start_step)
        # In batches of another layout; the caller enters it in its own.
        return previous.layout.position_after(previous.start, attempt.start_step)

    def _position(self, entry: Entry) -> Progress | None:
        """The position that a checkpoint holds, in the unit of the layouts."""
        progress = _progress(entry)
        if progress is None or not self.facts.counts_batches:
            return progress
        assert entry.manifest is not None
        world_size = max(1, entry.manifest.world_size // entry.manifest.tensor_size)
        return replace(progress, epoch_samples=progress.batch * world_size)

    def _split(self, stretch: Stretch) -> Iterator[Stretch]:
        """Divide the stretch of an attempt where its checkpoints show that data was skipped."""
        begin = stretch.start.step
        for entry in self.records.checkpoints:
            assert entry.manifest is not None
            if entry.manifest.attempt != stretch.attempt or not stretch.holds(entry.step):
                continue
            saved = self._position(entry)
            assert saved is not None
            computed = stretch.layout.position_after(stretch.start, entry.step)
            if _is_at(saved, computed):
                self.confirmed = True
                if stretch.start.step == begin:
                    self._agreeing.add(stretch.attempt)
                # From here on the checkpoint is known to be right.
                verified = replace(stretch, last_step=entry.step)
                stretch = replace(stretch, start=stretch.layout.enter(saved))
                yield verified
                continue
            yield self._after_jump(stretch, entry.step, saved)
            stretch = replace(stretch, start=stretch.layout.enter(saved), doubt=None)
        yield stretch

    def _after_jump(self, stretch: Stretch, step: int, saved: Progress) -> Stretch:
        """The stretch up to a checkpoint at which the position is another than computed: a roll back passed over data.

        The training went back to the checkpoint at the start of the stretch, and continued with later data.
        """
        start = stretch.start
        skipped = saved.passed_over - start.passed_over
        if skipped > 0:
            moved = replace(stretch.layout.position_after(start, start.step + skipped), step=start.step)
            shifted = replace(stretch, start=stretch.layout.enter(moved), last_step=step)
            between = [other for other in self.records.saved_steps if start.step < other < step]
            if _is_at(saved, shifted.layout.position_after(shifted.start, step)) and not between:
                self.confirmed = True
                return shifted
        return replace(
            stretch,
            last_step=step,
            doubt=f"step {start.step} does not lead to step {step}: data was skipped at an unrecorded step",
        )


def _is_at(saved: Progress, computed: Progress) -> bool:
    return (saved.epoch, saved.epoch_samples) == (computed.epoch, computed.epoch_samples)


def check_step(records: RunRecords, step: int) -> None:
    """Check that a run has a step, or will have it.

    Raises:
        UserError: it does not.
    """
    path = records.run.path
    if step < 1:
        raise UserError(f"step {step} used no samples: the first step of a run is step 1")
    first = 0 if records.fork is None else records.fork.step
    if step <= first:
        raise UserError(
            f"{path} began at step {first}: it was forked from another run, which trained step {step}",
            cure="Name that run.",
        )
    # A summary that was lost knows only the attempts since.
    if step <= (first_known := min(attempt.start_step for attempt in records.attempts)):
        raise UserError(
            f"{path} knows its attempts from step {first_known} on, so how step {step} was trained is unknown"
        )
    if records.end is not None and step > records.end:
        raise UserError(f"step {step} is after the end of {path}, which is step {records.end}")
