"""Stop and go on, in every place where that could go wrong: the results are those of going straight through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import flip_a_byte, names, train, weights
from compare import assert_same_run, assert_same_state, checkpoints, content, final_state, metrics, points

MLP = (
    "experiment=digits_mlp",
    "model.dropout=0.1",
    "loop.limit_train_batches=15",
    "loop.max_duration=3ep",
    "loop.eval_interval=8",
    "loop.log_interval=7",
    "checkpoint.save_interval=13",
    "checkpoint.ephemeral_save_interval=4",
    "+callbacks.interrupt._target_=interrupts.Interrupt",
)
"""Epochs of 15 steps of an MLP with dropout; nothing falls on the same step too often."""
CNN = ("experiment=digits", "model.channels=[4,8,8]", *MLP[1:])
"""The same of a small CNN with batch norm too, on augmented data."""
WORKERS = ("data.num_workers=2",)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of an uninterrupted training; trained once for each config."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*overrides: str) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("straight")
            done = train("fit", *overrides, "run_dir=run", cwd=folder)
            assert done.code == 0, done.err
            made[overrides] = folder / "run"
        return made[overrides]

    return get


STOPS = {
    "after the first step of an epoch": "SIGTERM train 15 0",
    "at a step that evaluates": "SIGTERM train 7 0",
    "after a step that evaluates": "SIGTERM train 8 0",
    "at a step that logs": "SIGTERM train 6 0",
    "in an evaluation": "SIGTERM validate 8 3",
    "killed in an evaluation": "SIGKILL validate 16 3",
    "killed in the last evaluation": "SIGKILL validate 45 3",
    "killed before the first interval": "SIGKILL train 2 0",
    "killed after the last checkpoint": "SIGKILL fit-end 45 0",
}
"""Places of a stop that the cover of test_resume_matrix.py has not."""


@pytest.mark.parametrize("place", STOPS)
def test_a_stop_anywhere_changes_nothing(place: str, straight: Callable[..., Path], tmp_path: Path) -> None:
    stopped = train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT=STOPS[place])
    assert stopped.code == (75 if STOPS[place].startswith("SIGTERM") else -9), stopped.err
    resumed = train("fit", *MLP, "run_dir=run", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_run(tmp_path / "run", straight(*MLP))
    before = content(tmp_path / "run")
    again = train("fit", *MLP, "run_dir=run", cwd=tmp_path)
    assert (again.code, again.err, "run is finished at step 45" in again.out) == (0, "", True)
    assert content(tmp_path / "run") == before


def test_several_stops_change_nothing(straight: Callable[..., Path], tmp_path: Path) -> None:
    stops = (
        "SIGTERM train 3 0",
        "SIGKILL train 14 0",
        "SIGTERM validate 16 1",
        "SIGTERM validate 16 2",
        "SIGKILL train 18 0",
        "SIGTERM train 43 0",
    )
    for interrupt in stops:
        assert train("fit", *CNN, "run_dir=run", cwd=tmp_path, INTERRUPT=interrupt).code in (75, -9)
    assert train("fit", *CNN, "run_dir=run", cwd=tmp_path).code == 0
    assert_same_run(tmp_path / "run", straight(*CNN))


def test_a_stop_in_the_last_evaluation_loses_neither_weights_nor_metrics(
    straight: Callable[..., Path], tmp_path: Path
) -> None:
    run, reference = tmp_path / "run", straight(*MLP)
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM validate 45 1").code == 75
    assert json.loads((run / "checkpoints/step45/manifest.json").read_text())["kind"] == "permanent"
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path).code == 0
    assert weights(run / "checkpoints/step45") == weights(reference / "checkpoints/step45")
    assert metrics(run) == metrics(reference)
    assert points(run) == points(reference)
    assert checkpoints(run) == checkpoints(reference)


def test_the_number_of_workers_may_change_on_the_way(straight: Callable[..., Path], tmp_path: Path) -> None:
    assert train("fit", *CNN, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM train 17 0").code == 75
    assert train("fit", *CNN, *WORKERS, "run_dir=run", cwd=tmp_path).code == 0
    assert_same_state(tmp_path / "run", straight(*CNN))
    assert metrics(tmp_path / "run") == metrics(straight(*CNN))


@pytest.mark.parametrize("step", [8, 15, 27])
def test_a_hard_stop_does_not_show_in_the_result(step: int, straight: Callable[..., Path], tmp_path: Path) -> None:
    first = train("fit", *MLP, "run_dir=run", f"loop.hard_stop={step}", cwd=tmp_path)
    assert first.code == 0, first.err
    assert "finished" in first.out
    assert checkpoints(tmp_path / "run")[-1] == f"step{step}"
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path).code == 0
    found, expected = tmp_path / "run", straight(*MLP)
    assert_same_state(found, expected)
    assert metrics(found) == metrics(expected)
    assert points(found) == points(expected)
    assert checkpoints(found) == checkpoints(expected)


def test_a_hard_stop_at_the_step_of_a_stop_is_lifted_by_leaving_it_out(
    straight: Callable[..., Path], tmp_path: Path
) -> None:
    # The evaluation that the signal left out is made by a part that makes no step.
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM validate 8 0").code == 75
    assert train("fit", *MLP, "run_dir=run", "loop.hard_stop=8", cwd=tmp_path).code == 0
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path).code == 0
    assert_same_run(tmp_path / "run", straight(*MLP))


def test_a_longer_training_reopens_a_finished_run(straight: Callable[..., Path], tmp_path: Path) -> None:
    # The end of the first training is evaluated by one that goes through, too.
    short = ("model=mlp", *MLP[1:], "loop.eval_interval=9")
    assert train("fit", *short, "run_dir=run", cwd=tmp_path).code == 0
    longer = train("fit", *short, "run_dir=run", "loop.max_duration=5ep", cwd=tmp_path)
    assert longer.code == 0, longer.err
    assert "resuming at step 45" in longer.err
    reference = straight(*short, "loop.max_duration=5ep")
    found, wanted = final_state(tmp_path / "run"), final_state(reference)
    assert {**found, "state": None} == {**wanted, "state": None}
    assert checkpoints(tmp_path / "run") == names_with(reference, "step45")


def test_a_reopened_run_stays_open_until_its_new_end(tmp_path: Path) -> None:
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path).code == 0
    longer = (*MLP, "run_dir=run", "loop.max_duration=4ep")
    assert train("fit", *longer, cwd=tmp_path, INTERRUPT="SIGKILL train 45 0").killed
    assert train("fit", *longer, cwd=tmp_path).code == 0
    assert checkpoints(tmp_path / "run")[-1] == "step60"


def test_a_run_directory_is_all_that_a_resume_needs(straight: Callable[..., Path], tmp_path: Path) -> None:
    config = CNN[:-1]
    assert train("fit", *config, "loop.hard_stop=17", "run_dir=run", cwd=tmp_path).code == 0
    run = tmp_path / "run"
    assert train("fit", f"resume={run}", cwd=tmp_path).code == 0
    assert checkpoints(run)[-1] == "step17", "a hard stop is part of the config"
    resumed = train("fit", f"resume={run}", "loop.hard_stop=null", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    reference = final_state(straight(*CNN))
    assert {**final_state(run), "state": None} == {**reference, "state": None}


@pytest.mark.parametrize(
    ("file", "warning"),
    [("rank0.safetensors", "step29 is quarantined as .aside."), ("manifest.json", "checkpoint step29 is not used")],
)
def test_a_damaged_newest_checkpoint_means_the_one_before_it_loudly(
    file: str, warning: str, straight: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM train 28 0").code == 75
    assert checkpoints(run)[-2:] == ["step26", "step29"]
    flip_a_byte(run / "checkpoints" / "step29" / file)
    resumed = train("fit", *MLP, "run_dir=run", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert warning in resumed.err
    assert "resuming at step 26" in resumed.err
    assert warning in (run / "train.log").read_text()
    assert_same_state(run, straight(*MLP))
    assert metrics(run) == metrics(straight(*MLP))
    assert points(run) == points(straight(*MLP))


def test_where_every_checkpoint_is_damaged_nothing_starts_afresh(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM train 28 0").code == 75
    for number, name in enumerate(checkpoints(run)):
        flip_a_byte(run / "checkpoints" / name / ("manifest.json" if number % 2 else "rank0.safetensors"))
    there = checkpoints(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for _ in range(2):
        refused = train("fit", *MLP, "run_dir=run", cwd=tmp_path)
        assert refused.code == 3
        assert "none is valid" in refused.err
        assert [name for name in there if name not in refused.err] == []
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert {path.name for path in {**before, **after} if before.get(path) != after.get(path)} <= {"train.log"}


def test_a_damaged_checkpoint_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train("fit", *MLP, "run_dir=run", cwd=tmp_path, INTERRUPT="SIGTERM train 28 0").code == 75
    flip_a_byte(run / "checkpoints" / "step29" / "rank0.json")
    before = checkpoints(run)
    refused = train("fit", *MLP, "run_dir=run", f"resume={run}/checkpoints/step29", cwd=tmp_path)
    assert refused.code == 3
    assert checkpoints(run) == before


def names_with(run: Path, name: str) -> list[str]:
    """The checkpoints of a run and one more, by step."""
    return sorted({*names(run / "checkpoints"), name}, key=lambda one: int(one[4:]))
