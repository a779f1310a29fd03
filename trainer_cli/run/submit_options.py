"""What `--submit` says: where the jobs of a sweep run, and with which of submitit's parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_cli.config.schema import ParallelConfig, ParallelStrategy
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.yaml_reader import Reading, read_file, read_text
from trainer_cli.errors import UserError, raise_all

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
