"""Ranks from the environment, and what two gloo ranks exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ranks import HERE, on_ranks
from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ALONE, Ranks, first_host, from_environment, ranks_in

MASTER = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", **MASTER}
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    ends = on_ranks(2, [HERE / "group_claims.py", folder])
    assert [code for code, _ in ends] == [0, 0], ends
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_does_not_come_within_the_limit_is_named(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["timed out"]
    assert answers[0]["lost"] == "rank 1 (HOST) has ended or hangs; the others waited at step 17"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "rank_0", "rank_1"),
    [
        ("rank", [0, 2, 0, True], [1, 2, 1, False]),
        ("broadcast", {"run": "of rank 0", "path": [1, None]}, {"run": "of rank 0", "path": [1, None]}),
        ("gather", ["rank 0", "rank 1"], ["rank 0", "rank 1"]),
        ("sum", [2.0, 1.0], [2.0, 1.0]),
        ("later", [1.0, 20.0], [1.0, 20.0]),
        ("on_main", "step500", "step500"),
        ("ran", [11, 0], []),
        ("shared", [2.0], [2.0]),
        ("checked", "PeerError: rank 1 failed", "ZeroDivisionError: division by zero"),
        ("failed", "UserError: no such file (here).", "PeerError: rank 0 failed"),
    ],
)
def test_two_ranks_agree(answers: list[dict[str, Any]], asked: str, rank_0: Any, rank_1: Any) -> None:
    assert [answer[asked] for answer in answers] == [rank_0, rank_1]


def test_one_process_needs_no_torch_distributed() -> None:
    code = (
        "import sys; from trainer_cli.parallel.process_group import from_environment as f;"
        "g = f({}); assert (g.gather(1), g.broadcast(2), g.on_main(lambda: 3)) == ([1], 2, 3); g.barrier(); g.close();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert from_environment({"WORLD_SIZE": "1", "RANK": "0"}) is ALONE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks()),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Ranks()),
        (TORCHRUN, Ranks(3, 4, 1, 1, "env://")),
        ({**SLURM, **MASTER}, Ranks(2, 4, 0, 1, "tcp://h:29500")),
        ({**SLURM, "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a[03-05],b"}, Ranks(2, 4, 0, 1, "tcp://a03:20007")),
        # A batch script sees these without srun: it is one process.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Ranks()),
        # Of two, torchrun's, which srun started.
        ({**SLURM, **TORCHRUN}, Ranks(3, 4, 1, 1, "env://")),
    ],
)
def test_ranks_come_from_torchrun_or_srun(environ: dict[str, str], expected: Ranks) -> None:
    assert ranks_in(environ) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x', expected a number"),
        ({"RANK": "4"}, "RANK is 4, but there are 4 processes"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE is 4, but MASTER_PORT is not set"),
    ],
)
def test_wrong_variables_are_named(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ranks_in({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],b", "gpu03"), ("n[7,9]", "n7"), ("", None)],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first
