"""Run jobs in child processes, some at a time: those of a sweep, and frozen configs that another add-on has made."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from trainer_cli.addons.jobs.devices import Devices, Taken, share_devices
from trainer_cli.addons.jobs.supervise import Children
from trainer_cli.addons.jobs.sweep_table import ERROR, FAILURE, recorded_error
from trainer_cli.environment import usable_cores
from trainer_cli.errors import ExitCode
from trainer_cli.files import replace
from trainer_cli.fit_parts import JobLimits
from trainer_cli.processes import FrozenJob, own_command
from trainer_cli.runs import RunDir
from trainer_cli.signals import StopSignals
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.addons.jobs.submit import Submitted

log = logging.getLogger(__name__)


class _Job(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def processes(self) -> int: ...


Job = TypeVar("Job", bound=_Job)


def run_jobs(
    folder: Path,
    jobs: Iterator[FrozenJob],
    on_ended: Callable[[str, int, str], bool],
    *,
    users: Collection[tuple[str, int]],
    limits: JobLimits,
    config_dir: Path | None = None,
) -> str | None:
    """Run jobs, taken one by one, until none is left; returns the signal that stopped them, or None.

    Args:
        folder: their frozen configs and outputs are in `.jobs` there.
        on_ended: gets the KEY, the exit code and the error of each job that has ended; True: no other is needed.
        users, limits: see `share_devices`; `users` are those of all jobs that may come.
    """
    devices, at_once = share_devices(users, limits)
    RunDir.make_directory(folder / ".jobs")
    env = job_environment(at_once, usable_cores(), processes=max(count for _, count in users))
    with contextlib.closing(Children(partial(job_file, folder, suffix="log"))) as children:

        def start(job: FrozenJob, taken: Taken) -> None:
            start_job(children, folder, job, taken, env, config_dir)

        def end(key: str, code: int) -> bool:
            return on_ended(key, code, recorded_error(job_file(folder, key, "yaml")))

        with StopSignals(children.promise) as signals:
            try:
                run_in_turn(children, jobs, start, end, at_once=at_once, signals=signals, devices=devices)
            except KeyboardInterrupt:
                children.kill()
                raise
            return signals.stop_request


def start_job(
    children: Children | Submitted,
    folder: Path,
    job: FrozenJob,
    taken: Taken,
    env: Mapping[str, str],
    config_dir: Path | None,
) -> None:
    """Write the config of a job, and start it."""
    file = job_file(folder, job.key, "yaml")
    # As it was when the job was planned: one that starts hours later must not see an edit of the configs.
    replace(file, [job.frozen.encode()])
    # The files of an earlier command.
    for suffix in (FAILURE, ERROR):
        job_file(folder, job.key, suffix).unlink(missing_ok=True)
    flags = {"config-dir": config_dir, "metric": job.metric, "until": job.until, "submitted": job.submitted}
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    words += [f"--hold={lock}" for lock in taken.locks]
    command = own_command(["_job", *words, str(file), *job.overrides])
    children.start(job.key, command, {**env, **taken.variables()})


def run_in_turn(
    children: Children | Submitted,
    jobs: Iterator[Job | None],
    start: Callable[[Job, Taken], None],
    on_ended: Callable[[str, int], bool],
    *,
    at_once: int,
    signals: StopSignals,
    devices: Devices | None = None,
    draw: Callable[[], None] = lambda: None,
) -> None:
    """Start jobs in order, at most `at_once` at a time, until all have ended, or a signal or `on_ended` asks to stop.

    Args:
        jobs: asked when one more can start; None: there are more, but none can start now.
        on_ended: gets the KEY and the exit code of each job that has ended; True: no other is needed.
        devices: gives each job its own; None: the jobs see all devices.
    """
    ready = _give_devices(jobs, devices)
    more, signal_sent, enough = True, False, False
    while more or children:
        while more and not enough and len(children) < at_once and signals.stop_request is None:
            try:
                job = next(ready)
            except StopIteration:
                more = False
                break
            if job is None:
                break
            start(*job)
            # Before the next start, which may wait for seconds until the server of the forks has imported torch.
            draw()
        if signals.stop_request is not None or enough:
            # No other job begins after the signal; those that run may save first.
            more = False
            if not signal_sent:
                # Not SIGINT for Ctrl-C: the terminal sends that to the jobs itself, and a second one interrupts.
                children.signal(signal.SIGTERM)
                signal_sent = True
        draw()
        for key, code in children.wait():
            if signal_sent and code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
                # The signal ended the process before its handlers were set, so there was nothing to save.
                code = ExitCode.STOPPED_EARLY
            if devices is not None:
                devices.release(key)
            enough = on_ended(key, code) or enough


def _give_devices(jobs: Iterator[Job | None], devices: Devices | None) -> Iterator[tuple[Job, Taken] | None]:
    """Each job with its devices; None while too few are free, or while no job can start."""
    for job in jobs:
        taken, waits = Taken(), False
        if job is not None and devices is not None:
            while (free := devices.take(job.key, job.processes)) is None:
                if not waits:
                    log.info("%s waits: no device is free of %s", job.key, devices)
                waits = True
                yield None
            taken = free
        yield None if job is None else (job, taken)


def job_file(folder: Path, key: str, suffix: str) -> Path:
    """A file of a job in the folder of all: the frozen config (yaml), the output (log), how it failed."""
    return folder / ".jobs" / f"{key}.{suffix}"


def job_environment(side_by_side: int, cores: int | None, *, processes: int = 1) -> Mapping[str, str]:
    """The environment of a job. Jobs that run at the same time share the cores.

    Args:
        cores: for all jobs together; None: they run on other machines.
        processes: the most processes of a job.
    """
    env = dict(os.environ)
    # Their lines are in their logs as they come.
    env["PYTHONUNBUFFERED"] = "1"
    if cores is not None and side_by_side > 1 and "OMP_NUM_THREADS" not in env:
        # Each job of torch would otherwise start a thread for every core.
        threads = max(1, cores // (side_by_side * processes))
        env["OMP_NUM_THREADS"] = str(threads)
        log.info("%s at a time, each with OMP_NUM_THREADS=%d", format_count(side_by_side, "job"), threads)
    return env
