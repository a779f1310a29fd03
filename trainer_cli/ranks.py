"""Ranks of processes: read from the environment variables of torchrun or Slurm's srun, and checked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.terminal import format_count

_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
LAUNCHED = (*_TORCHRUN, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", _AGENT_STORE)
"""The variables that `variables_of_rank` sets."""
ON_NCCL_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What a rank does when a collective on GPUs fails. Torch reads it when it creates a group."""
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
"""Variables of the number of processes, the rank, the rank on its node, and the node's rank.

Slurm's are those of a job step, which srun starts. SLURM_NTASKS and SLURM_PROCID are set in a batch script and in the
shell of salloc too, where there is one process.
"""
_LAUNCH = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_FIRST_PORT, _PORTS = 20000, 12000
"""Ports below 32768, from where on Linux assigns ports to outgoing connections."""
_STEP_STRIDE = 7919
"""A prime, so that the steps of a job and the first steps of the next jobs have different ports."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of this process, and the address of rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    address: tuple[str, int] | None = None
    """Host and port where rank 0, or the launcher, listens; None for one process."""
    per_node: int | None = None
    """Processes on each machine, if that is known and equal."""


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Whether torchrun or Slurm has started this command again after it ended early."""
    return any(environ.get(name, "0") not in ("", "0") for name in _RESTARTS)


def job_of(environ: Mapping[str, str], parent: int) -> str | None:
    """The job of Slurm or torchrun, which keeps its name when it starts a command again; None without one.

    Args:
        parent: the number of the process that has started this one. By it launches of torchrun without `--rdzv-id`
            differ, which are all named `none`.
    """
    launch = environ.get("TORCHELASTIC_RUN_ID")
    return environ.get("SLURM_JOB_ID") or (f"none/{parent}" if launch == "none" else launch)


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """The ranks that torchrun (`WORLD_SIZE`, `RANK`) or srun (`SLURM_STEP_NUM_TASKS`, `SLURM_PROCID`) has set.

    Raises:
        UserError: a variable is missing, or no number.
    """
    for names in (_TORCHRUN, _SLURM):
        size, rank = (_read_number(environ, name) for name in names[:2])
        # One process needs no address: it may run in an environment left by a launcher.
        if size is None or size <= 1 or rank is None:
            continue
        if not 0 <= rank < size:
            raise UserError(f"{names[1]} is {rank} in a group of {format_count(size, 'process')}", where=names[1])
        local, node = (_read_number(environ, name) or 0 for name in names[2:])
        slurm = names is _SLURM
        address, port = environ.get("MASTER_ADDR"), _read_number(environ, "MASTER_PORT")
        if slurm:
            # srun sets no address: that of rank 0 is the first host of the step.
            nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
            address = address or first_host(nodes)
            port = _port_of_step(environ) if port is None else port
        if not address or port is None:
            missing = "MASTER_PORT" if address else "MASTER_ADDR"
            cure = "Start the processes by torchrun or srun, or set the address and the port of rank 0."
            raise UserError(f"{names[0]} is {size}, but {missing} is not set", where=missing, cure=cure)
        return Ranks(rank, size, local, node, (address, port), _read_node_size(environ, size, slurm=slurm))
    return Ranks()


def read_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of processes that torchrun or srun has started; (0, 1) for one alone."""
    for size_name, rank_name in (_TORCHRUN[:2], _SLURM[:2]):
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "")
        if size.isdecimal() and rank.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return 0, 1


def identify_launch(environ: Mapping[str, str]) -> str:
    """A text that the processes of one launch share, and those of no other; empty if nothing tells it."""
    values = [environ.get(name, "") for name in _LAUNCH]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16] if any(values) else ""


def variables_of_rank(rank: int, processes: int, port: int) -> dict[str, str]:
    """The variables of a rank whose launcher is on this machine, and holds the store at a port of it."""
    numbers = {
        "WORLD_SIZE": processes,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_PORT": port,
    }
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1", _AGENT_STORE: "True"}


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether the launcher holds the store, which then outlives each rank; else rank 0 does."""
    return environ.get(_AGENT_STORE) == "True"


def drop_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for a process that torchrun or srun has not started."""
    names = {*LAUNCHED, *_SLURM}
    return {
        name: value for name, value in environ.items() if name not in names and not name.startswith("TORCHELASTIC_")
    }


def refuse_other_processes(ranks: Ranks, per_node: int | None) -> None:
    """Check that `parallel.processes_per_node` is the number of processes that was started.

    Raises:
        UserError: it is not.
    """
    if per_node is not None and ranks.per_node is not None and per_node != ranks.per_node:
        raise UserError(
            f"parallel.processes_per_node is {per_node}, but torchrun or srun has started {ranks.per_node} on each "
            "machine",
            where="parallel.processes_per_node",
            cure=f"Leave it out, and start {per_node} by torchrun --nproc-per-node or srun --ntasks-per-node.",
        )


def check_tensor_size(tensor_size: int, world_size: int) -> None:
    """Refuse a tensor_size that does not divide the processes.

    Raises:
        ConfigError: it does not.
    """
    if world_size % tensor_size:
        raise ConfigError(
            f"parallel.tensor_size is {tensor_size}, which does not divide {format_count(world_size, 'process')}",
            location="parallel.tensor_size",
            hint="Start a multiple of tensor_size processes: parallel.processes_per_node, torchrun or srun.",
        )


def check_shards(shard_size: int | None, tensor_size: int, world_size: int) -> None:
    """Refuse a number of processes for one copy of the parameters that does not fit; None: all processes.

    Raises:
        ConfigError: it does not divide the processes, or is not a multiple of tensor_size.
    """
    if shard_size is not None and (shard_size > world_size or world_size % shard_size):
        raise ConfigError(
            f"parallel.shard_size is {shard_size}, which does not divide {format_count(world_size, 'process')}",
            location="parallel.shard_size",
        )
    if shard_size is not None and shard_size % tensor_size:
        raise ConfigError(
            f"parallel.shard_size is {shard_size}, which is not a multiple of tensor_size, {tensor_size}",
            location="parallel.shard_size",
        )


def tasks_without_srun(environ: Mapping[str, str]) -> int | None:
    """Number of tasks of the Slurm job whose batch script or shell started this process; None if srun started it, or
    the job has one task."""
    tasks, of_step = (_read_number(environ, name) or 1 for name in ("SLURM_NTASKS", _SLURM[0]))
    return tasks if tasks > 1 and of_step == 1 else None


def tasks_of_mpi(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of the processes that mpirun or mpiexec has started, this one among them; None for one process.

    The variables are those of Open MPI, of MPICH and Intel MPI, and of MVAPICH.
    """
    for kind in ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD"):
        rank, size = (environ.get(f"{kind}_{name}", "") for name in ("RANK", "SIZE"))
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(rank), int(size)
    return None


def first_host(nodes: str) -> str | None:
    """The first host of Slurm's compressed list, such as `a[03-05,9]-ib,b`: a03-ib. None for an empty list."""
    # A comma inside brackets separates numbers, not hosts.
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    return None if match is None else re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def _port_of_step(environ: Mapping[str, str]) -> int:
    """A port that depends on the job and the step, so that jobs and steps on one machine seldom share one. Each task of
    a job array has a SLURM_JOB_ID of its own."""
    job, step = (_read_number(environ, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # It is computed, because all ranks must arrive at the same port without exchanging a word.
    return _FIRST_PORT + (job + _STEP_STRIDE * step) % _PORTS


def _read_node_size(environ: Mapping[str, str], size: int, *, slurm: bool) -> int | None:
    """The number of ranks on each node, of `size` in all; None if it is unknown or differs."""
    if not slurm:
        return _read_number(environ, "LOCAL_WORLD_SIZE")
    nodes = _read_number(environ, "SLURM_STEP_NUM_NODES")
    # Where the nodes have different numbers, None skips the check.
    return None if not nodes or size % nodes else size // nodes


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    """The number in an environment variable; None if it is not set or empty."""
    value = environ.get(name, "")
    if not value:
        return None
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}, expected a number", where=name)
    return int(value)
