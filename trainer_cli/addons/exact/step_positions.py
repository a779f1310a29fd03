"""From which position of its data each attempt of a run has trained which steps, and with which settings.

It is computed from the stored configs, the attempts and the manifests of checkpoints, without torch. Checkpoints hold
the position after their step, so they confirm the arithmetic, and show where data was skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.epoch_layout import EpochLayout
from trainer_cli.bounds import read_yaml
from trainer_cli.catalog import Life
from trainer_cli.errors import CheckpointError, RunDirectoryError, TrainError, UserError
from trainer_cli.files import is_url, read_last_row, read_rows
from trainer_cli.format import FilesOfRank
from trainer_cli.loads import LoadOptions
from trainer_cli.manifest import Manifest
from trainer_cli.runs import Run, RunDir, split_attempt
from trainer_cli.schema import CheckpointFormat
from trainer_cli.selection import StoredCheckpoint, select_one
from trainer_cli.steps import Progress, divide_step

log = logging.getLogger(__name__)

_SKIP_SAMPLES = ("trainer_cli.SkipSamples", "trainer_cli.callbacks.SkipSamples")
_DEFAULT_BATCH_SIZE = 32
_ASSUMED = "no checkpoint of attempt {} is left, so its settings are assumed to be those of the next"


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
    """Consecutive steps that were trained with the same layout, from one position on."""

    attempt: int
    start: Progress
    """The position before its first step, in batches of `layout`."""
    last_step: int | None
    """None: it continues after the last step of the run."""
    layout: EpochLayout
    uncertainty: str | None = None
    """Why its samples are not certain."""

    def holds(self, step: int) -> bool:
        """Whether the stretch has trained a step, or will."""
        return self.start.step < step and (self.last_step is None or step <= self.last_step)


@dataclass(frozen=True)
class StepRecords:
    """What the files of a run tell about its steps."""

    history: Run
    config: Mapping[str, Any]
    attempts: Sequence[Attempt]

    @property
    def run(self) -> RunDir:
        return self.history.directory

    @cached_property
    def checkpoints(self) -> dict[int, tuple[Manifest, Path]]:
        """Step -> the valid checkpoint, which may be a copy; in the order of the steps."""
        return {
            entry.step: (entry.manifest, path) for entry, path in self.history.entries if entry.manifest is not None
        }

    @cached_property
    def last_record(self) -> tuple[int, float] | None:
        """Step and epochs of the last line of metrics.jsonl."""
        # Later attempts have replaced the last records of an earlier one.
        record = read_last_row(self.run.metrics_file) if self.history.is_whole else {}
        return (record["step"], float(record["epoch"])) if "step" in record and "epoch" in record else None

    @cached_property
    def newest_step(self) -> int:
        """The last step that was trained."""
        recorded = 0 if self.last_record is None else self.last_record[0]
        return max(self.history.end.get("step") or 0, recorded, *self.checkpoints, 0)

    @cached_property
    def end(self) -> int | None:
        """The last step of the run, trained or not; None if it is unknown."""
        end = self.history.end.get("step" if self.history.is_finished else "total_steps")
        return max(end, self.newest_step) if isinstance(end, int) else None

    @cached_property
    def data_state(self) -> Mapping[str, Any]:
        """The loader's state in the newest checkpoint whose small states are JSON, read without torch; empty if there
        is none."""
        for manifest, path in reversed(self.checkpoints.values()):
            if manifest.format != CheckpointFormat.tensors or is_url(path):
                continue
            try:
                state = json.loads(StoredCheckpoint(path).read(FilesOfRank(0).state) or b"{}")["state"]["data"]
            except (TrainError, OSError, ValueError, KeyError):
                continue
            if isinstance(state, dict):
                return state
        return {}

    @cached_property
    def fork(self) -> Progress | None:
        """The position of another run's checkpoint at which this run began with `load.states=[all]`."""
        states, ckpt = _section(self.config, "load").get("states"), self.config.get("ckpt")
        if not isinstance(ckpt, str) or not isinstance(states, list) or not LoadOptions(states=states).resumes:
            return None
        try:
            manifest = StoredCheckpoint(select_one(ckpt)).manifest
        except (TrainError, OSError):
            return None
        return None if manifest is None else Progress.of(manifest.progress)

    def attempt_of(self, step: int) -> Attempt:
        """The attempt that has trained a step, or will."""
        return [attempt for attempt in self.attempts if attempt.start_step < step][-1]

    def check_step(self, step: int) -> None:
        """Check that the run has a step, or will have it.

        Raises:
            UserError: it does not.
        """
        path = self.run.path
        if step < 1:
            raise UserError(f"step {step} used no samples: the first step of a run is step 1")
        first = 0 if self.fork is None else self.fork.step
        if step <= first:
            raise UserError(
                f"{path} began at step {first}: it was forked from another run, which trained step {step}",
                cure="Name that run.",
            )
        # A summary that was lost knows only the attempts since.
        if step <= (first_known := min(attempt.start_step for attempt in self.attempts)):
            raise UserError(
                f"{path} knows its attempts from step {first_known} on, so how step {step} was trained is unknown"
            )
        if self.end is not None and step > self.end:
            raise UserError(f"step {step} is after the end of {path}, which is step {self.end}")


def read_records(path: Path) -> StepRecords:
    """Read what is known of the steps of a run, or of `RUN@attempt2`: the run as that attempt left it.

    Raises:
        UserError: the folder holds no run, or the run has no such attempt.
    """
    path, number = split_attempt(path)
    run = RunDir(path)
    if not run.exists_as_run():
        raise UserError(f"{path} holds no run", cure=RunDir.advise(path))
    config = RunDir(path).values
    if not config:
        raise RunDirectoryError(f"{run.config_file} cannot be read")
    history = Run(path)
    try:
        kept = history.valid_checkpoints
    except (OSError, CheckpointError) as error:
        log.warning("the checkpoints of %s cannot be listed: %s", path, error)
        kept = []
    history.valid_checkpoints = [
        (entry, folder)
        for entry, folder in kept
        if entry.manifest is not None and Progress.of(entry.manifest.progress) is not None
    ]
    # Before later attempts are left out: an attempt without a checkpoint has the config of the next.
    attempts = _attempts(history, config)
    if number is not None:
        history, attempts = history.until(number), [attempt for attempt in attempts if attempt.number <= number]
    return StepRecords(history, config, attempts)


def _attempts(history: Run, config: Mapping[str, Any]) -> list[Attempt]:
    """The attempts in their order, each with the config that it trained with, as far as it is known."""
    recorded = [attempt for attempt in history.attempts if isinstance(attempt.get("attempt"), int)]
    recorded = recorded or [{"attempt": 1, "start_step": 0}]
    saved = {
        entry.manifest.attempt: (entry.manifest, path) for entry, path in history.kept if entry.manifest is not None
    }
    attempts: list[Attempt] = []
    # From the last one, whose config is that of the run: an attempt without a checkpoint has that of the next.
    for facts in reversed(recorded):
        number, start_step, is_last = facts["attempt"], facts.get("start_step"), not attempts
        processes = history.directory.environment_of(number).get("processes")
        if number in saved:
            manifest, path = saved[number]
            processes = manifest.world_size
            config = config if is_last else _config_of(path) or config
        attempts.append(
            Attempt(
                number,
                start_step if isinstance(start_step, int) else 0,
                processes if isinstance(processes, int) and processes > 0 else 1,
                config,
                is_last or number in saved,
            )
        )
    return attempts[::-1]


def _config_of(checkpoint: Path) -> Mapping[str, Any] | None:
    try:
        config = read_yaml(StoredCheckpoint(checkpoint).read_config()[1])
    except (TrainError, OSError, UnicodeDecodeError):
        return None
    return config if isinstance(config, dict) else None


_READ = (
    "batch_size", "global_batch_size", "grad_accum_steps", "limit_train_batches", "tensor_size", "overfit_batches",
    "drop_last",
)  # fmt: skip
"""Keys of the sections data, loop and parallel that decide which samples a step uses."""


def needs_resolving(config: Mapping[str, Any]) -> bool:
    """Whether a value on which the samples of a step depend is an interpolation, which only OmegaConf resolves."""
    values = [config.get("seed"), *_section(config, "callbacks").values()]
    values += [_section(config, name).get(key) for name in ("data", "loop", "parallel") for key in _READ]
    return any("${" in str(value) for value in values)


def _skipped_samples(config: Mapping[str, Any]) -> int:
    """`samples` of the callbacks SkipSamples."""
    return sum(
        int(node.get("samples") or 0)
        for node in _section(config, "callbacks").values()
        if isinstance(node, Mapping) and str(node.get("_target_")) in _SKIP_SAMPLES
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


class StepPositions:
    """The positions of a run's steps in its data: stretches, in the order of their steps.

    Args:
        facts: what the train loader is like.
    """

    def __init__(self, records: StepRecords, facts: DataFacts) -> None:
        self.records, self.facts = records, facts
        self.confirmed = False
        """Whether the position of a checkpoint is the one that was computed from an earlier step."""
        self.stretches: list[Stretch] = []
        skipped = 0
        for number, attempt in enumerate(records.attempts, 1):
            last_step = min((later.start_step for later in records.attempts[number:]), default=None)
            # Later attempts began before its first step, so nothing of it is left.
            if last_step is not None and last_step <= attempt.start_step:
                continue
            layout = self._layout(attempt)
            start = layout.enter(self._start(attempt))
            if (more := _skipped_samples(attempt.config) - skipped) > 0 and not facts.counts_batches:
                start, skipped = layout.pass_over(start, more), skipped + more
            uncertainty = None if attempt.is_config_known else _ASSUMED.format(attempt.number)
            self._add(Stretch(attempt.number, start, last_step, layout, uncertainty))

    def stretch_of(self, step: int) -> Stretch:
        """The stretch that has trained a step, or will.

        Raises:
            UserError: there is no such step.
        """
        self.records.check_step(step)
        return next(stretch for stretch in reversed(self.stretches) if stretch.holds(step))

    def are_certain(self, first: int, last: int) -> bool:
        """Whether the samples of all of these steps are certain."""
        return not any(
            stretch.uncertainty is not None
            for stretch in self.stretches
            if stretch.start.step < last and (stretch.last_step is None or stretch.last_step >= first)
        )

    def _layout(self, attempt: Attempt) -> EpochLayout:
        """How an attempt divided an epoch.

        Raises:
            ConfigError: its global batch size cannot be divided among the processes.
        """
        facts = self.facts
        data, loop, parallel = (_section(attempt.config, name) for name in ("data", "loop", "parallel"))
        world_size = max(1, attempt.processes // int(parallel.get("tensor_size") or 1))
        batch_size, accumulated = divide_step(data, int(loop.get("grad_accum_steps") or 1), world_size)
        return EpochLayout(
            length=facts.length,
            batch_size=1 if facts.counts_batches else facts.batch_size or int(batch_size or _DEFAULT_BATCH_SIZE),
            world_size=world_size,
            grad_accum_steps=accumulated,
            limit_train_batches=loop.get("limit_train_batches"),
            drop_last=bool(data.get("drop_last")) if facts.drop_last is None else facts.drop_last,
            whole_batches=facts.whole_batches,
        )

    def _start(self, attempt: Attempt) -> Progress:
        """The position at which an attempt began."""
        if attempt.start_step and attempt.start_step in self.records.checkpoints:
            return self._position(attempt.start_step)
        if not self.stretches or attempt.start_step == 0:
            return self.records.fork or Progress(step=attempt.start_step)
        # In batches of another layout; the caller enters it in its own.
        previous = self.stretches[-1]
        return previous.layout.position_after(previous.start, attempt.start_step)

    def _position(self, step: int) -> Progress:
        """The position that the checkpoint of a step holds, in the unit of the layouts."""
        manifest, _ = self.records.checkpoints[step]
        progress = Progress.of(manifest.progress)
        assert progress is not None, "records hold checkpoints with their progress"
        if not self.facts.counts_batches:
            return progress
        world_size = max(1, manifest.world_size // manifest.tensor_size)
        return replace(progress, epoch_samples=progress.batch * world_size)

    def _add(self, stretch: Stretch) -> None:
        """Add the stretch of an attempt, divided at its checkpoints, which show where data was skipped."""
        is_computed = True
        for step, (manifest, _) in self.records.checkpoints.items():
            if manifest.attempt != stretch.attempt or not stretch.holds(step):
                continue
            saved = self._position(step)
            # From here on the checkpoint is known to be right.
            entered = stretch.layout.enter(saved)
            if _is_at(saved, stretch.layout.position_after(stretch.start, step)):
                self.confirmed = True
                if is_computed:
                    self._confirm_last_attempt()
                self.stretches.append(replace(stretch, last_step=step))
                stretch = replace(stretch, start=entered)
            else:
                self.stretches.append(self._after_jump(stretch, step, saved))
                stretch = replace(stretch, start=entered, uncertainty=None)
            is_computed = False
        self.stretches.append(stretch)

    def _confirm_last_attempt(self) -> None:
        """Settings that were assumed are right if the next attempt continues at the position computed with them."""
        if self.stretches:
            number = self.stretches[-1].attempt
            self.stretches = [
                replace(stretch, uncertainty=None) if stretch.uncertainty == _ASSUMED.format(number) else stretch
                for stretch in self.stretches
            ]

    def _after_jump(self, stretch: Stretch, step: int, saved: Progress) -> Stretch:
        """The stretch up to a checkpoint at which the position is another than computed: a roll back passed over data.

        The training went back to the checkpoint at the start of the stretch, and continued with later data.
        """
        start = stretch.start
        skipped = saved.passed_over - start.passed_over
        if skipped > 0:
            moved = replace(stretch.layout.position_after(start, start.step + skipped), step=start.step)
            shifted = replace(stretch, start=stretch.layout.enter(moved), last_step=step)
            # One that was removed since: the training may have gone back to it instead.
            saves = Life.read_all(read_rows(self.records.run.history_file))
            between = any(life.step is not None and start.step < life.step < step for life in saves)
            if _is_at(saved, shifted.layout.position_after(shifted.start, step)) and not between:
                self.confirmed = True
                return shifted
        return replace(
            stretch,
            last_step=step,
            uncertainty=f"step {start.step} does not lead to step {step}: data was skipped at an unrecorded step",
        )


def _is_at(saved: Progress, computed: Progress) -> bool:
    return (saved.epoch, saved.epoch_samples) == (computed.epoch, computed.epoch_samples)
