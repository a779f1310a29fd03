"""Submit the jobs of a sweep to Slurm, or to local processes of submitit, and wait for them.

    this process:  submit each job -> record its id -> poll for its exit code -> without one, ask Slurm for its state
    the job:       runs the command of a child process and writes its exit code next to its frozen config
                   exit code 75 under Slurm: the job is requeued under its id, unless SIGTERM came (scancel, preemption)

Jobs under Slurm continue when this process ends. The same sweep again finds them by the recorded ids.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer_cli.addons.jobs.supervise import Child
from trainer_cli.addons.jobs.sweep_table import ERROR, QUEUED
from trainer_cli.config import read_values
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.loggers import import_extra
from trainer_cli.patterns import did_you_mean
from trainer_cli.runs import read_json, write_json
from trainer_cli.schema import ParallelConfig, ParallelStrategy
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

SLURM, LOCAL = "slurm", "local"
CLUSTERS = (SLURM, LOCAL)
_CHOICES = "slurm, local, a .yaml file with parameters, or PARAMETER=VALUE"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # As in scripts/slurm.sbatch. Submitit's own are 5 minutes and 90 seconds.
    SLURM: {"timeout_min": 240, "signal_delay_s": 300, "stderr_to_stdout": True},
    # A year: submitit would end a job after 2 minutes.
    LOCAL: {"timeout_min": 525_600, "stderr_to_stdout": True},
}
_SLURM_NAMES = {"time": "timeout_min", "job_name": "name", "mem": "mem_gb", "ntasks_per_node": "tasks_per_node"}
"""Slurm's name of a parameter -> submitit's name, whose default it replaces."""
_USUAL = {"gpus": "gpus_per_node", "num_gpus": "gpus_per_node", "ntasks": "tasks_per_node", "cpus": "cpus_per_task"}
"""Frequent mistake -> the parameter that is meant."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Where jobs run, and the parameters for submitit under the names that users write, with our defaults."""

    cluster: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, generic: Collection[str]) -> dict[str, Any]:
        """The arguments of `AutoExecutor.update_parameters`.

        Args:
            generic: names of the parameters that every executor has. Others get the prefix `slurm_`, and submitit
                ignores them elsewhere.
        """
        arguments = {name if name in generic else f"slurm_{name}": value for name, value in self.parameters.items()}
        if self.cluster == SLURM:
            # A job that a time limit stopped is queued again.
            additional = {"requeue": True, **arguments.get("slurm_additional_parameters", {})}
            arguments["slurm_additional_parameters"] = additional
        return arguments


def read_submission(flags: Sequence[str]) -> Submission:
    """Combine the values of `--submit`. Of two values for a parameter the later one counts.

    Raises:
        UserError: a value is not one of the choices, a file cannot be read, or no value names the cluster.
    """
    cluster, parameters = "", {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        if equals:
            parameters[name] = _parse_value(name, text)
        elif flag in CLUSTERS:
            cluster = flag
        elif flag.endswith((".yaml", ".yml")):
            values = read_values(Path(flag), flag)
            cluster = values.pop("cluster", cluster)
            parameters.update(values)
        else:
            raise UserError(f"--submit is {flag!r}", cure=f"Choose {_CHOICES}.{did_you_mean(flag, CLUSTERS)}")
    if cluster not in CLUSTERS:
        mistake = f"cluster is {cluster!r}" if cluster else "--submit does not say where the jobs run"
        raise UserError(mistake, cure="Add --submit slurm, or --submit local.")
    parameters = {name: value for name, value in parameters.items() if value is not None}
    replaced = {_SLURM_NAMES.get(name) for name in parameters}
    defaults = {name: value for name, value in _DEFAULTS[cluster].items() if name not in replaced}
    return Submission(cluster, {**defaults, **parameters})


def check_names(submission: Submission, names: Collection[str]) -> None:
    """Check the names of the parameters against submitit's, and values that cannot work.

    Raises:
        UserError: with the first mistake, and the nearest name.
    """
    for name in submission.parameters:
        if name not in names:
            suggestion = f" Did you mean '{_USUAL[name]}'?" if name in _USUAL else did_you_mean(name, names)
            raise UserError(
                f"submitit knows no parameter {name!r}",
                where="--submit",
                cure=f"Other options of sbatch go into additional_parameters={{NAME: VALUE}}.{suggestion}",
            )
    limit, ahead_s = (submission.parameters.get(name) for name in ("timeout_min", "signal_delay_s"))
    if isinstance(limit, int) and isinstance(ahead_s, int) and limit * 60 <= ahead_s:
        raise UserError(
            f"timeout_min is {limit}, and the signal to save would come {ahead_s} s before that: before the job begins",
            where="--submit",
            cure="Set a smaller signal_delay_s.",
        )
    if submission.cluster == LOCAL and submission.parameters.get("tasks_per_node", 1) != 1:
        raise UserError(
            "tasks_per_node is for slurm, whose srun starts the processes",
            where="--submit",
            cure="Set parallel.processes_per_node instead.",
        )


def check_processes(submission: Submission, parallel: ParallelConfig) -> None:
    """Check that the processes that srun starts will train one model.

    Raises:
        UserError: a parameter and a key of the config contradict each other.
    """
    nodes, per_node = (submission.parameters.get(name, 1) for name in ("nodes", "tasks_per_node"))
    if submission.cluster != SLURM or (nodes, per_node) == (1, 1):
        return
    tasks = f"nodes={nodes} and tasks_per_node={per_node}"
    if parallel.strategy is ParallelStrategy.single:
        raise UserError(
            f"--submit says {tasks}, but parallel.strategy is single: one process",
            where="parallel.strategy",
            cure="Add parallel=ddp or parallel=fsdp.",
        )
    if parallel.processes_per_node not in (None, per_node):
        raise UserError(
            f"--submit says {tasks}, but parallel.processes_per_node is {parallel.processes_per_node}",
            where="parallel.processes_per_node",
            cure="Leave it out: srun starts the processes.",
        )


def _parse_value(name: str, text: str) -> Any:
    """Parse PARAMETER=VALUE: a number, true, false, null, a list or mapping in YAML, or a string."""
    if text[:1] in ("[", "{"):
        return read_values(f"{name}: {text}", "--submit")[name]
    if re.fullmatch(r"0|[1-9]\d*", text):
        return int(text)
    if re.fullmatch(r"\d+\.\d+", text):
        return float(text)
    return {"true": True, "false": False, "null": None}.get(text, text)


_POLL_S = {SLURM: 2.0, LOCAL: 0.1}
_SIGNAL = "USR1"
"""The signal before Slurm's time limit, at which a run saves. Submitit's default, USR2, would end it."""


class Submitted:
    """Submits jobs and waits for them, with the interface of `Children`.

    Args:
        folder: the sweep's folder; submitit writes into its subfolder `submitit`.

    Raises:
        UserError: submitit or Slurm's commands are not installed, or a parameter is wrong.
    """

    def __init__(self, submission: Submission, folder: Path) -> None:
        submitit = _submitit()
        self._cluster = submission.cluster
        self._records = folder / ".jobs"
        self._named = "name" in submission.parameters
        self._gpus = "gpus_per_node" in submission.parameters
        self._job_class = submitit.SlurmJob if submission.cluster == SLURM else submitit.LocalJob
        self._folder = folder.absolute() / "submitit"
        self._jobs: dict[str, Any] = {}
        self._abandoned: dict[str, Any] = {}
        self._stopping = False
        generic = submitit.AutoExecutor._valid_parameters()
        check_names(submission, known_parameters())
        if submission.cluster == SLURM:
            _find_commands("sbatch", "srun")
        self._executor = submitit.AutoExecutor(self._folder, cluster=submission.cluster)
        try:
            self._executor.update_parameters(**submission.arguments(generic))
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise UserError(f"submitit refuses its parameters: {error}", where="--submit") from error

    @property
    def promise(self) -> str:
        """What a signal does, as a message for the user."""
        stay = "the jobs stay in the queue, and no other is submitted"
        return stay if self._cluster == SLURM else "the running jobs stop after this step, and no other job starts"

    def __len__(self) -> int:
        return len(self._jobs)

    def state(self, name: str) -> str | None:
        """`queued` for a job that waits or runs, else None."""
        return QUEUED if name in self._jobs or name in self._abandoned else None

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Submit a job, unless an earlier command did and it has not ended.

        Raises:
            UserError: the cluster refuses it.
        """
        if (job := self._queued(name)) is not None:
            log.info("%s is job %s already (%s)", name, job.job_id, job.state)
            self._jobs[name] = job
            return
        # Only the differences: the job has the environment of its own node.
        changes: dict[str, str | None] = {key: value for key, value in env.items() if os.environ.get(key) != value}
        if self._cluster == LOCAL and not self._gpus:
            # Without gpus_per_node submitit would hide all GPUs.
            changes["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not self._named:
            self._executor.update_parameters(name=name)
        # Local jobs inherit the blocked SIGINT: a terminal's Ctrl-C reaches them too, and would kill them as they save.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if self._cluster == LOCAL else ())
        try:
            job = self._executor.submit(SubmittedJob(tuple(command), changes, self._file(name, "code").absolute()))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{name} could not be submitted: {error}", cure="No other job is submitted.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # At once after the submission: a command that is killed here must find the job, or it would run twice.
        write_json(self._file(name, "job"), {"cluster": self._cluster, "id": job.job_id})
        self._jobs[name] = job
        log.info("%s is job %s; its output: %s", name, job.job_id, job.task(0).paths.stdout)

    def wait(self) -> Iterator[tuple[str, int]]:
        """Pause; then yield each job that has ended, with its exit code."""
        # Before each poll, since it asks Slurm's controller about every job.
        time.sleep(_POLL_S[self._cluster])
        for name, job in list(self._jobs.items()):
            code = self._code(name, job)
            if code is not None:
                del self._jobs[name]
                yield name, code

    def signal(self, number: signal.Signals) -> None:
        """Abandon jobs under Slurm, which continue; let local ones save and exit."""
        if self._cluster == SLURM:
            # Nothing is left to wait for; the table still shows them as queued.
            self._abandoned, self._jobs = dict(self._jobs), {}
            if self._abandoned:
                ids = " ".join(job.job_id for job in self._abandoned.values())
                count = format_count(len(self._abandoned), "job")
                log.warning("%s left in the queue; `scancel %s` ends them", count, ids)
            return
        self._stopping = True
        for job in self._jobs.values():
            os.kill(int(job.job_id), number)

    def kill(self) -> None:
        """Stop waiting for jobs."""
        self.signal(signal.SIGTERM)

    def _file(self, name: str, suffix: str) -> Path:
        return self._records / f"{name}.{suffix}"

    def _queued(self, name: str) -> Any:
        """The job that an earlier command submitted, if it has not ended."""
        # Only jobs under Slurm outlive the command that submitted them.
        record = read_json(self._file(name, "job")) or {}
        if self._cluster != SLURM or record.get("cluster") != SLURM:
            return None
        job = self._job_class(self._folder, str(record["id"]))
        # Forced: otherwise submitit answers from its last poll, which knows nothing of this job.
        job.get_info(mode="force")
        return job if self._code(name, job) is None else None

    def _code(self, name: str, job: Any) -> int | None:
        """The exit code of a job; None while it waits or runs."""
        code = self._written(name, job)
        if self._cluster == SLURM and code not in (None, ExitCode.STOPPED_EARLY):
            return code
        if not job.done():
            # A job that saved at SIGTERM was preempted. Slurm may requeue it under the same id, or cancel it; without
            # accounting the state is not reported.
            return code if self._cluster == SLURM and job.state in ("UNKNOWN", "PREEMPTED") else None
        code = self._written(name, job)
        if code is not None:
            return code
        state = str(job.state)
        if state.startswith("CANCELLED") or self._stopping:
            # A local job that ended before it handled signals had nothing to save.
            return ExitCode.STOPPED_EARLY
        self._file(name, ERROR).write_text(f"{state} by {self._cluster}; {job.task(0).paths.stdout}", "utf-8")
        return ExitCode.FAILED

    def _written(self, name: str, job: Any) -> int | None:
        """The exit code that the job wrote; None if it has written none. That of an earlier job does not count."""
        record = read_json(self._file(name, "code")) or {}
        return int(record["code"]) if record.get("id") == job.job_id else None


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """The function that submitit runs in a job: run the command as a child, and exit with its code."""

    command: tuple[str, ...]
    changes: Mapping[str, str | None]
    """Changes of the environment; None removes a variable."""
    code_file: Path

    def __call__(self) -> NoReturn:
        """Run the command. Rank 0 writes the exit code into the file, or lets Slurm queue the job again."""
        job = _submitit().JobEnvironment()
        env = {key: value for key, value in {**os.environ, **self.changes}.items() if value is not None}
        if job.global_rank == 0:
            # The code of an earlier attempt would end the wait for this one.
            self.code_file.unlink(missing_ok=True)
        with Child() as child:
            code = child.run(self.command, env)
            if job.global_rank == 0:
                # After SIGTERM Slurm itself cancels the job or queues it again; after a time limit's USR1 we do.
                cancelled = signal.SIGTERM in child.received
                requeue = job.cluster == SLURM and code == ExitCode.STOPPED_EARLY and not cancelled
                # As in scripts/slurm.sbatch: the job keeps its id.
                if not requeue or subprocess.run(["scontrol", "requeue", job.raw_job_id], check=False).returncode != 0:
                    write_json(self.code_file, {"id": job.job_id, "code": code})
        # As a shell reports the signal that ended a process.
        sys.exit(code if code >= 0 else 128 - code)


def _submitit() -> Any:
    """Import submitit, and set its signal here and in the processes that it starts."""
    # In the environment too: the process of the job imports submitit anew.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = _SIGNAL
    submitit = import_extra("submitit", "submitit")
    submitit.JobEnvironment.USR_SIG = _SIGNAL
    return submitit


def known_parameters() -> set[str]:
    """Names of submitit's parameters, of every executor and of Slurm, without `num_gpus`, which is deprecated."""
    submitit = _submitit()
    names: set[str] = submitit.AutoExecutor._valid_parameters() | submitit.SlurmExecutor._valid_parameters()
    return names - {"num_gpus"}


def _find_commands(*names: str) -> None:
    """Raise UserError if one of the programs is not on this machine."""
    for name in names:
        if shutil.which(name) is None:
            raise UserError(
                f"there is no {name} on this machine, by which Slurm's jobs are submitted",
                where="--submit",
                cure="Type the command on a login node of the cluster; or use --submit local.",
            )
