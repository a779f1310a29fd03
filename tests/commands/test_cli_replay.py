"""`train replay RUN STEP`, and checkpoints named as `RUN@stepN` that were not kept."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.exact.replay_command import parse_steps
from trainer_cli.commands.command_line import listed_verbs, main
from trainer_cli.errors import UserError
from trainer_cli.runs.run_dir import RunDir

STEPS = 24


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("replayed") / "run"
    arguments = [
        "fit", "+experiment=digits_mlp", f"run_dir={run}", f"loop.max_duration={STEPS}", "loop.log_interval=4",
        "loop.eval_interval=10", "loop.eval_steps=2", "checkpoint.save_interval=8", "precision.clip_norm=1",
        "logging.console=off",
    ]  # fmt: skip
    assert main(arguments) == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    return Path("run")


def recorded(run: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


def test_a_step_is_shown_as_it_was(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "9..12", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    steps = shown["steps"]
    assert [step["step"] for step in steps] == [9, 10, 11, 12]
    # The record of step 12 holds the mean since step 8, and the rate and norm of the last step.
    record = recorded(run, 12)
    losses = [step["batches"][0]["loss"] for step in steps]
    assert sum(losses) / 4 == pytest.approx(record["train/loss"], rel=1e-6)
    assert steps[-1]["lr"]["optimizer"][0] == record["train/lr"]
    assert steps[-1]["grad_norm"] == pytest.approx(record["train/grad_norm"], rel=1e-6)
    assert max(steps[0]["grad_norms"].values()) <= steps[0]["grad_norm"]
    assert all(step["not_finite"] is None for step in steps)
    # The samples are those of `train data`.
    assert main(["data", str(run), "9..12", "--json"]) == 0
    assert [step["samples"] for step in steps] == json.loads(capsys.readouterr().out)
    assert (shown["equal"], shown["records"], shown["start_step"], shown["states"]) == (True, 2, 8, {})


def test_the_result_of_the_comparison_is_the_last_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified: equal at 3 of 3 records, and 1 kept checkpoint"
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace(str(recorded(run, 12)["train/loss"]), "1.5"))
    assert main(["replay", str(run), "16", "--keep"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("not equal: step 12: train/loss is ")
    assert not (run / "replayed/step16").exists()


def test_what_is_not_finite_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "9..10", "--json", "optimizer.lr=1e30"]) == 1
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[0]["not_finite"] is None
    assert steps[1]["not_finite"].startswith("activation of ")
    # The loss is not finite at two logs, which ends a fit too, with advice how to go on with the run.
    assert main(["replay", str(run), "9..20", "--json", "optimizer.lr=1e30"]) == 1
    error = capsys.readouterr().err.rpartition("error: ")[2]
    assert error.splitlines()[1:] == ["help: `train data run 16 --show` shows the samples of its last step."]


def test_a_callback_that_is_added_writes_into_the_folder_of_replays(run: Path) -> None:
    before = sorted(path for path in run.iterdir() if path.name != "replayed")
    profiler = "{_target_: trainer_cli.TorchProfiler, wait: 0, warmup: 1, active: 1}"
    assert main(["replay", str(run), "10", "--quiet", f"+callbacks.profile={profiler}"]) == 0
    assert list(run.glob("replayed/**/trace-step10.json"))
    assert sorted(path for path in run.iterdir() if path.name != "replayed") == before


def test_the_loss_of_each_sample_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "14..16", "--json", "--per-sample"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["states"] == {"16": None}
    # This model has no dropout, so that the mean of the samples is the loss of the batch.
    for step in shown["steps"]:
        (batch,) = step["batches"]
        assert len(batch["sample_losses"]) == batch["samples"] == 32
        assert sum(batch["sample_losses"]) / 32 == pytest.approx(batch["loss"], rel=1e-5)


@pytest.fixture
def _ctrl_c_stays() -> Iterator[None]:
    """Undo what `continue` of the debugger leaves to the rest of the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_stays")
def test_the_debugger_stops_before_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("p trainer.progress.step, type(model).__name__, len(batch[1])\nc\n"))
    assert main(["replay", str(run), "15", "--pdb"]) == 0
    assert "(14, 'MLP', 32)" in capsys.readouterr().out


def test_a_step_that_was_not_kept_is_computed_where_a_checkpoint_is_named(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "show", f"{run}@step11", "--no-replay"]) == 3
    assert "To compute it: train replay run 11 --keep (replays 3 steps from step8" in capfd.readouterr().err
    assert main(["plan", "+experiment=digits_mlp", "name=fork", f"ckpt={run}@step11"]) == 3
    assert "To compute it: train replay run 11 --keep" in capfd.readouterr().err
    assert main(["ckpt", "show", f"{run}@step11", "--json"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out)["kind"] == "replayed"
    assert f"{run}@step11 was not kept: replays 3 steps from step8" in output.err
    assert "verified: equal at 1 of 1 record" in output.err
    # It is there now.
    assert main(["validate", f"ckpt={run}@step11", "--no-replay"]) == 0
    assert main(["fit", "+experiment=digits_mlp", "name=fork", f"ckpt={run}@step11", "loop.max_duration=1"]) == 0
    assert "weights from run/replayed/step11 step 11" in capfd.readouterr().err
    assert main(["ckpt", "ls", f"{run}/replayed/*", "--json"]) == 0
    assert [item["step"] for item in json.loads(capfd.readouterr().out)] == [11]
    (run / "replayed/bisect").mkdir()
    assert main(["ckpt", "ls", str(run)]) == 0
    assert f"of replayed steps, which `train ckpt prune {run}` removes" in capfd.readouterr().out.splitlines()[-1]
    assert main(["ckpt", "pin", f"{run}@step11"]) == 0
    assert main(["ckpt", "prune", str(run), "--yes"]) == 0
    assert (run / "replayed/step11").exists()
    assert main(["ckpt", "unpin", f"{run}@step11"]) == 0
    assert main(["ckpt", "prune", str(run), "--yes"]) == 0
    assert [path.name for path in (run / "replayed").iterdir()] == [".lock"]
    assert main(["ckpt", "ls", str(run)]) == 0
    assert "of replayed steps" not in capfd.readouterr().out
    assert (run / "checkpoints/step24").exists()


MISTAKES = {
    "after the end": ([f"{STEPS + 1}"], [], f"has made {STEPS} steps, so there is no step {STEPS + 1}"),
    "no number": (["last"], [], "'last' is not a step"),
    "backwards": (["9..7"], [], "ends before it begins"),
    "step 0": (["0"], [], "step 0 is the state before the first step"),
    "no step": ([], [], "train replay needs STEP\n"),
    "an unknown key": (["9"], ["model.widht=3"], "widht"),
    "missing data": (["9"], ["data._target_=nowhere.Digits"], "nowhere"),
}


def begun_at_8(run: Path, *removed: int) -> Path:
    summary = json.loads((run / "summary.json").read_text())
    summary["attempts"][0]["start_step"] = 8
    (run / "summary.json").write_text(json.dumps(summary))
    for step in removed:
        shutil.rmtree(run / f"checkpoints/step{step}")
    return run


def damage(run: Path, step: int) -> None:
    file = run / f"checkpoints/step{step}/rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], object], list[str], int, str]] = {
    "before the first checkpoint": (
        lambda run: begun_at_8(run, 0, 8), ["replay", "run", "9"], 3,
        "run has no valid checkpoint at or before step 8, and was not begun at step 0 there\n"
        "help: The earliest valid one is step 16.",
    ),
    "a checkpoint before the first": (
        lambda run: begun_at_8(run, 0, 8), ["ckpt", "show", "run@step9"], 3,
        "run has no valid checkpoint at or before step 9",
    ),
    "checkpoints removed": (
        lambda run: begun_at_8(run, 0, 8, 16, 24), ["replay", "run", "20"], 3,
        "run has no valid checkpoint at or before step 19, and was not begun at step 0 there",
    ),
    "a damaged one to begin with": (
        lambda run: damage(begun_at_8(run, 0), 8), ["replay", "run", "9"], 3,
        "run/checkpoints/step8 is skipped: ",
    ),
    "a damaged one to compare with": (
        lambda run: damage(run, 16), ["replay", "run", "16", "--quiet"], 3,
        "a file of the checkpoint is damaged",
    ),
    "a damaged one that is named": (
        lambda run: damage(run, 16), ["ckpt", "export", "run@step16", "--format", "safetensors"], 3,
        "rank0.safetensors",
    ),
    "the number of a step": (
        lambda run: None, ["ckpt", "show", "run@9"], 3, "run@9 names no checkpoint\nhelp: Write run@step9.",
    ),
    "a misspelt name": (
        lambda run: None, ["validate", "ckpt=run@lastest"], 3, "Did you mean 'latest'?",
    ),
    "an attempt that was not made": (
        lambda run: None, ["replay", "run@attempt2", "9"], 2, "run has no attempt 2\nhelp: Its attempts are 1.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_run_lacks_is_one_message(run: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    break_run, command, code, message = BROKEN[what]
    break_run(run)
    capfd.readouterr()
    assert main(command) == code
    error = capfd.readouterr().err
    assert message in error
    assert error.count("error: ") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_message(run: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps, overrides, message = MISTAKES[what]
    assert main(["replay", str(run), *steps, *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_folder_that_is_no_run_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere", "3"]) == 2
    assert "nowhere is not a run's directory" in capsys.readouterr().err
    Path("runs").mkdir()
    run.rename("runs/mine")
    for command, shown in (
        ("replay mine 3", "'runs/mine'"),
        ("report mine", "'runs/mine'"),
        ("data mine 3", "'runs/mine'"),
        ("ckpt ls mine", "'runs/mine'"),
        ("ckpt show mine@latest", "'runs/mine'"),
        ("validate ckpt=mine", "'runs/mine'"),
        ("validate mine", "'ckpt=runs/mine'"),
        ("predict mine@best", "'ckpt=runs/mine@best'"),
    ):
        if command.split()[0] in listed_verbs():
            assert main(command.split()) in (2, 3)
            assert capsys.readouterr().err.endswith(f"help: Did you mean {shown}?\n"), command


def test_a_step_of_a_run_in_training_must_be_before_its_newest_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints/step24")
    with RunDir(run).lock():
        assert main(["replay", str(run), "15", "--quiet"]) == 0
        assert main(["replay", str(run), "17"]) == 2
    assert "its newest checkpoint is of step 16" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "steps"), [("7", (7, 7)), ("step7", (7, 7)), ("7..9", (7, 9))])
def test_steps_are_written_as_a_number_or_a_range(text: str, steps: tuple[int, int]) -> None:
    assert parse_steps(text, keeps=False) == steps


def test_step_0_can_only_be_kept() -> None:
    assert parse_steps("0", keeps=True) == (0, 0)
    with pytest.raises(UserError, match="the first is 1"):
        parse_steps("0", keeps=False)


def test_torch_is_set_up_before_the_checkpoint_to_begin_with_is_verified(run: Path) -> None:
    """Its threads spin as shortly as in `train fit`, and the garbage collector leaves out what was imported."""
    code = (
        "import gc, os, sys; from pathlib import Path; from trainer_cli.addons.exact.replay_plan import plan_replay;"
        f"assert 'torch' not in sys.modules; plan_replay(Path({str(run)!r}), 9); assert 'torch' in sys.modules;"
        "print(os.environ['GOMP_SPINCOUNT'], gc.get_freeze_count() > 100_000)"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert done.stdout == "10000 True\n", done.stderr
