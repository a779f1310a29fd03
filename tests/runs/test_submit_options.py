"""What `--submit` says, as a table; nothing is submitted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.jobs.submit import LOCAL, SLURM, Submission, check_names, check_processes, read_submission
from trainer_cli.errors import UserError
from trainer_cli.schema.sections import ParallelConfig, ParallelStrategy

GENERIC = {"stderr_to_stdout", "timeout_min", "nodes", "gpus_per_node", "tasks_per_node", "mem_gb", "name"}
KNOWN = GENERIC | {"partition", "account", "signal_delay_s", "setup", "additional_parameters", "time"}
OURS = {"timeout_min": 240, "signal_delay_s": 300, "stderr_to_stdout": True}
LONG = {"timeout_min": 525_600, "stderr_to_stdout": True}


@pytest.mark.parametrize(
    ("given", "cluster", "parameters"),
    [
        (["slurm"], SLURM, OURS),
        (["local"], LOCAL, LONG),
        (["slurm", "timeout_min=60", "partition=gpu"], SLURM, {**OURS, "timeout_min": 60, "partition": "gpu"}),
        (["partition=a", "slurm", "partition=b"], SLURM, {**OURS, "partition": "b"}),
        # Slurm's own name of the limit takes the place of our default.
        (["slurm", "time=2-00:00:00"], SLURM, {"signal_delay_s": 300, "stderr_to_stdout": True, "time": "2-00:00:00"}),
        (["slurm.yaml"], SLURM, {**OURS, "account": "abc", "nodes": 2, "setup": ["module load cuda"]}),
        (["slurm.yaml", "nodes=4", "account=null"], SLURM, {**OURS, "nodes": 4, "setup": ["module load cuda"]}),
        (["slurm.yaml", "local", "setup=null", "nodes=1"], LOCAL, {**LONG, "account": "abc", "nodes": 1}),
        (
            ["slurm", "mem_gb=0.5", "account=007", "exclusive=true", "srun_args=[--cpu-bind=none]", "gres=gpu:a100:2"],
            SLURM,
            {
                **OURS, "mem_gb": 0.5, "account": "007", "exclusive": True, "srun_args": ["--cpu-bind=none"],
                "gres": "gpu:a100:2",
            },
        ),
    ],
)  # fmt: skip
def test_flags_say_where_and_with_which_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], cluster: str, parameters: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slurm.yaml").write_text("cluster: slurm\naccount: abc\nnodes: 2\nsetup: [module load cuda]\n")
    assert read_submission(given) == Submission(cluster, parameters)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["slrum"], "--submit is 'slrum'. Choose slurm, local, .* Did you mean 'slurm'?"),
        (["partition=gpu"], "--submit does not say where the jobs run. Add --submit slurm"),
        (["other.yaml"], "cluster is 'pbs'"),
        (["none.yaml"], "none.yaml"),
        (["slurm", "setup=[a"], "not valid YAML"),
        (["slurm", "partion=gpu"], "submitit knows no parameter 'partion' .*Did you mean 'partition'?"),
        (["slurm", "gpus=8"], "submitit knows no parameter 'gpus' .*Did you mean 'gpus_per_node'?"),
        (["slurm", "timeout_min=5"], "timeout_min is 5, and the signal to save would come 300 s before that"),
        (["local", "tasks_per_node=2"], "Set parallel.processes_per_node instead"),
        (["slurm", "timeout_min=6", "tasks_per_node=8", "partition=gpu"], None),
        (["local", "partition=gpu"], None),
    ],
)
def test_what_says_nothing_and_parameters_that_cannot_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("cluster: pbs\n")
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_names(read_submission(given), KNOWN)


@pytest.mark.parametrize(
    ("given", "parallel", "message"),
    [
        (["slurm"], {}, None),
        (["slurm", "tasks_per_node=8"], {"strategy": "ddp"}, None),
        (["slurm", "tasks_per_node=8"], {"strategy": "fsdp", "processes_per_node": 8}, None),
        (["slurm"], {"strategy": "ddp", "processes_per_node": 8}, None),
        (["slurm", "tasks_per_node=8"], {}, "nodes=1 and tasks_per_node=8, but parallel.strategy is single"),
        (["slurm", "nodes=2"], {}, "nodes=2 and tasks_per_node=1, but parallel.strategy is single"),
        (["slurm", "nodes=2"], {"strategy": "ddp", "processes_per_node": 8}, "parallel.processes_per_node is 8"),
    ],
)
def test_processes_that_would_not_train_one_model_are_refused_before_they_wait_in_a_queue(
    given: list[str], parallel: dict[str, Any], message: str | None
) -> None:
    config = ParallelConfig(**{**parallel, "strategy": ParallelStrategy(parallel.get("strategy", "single"))})
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_processes(read_submission(given), config)


def test_submitit_gets_slurms_own_parameters_under_its_prefix_and_a_job_that_may_be_queued_again() -> None:
    asked = read_submission(["slurm", "partition=gpu", "additional_parameters={reservation: r}"])
    assert asked.arguments(GENERIC) == {
        "timeout_min": 240,
        "stderr_to_stdout": True,
        "slurm_signal_delay_s": 300,
        "slurm_partition": "gpu",
        "slurm_additional_parameters": {"requeue": True, "reservation": "r"},
    }
    assert read_submission(["local", "nodes=1"]).arguments(GENERIC) == {**LONG, "nodes": 1}
