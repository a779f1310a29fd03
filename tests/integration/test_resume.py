"""Stop and go on, in every place where that could go wrong: the results are those of going straight through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import flip_a_byte, names, weights
from compare import assert_same_run, assert_same_state, checkpoints, content, final_state, metrics, points
from forks import Forks

MLP = (
    "experiment=digits_mlp",
    "model.dropout=0.1",
    "loop.max_duration=3ep",
    "loop.eval_interval=20",
    "loop.log_interval=7",
    "checkpoint.save_interval=30",
    "checkpoint.ephemeral_save_interval=4",
    "+callbacks.interrupt._target_=interrupts.Interrupt",
)
"""Epochs of 45 steps of an MLP with dropout; nothing falls on the same step too often."""
CNN = ("experiment=digits", "model.channels=[4,8,8]", *MLP[1:])
"""The same of a small CNN with batch norm too, on augmented data."""
ACCUMULATED = ("loop.grad_accum_steps=3",)
"""Epochs of 15 steps of three batches each."""
WORKERS = ("data.num_workers=2",)


@pytest.fixture(scope="module")
def straight(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of an uninterrupted training; trained once for each config."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*overrides: str) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("straight")
            done = forks.fit(folder, *overrides, "run_dir=run")
            assert done.code == 0, done.err
            made[overrides] = folder / "run"
        return made[overrides]

    return get


STOPS = [
    pytest.param(MLP, "SIGTERM train 50 0", 75, id="mid-epoch"),
    pytest.param(MLP, "SIGTERM train 44 0", 75, id="at-the-end-of-an-epoch"),
    pytest.param(MLP, "SIGTERM train 45 0", 75, id="after-the-first-step-of-an-epoch"),
    pytest.param(MLP, "SIGTERM train 19 0", 75, id="at-a-step-that-evaluates"),
    pytest.param(MLP, "SIGTERM train 20 0", 75, id="after-a-step-that-evaluates"),
    pytest.param(MLP, "SIGTERM train 6 0", 75, id="at-a-step-that-logs"),
    pytest.param(MLP, "SIGTERM validate 20 3", 75, id="in-an-evaluation"),
    pytest.param(MLP, "SIGKILL validate 135 3", -9, id="killed-in-the-last-evaluation"),
    pytest.param(MLP, "SIGKILL validate 40 3", -9, id="killed-in-an-evaluation"),
    pytest.param(MLP, "SIGKILL train 2 0", -9, id="killed-before-the-first-interval"),
    pytest.param((*MLP, *ACCUMULATED), "SIGKILL train 18 1", -9, id="killed-inside-an-accumulation"),
    pytest.param((*MLP, *ACCUMULATED), "SIGTERM train 18 1", 75, id="inside-an-accumulation"),
    pytest.param(CNN, "SIGTERM train 70 0", 75, id="cnn"),
    pytest.param(CNN, "SIGKILL train 90 0", -9, id="cnn-killed-between-epochs"),
    pytest.param((*CNN, *ACCUMULATED), "SIGKILL train 34 2", -9, id="cnn-inside-an-accumulation"),
    pytest.param((*CNN, *WORKERS), "SIGTERM train 50 0", 75, id="workers"),
    pytest.param((*CNN, *WORKERS), "SIGKILL train 45 0", -9, id="workers-killed"),
    pytest.param((*CNN, *WORKERS, *ACCUMULATED), "SIGKILL train 20 1", -9, id="workers-inside-an-accumulation"),
]


@pytest.mark.parametrize(("config", "interrupt", "code"), STOPS)
def test_a_stop_anywhere_changes_nothing(
    config: tuple[str, ...], interrupt: str, code: int, forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    stopped = forks.fit(tmp_path, *config, "run_dir=run", INTERRUPT=interrupt)
    assert stopped.code == code, stopped.err
    resumed = forks.fit(tmp_path, *config, "run_dir=run")
    assert resumed.code == 0, resumed.err
    assert_same_run(tmp_path / "run", straight(*config))


def test_several_stops_change_nothing(forks: Forks, straight: Callable[..., Path], tmp_path: Path) -> None:
    stops = (
        "SIGTERM train 3 0",
        "SIGKILL train 31 0",
        "SIGTERM validate 40 1",
        "SIGTERM validate 40 2",
        "SIGKILL train 46 0",
        "SIGTERM train 133 0",
    )
    for interrupt in stops:
        assert forks.fit(tmp_path, *CNN, "run_dir=run", INTERRUPT=interrupt).code in (75, -9)
    assert forks.fit(tmp_path, *CNN, "run_dir=run").code == 0
    assert_same_run(tmp_path / "run", straight(*CNN))


def test_a_stop_in_the_last_evaluation_loses_neither_weights_nor_metrics(
    forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run, reference = tmp_path / "run", straight(*MLP)
    assert forks.fit(tmp_path, *MLP, "run_dir=run", INTERRUPT="SIGTERM validate 135 1").code == 75
    assert json.loads((run / "checkpoints/step135/manifest.json").read_text())["kind"] == "permanent"
    assert forks.fit(tmp_path, *MLP, "run_dir=run").code == 0
    assert weights(run / "checkpoints/step135") == weights(reference / "checkpoints/step135")
    assert metrics(run) == metrics(reference)
    assert points(run) == points(reference)
    assert checkpoints(run) == checkpoints(reference)
    before = content(run)
    assert "is finished" in forks.fit(tmp_path, *MLP, "run_dir=run").out
    assert content(run) == before


def test_the_number_of_workers_may_change_on_the_way(
    forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    assert forks.fit(tmp_path, *CNN, "run_dir=run", INTERRUPT="SIGTERM train 50 0").code == 75
    assert forks.fit(tmp_path, *CNN, *WORKERS, "run_dir=run").code == 0
    assert_same_state(tmp_path / "run", straight(*CNN))
    assert metrics(tmp_path / "run") == metrics(straight(*CNN))


@pytest.mark.parametrize("step", [20, 45, 61])
def test_a_hard_stop_does_not_show_in_the_result(
    step: int, forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    first = forks.fit(tmp_path, *MLP, "run_dir=run", f"loop.hard_stop={step}")
    assert first.code == 0, first.err
    assert "finished" in first.out
    assert checkpoints(tmp_path / "run")[-1] == f"step{step}"
    assert forks.fit(tmp_path, *MLP, "run_dir=run").code == 0
    # The stop itself evaluates and logs, so the books have records more; the state has not.
    found, wanted = final_state(tmp_path / "run"), final_state(straight(*MLP))
    assert found.pop("state")["state"]["model"] == wanted.pop("state")["state"]["model"]
    assert found == wanted


def test_a_finished_run_is_left_alone(forks: Forks, tmp_path: Path) -> None:
    assert forks.fit(tmp_path, *MLP, "run_dir=run").code == 0
    before = content(tmp_path / "run")
    for _ in range(2):
        again = forks.fit(tmp_path, *MLP, "run_dir=run")
        assert again.code == 0
        assert "run is finished at step 135" in again.out
        assert again.err == ""
        assert content(tmp_path / "run") == before


def test_a_run_killed_after_its_last_checkpoint_says_later_that_it_is_finished(
    forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    assert forks.fit(tmp_path, *MLP, "run_dir=run", INTERRUPT="SIGKILL fit-end 135 0").killed
    again = forks.fit(tmp_path, *MLP, "run_dir=run")
    assert again.code == 0, again.err
    assert_same_run(tmp_path / "run", straight(*MLP))
    assert "nothing to do" in forks.fit(tmp_path, *MLP, "run_dir=run").out


def test_a_longer_training_reopens_a_finished_run(forks: Forks, straight: Callable[..., Path], tmp_path: Path) -> None:
    short = MLP[1:]
    assert forks.fit(tmp_path, *short, "run_dir=run").code == 0
    longer = forks.fit(tmp_path, *short, "run_dir=run", "loop.max_duration=5ep")
    assert longer.code == 0, longer.err
    assert "resuming at step 135" in longer.err
    reference = straight(*short, "loop.max_duration=5ep")
    found, wanted = final_state(tmp_path / "run"), final_state(reference)
    assert {**found, "state": None} == {**wanted, "state": None}
    assert checkpoints(tmp_path / "run") == names_with(reference, "step135")


def test_a_reopened_run_stays_open_until_its_new_end(forks: Forks, tmp_path: Path) -> None:
    assert forks.fit(tmp_path, *MLP, "run_dir=run").code == 0
    longer = (*MLP, "run_dir=run", "loop.max_duration=4ep")
    assert forks.fit(tmp_path, *longer, INTERRUPT="SIGKILL train 135 0").killed
    assert forks.fit(tmp_path, *longer).code == 0
    assert checkpoints(tmp_path / "run")[-1] == "step180"


def test_a_run_directory_is_all_that_a_resume_needs(
    forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    config = CNN[:-1]
    assert forks.fit(tmp_path, *config, "loop.hard_stop=50", "run_dir=run").code == 0
    run = tmp_path / "run"
    assert forks.fit(tmp_path, f"resume={run}").code == 0
    assert checkpoints(run)[-1] == "step50", "a hard stop is part of the config"
    resumed = forks.fit(tmp_path, f"resume={run}", "loop.hard_stop=null")
    assert resumed.code == 0, resumed.err
    reference = final_state(straight(*CNN))
    assert {**final_state(run), "state": None} == {**reference, "state": None}


@pytest.mark.parametrize("file", ["rank0.safetensors", "rank0.json", "config.yaml", "manifest.json"])
def test_a_damaged_newest_checkpoint_means_the_one_before_it_loudly(
    file: str, forks: Forks, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert forks.fit(tmp_path, *MLP, "run_dir=run", INTERRUPT="SIGTERM train 65 0").code == 75
    assert checkpoints(run)[-2:] == ["step60", "step66"]
    flip_a_byte(run / "checkpoints" / "step66" / file)
    resumed = forks.fit(tmp_path, *MLP, "run_dir=run")
    assert resumed.code == 0, resumed.err
    assert "warning: checkpoint step66 is not used" in resumed.err
    assert "resuming at step 60" in resumed.err
    assert "step66 is not used" in (run / "train.log").read_text()
    assert_same_state(run, straight(*MLP))
    assert metrics(run) == metrics(straight(*MLP))
    assert points(run) == points(straight(*MLP))


def test_where_every_checkpoint_is_damaged_nothing_starts_afresh(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.fit(tmp_path, *MLP, "run_dir=run", INTERRUPT="SIGTERM train 65 0").code == 75
    for number, name in enumerate(checkpoints(run)):
        flip_a_byte(run / "checkpoints" / name / ("manifest.json" if number % 2 else "rank0.safetensors"))
    there = checkpoints(run)
    records = metrics(run)
    for _ in range(3):
        refused = forks.fit(tmp_path, *MLP, "run_dir=run")
        assert refused.code == 3
        assert "none is valid" in refused.err
        for name in there:
            assert name in refused.err
        assert checkpoints(run) == there
        assert metrics(run) == records


def test_a_damaged_checkpoint_that_was_named_is_not_replaced_by_another(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert forks.fit(tmp_path, *MLP, "run_dir=run", INTERRUPT="SIGTERM train 65 0").code == 75
    flip_a_byte(run / "checkpoints" / "step66" / "rank0.json")
    before = checkpoints(run)
    refused = forks.fit(tmp_path, *MLP, "run_dir=run", f"resume={run}/checkpoints/step66")
    assert refused.code == 3
    assert checkpoints(run) == before


def names_with(run: Path, name: str) -> list[str]:
    """The checkpoints of a run and one more, by step."""
    return sorted({*names(run / "checkpoints"), name}, key=lambda one: int(one[4:]))
