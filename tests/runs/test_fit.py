"""A fit: in which process it trains and how that one is started again, and what it prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_parts import note

from trainer_cli.addons.jobs import supervise
from trainer_cli.config.composing import compose
from trainer_cli.errors import ConfigError
from trainer_cli.processes.fit import fit_in_processes
from trainer_cli.running import fitting as fit
from trainer_cli.running.ending import print_outcome
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.steps.run_status import RunStatus

AGAIN = ["_job", "seed=1.yaml", "--supervised"]
TWO = ("parallel=ddp", "parallel.processes_per_node=2")
SUPERVISED, LAUNCHED = ("supervise", AGAIN), ("launch", 2, AGAIN)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started, in place of a training."""
    calls: list[Any] = []
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # What is set for ranks is set back.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(supervise, "supervise", lambda config, again: note(calls, ("supervise", again)) or 0)
    monkeypatch.setattr(
        supervise, "launch_ranks", lambda again, processes: note(calls, ("launch", processes, again)) or 0
    )
    monkeypatch.setattr(fit, "fit", lambda composed, **options: note(calls, "fit") or 0)
    return calls


def fitted(*overrides: str, supervised: bool = False) -> int:
    return fit_in_processes(lambda: compose(["+experiment=digits_mlp", *overrides]), AGAIN, supervised=supervised)


@pytest.mark.parametrize(
    ("overrides", "supervised", "expected"),
    [
        ([], False, "fit"),
        (["restarts.max=1"], False, SUPERVISED),
        (["restarts.max=1"], True, "fit"),
        (["restarts.max=1", *TWO], False, SUPERVISED),
        (["restarts.max=1", *TWO], True, LAUNCHED),
        (TWO, False, LAUNCHED),
    ],
)
def test_a_job_is_supervised_or_launched_as_its_config_says(
    started: list[Any], overrides: list[str], supervised: bool, expected: Any
) -> None:
    assert fitted(*overrides, supervised=supervised) == 0
    assert started == [expected]


UNSTARTED = "the Slurm job has 8 tasks, but srun did not start this process: it trains alone"
ONE_PROCESS = "parallel=ddp trains in this process alone"


@pytest.mark.parametrize(
    ("overrides", "tasks", "warnings"),
    [
        ([], None, ()),
        ([], "8", ()),
        (["parallel=ddp"], None, [ONE_PROCESS]),
        (["parallel=ddp"], "8", [UNSTARTED]),
        (["parallel=ddp", "parallel.processes_per_node=1"], None, ()),
    ],
)
def test_training_alone_is_a_warning_where_the_config_expects_several_processes(
    started: list[Any],
    overrides: list[str],
    tasks: str | None,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if tasks is not None:
        monkeypatch.setenv("SLURM_NTASKS", tasks)
    assert fitted(*overrides) == 0
    printed = capsys.readouterr().err
    assert [warning for warning in (UNSTARTED, ONE_PROCESS) if warning in printed] == list(warnings)
    assert started == ["fit"]


@pytest.mark.parametrize(("rank", "supervised", "lines"), [("0", False, 1), ("1", False, 0), ("0", True, 0)])
def test_mpirun_whose_ranks_are_not_used_is_one_warning(
    started: list[Any],
    rank: str,
    supervised: bool,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert fitted(supervised=supervised) == 0
    assert capsys.readouterr().err.count("mpirun has started 4 processes, whose ranks are not used") == lines
    assert started == ["fit"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=single"], "there are 2 processes, but parallel.strategy is single"),
        (["parallel=fsdp", "precision=fp16"], "parallel.strategy is fsdp, and precision.dtype fp16"),
        (["parallel.tensor_size=2"], "parallel.tensor_size is 2, but parallel.strategy is ddp"),
        (["parallel=fsdp", "parallel.tensor_size=3"], "parallel.tensor_size is 3, which does not divide 2 processes"),
        (["parallel=fsdp", "parallel.shard_size=4"], "parallel.shard_size is 4, which does not divide 2 processes"),
        (
            ["data.global_batch_size=33"],
            "data.global_batch_size is 33, which is not a multiple of batches of 32 on each",
        ),
        (["data.global_batch_size=33", "data.batch_size=null"], "which cannot be divided between 2 ranks"),
        (["checkpoint.format=torch_file"], "checkpoint.format is torch_file, which saves the state of one process"),
        (["checkpoint.format=huggingface"], "checkpoint.format is huggingface, which saves the state of one process"),
        (["optimizer=null"], "optimizer is null, but nothing trains without"),
        (["optimizer=null", "restarts.max=1"], "optimizer is null, but nothing trains without"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_processes_are_started(
    started: list[Any], tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(*TWO, *overrides, f"run_dir={tmp_path / 'run'}")
    assert message in str(caught.value)
    assert started == []


def test_a_changed_config_is_refused_before_processes_are_started(started: list[Any], tmp_path: Path) -> None:
    where = f"run_dir={tmp_path / 'run'}"
    run = RunDir(tmp_path / "run")
    before = compose(["+experiment=digits_mlp", *TWO, where])
    with run.create(before.to_yaml(), before.overrides, {}):
        run.summary_file.write_text('{"status": "finished"}')
    with pytest.raises(ConfigError, match="the config differs from the one"):
        fitted(*TWO, "optimizer.lr=0.5", where)
    assert started == []
    assert fitted(*TWO, where) == 0
    assert started == [LAUNCHED]


def test_the_best_and_the_pinned_are_reported_however_many_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [{"name": f"step{step}", "why": "regular"} for step in range(900, 0, -100)]
    kept[0]["why"], kept[5]["why"], kept[7]["why"] = "final", "val/loss 0.1 is the best", "pinned"
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=900, wall_time_s=1.0, checkpoints=kept)
    print_outcome(RunDir(tmp_path), outcome, {})
    line = next(line for line in capsys.readouterr().out.splitlines() if "checkpoints  " in line)
    message = "step900 (final), step400 (val/loss 0.1 is the best), step200 (pinned), step800 (regular) and 5 more"
    assert line.split(maxsplit=1)[1] == message


def test_a_finished_run_ends_with_the_command_that_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=9, wall_time_s=1.0)
    print_outcome(RunDir(tmp_path), outcome, {})
    assert capsys.readouterr().out.endswith(f"next:\n  train serve {tmp_path.parent}\n")
