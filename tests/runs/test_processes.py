"""In which process a config is trained, and how that one is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_cli.config.compose import compose, to_yaml
from trainer_cli.errors import ConfigError
from trainer_cli.parallel import launch
from trainer_cli.runs import fit, supervise
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.supervise import fit_in_processes

AGAIN = ["_job", "seed=1.yaml", "--supervised"]
SLURM = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started, in place of a training."""
    calls: list[Any] = []
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(supervise, "supervise", lambda config, again: calls.append(("supervise", again)) or 0)
    monkeypatch.setattr(launch, "launch", lambda again, processes: calls.append(("launch", processes, again)) or 0)
    monkeypatch.setattr(fit, "fit", lambda composed, **options: calls.append("fit") or 0)
    return calls


def fitted(*overrides: str, supervised: bool) -> int:
    return fit_in_processes(lambda: compose(["+experiment=digits_mlp", *overrides]), AGAIN, supervised=supervised)


@pytest.mark.parametrize(
    ("overrides", "supervised", "expected"),
    [
        ([], False, "fit"),
        (["restarts.max=1"], False, ("supervise", AGAIN)),
        (["restarts.max=1"], True, "fit"),
        (["restarts.max=1", "parallel=ddp", "parallel.processes_per_node=2"], False, ("supervise", AGAIN)),
        (["restarts.max=1", "parallel=ddp", "parallel.processes_per_node=2"], True, ("launch", 2, AGAIN)),
        (["parallel=ddp", "parallel.processes_per_node=2"], False, ("launch", 2, AGAIN)),
    ],
)
def test_a_job_is_supervised_or_launched_as_its_config_says(
    started: list[Any], overrides: list[str], supervised: bool, expected: Any
) -> None:
    assert fitted(*overrides, supervised=supervised) == 0
    assert started == [expected]


@pytest.mark.parametrize(("overrides", "warns"), [([], False), (["parallel=ddp"], True)])
def test_a_job_of_several_tasks_that_srun_did_not_start_is_a_warning_if_it_was_to_be_parallel(
    started: list[Any],
    overrides: list[str],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert fitted(*overrides, supervised=False) == 0
    said = "the Slurm job has 8 tasks, but srun did not start this process: it trains alone"
    assert (said in capsys.readouterr().err) == warns
    assert started == ["fit"]


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [([], False), (["parallel=ddp"], True), (["parallel=ddp", "parallel.processes_per_node=1"], False)],
)
def test_ddp_in_one_process_is_a_warning_unless_that_was_asked_for(
    started: list[Any], overrides: list[str], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fitted(*overrides, supervised=False) == 0
    assert ("parallel=ddp trains in this process alone" in capsys.readouterr().err) == warns
    assert started == ["fit"]


TWO = ("parallel=ddp", "parallel.processes_per_node=2")


@pytest.mark.parametrize("more", [(), ("restarts.max=1",)])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=single"], "there are 2 processes, but parallel.strategy is single"),
        (["parallel=fsdp", "precision=fp16"], "parallel.strategy is fsdp, and precision.dtype fp16"),
        (["parallel.tensor_size=2"], "parallel.tensor_size is 2, but parallel.strategy is ddp"),
        (["parallel=fsdp", "parallel.tensor_size=3"], "parallel.tensor_size is 3, which does not divide 2 processes"),
        (["parallel=fsdp", "parallel.shard_size=4"], "parallel.shard_size is 4, which does not divide 2 processes"),
        (["data.global_batch_size=33"], "data.global_batch_size is 33, which is no multiple of batches of 32 on each"),
        (["data.global_batch_size=33", "data.batch_size=null"], "which cannot be divided between 2 ranks"),
        (["checkpoint.format=torch_file"], "checkpoint.format is torch_file, which saves the state of one process"),
        (["checkpoint.format=huggingface"], "checkpoint.format is huggingface, which saves the state of one process"),
        (["optimizer=null"], "optimizer is null, but nothing trains without"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_processes_are_started(
    started: list[Any], tmp_path: Path, overrides: list[str], message: str, more: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(*TWO, *overrides, *more, f"run_dir={tmp_path / 'run'}", supervised=False)
    assert message in str(caught.value)
    assert started == []


def test_a_changed_config_is_refused_before_processes_are_started(started: list[Any], tmp_path: Path) -> None:
    where = f"run_dir={tmp_path / 'run'}"
    run = RunDir(tmp_path / "run")
    before = compose(["+experiment=digits_mlp", *TWO, where])
    with run.create(to_yaml(before), before.overrides, {}):
        run.summary_file.write_text('{"status": "finished"}')
    with pytest.raises(ConfigError, match="the config differs from the one"):
        fitted(*TWO, "optimizer.lr=0.5", where, supervised=False)
    assert started == []
    assert fitted(*TWO, where, supervised=False) == 0
    assert started == [("launch", 2, AGAIN)]
