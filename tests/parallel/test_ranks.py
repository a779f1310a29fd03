"""Which process this is, by the variables of torchrun and of Slurm in all places where `train` may be started."""

from __future__ import annotations

import pytest

from trainer_cli.errors import UserError
from trainer_cli.ranks import (
    Ranks,
    first_host,
    job_of,
    read_ranks,
    refuse_other_processes,
    tasks_of_mpi,
    tasks_without_srun,
)

MASTER = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", **MASTER}
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
# What sbatch sets for its script, and salloc for its shell: the allocation has four tasks, and this is none of them.
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a[03-05]", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
# With LaunchParameters=use_interactive_step the shell of salloc is a step of one task itself.
INTERACTIVE = {
    **BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a03",
    "SLURM_PTY_PORT": "40000", "SLURM_JOB_NAME": "interactive",
}  # fmt: skip
SRUN = {**BATCH, **STEP, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[03-04]", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks()),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Ranks()),
        (TORCHRUN, Ranks(3, 4, 1, 1, ("h", 29500))),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, Ranks(3, 4, 1, 1, ("h", 29500), 2)),
        ({**STEP, **MASTER}, Ranks(2, 4, 0, 1, ("h", 29500))),
        (SRUN, Ranks(2, 4, 0, 1, ("a03", 20007), 2)),
        # srun from the shell of salloc, whose variables of a terminal are still there.
        ({**INTERACTIVE, **SRUN}, Ranks(2, 4, 0, 1, ("a03", 20007), 2)),
        # A second step of the same job, beside the first.
        ({**SRUN, "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "a05"}, Ranks(2, 4, 0, 1, ("a05", 27926), 2)),
        # Each task of a job array has an id of its own.
        (
            {**SRUN, "SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"},
            Ranks(2, 4, 0, 1, ("a03", 20008), 2),
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, Ranks(2, 4, 0, 1, ("a03", 20007), 2)),
        # Three tasks on two nodes.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "3"}, Ranks(2, 3, 0, 1, ("a03", 20007))),
        # A script that exports the size alone, for code that reads it.
        ({**SRUN, "WORLD_SIZE": "4"}, Ranks(2, 4, 0, 1, ("a03", 20007), 2)),
        (BATCH, Ranks()),
        (INTERACTIVE, Ranks()),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Ranks()),
        # Of two, torchrun's, which srun started.
        ({**SRUN, **TORCHRUN}, Ranks(3, 4, 1, 1, ("h", 29500))),
    ],
)
def test_ranks_come_from_torchrun_or_srun(environ: dict[str, str], expected: Ranks) -> None:
    assert read_ranks(environ) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x', expected a number"),
        ({"RANK": "4"}, "RANK is 4 in a group of 4 processes"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE is 4, but MASTER_PORT is not set"),
    ],
)
def test_wrong_variables_are_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_ranks({**TORCHRUN, **wrong})


@pytest.mark.parametrize("job", ["0", "31999", "4294967295"])
@pytest.mark.parametrize("step", ["0", "1", "4294967290"])
def test_the_port_is_below_those_of_outgoing_connections(job: str, step: str) -> None:
    address = read_ranks({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).address
    assert address is not None
    assert 20000 <= address[1] < 32768


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({}, None),
        (BATCH, 4),
        (INTERACTIVE, 4),
        ({**BATCH, "SLURM_NTASKS": "1"}, None),
        (SRUN, None),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_tasks_of_a_job_that_srun_did_not_start_are_noticed(environ: dict[str, str], tasks: int | None) -> None:
    assert tasks_without_srun(environ) == tasks


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, (3, 4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, (0, 2)),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, (1, 2)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({"PMI_SIZE": "many", "PMI_RANK": "0"}, None),
    ],
)
def test_processes_of_mpirun_are_noticed(environ: dict[str, str], tasks: tuple[int, int] | None) -> None:
    assert tasks_of_mpi(environ) == tasks


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x"}, "7"),
        # Rank 0 may have moved to another machine, where another process has started it.
        ({"TORCHELASTIC_RUN_ID": "x"}, "x"),
        # Each launch without --rdzv-id has this name.
        ({"TORCHELASTIC_RUN_ID": "none"}, "none/1"),
    ],
)
def test_a_job_is_the_same_after_its_restart_and_another_one_after_another_launch(
    environ: dict[str, str], job: str | None
) -> None:
    assert job_of(environ, 1) == job


def test_another_number_of_processes_than_was_started_is_refused() -> None:
    for agreed in (None, 2):
        refuse_other_processes(read_ranks(SRUN), agreed)
    refuse_other_processes(Ranks(2, 3), 8)
    with pytest.raises(UserError, match="processes_per_node is 8, but torchrun or srun has started 2 on each machine"):
        refuse_other_processes(read_ranks(SRUN), 8)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9],b", "gpu03"),
        ("n[7,9]", "n7"),
        ("jean-zay-ia[810-811]", "jean-zay-ia810"),
        ("r[1-2]n[08,10]-ib,b", "r1n08-ib"),
        ("", None),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first
