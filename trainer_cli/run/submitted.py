"""Jobs of a sweep in the queue of a cluster, or in processes of submitit, in place of child processes.

    this process:  submit each job -> write down its id -> look for its exit code -> ask Slurm if there is none
    the job:       the command of a child process; its exit code is written next to its frozen config
                   75 under Slurm: queued again under the same id, unless SIGTERM came (scancel, or a preemption)

Slurm's jobs stay when this process ends. The same sweep again finds them by the ids that it wrote down.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainer_cli.errors import ExitCode, UserError
from trainer_cli.loggers.own_run import imported
from trainer_cli.run.children import Child
from trainer_cli.run.run_dir import write_json
from trainer_cli.run.submit_options import LOCAL, SLURM, Submission, check_names
from trainer_cli.run.sweep_table import ERROR, QUEUED

log = logging.getLogger(__name__)

_LOOK_AFTER_S = {SLURM: 2.0, LOCAL: 0.1}
_SIGNAL = "USR1"
"""What Slurm sends ahead of the time limit: a job saves at it. Submitit's USR2 would end it."""


class Submitted:
    """The submitted jobs by name, with the methods of `Children`.

    Args:
        folder: the sweep's; submitit's files are in `submitit` of it.

    Raises:
        UserError: submitit or Slurm's commands are not installed, or a parameter is wrong.
    """

    def __init__(self, asked: Submission, folder: Path) -> None:
        submitit = _submitit()
        self._cluster = asked.cluster
        self._records = folder / ".jobs"
        self._named = "name" in asked.parameters
        self._gpus = "gpus_per_node" in asked.parameters
        self._job_class = submitit.SlurmJob if asked.cluster == SLURM else submitit.LocalJob
        self._folder = folder.absolute() / "submitit"
        self._jobs: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        self._stopping = False
        generic = submitit.AutoExecutor._valid_parameters()
        check_names(asked, known_parameters())
        if asked.cluster == SLURM:
            _find_commands("sbatch", "srun")
        self._executor = submitit.AutoExecutor(self._folder, cluster=asked.cluster)
        try:
            self._executor.update_parameters(**asked.arguments(generic))
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise UserError(f"submitit refuses its parameters: {error}", where="--submit") from error

    @property
    def promise(self) -> str:
        """What happens at a signal, to be said to the user."""
        stay = "the jobs stay in the queue, and no other is submitted"
        return stay if self._cluster == SLURM else "the running jobs stop after this step, and no other begins"

    def __len__(self) -> int:
        return len(self._jobs)

    def state(self, name: str) -> str | None:
        """Whether the job may be in the queue, or run."""
        return QUEUED if name in self._jobs or name in self._left else None

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Submit a job, unless it is in the queue already, or runs.

        Raises:
            UserError: the cluster refuses it.
        """
        if (job := self._queued(name)) is not None:
            log.info("%s is job %s already (%s)", name, job.job_id, job.state)
            self._jobs[name] = job
            return
        changes: dict[str, str | None] = {key: value for key, value in env.items() if os.environ.get(key) != value}
        if self._cluster == LOCAL and not self._gpus:
            # Without gpus_per_node submitit would hide them.
            changes["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not self._named:
            self._executor.update_parameters(name=name)
        # Local jobs keep the mask: the Ctrl-C of a terminal would kill them a second later.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if self._cluster == LOCAL else ())
        try:
            job = self._executor.submit(SubmittedJob(tuple(command), changes, self._file(name, "code").absolute()))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{name} could not be submitted: {error}", cure="No other job is submitted.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        write_json(self._file(name, "job"), {"cluster": self._cluster, "id": job.job_id})
        self._jobs[name] = job
        log.info("%s is job %s; its output: %s", name, job.job_id, job.task(0).paths.stdout)

    def wait(self) -> Iterator[tuple[str, int]]:
        """Wait for a moment; then yield each job that has ended, with its exit code."""
        time.sleep(_LOOK_AFTER_S[self._cluster])
        for name, job in list(self._jobs.items()):
            code = self._code(name, job)
            if code is not None:
                del self._jobs[name]
                yield name, code

    def signal(self, number: signal.Signals) -> None:
        """Leave Slurm's jobs alone from now on; let local ones save and exit."""
        if self._cluster == SLURM:
            self._left, self._jobs = dict(self._jobs), {}
            if self._left:
                ids = " ".join(job.job_id for job in self._left.values())
                log.warning("%d jobs stay in the queue; `scancel %s` ends them", len(self._left), ids)
            return
        self._stopping = True
        for job in self._jobs.values():
            os.kill(int(job.job_id), number)

    def kill(self) -> None:
        """Wait for no job any more."""
        self.signal(signal.SIGTERM)

    def _file(self, name: str, suffix: str) -> Path:
        return self._records / f"{name}.{suffix}"

    def _queued(self, name: str) -> Any:
        """The job that an earlier command submitted, if it may not have ended. Only Slurm's jobs outlive a command."""
        record = _read(self._file(name, "job"))
        if self._cluster != SLURM or record.get("cluster") != SLURM:
            return None
        job = self._job_class(self._folder, str(record["id"]))
        job.get_info(mode="force")
        return job if self._code(name, job) is None else None

    def _code(self, name: str, job: Any) -> int | None:
        """The exit code of a job that has ended, else None."""
        code = self._written(name, job)
        if self._cluster == SLURM and code not in (None, ExitCode.STOPPED_EARLY):
            return code
        if not job.done():
            # A job that saved at SIGTERM was preempted, and Slurm may queue it again, under the same id. It does not
            # where it cancels preempted jobs; without accounting it does not say so.
            return code if self._cluster == SLURM and job.state in ("UNKNOWN", "PREEMPTED") else None
        code = self._written(name, job)
        if code is not None:
            return code
        state = str(job.state)
        if state.startswith("CANCELLED") or self._stopping:
            # A local job that did not handle signals yet had nothing to save.
            return ExitCode.STOPPED_EARLY
        self._file(name, ERROR).write_text(f"{state} by {self._cluster}; {job.task(0).paths.stdout}", "utf-8")
        return ExitCode.FAILED

    def _written(self, name: str, job: Any) -> int | None:
        """The exit code that the job wrote."""
        found = _read(self._file(name, "code"))
        return int(found["code"]) if found.get("id") == job.job_id else None


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """What submitit calls in a job: it runs the command as a child, and exits as that does."""

    command: tuple[str, ...]
    changes: Mapping[str, str | None]
    """Of the environment; None removes a variable."""
    code_file: Path

    def __call__(self) -> NoReturn:
        """Run the command. Rank 0 writes the exit code into the file, or lets Slurm queue the job again."""
        where = _submitit().JobEnvironment()
        env = {key: value for key, value in {**os.environ, **self.changes}.items() if value is not None}
        if where.global_rank == 0:
            self.code_file.unlink(missing_ok=True)
        with Child() as child:
            code = child.run(self.command, env)
            if where.global_rank == 0:
                ahead = signal.SIGTERM not in child.received
                again = where.cluster == SLURM and code == ExitCode.STOPPED_EARLY and ahead
                # As in scripts/slurm.sbatch: the job keeps its id and its place.
                if not again or subprocess.run(["scontrol", "requeue", where.raw_job_id], check=False).returncode != 0:
                    write_json(self.code_file, {"id": where.job_id, "code": code})
        sys.exit(code if code >= 0 else 128 - code)


def _submitit() -> Any:
    """The package, which is to use our signal here, and in the processes that it starts."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = _SIGNAL
    submitit = imported("submitit", "submitit")
    submitit.JobEnvironment.USR_SIG = _SIGNAL
    return submitit


def known_parameters() -> set[str]:
    """The names of submitit's parameters: those of every executor, and Slurm's own. `num_gpus` is deprecated."""
    submitit = _submitit()
    known: set[str] = submitit.AutoExecutor._valid_parameters() | submitit.SlurmExecutor._valid_parameters()
    return known - {"num_gpus"}


def _find_commands(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            raise UserError(
                f"there is no {name} on this machine, by which Slurm's jobs are submitted",
                where="--submit",
                cure="Type the command on a login node of the cluster; or use --submit local.",
            )


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
