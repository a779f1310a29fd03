"""Jobs of a sweep in the queue of a cluster, or in processes of submitit, in place of child processes.

    this process:  submit each job -> write down its id -> look for its exit code -> ask Slurm if there is none
    the job:       the command of a child process; its exit code is written next to its frozen config
                   75 under Slurm: queued again under the same id, unless SIGTERM came (scancel, or a preemption)

Slurm's jobs stay when this process ends. The same sweep again finds them by the ids that it wrote down.

What `--submit` says: where the jobs of a sweep run, and with which of submitit's parameters.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer_cli.commands.sweep_table import ERROR, QUEUED
from trainer_cli.config.yaml import Reading, read_file, read_text
from trainer_cli.core.patterns import did_you_mean
from trainer_cli.core.schema import ParallelConfig, ParallelStrategy
from trainer_cli.errors import ExitCode, UserError, raise_all
from trainer_cli.loggers.base import import_extra
from trainer_cli.runs.run_dir import write_json
from trainer_cli.runs.supervise import Child

SLURM, LOCAL = "slurm", "local"
CLUSTERS = (SLURM, LOCAL)
_CHOICES = "slurm, local, a .yaml file with parameters, or PARAMETER=VALUE"
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # As in scripts/slurm.sbatch. Submitit's own are 5 minutes and 90 seconds.
    SLURM: {"timeout_min": 240, "signal_delay_s": 300, "stderr_to_stdout": True},
    # A year: submitit would end a job after 2 minutes.
    LOCAL: {"timeout_min": 525_600, "stderr_to_stdout": True},
}
_SAME = {"time": "timeout_min", "job_name": "name", "mem": "mem_gb", "ntasks_per_node": "tasks_per_node"}
"""Slurm's own name -> submitit's, of which a default must give way."""
_USUAL = {"gpus": "gpus_per_node", "num_gpus": "gpus_per_node", "ntasks": "tasks_per_node", "cpus": "cpus_per_task"}
"""What is often written -> what is meant."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Where jobs run, and the parameters of submitit that were given or are ours, by the names that users write."""

    cluster: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, generic: Collection[str]) -> dict[str, Any]:
        """The parameters as `AutoExecutor.update_parameters` takes them: Slurm's own have its prefix, and do nothing
        elsewhere. A job that was stopped by a time limit may be queued again.

        Args:
            generic: names of the parameters that every executor has.
        """
        given = {name if name in generic else f"slurm_{name}": value for name, value in self.parameters.items()}
        if self.cluster == SLURM:
            given["slurm_additional_parameters"] = {"requeue": True, **given.get("slurm_additional_parameters", {})}
        return given


def submission(given: Sequence[str], read: Callable[[Path, str], Reading] = read_file) -> Submission:
    """What the flags say together; of two values for a parameter the later one counts.

    Raises:
        UserError: it is none of the choices, a file cannot be read, or it is not said where the jobs run.
    """
    cluster, parameters = "", {}
    for one in given:
        name, equals, text = one.partition("=")
        if equals:
            parameters[name] = _value(name, text)
        elif one in CLUSTERS:
            cluster = one
        elif one.endswith((".yaml", ".yml")):
            reading = read(Path(one), one)
            raise_all(reading.mistakes)
            values = dict(reading.values)
            cluster = values.pop("cluster", cluster)
            parameters.update(values)
        else:
            raise UserError(f"--submit is {one!r}", cure=f"Choose {_CHOICES}.{did_you_mean(one, CLUSTERS)}")
    if cluster not in CLUSTERS:
        what = f"cluster is {cluster!r}" if cluster else "--submit does not say where the jobs run"
        raise UserError(what, cure="Add --submit slurm, or --submit local.")
    parameters = {name: value for name, value in parameters.items() if value is not None}
    replaced = {_SAME.get(name) for name in parameters}
    return Submission(cluster, {**{k: v for k, v in _DEFAULTS[cluster].items() if k not in replaced}, **parameters})


def check_names(asked: Submission, known: Collection[str]) -> None:
    """Refuse parameters that submitit does not know, and those that cannot work.

    Raises:
        UserError: the first of them, with the nearest name.
    """
    for name in asked.parameters:
        if name not in known:
            meant = f" Did you mean '{_USUAL[name]}'?" if name in _USUAL else did_you_mean(name, known)
            raise UserError(
                f"submitit knows no parameter {name!r}",
                where="--submit",
                cure=f"Others of sbatch's stand in additional_parameters={{NAME: VALUE}}.{meant}",
            )
    limit, ahead = (asked.parameters.get(name) for name in ("timeout_min", "signal_delay_s"))
    if isinstance(limit, int) and isinstance(ahead, int) and limit * 60 <= ahead:
        raise UserError(
            f"timeout_min is {limit}, and the signal to save would come {ahead} s before that: before the job begins",
            where="--submit",
            cure="Set a smaller signal_delay_s.",
        )
    if asked.cluster == LOCAL and asked.parameters.get("tasks_per_node", 1) != 1:
        raise UserError(
            "tasks_per_node is for slurm, whose srun starts the processes",
            where="--submit",
            cure="Set parallel.processes_per_node instead.",
        )


def check_processes(asked: Submission, parallel: ParallelConfig) -> None:
    """Refuse jobs whose processes, started by srun, would not train one model.

    Raises:
        UserError: with the parameter and the key that do not agree.
    """
    nodes, per_node = (asked.parameters.get(name, 1) for name in ("nodes", "tasks_per_node"))
    if asked.cluster != SLURM or (nodes, per_node) == (1, 1):
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


def _value(name: str, text: str) -> Any:
    """The value of PARAMETER=VALUE: a number, true, false, null, a list or mapping in YAML, or a text."""
    if text[:1] in ("[", "{"):
        reading = read_text(f"{name}: {text}", "--submit")
        raise_all(reading.mistakes)
        return reading.values[name]
    if re.fullmatch(r"0|[1-9]\d*", text):
        return int(text)
    if re.fullmatch(r"\d+\.\d+", text):
        return float(text)
    return {"true": True, "false": False, "null": None}.get(text, text)


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
    submitit = import_extra("submitit", "submitit")
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
