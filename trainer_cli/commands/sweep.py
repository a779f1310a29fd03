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
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_cli.commands.submit import SLURM, Submitted, check_processes, submission
from trainer_cli.commands.sweep_table import (
    ERROR,
    JobStatus,
    Planned,
    as_table,
    folder_of,
    job_status,
    plan,
    recorded_error,
    write_csv,
    write_failure,
)
from trainer_cli.core.files import replace
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.signals import StopSignals
from trainer_cli.runs.supervise import Children, own_command
from trainer_cli.trainer.messages import to_console

log = logging.getLogger(__name__)

_SAVED = (ExitCode.STOPPED_EARLY, ExitCode.INTERRUPTED)


def sweep(
    arguments: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    at_once: int | None = None,
    submit: Sequence[str] = (),
) -> int:
    """Run every job of the command line, and return the exit code.

    Args:
        at_once: jobs at a time; None: one, or all under Slurm.
        submit: where they run, and with which parameters (`submit_options.submission`); empty: in child processes.
    """
    if at_once is not None and at_once < 1:
        raise UserError(f"--jobs is {at_once}, but it must be at least 1")
    asked = submission(submit) if submit else None
    planned = plan(arguments, config_dir=config_dir, config_name=config_name)
    to_console(planned[0].level)
    options = ["--config-dir", str(config_dir)] if config_dir is not None else []

    def command(one: Planned, frozen: Path) -> list[str]:
        return own_command(["_job", *options, str(frozen), *one.job.overrides])

    cores: int | None = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if asked is not None and asked.cluster == SLURM:
        at_once, cores = at_once or len(planned), None
    at_once = at_once or 1
    children: Children | Submitted
    if asked is None:
        children = Children(prefixed=at_once > 1)
    else:
        for one in planned:
            check_processes(asked, one.parallel)
        children = Submitted(asked, folder_of([one.base for one in planned]))
    return Sweep(planned, command, at_once, cores, children).run()


@dataclass(slots=True)
class Sweep:
    """The jobs of one command, from the lock to the last table."""

    planned: Sequence[Planned]
    command: Callable[[Planned, Path], Sequence[str]]
    """The command of a job, whose config is in that file."""
    at_once: int
    cores: int | None
    """The cores for all jobs together; None: they run on other machines."""
    children: Children | Submitted
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of the jobs that ended in this command."""

    @property
    def folder(self) -> Path:
        """The folder of the lock, sweep.csv and the frozen configs: that of the jobs, if they have one base."""
        return folder_of([one.base for one in self.planned])

    def run(self) -> int:
        """Run the jobs that are not finished, print the status of all, and return the exit code."""
        try:
            (self.folder / ".jobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made: {error.strerror}") from error
        with RunDir(self.folder).lock() as lock:
            lock.name_holder()
            waiting = [one for one in self.planned if not one.done]
            for one in waiting:
                replace(self._file(one, "yaml"), [one.frozen.encode()])
            finished = len(self.planned) - len(waiting)
            log.info("%d jobs in %s%s", len(self.planned), self.folder, f", {finished} finished" if finished else "")
            with StopSignals(self.children.promise) as signals:
                try:
                    self._work(waiting, signals, self._environment(len(waiting)))
                except KeyboardInterrupt:
                    self.children.kill()
                    raise
                finally:
                    # Child processes that still run after an error stop with this one (runs/supervise.py).
                    self._write()
            rows = self._rows()
            print(f"\n{as_table(rows)}\nresults: {self.folder / 'sweep.csv'}")
            if any(not row.finished for row in rows):
                print("next: the same command again resumes, and repeats what failed.")
            sys.stdout.flush()
            left = any(one.job.key not in self.codes for one in waiting)
            return exit_code(list(self.codes.values()), stopped=signals.stop_request is not None, left=left)

    def _work(self, waiting: Sequence[Planned], signals: StopSignals, env: Mapping[str, str]) -> None:
        """Start the jobs in order, so many at a time, until all have ended or a signal says stop."""
        self._write()
        by_key = {one.job.key: one for one in waiting}
        queue = list(waiting)
        passed_on = False
        while queue or self.children:
            while queue and len(self.children) < self.at_once and signals.stop_request is None:
                self._start(queue.pop(0), env)
            if signals.stop_request is not None:
                queue.clear()
                if not passed_on:
                    # Not SIGINT for Ctrl-C: the terminal sends that to the jobs itself, and a second one interrupts.
                    self.children.signal(signal.SIGTERM)
                    passed_on = True
            for key, code in self.children.wait():
                if passed_on and code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
                    # It did not handle signals yet, and had nothing to save.
                    code = ExitCode.STOPPED_EARLY
                self._ended(by_key[key], code)
                self._write()

    def _start(self, one: Planned, env: Mapping[str, str]) -> None:
        number = [other.job.key for other in self.planned].index(one.job.key) + 1
        log.info("[%d/%d] %s", number, len(self.planned), one.job.key)
        for suffix in ("failure", ERROR):
            with contextlib.suppress(FileNotFoundError):
                self._file(one, suffix).unlink()
        self.children.start(one.job.key, self.command(one, self._file(one, "yaml")), env)

    def _ended(self, one: Planned, code: int) -> None:
        self.codes[one.job.key] = code
        if code not in (ExitCode.DONE, *_SAVED):
            error = recorded_error(self._file(one, "yaml"))
            write_failure(self._file(one, "failure"), code, one.run, error)
            log.error("%s failed: %s", one.job.key, f"signal {-code}" if code < 0 else f"exit code {code}")

    def _environment(self, count: int) -> dict[str, str]:
        """The environment of a job: ours, with its share of the cores where several run at once."""
        env = dict(os.environ)
        side_by_side = min(self.at_once, count)
        if self.at_once > 1:
            env["PYTHONUNBUFFERED"] = "1"
        if self.cores is not None and side_by_side > 1 and "OMP_NUM_THREADS" not in env:
            threads = max(1, self.cores // side_by_side)
            env["OMP_NUM_THREADS"] = str(threads)
            log.info("%d jobs at a time, each with OMP_NUM_THREADS=%d", side_by_side, threads)
        return env

    def _file(self, one: Planned, suffix: str) -> Path:
        return self.folder / ".jobs" / f"{one.job.key}.{suffix}"

    def _rows(self) -> list[JobStatus]:
        return [
            job_status(
                one.job.key, one.job.swept, one.run, self._file(one, "failure"), now=self.children.state(one.job.key)
            )
            for one in self.planned
        ]

    def _write(self) -> None:
        file = self.folder / "sweep.csv"
        try:
            write_csv(file, self._rows())
        except OSError as error:
            # Probably a full disk, which the jobs report themselves.
            log.error("%s could not be written: %s", file, error)


def exit_code(codes: Sequence[int], *, stopped: bool, left: bool) -> ExitCode:
    """The sweep's exit code from those of the jobs that ended; `left`: some did not begin."""
    early = left or any(code in _SAVED for code in codes)
    failures = [code for code in codes if code not in (ExitCode.DONE, *_SAVED)]
    if stopped and early:
        return ExitCode.STOPPED_EARLY
    if failures:
        return ExitCode.USER if all(code == ExitCode.USER for code in failures) else ExitCode.FAILED
    return ExitCode.STOPPED_EARLY if early else ExitCode.DONE
