"""In which process a config is trained, and how that one is started again."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_cli.config.compose import compose
from trainer_cli.parallel import launch
from trainer_cli.run import fit, supervise
from trainer_cli.run.processes import fit_in_processes

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
