"""`train fit -m`: run the jobs of a sweep.

    split the command line into jobs; compose and check the config of every job, against the run if it exists
    make and lock the sweep's folder only now; freeze the config of each job that is not finished
    run the jobs in order, each in its own process, `--jobs` at a time
    after each job and at the end: read the status of all of them from their directories

Each job is a run in `runs/NAME/sweep/KEY`, so that the same command again starts those that are not finished, and
each resumes. A job that fails does not stop the others. A signal is passed to all jobs: they save and exit, and no
other job begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import random
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trainer_cli.addons.jobs.devices import Devices, Taken, share_devices
from trainer_cli.addons.jobs.run_jobs import job_environment, job_file, run_in_turn, start_job
from trainer_cli.addons.jobs.submit import SLURM, Submission, Submitted, check_processes, read_submission
from trainer_cli.addons.jobs.submitted import keep_submitted
from trainer_cli.addons.jobs.supervise import Children
from trainer_cli.addons.jobs.sweep_display import SweepDisplay
from trainer_cli.addons.jobs.sweep_jobs import MOST_JOBS, Job, read_swept
from trainer_cli.addons.jobs.sweep_table import (
    FAILURE,
    JobStatus,
    as_sentence,
    as_table,
    best_jobs,
    job_status,
    recorded_error,
    shorten_error,
    write_csv,
    write_failure,
)
from trainer_cli.config import Composed, SearchPath, compose, override_error
from trainer_cli.environment import usable_cores
from trainer_cli.errors import ConfigError, ExitCode, TrainError, UserError, describe_exit, raise_all
from trainer_cli.fit_parts import NO_LIMITS, JobLimits
from trainer_cli.layout import SWEEP_FOLDER
from trainer_cli.messages import to_console
from trainer_cli.parts import AddOnPart
from trainer_cli.policy import RecordedEnd
from trainer_cli.processes import FrozenJob, text_of
from trainer_cli.running import accepted_changes, refuse_anew, refuse_no_optimizer, validate_command
from trainer_cli.runs import BestSettings, RunDir, RunView, refuse_nested
from trainer_cli.schema import (
    ANEW,
    RESUME_WORDS,
    CheckpointConfig,
    ParallelConfig,
    TrainConfig,
)
from trainer_cli.search_parts import SEARCH, Draw, Numbers, Trial, TrialSearch
from trainer_cli.signals import StopSignals
from trainer_cli.steps import Duration, RunStatus
from trainer_cli.terminal import clear_status, format_count, is_terminal, line_width, show_status, wrapped_message

log = logging.getLogger(__name__)

_LENGTH = "loop.max_duration"
_SAVED = (ExitCode.STOPPED_EARLY, ExitCode.INTERRUPTED)


def run_sweep(
    arguments: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    limits: JobLimits = NO_LIMITS,
    submit: Sequence[str] = (),
) -> int:
    """Run every job of the command line, and return the exit code.

    Args:
        submit: values of `--submit`, see `read_submission`; empty: the jobs run in child processes.
    """
    submission = read_submission(submit) if submit else None
    # All jobs are checked before the first begins: a mistake in the last one would be found after days.
    plan = SweepPlan(arguments, config_dir, config_name)
    if submission is not None:
        _refuse_to_submit(plan, submission, limits)
    plan.refuse_anew()
    to_console(plan.planned[0].level)
    if not plan.folder.exists() and RunDir(plan.folder.parent).exists_as_run():
        log.info(
            "%s is a run, too: while it holds this sweep, resume=anew does not move it; name=OTHER keeps them apart",
            plan.folder.parent,
        )
    if submission is not None:
        return _submit(plan, submission, limits.at_once)
    users = [(job.device, job.processes) for job in plan.planned]
    devices, at_once = share_devices(users, limits)
    with contextlib.closing(Children(partial(job_file, plan.folder, suffix="log"))) as children:
        return Sweep(plan, children, at_once, usable_cores(), devices, _show(plan)).run()


def _submit(plan: SweepPlan, submission: Submission, at_once: int | None) -> int:
    """Run the jobs of a sweep by submitit, and return the exit code."""
    is_slurm = submission.cluster == SLURM
    # Slurm runs the jobs on other machines: all may wait in its queue at once.
    at_once, cores = at_once or (len(plan.planned) if is_slurm else 1), None if is_slurm else usable_cores()
    return Sweep(plan, Submitted(submission, plan.folder), at_once, cores, display=_show(plan)).run()


def _show(plan: SweepPlan) -> SweepDisplay | None:
    """What shows the jobs on a terminal; None without one."""
    if not is_terminal(sys.stderr):
        return None
    return SweepDisplay(sys.stderr, {job.key: job.run for job in plan.planned}, plan.best, plan.prunes)


def _refuse_to_submit(plan: SweepPlan, submission: Submission, limits: JobLimits) -> None:
    """Refuse what only jobs in child processes can do."""
    if (limits.devices, limits.per_device) != (None, None):
        raise UserError(
            "--devices and --jobs-per-device are for runs that this command starts",
            cure="With --submit the cluster chooses: --submit gpus_per_node=1.",
        )
    if plan.learns:
        raise UserError(
            "a sweep whose runs follow from results is not submitted",
            where="sweep",
            cure="Leave --submit out; sweep.search=random without sweep.prune may be submitted.",
        )
    for job in plan.planned:
        check_processes(submission, job.parallel)


@dataclass(frozen=True, slots=True)
class Planned:
    """A job whose config is checked; nothing of it is written yet."""

    job: Job
    run: RunDir
    base: Path
    """The directory that the run would have outside the sweep."""
    frozen: str
    """The text of its frozen config."""
    reopened: bool
    """Whether a finished run trains further under another config."""
    level: str
    """Of the messages on the console."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: str = "auto"
    folders: Mapping[str, str] = field(default_factory=dict)
    """Config key -> folder outside the run directory in which the job saves or copies checkpoints."""
    begins_anew: bool = False
    """Whether `resume=anew` moves the run away that it has."""
    how_to_resume: str = ""
    """What to do while jobs of the sweep are not finished."""
    doubled_duration: str = ""
    """Twice the length of the training, for `loop.max_duration`."""
    best: BestSettings = field(default_factory=BestSettings)
    """What the config says about which run is best."""
    until: str | None = None
    """The length at which it pauses."""

    @property
    def key(self) -> str:
        """The name of the job in the sweep."""
        return self.job.key

    @property
    def processes(self) -> int:
        """The number of processes that train the job."""
        return self.parallel.processes_per_node or 1

    @property
    def overrides(self) -> list[str]:
        """The overrides of the job, with its directory."""
        return [*self.job.overrides, f"run_dir={text_of(str(self.run.path))}"]

    @property
    def done(self) -> bool:
        """Whether the run directory says that the job is finished."""
        return (
            not self.reopened and not self.begins_anew and self.run.read_summary().get("status") == RunStatus.finished
        )


class SweepPlan:
    """The jobs of a command line, composed and checked. Nothing is written.

    Raises:
        ConfigError: every mistake, with the swept values of its first job; or two jobs that do not differ.
    """

    def __init__(self, arguments: Sequence[str], config_dir: Path | None, config_name: str) -> None:
        search = SearchPath.of(config_dir, config_name, None)

        def options(group: str) -> list[str] | None:
            return list(search.options(group)) if search.is_group(group) else None

        self.config_dir = config_dir
        self._compose = partial(compose, config_dir=config_dir, config_name=config_name)
        self.line = read_swept(arguments, options)
        self._first = self.line.make_first_job()
        self._composed: Composed | None = None
        self.settings = self._read_config().sweep
        self.planned: list[Planned] = []
        """In order."""
        if self.learns:
            # Here, before anything is written.
            SEARCH.need(f"sweep.prune={self.settings.prune}", "sweep.prune")
        if self.settings.search == "grid":
            self.add(self.line.list_grid())
            return
        self._refuse_settings()
        trials: list[Trial] = []
        # The draws of a search that learns are made when there are results.
        for _ in range(1 if self.settings.search == "optuna" else self.trials):
            trials.append(Trial(self.draw(trials)))
        self.add([self.line.make_job(trial.values) for trial in trials])

    @cached_property
    def folder(self) -> Path:
        """The folder of the lock, sweep.csv and the frozen configs."""
        return folder_of([job.base for job in self.planned])

    @property
    def best(self) -> BestSettings:
        """What the configs of all jobs say about which is best, also of those that have not begun."""
        return BestSettings.common(job.best for job in self.planned)

    @property
    def trials(self) -> int:
        """The number of jobs, also of those that are not drawn yet."""
        return self.settings.trials or len(self.planned)

    @property
    def prunes(self) -> bool:
        """Whether jobs are paused by results."""
        return self.settings.prune != "none"

    @property
    def learns(self) -> bool:
        """Whether what is trained follows from results."""
        return self.settings.search == "optuna" or self.prunes

    def refuse_anew(self) -> None:
        """Refuse to begin runs anew that a search has chosen by their results."""
        if self.learns and any(job.begins_anew for job in self.planned):
            raise UserError(
                "resume=anew and a sweep whose runs follow from results",
                where="resume",
                cure=f"name=OTHER begins another one; or remove {self.folder} first.",
            )

    def open_search(self, file: Path) -> TrialSearch:
        """The search that chooses among the jobs, with its record."""
        rules = {f"sweep.{name}": value for name, value in asdict(self.settings).items() if name != "trials"}
        if _LENGTH not in self.line.space and self._composed is not None:
            rules[_LENGTH] = str(self._composed.config.loop.max_duration)
        return SEARCH.need("a search")(file, rules, self.begin, self.restore)

    def begin(self, trials: Mapping[str, Trial]) -> tuple[str, Mapping[str, Any]] | None:
        """KEY and values of the trial after these, composed and checked; None if there is none."""
        if len(trials) >= self.trials:
            return None
        if left := [job.job for job in self.planned if job.key not in trials]:
            # By chance: of sorted values each might be better than all before it, and would never be paused.
            job = min(left, key=lambda job: random.Random(job.key).random())
            return job.key, job.values
        job = self.line.make_job(self.draw(list(trials.values())))
        self.add([job])
        return job.key, job.values

    def restore(self, key: str, values: Mapping[str, Any]) -> bool:
        """Whether a recorded trial is one of these; one that a search has drawn is composed and checked again."""
        known = any(job.key == key for job in self.planned)
        if known or self.settings.search != "optuna" or not self.line.has(values):
            return known
        self.add([self.line.make_job(values)])
        return True

    def draw(self, trials: Sequence[Trial]) -> Mapping[str, Any]:
        """The values of the trial after these."""
        method = self.settings.search
        part: AddOnPart[Draw] = AddOnPart(f"search.{method}")
        return part.need(f"sweep.search={method}", "sweep.search")(self.line.space, self.settings.seed, trials)

    def add(self, all_jobs: Sequence[Job]) -> None:
        """Compose and check more jobs."""
        mistakes: dict[str, list[tuple[Job, TrainError]]] = {}
        for number, job in enumerate(all_jobs, 1):
            show_status(f"checking job {number:,} of {len(all_jobs):,} …")
            try:
                is_known = self._composed is not None and job.overrides == self._first.overrides
                composed = self._composed if is_known else None
                self.planned.append(_plan_job(job, composed or self._compose(job.overrides)))
            except TrainError as error:
                # By their text, apart from the job's own directory: a hundred jobs with one mistake are one message.
                text = str(error).replace(f"/{SWEEP_FOLDER}/{job.key}", "")
                mistakes.setdefault(text, []).append((job, error))
        for failed in mistakes.values():
            # A mistake of every job is not one of the swept values.
            if len(failed) == len(all_jobs):
                raise failed[0][1]
        raise_all([_join_mistakes(failed) for failed in mistakes.values()])
        clear_status()
        _refuse_equal(self.planned)
        _refuse_shared_folder(self.planned)
        if self.settings.search != "grid" and len({job.base for job in self.planned}) > 1:
            raise UserError(
                f"the runs of a sweep with sweep.search={self.settings.search} have several names",
                where="name",
                cure="Add name=NAME: they are in one folder, to which more trials are added.",
            )

    def _read_config(self) -> TrainConfig:
        """The config of the first job."""
        try:
            self._composed = self._compose(self._first.overrides)
        except TrainError:
            if any(isinstance(of, Numbers) for of in self.line.space.values()):
                raise
            # That of each job is reported with its values.
            return TrainConfig()
        return self._composed.config

    def _refuse_settings(self) -> None:
        """Refuse what a search cannot do."""
        if self.settings.trials is None:
            raise UserError(
                f"sweep.search is {self.settings.search}, and sweep.trials, the number of runs, is null",
                where="sweep.trials",
                cure="Set sweep.trials=20.",
            )
        most = min(self.line.size, MOST_JOBS)
        if self.trials > most:
            raise UserError(
                f"sweep.trials is {self.trials:,}, but there are at most {int(most):,}",
                where="sweep.trials",
                cure=f"Set sweep.trials={int(most)}, or give more values or an interval.",
            )


def plan_jobs(
    arguments: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config"
) -> list[Planned]:
    """The jobs of a command line, in order; of a search that learns the first. See `SweepPlan`."""
    return SweepPlan(arguments, config_dir, config_name).planned


def folder_of(bases: Sequence[Path]) -> Path:
    """The sweep's folder: `BASE/sweep`, or for jobs with different bases `COMMON/A,B/sweep` of what differs."""
    different = sorted(set(bases))
    if len(different) == 1:
        return different[0] / SWEEP_FOLDER
    common = Path(os.path.commonpath(different))
    ends = [re.sub(r"[^A-Za-z0-9_.-]", "-", str(base.relative_to(common))) for base in different]
    name = ",".join(ends)
    if len(name) > 100:
        # File systems limit a name to 255 bytes.
        digest = hashlib.sha256("\n".join(map(str, different)).encode()).hexdigest()[:12]
        name = f"{name[:87]}-{digest}"
    return common / name / SWEEP_FOLDER


def _plan_job(job: Job, composed: Composed) -> Planned:
    """Check the config of a job, against its run if that exists, and freeze it. Nothing is written.

    Raises:
        UserError: the config is not one that a job of a sweep may have, or does not fit its run.
    """
    composed.refuse_shipped_default()
    refuse_no_optimizer(composed)
    config = composed.config
    if config.resume not in RESUME_WORDS:
        raise UserError(
            f"resume={config.resume} is one run, but a sweep has several",
            where="resume",
            cure="Leave resume= out: the same command again resumes.",
        )
    composed.refuse_time("a sweep could not be resumed")
    job_folder = f"{SWEEP_FOLDER}/{job.key}"
    run = RunDir(Path(config.run_dir) / job_folder)
    length = config.loop.max_duration
    reopened, begins_anew = False, config.resume == ANEW and run.exists_as_run()
    if begins_anew:
        refuse_anew(run, composed)
    elif run.exists_as_run():
        in_job_folder = composed.with_values({"run_dir": str(run.path)})
        stored = accepted_changes(run, in_job_folder, in_sweep=True).stored.config
        summary = run.read_summary()
        reopened = RecordedEnd.of(str(summary.get("reason")), summary).may_reopen(stored, config)
        if summary.get("status") == RunStatus.finished and not reopened:
            # It may have been trained longer than the sweep.
            length = stored.loop.max_duration
    else:
        # Only a new run: one that exists has its place already.
        refuse_nested(run.path)
        composed.check_targets()
    how_to_resume = composed.naming_again("next: the same command again resumes, and repeats what failed.")
    if config.resume == ANEW:
        # The sweep moves the runs before its first job, so that a restarted job resumes.
        composed = composed.with_values({"resume": "auto"})
    return Planned(
        job=job,
        run=run,
        base=Path(config.run_dir),
        frozen=composed.freeze(job_folder),
        reopened=reopened,
        level=config.logging.level,
        parallel=config.parallel,
        device=config.device,
        folders=_folders(config.checkpoint),
        begins_anew=begins_anew,
        how_to_resume=how_to_resume,
        doubled_duration=_twice(Duration.parse(length)),
        best=_best_settings(config),
    )


def _best_settings(config: TrainConfig) -> BestSettings:
    """What a config says about which run of its sweep is best."""
    settings, metric = BestSettings.of(asdict(config)), config.sweep.metric
    if metric is None:
        return settings
    if (mode := settings.mode_of(metric)) is None:
        raise UserError(
            f"the name {metric} does not say whether less or more of it is better",
            where="sweep.metric",
            cure=f"Set checkpoint.keep_best.metric={metric} and checkpoint.keep_best.mode=min or max.",
        )
    return settings._replace(metric=metric, mode=mode)


def _twice(duration: Duration) -> str:
    """The text of twice a duration, as a config holds it: `1.5ep` for `0.75ep`."""
    number = 2 * duration.value
    return f"{number if number.denominator == 1 else float(number)}{duration.unit.value}"


def _folders(checkpoint: CheckpointConfig) -> dict[str, str]:
    """Config key -> folder outside the run directory in which checkpoints are saved or copied, if there are some."""
    folders = {"checkpoint.folder": checkpoint.folder, "checkpoint.copy_to.folder": checkpoint.copy_to.folder}
    return {key: folder for key, folder in folders.items() if folder is not None and checkpoint.enabled}


def _join_mistakes(failed: Sequence[tuple[Job, TrainError]]) -> ConfigError:
    """One error for all jobs with the same mistake, with the swept values of the first."""
    job, error = failed[0]
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    source = error.source if isinstance(error, UserError) else None
    return ConfigError(
        f"{_swept_values(job)}{more}: {error.what}", location=error.where, source=source, hint=error.cure
    )


def _swept_values(job: Job) -> str:
    """The swept values of a job, as on the command line."""
    return " ".join(f"{key}={text}" for key, text in job.swept.items())


def _refuse_shared_folder(planned: Sequence[Planned]) -> None:
    """Refuse two jobs that save their checkpoints in the same folder."""
    seen: dict[str, Job] = {}
    for entry in planned:
        for key, folder in entry.folders.items():
            other = seen.setdefault(folder, entry.job)
            if other is not entry.job:
                raise ConfigError(
                    f"{_swept_values(other)} and {_swept_values(entry.job)} both save in {folder}",
                    location=key,
                    hint="Leave it out: each job of a sweep has a directory of its own; or put the swept key into it.",
                )


def _refuse_equal(planned: Sequence[Planned]) -> None:
    """Refuse jobs whose configs do not differ: the swept key does nothing, or is set again by another."""
    seen: dict[str, Job] = {}
    for entry in planned:
        # The run directory contains the key of the job: it always differs.
        text = re.sub(r"(?m)^run_dir: .*\n", "", entry.frozen, count=1)
        other = seen.setdefault(text, entry.job)
        if other is not entry.job:
            message = f"{_swept_values(other)} and {_swept_values(entry.job)} give the same config"
            raise override_error(message, "Sweep a key that nothing else sets.")


@dataclass(slots=True)
class Sweep:
    """Runs the jobs of one command, from the lock of the sweep's folder to the last table."""

    plan: SweepPlan
    children: Children | Submitted
    at_once: int
    cores: int | None
    """The cores for all jobs together; None: they run on other machines."""
    devices: Devices | None = None
    """Gives each job its own; None: the jobs see all devices."""
    display: SweepDisplay | None = None
    """Shows the jobs on a terminal; None: a line is printed at the start and the end of each."""
    search: TrialSearch | None = None
    """Chooses what is trained, of a sweep in which that follows from results."""
    submitted: Path | None = None
    """The source by which the jobs are trained; None: what they find."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of the jobs that ended in this command."""

    @property
    def folder(self) -> Path:
        """See `SweepPlan.folder`."""
        return self.plan.folder

    def run(self) -> int:
        """Run the jobs that are not finished, print the status of all, and return the exit code."""
        RunDir.make_directory(self.folder / ".jobs")
        # One command at a time works on a sweep: two would start the same jobs.
        with RunDir(self.folder).lock() as lock:
            lock.name_holder()
            if self.plan.learns:
                self.search = self.plan.open_search(self.folder / "search.jsonl")
            waiting = [job for job in self.plan.planned if not job.done]
            for job in waiting:
                if job.begins_anew:
                    moved = RunDir.describe_moved(job.run.move_to_trash())
                    log.info("moved the earlier run of %s to %s", job.key, moved)
            if waiting or self.search is not None:
                self.submitted = keep_submitted(self.folder, self.plan.line.arguments, self.plan.config_dir)
            finished = len(self.plan.planned) - len(waiting)
            count = format_count(self.plan.trials, "job")
            log.info("%s in %s%s", count, self.folder, f", {finished} finished" if finished else "")
            with StopSignals(self.children.promise) as signals:
                try:
                    self._work(waiting, signals, self._environment())
                except KeyboardInterrupt as interrupt:
                    self.children.kill()
                    interrupt.add_note(f"kept: the checkpoints that the jobs saved, in {self.folder}")
                    interrupt.add_note(self.plan.planned[0].how_to_resume)
                    raise
                finally:
                    if self.display is not None:
                        self.display.close()
                    # After an error child processes may still run: they stop when this process ends.
                    self._write()
            is_complete = self._print_results()
            # Of a grid, a job that has failed has begun and ended.
            incomplete = any(job.key not in self.codes for job in waiting) if self.search is None else not is_complete
            stopped = signals.stop_request is not None
            return exit_code(list(self.codes.values()), stopped=stopped, incomplete=incomplete)

    def _print_results(self) -> bool:
        """Print the status of all jobs, and what to do next; returns whether nothing is left to train."""
        rows, settings = self._rows(), self.plan.best
        is_complete = all(row.finished for row in rows) if self.search is None else self.search.is_complete
        lines = [as_table(rows, settings), f"results: {self.folder / 'sweep.csv'}"]
        if not is_complete:
            lines.append(self.plan.planned[0].how_to_resume)
        print("\n" + wrapped_message("\n".join(lines), line_width(sys.stdout)), flush=True)
        if is_complete:
            # Not wrapped: commands are copied as a whole.
            _, best = best_jobs(rows, settings)
            print(self._next_commands(best), flush=True)
        return is_complete

    def _work(self, waiting: Sequence[Planned], signals: StopSignals, env: Mapping[str, str]) -> None:
        """Start the jobs in order, at most `at_once` at a time, until all have ended or a signal asks to stop."""
        self._write(follows=True)
        # Before the first job starts, which takes seconds: its process imports torch.
        self._draw()

        def end(key: str, code: int) -> bool:
            self._on_ended(self._find(key), code)
            self._write(follows=True)
            return False

        run_in_turn(
            self.children,
            self._take_unlocked(waiting) if self.search is None else self._take_chosen(self.search),
            lambda job, taken: self._start(job, env, taken),
            end,
            at_once=self.at_once,
            signals=signals,
            devices=self.devices,
            draw=self._draw,
        )

    def _take_unlocked(self, waiting: Sequence[Planned]) -> Iterator[Planned | None]:
        """The jobs in order, without those whose run is in use until it is free; None while that are all."""
        queue, waits = list(waiting), False
        while queue:
            # A job of an earlier command, which was killed, may still be saving.
            job = next((job for job in queue if not job.run.is_locked()), None)
            if job is not None:
                queue.remove(job)
            elif not waits:
                log.info("%s waits: its run is in use by another process", queue[0].key)
            waits = job is None
            yield job

    def _take_chosen(self, search: TrialSearch) -> Iterator[Planned | None]:
        """The jobs that the search chooses, each up to where it pauses; None while it waits for results."""
        while (chosen := search.choose()) is not None or self.children:
            if chosen is None:
                yield None
                continue
            job = self._find(chosen[0])
            while job.run.is_locked():
                yield None
            yield dataclasses.replace(job, until=chosen[1])

    def _measure(self, search: TrialSearch, job: Planned) -> None:
        """Tell the search what was measured of a job until its rung, or its end.

        Raises:
            UserError: the metric was not.
        """
        row, settings = self._row(job), self.plan.best
        rule = settings.rule([*row.best, *row.last])
        if rule is None or settings.metric not in (None, rule.metric):
            raise UserError(
                f"{job.key} has no value of {settings.metric or 'a validation loss'} at step {row.step}",
                where="sweep.metric",
                cure=f"Measured until there: {', '.join(row.last) or 'nothing'}. Set sweep.metric to one of these, or "
                "loop.eval_interval to evaluate before the first of sweep.rungs.",
            )
        best = row.best.get(rule.metric)
        loss = None if best is None else rule.loss({rule.metric: best["value"]})
        search.measure(job.key, rule.metric, loss, row.step)

    def _find(self, key: str) -> Planned:
        return next(job for job in self.plan.planned if job.key == key)

    def _environment(self) -> Mapping[str, str]:
        # Of all jobs, not of those that are left: a job that resumes must have as many threads as before.
        most = max(job.processes for job in self.plan.planned)
        side_by_side = self.at_once if self.plan.learns else min(self.at_once, len(self.plan.planned))
        return job_environment(side_by_side, self.cores, processes=most)

    def _draw(self) -> None:
        """Draw the table of the jobs, if there is one."""
        if self.display is not None:
            self.display.draw_if_due()

    def _start(self, job: Planned, env: Mapping[str, str], taken: Taken) -> None:
        """Start a job, and show that it has started."""
        self._report(job, f"started on device {taken.names}" if taken.names else "started")
        frozen = FrozenJob(
            job.key,
            job.frozen,
            job.job.overrides,
            job.processes,
            self.submitted,
            self.plan.settings.metric,
            job.until,
        )
        start_job(self.children, self.folder, frozen, taken, env, self.plan.config_dir)
        if self.display is not None:
            self.display.update(self._rows())

    def _on_ended(self, job: Planned, code: int) -> None:
        """Take over the exit code of a job, record a failure, and print how it ended."""
        self.codes[job.key] = code
        if self.search is not None:
            if code == ExitCode.DONE:
                self._measure(self.search, job)
            else:
                self.search.leave(job.key, is_killed=code == -signal.SIGKILL)
        if code in (ExitCode.DONE, *_SAVED):
            self._report(job, as_sentence(self._row(job), self.plan.best))
            return
        error = shorten_error(recorded_error(self._file(job, "yaml")))
        write_failure(self._file(job, FAILURE), code, job.run, error)
        output = self._file(job, "log")
        # The table at the end has the reasons of all jobs but those that are finished.
        reason = f": {error}" if error and self._row(job).finished else ""
        log.error(
            "%s failed: %s%s%s",
            job.key,
            describe_exit(code),
            reason,
            f" (output: {output})" if output.is_file() else "",
        )

    def _next_commands(self, best: Sequence[JobStatus]) -> str:
        """The next commands after a complete sweep: two for the best job, and the report of all."""
        commands = []
        if best:
            job = next(job for job in self.plan.planned if job.key == best[0].key)
            # The parser of overrides reads the second `=` in quotes alone.
            resume = shlex.quote(f'resume="{job.run.path}"')
            commands.append(f"train fit {resume} loop.max_duration={job.doubled_duration}")
            if kept := job.run.read_summary().get("checkpoints"):
                commands.append(validate_command(job.run, kept))
        commands.append(f"train report {shlex.quote(str(self.folder))}")
        of_first = " the best job, trained twice as long:" if best else ""
        return "\n  ".join([f"next:{of_first}", *commands])

    def _report(self, job: Planned, event: str) -> None:
        """Print a line about a job, unless the table on the terminal shows it."""
        if self.display is None:
            number = [other.job.key for other in self.plan.planned].index(job.key) + 1
            log.info("[%d/%d] %s %s", number, self.plan.trials, job.key, event)

    def _file(self, job: Planned, suffix: str) -> Path:
        return job_file(self.folder, job.key, suffix)

    def _row(self, job: Planned) -> JobStatus:
        row = job_status(
            job.key,
            job.job.swept,
            job.run,
            self._file(job, FAILURE),
            live_state=self.children.state(job.key),
            devices="" if self.devices is None else self.devices.names(job.key),
        )
        if row.finished and self.search is not None and (why := self.search.why_paused(job.key)) is not None:
            return dataclasses.replace(row, status=RunView.PAUSED, reason=why)
        return row

    def _rows(self) -> list[JobStatus]:
        """The states of all jobs, read from the disk."""
        return [self._row(job) for job in self.plan.planned]

    def _write(self, *, follows: bool = False) -> None:
        """Show the states of the jobs, and write them into sweep.csv.

        Args:
            follows: whether the search takes over what was trained by hand.
        """
        file, rows = self.folder / "sweep.csv", self._rows()
        if follows and self.search is not None:
            for row in rows:
                self.search.follow(row.key, row.step)
        if self.display is not None:
            self.display.update(rows)
        try:
            write_csv(file, rows)
        except OSError as error:
            # Not raised: the jobs continue without the table, and report a full disk themselves.
            log.error("%s could not be written: %s", file, error)


def exit_code(codes: Sequence[int], *, stopped: bool, incomplete: bool) -> ExitCode:
    """The exit code of a sweep.

    Args:
        codes: exit codes of the jobs that ended.
        stopped: whether a signal stopped the sweep.
        incomplete: whether some jobs did not begin or end.
    """
    can_continue = incomplete or any(code in _SAVED for code in codes)
    failures = [code for code in codes if code not in (ExitCode.DONE, *_SAVED)]
    if stopped and can_continue:
        return ExitCode.STOPPED_EARLY
    if failures:
        return ExitCode.USER if all(code == ExitCode.USER for code in failures) else ExitCode.FAILED
    return ExitCode.STOPPED_EARLY if can_continue else ExitCode.DONE
