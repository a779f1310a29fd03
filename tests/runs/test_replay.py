"""The state after any step of a run is computed again: it equals the checkpoint that the run saved there."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import yaml

from trainer_cli.addons.exact.replay import compose_replay, replay
from trainer_cli.addons.exact.replay_plan import bytes_of_config, config_of, find_step, plan_replay
from trainer_cli.addons.exact.replay_saver import find_differences
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.commands.command_line import main
from trainer_cli.errors import CheckpointError, RunDirectoryError, UserError
from trainer_cli.manifest import Manifest
from trainer_cli.runs.run import Run
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.storage.downloads import DOWNLOADS

STEPS = 60
FIXED = sorted(random.Random(0).sample(range(1, STEPS), 10))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at the start, at random steps and at the end."""
    run = tmp_path_factory.mktemp("replay") / "run"
    arguments = [
        "fit", "+experiment=digits_mlp", f"run_dir={run}", f"loop.max_duration={STEPS}", "loop.log_interval=7",
        "loop.eval_interval=25", "checkpoint.save_interval=null", f"checkpoint.fixed_steps={FIXED}", "callbacks=ema",
        "logging.console=off",
    ]  # fmt: skip
    assert main(arguments) == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def remove(run: Path, *steps: int) -> None:
    """Remove checkpoints of a run; without steps all."""
    for step in steps or (0, *FIXED, STEPS):
        shutil.rmtree(run / "checkpoints" / f"step{step}")


def contents(run: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run but the replayed ones, with its time of change and its bytes."""
    files = (path for path in run.rglob("*") if path.is_file() and "replayed" not in path.parts)
    return {str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("from_start", [True, False])
def test_the_state_after_every_step_is_that_of_the_run(run: Path, from_start: bool) -> None:
    if from_start:
        remove(run, 0)
    before = contents(run)
    plan = plan_replay(run, STEPS, first=1)
    assert (plan.start_step, plan.start is None) == (0, from_start)
    replayed = replay(plan, compose_replay(plan), keep=[13])
    assert replayed.states == dict.fromkeys([*FIXED, STEPS])
    assert replayed.records == STEPS // 7 + len((25, 50, STEPS))
    assert replayed.equal
    assert contents(run) == before
    assert find_step(run, 13) == run / "replayed" / "step13"
    assert find_step(run, 14) is None


def test_a_replayed_checkpoint_is_not_one_of_the_run(run: Path) -> None:
    remove(run, FIXED[-1], STEPS)
    plan = plan_replay(run, FIXED[-1])
    assert replay(plan, compose_replay(plan), keep=[plan.last]).kept
    replayed = Catalog.of(run / "replayed")
    entry = replayed.entry(f"step{plan.last}")
    assert entry.valid
    assert entry.manifest is not None
    assert entry.manifest.kind == "replayed"
    # Also where a user has copied it: no resume and no rule may take it for one that the run has saved.
    shutil.copytree(run / "replayed" / entry.name, run / "checkpoints" / entry.name)
    newest = Catalog.of(run / "checkpoints").newest_valid()
    assert newest is not None
    assert newest.step == FIXED[-2]


def test_a_replay_begins_with_the_newest_checkpoint_before_the_step(run: Path) -> None:
    last = FIXED[1]
    assert plan_replay(run, last).start == run / "checkpoints" / f"step{last}"
    assert plan_replay(run, last, first=last).start == run / "checkpoints" / f"step{FIXED[0]}"
    remove(run, last)
    assert plan_replay(run, last + 1).start_step == FIXED[0]


def test_the_time_of_a_replay_is_estimated_from_the_pace_near_its_steps(run: Path) -> None:
    slow_from, seconds, records = 34, 0, []
    for step in range(1, STEPS + 1):
        seconds += 10 if step >= slow_from else 1
        records.append(json.dumps({"step": step, "time": seconds}))
    (run / "metrics.jsonl").write_text("\n".join(records) + "\n")
    plan = plan_replay(run, STEPS, first=STEPS)
    assert plan.seconds == 10 * (STEPS - plan.start_step)


def test_a_damaged_checkpoint_is_passed_over(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = run / "checkpoints" / f"step{FIXED[1]}" / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert plan_replay(run, FIXED[1] + 1).start_step == FIXED[0]
    assert f"step{FIXED[1]} is skipped" in caplog.text


def test_the_first_record_that_differs_is_named_and_nothing_is_kept(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = next(line for line in lines if line["step"] == 14)
    recorded = changed["train/loss"]
    changed["train/loss"] = recorded * (1 + 2**-52)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = plan_replay(run, 22, first=1)
    # It is read once, for the plan and the comparison.
    (run / "metrics.jsonl").unlink()
    replayed = replay(plan, compose_replay(plan), keep=[12, 20])
    assert list(replayed.kept) == [12]
    assert (
        str(replayed) == f"not equal: step 14: train/loss is {recorded}, and the run recorded {changed['train/loss']}"
    )
    assert not replayed.equal


def test_a_state_that_differs_from_a_kept_checkpoint_is_named(run: Path) -> None:
    plan = plan_replay(run, FIXED[1], first=1)
    replayed = replay(plan, compose_replay(plan, ["optimizer.weight_decay=0.5"]))
    assert replayed.states[FIXED[1]] is not None
    assert not replayed.equal


@pytest.mark.parametrize(
    ("key", "saved", "live", "differing"),
    [
        ("callbacks", {"log": {"losses": [1, 2]}}, {"log": {"losses": []}}, []),
        ("callbacks", {"log": {"best": {"loss": 1}}}, {"log": {"best": {}}}, []),
        ("callbacks", {"log": {"best": None}}, {"log": {"best": {"loss": 1}}}, []),
        ("data", {"buffer": [1, 2]}, {"buffer": [1]}, ["data.buffer[1]"]),
    ],
    ids=["a list", "a mapping", "nothing yet", "a state that each rank saves"],
)
def test_a_rank_is_not_held_against_what_rank_0_alone_has(
    key: str, saved: object, live: object, differing: list[str]
) -> None:
    assert list(find_differences(saved, live, key, rank=1)) == differing
    assert list(find_differences(saved, live, key, rank=0)) != []


@pytest.mark.parametrize(
    ("source", "override", "doubt"),
    [
        ({}, "loop.eval_interval=50", "loop.eval_interval: 25 -> 50"),
        ({"gone.py": "0"}, "trust=[]", "gone.py is not there"),
    ],
    ids=["config", "source"],
)
def test_with_another_config_or_source_a_state_is_kept_once_the_next_record_shows_it_to_be_equal(
    run: Path, source: dict[str, str], override: str, doubt: str, caplog: pytest.LogCaptureFixture
) -> None:
    remove(run, *FIXED, STEPS)
    manifest = run / "checkpoints" / "step0" / "manifest.json"
    manifest.write_bytes(replace(Manifest.parse(manifest.read_bytes()), source=source).to_bytes())
    plan = plan_replay(run, 5)
    replayed = replay(plan, compose_replay(plan, [override]), keep=[3, 5])
    assert f"{doubt}: replays up to step 7 first, where" in caplog.text
    assert replayed.kept == {step: find_step(run, step) for step in (3, 5)}
    # What a record has shown of the source holds for the steps after it.
    later = plan_replay(run, 6)
    assert (later.start, later.reference) == (run / "replayed" / "step5", manifest.parent)
    assert list(replay(later, compose_replay(later), keep=[6]).kept) == [6]


def test_a_checkpoint_that_the_run_has_removed_meanwhile_is_not_compared(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_replay(run, FIXED[2], first=1)
    remove(run, FIXED[1])
    with caplog.at_level("INFO"):
        replayed = replay(plan, compose_replay(plan))
    assert replayed.states == {FIXED[0]: None, FIXED[2]: None}
    assert replayed.equal
    assert f"step{FIXED[1]} has been removed meanwhile, so it is not compared" in caplog.text


def test_a_kept_checkpoint_shows_it_where_no_record_does(run: Path) -> None:
    remove(run, *FIXED[2:], STEPS)
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").unlink()
    step, override = FIXED[1] - 1, "loop.eval_interval=50"
    plan = plan_replay(run, step)
    replayed = replay(plan, compose_replay(plan, [override]), keep=[step])
    assert (replayed.states, list(replayed.kept)) == ({}, [step])
    remove(run, FIXED[1])
    shutil.rmtree(run / "replayed")
    (run / "summary.json").write_text(json.dumps({"step": 40}))
    unproven = plan_replay(run, step)
    with pytest.raises(CheckpointError, match="eval_interval: 25 -> 50; and no record or checkpoint of the run shows"):
        replay(unproven, compose_replay(unproven, [override]), keep=[step])
    assert find_step(run, step) is None


def test_a_state_before_a_record_that_differs_is_not_kept(run: Path) -> None:
    remove(run, *FIXED, STEPS)
    plan = plan_replay(run, 5)
    replayed = replay(plan, compose_replay(plan, ["optimizer.weight_decay=0.5"]), keep=[5])
    assert str(replayed).startswith("not equal: step 7: train/loss is ")
    assert (replayed.kept, find_step(run, 5)) == ({}, None)


@pytest.mark.parametrize(
    ("step", "message"),
    [(STEPS + 1, f"has made {STEPS} steps, so there is no step {STEPS + 1}"), (-1, "there is no step -1")],
)
def test_a_step_that_was_not_made_is_refused(trained: Path, step: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_replay(trained, step)


def test_a_run_that_was_not_begun_here_needs_a_checkpoint(run: Path) -> None:
    remove(run)
    summary = json.loads((run / "summary.json").read_text())
    summary["attempts"][0]["start_step"] = 30
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(CheckpointError, match="no valid checkpoint at or before step 40"):
        plan_replay(run, 40)


def test_steps_before_the_first_known_attempt_are_made(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["attempts"][0] |= {"start_step": 30, "status": "finished"}
    (run / "summary.json").write_text(json.dumps(summary))
    assert plan_replay(run, 40, first=FIXED[0] + 1).start_step == FIXED[0] < 30


def test_a_run_in_training_is_replayed_up_to_its_newest_checkpoint(run: Path) -> None:
    remove(run, STEPS)
    with RunDir(run).lock():
        assert plan_replay(run, FIXED[-1] - 1).last == FIXED[-1] - 1
        with pytest.raises(UserError, match=f"its newest checkpoint is of step {FIXED[-1]}"):
            plan_replay(run, FIXED[-1] + 1)


def test_no_training_begins_while_a_run_is_replayed(run: Path) -> None:
    first, second = RunDir(run).share(), RunDir(run).share()
    assert first is not None
    assert second is not None
    with pytest.raises(RunDirectoryError, match="is being replayed"):
        RunDir(run).lock()
    first.release()
    second.release()
    RunDir(run).lock().release()


def test_a_step_that_was_made_again_is_no_longer_what_was_replayed_before(run: Path) -> None:
    plan = plan_replay(run, 22)
    replay(plan, compose_replay(plan), keep=[22])
    assert find_step(run, 22) is not None
    # As a second attempt that went back to step 20 records itself.
    summary = json.loads((run / "summary.json").read_text())
    summary["attempts"].append({**summary["attempts"][0], "attempt": 2, "start_step": 20})
    (run / "summary.json").write_text(json.dumps(summary))
    assert find_step(run, 22) is None
    assert f"{plan_replay(Path(f'{run}@attempt1'), 22)}".startswith("replays ")
    with pytest.raises(UserError, match="run has no attempt 3"):
        plan_replay(Path(f"{run}@attempt3"), 22)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three attempts: the first two end it, and it is made longer; the third has another rate."""
    run = tmp_path_factory.mktemp("resumed") / "run"
    base = [
        "fit", "+experiment=digits_mlp", f"run_dir={run}", "loop.log_interval=3", "loop.eval_interval=20",
        "loop.eval_steps=1", "scheduler.warmup=2", "checkpoint.save_interval=null", "logging.console=off",
        "checkpoint.fixed_steps=[4,9,15]", "loggers.tensorboard=null",
    ]  # fmt: skip
    assert main([*base, "loop.max_duration=7"]) == 0
    assert main([*base, "loop.max_duration=13"]) == 0
    assert main([*base, "loop.max_duration=20", "optimizer.lr=0.01", "resume_allow=[optimizer.lr]"]) == 0
    return run


def test_steps_of_attempts_with_several_configs_are_refused(resumed: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(resumed, tmp_path / "run"))
    assert plan_replay(run, 8, first=8).start == run / "checkpoints/step7"
    with pytest.raises(CheckpointError, match="Make steps 5 to 7, and 8 to 9"):
        plan_replay(run, 9, first=6)
    for step in (7, 13):
        shutil.rmtree(run / f"checkpoints/step{step}")
    # What is before the boundary, and what is after the next checkpoint.
    for first, last, records in ((2, 7, 3), (10, 13, 2), (16, 18, 1)):
        plan = plan_replay(run, last, first=first)
        replayed = replay(plan, compose_replay(plan))
        assert (replayed.equal, replayed.records) == (True, records)
    for first, last, attempt, began, why in (
        (2, 18, 3, 13, "continued the finished run"),
        (8, 8, 2, 7, "continued the finished run"),
        (10, 14, 3, 13, "continued the finished run"),
    ):
        message = f"to {last} of .* cannot be made in one replay: attempt {attempt}, which {why}, began at step {began}"
        with pytest.raises(CheckpointError, match=message):
            plan_replay(run, last, first=first)
    with pytest.raises(CheckpointError, match="The checkpoint of step 13 is gone: only steps up to it"):
        plan_replay(run, 14)
    # An attempt that was stopped: the configs differ.
    summary = json.loads((run / "summary.json").read_text())
    summary["attempts"][1]["status"] = "stopped"
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(CheckpointError, match="attempt 3, which has another config than the one before"):
        plan_replay(run, 14)


def test_the_config_of_an_earlier_attempt_comes_from_its_checkpoint_in_an_object_store(
    resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("part_bytes", "progress"):
        # Restored after the test.
        monkeypatch.setattr(DOWNLOADS, name, getattr(DOWNLOADS, name))
    run = Path(shutil.copytree(resumed, tmp_path / "run"))
    fsspec.filesystem("memory").put(str(run / "checkpoints"), "/store/replayed", recursive=True)
    shutil.rmtree(run / "checkpoints")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["checkpoint"]["folder"] = "memory://store/replayed"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    history = Run.open(run)
    earlier = yaml.safe_load(bytes_of_config(config_of(history, 2)))
    assert (earlier["loop"]["max_duration"], earlier["optimizer"]["lr"]) == (13, 0.003)
    assert config_of(history, 3) == run / "config.yaml"
    plan = plan_replay(run, 11)
    assert replay(plan, compose_replay(plan, ["load.chunk_size=65536", "load.progress=false"])).equal
    assert (DOWNLOADS.part_bytes, DOWNLOADS.progress) == (65536, False)
