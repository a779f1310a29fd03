"""`train check run`: stretches of a run are made again, and everything that differs is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainer_cli.addons.exact.check_run import list_stretches, spread_evenly
from trainer_cli.commands.command_line import main
from trainer_cli.manifest import Manifest

STEPS = 16
EVERY = 4


@pytest.mark.parametrize(
    ("steps", "begins_at_0", "expected"),
    [
        ([0, 5, 9], True, [(0, 5), (5, 9)]),
        ([5, 9], True, [(0, 5), (5, 9)]),
        ([5, 9], False, [(5, 9)]),
        ([5], False, []),
        ([0], True, []),
        ([], True, []),
    ],
)
def test_a_stretch_lies_between_what_steps_can_be_made_from(
    steps: list[int], begins_at_0: bool, expected: list[tuple[int, int]]
) -> None:
    assert list_stretches(steps, begins_at_0=begins_at_0) == expected


@pytest.mark.parametrize(
    ("count", "last_steps"), [(1, [10]), (2, [5, 10]), (3, [3, 6, 10]), (10, range(1, 11)), (None, range(1, 11))]
)
def test_stretches_are_spread_over_the_run_with_the_last_one(count: int | None, last_steps: list[int]) -> None:
    stretches = [(step, step + 1) for step in range(10)]
    assert [last for _, last in spread_evenly(stretches, count)] == list(last_steps)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check_run")
    arguments = [
        "fit", "+experiment=digits_mlp", "run_dir=run", f"loop.max_duration={STEPS}", "loop.log_interval=2",
        f"checkpoint.save_interval={EVERY}", "logging.console=off",
    ]  # fmt: skip
    # A project without source of its own.
    with contextlib.chdir(folder):
        assert main(arguments) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    return Path("run")


@pytest.mark.usefixtures("forked_replays")
def test_steps_that_one_replay_cannot_make_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (first,) = summary["attempts"]
    summary["attempts"] = [{**first, "status": "finished"}, {**first, "attempt": 2, "start_step": 6}]
    (run / "summary.json").write_text(json.dumps(summary))
    for step in (8, 12, 16):
        file = run / f"checkpoints/step{step}/manifest.json"
        file.write_bytes(replace(Manifest.parse(file.read_bytes()), attempt=2).to_bytes())
    assert main(["check", "run", "run", "--stretches", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "steps 5 to 8 are left out: attempt 2, which continued the finished run, began at step 6"
    )
    assert lines[-1] == "verified: 1 of 3 stretches, 4 steps, equal in every record and tensor"


def test_a_run_that_equals_itself_is_proved_in_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run", "run", "--stretches", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "replays steps 13 to 16",
        "steps 13 to 16: equal at 2 records",
        "written: run/replayed/check.json",
        "verified: 1 of 4 stretches, 4 steps, equal in every record and tensor",
    ]
    proof = json.loads((run / "replayed" / "check.json").read_text())
    assert proof["equal"] is True
    assert proof["stretches"] == [{"start": 12, "last": 16, "records": 2, "problem": None, "equal": True}]
    assert [link["step"] for link in proof["manifests"]] == [0, 4, 8, 12, 16]
    assert len({link["chain"] for link in proof["manifests"]}) == 5
    assert proof["versions"]["run"] == proof["versions"]["now"]
    assert sorted(path.name for path in (run / "replayed").iterdir()) == ["check.json"]


@pytest.mark.usefixtures("forked_replays")
def test_source_that_has_changed_since_is_named_before_the_stretches(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run / "checkpoints" / f"step{STEPS}" / "manifest.json"
    manifest.write_bytes(replace(Manifest.parse(manifest.read_bytes()), source={"gone.py": "0"}).to_bytes())
    assert main(["check", "run", "run", "--stretches", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["the source has changed since: gone.py (not there)", "replays steps 13 to 16"]


def test_a_file_that_cannot_be_written_is_named_before_the_stretches(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "run", "run", "--output", "run/checkpoints"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "run/checkpoints cannot be written: Is a directory" in printed.err
    assert "Name another file for the result: --output FILE." in printed.err


@pytest.mark.usefixtures("forked_replays")
def test_each_stretch_that_proves_nothing_says_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["step"] == 14:
            record["train/loss"] += 1e-15 + record["train/loss"] * 2**-50
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = run / "checkpoints" / f"step{2 * EVERY}" / "rank0.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["check", "run", "run", "--stretches", "all", "--json", "--output", "proof.json"]) == 1
    proof = json.loads(capsys.readouterr().out)
    assert proof == json.loads(Path("proof.json").read_text())
    problems = [stretch["problem"] for stretch in proof["stretches"]]
    assert problems[0] is None
    # One ends with the damaged checkpoint and one begins with it.
    for problem in problems[1:3]:
        assert problem.startswith("cannot be made: a file of the checkpoint is damaged")
    assert problems[3].startswith("not equal: step 14: train/loss is ")
    assert main(["check", "run", "run", "--stretches", "all"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not verified: of 4 stretches 1 not equal, 2 cannot be made"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs"], "runs is not a run's directory"),
        (["run", "--stretches", "0"], "--stretches 0 is not a number of stretches"),
        (["run", "--stretches", "most"], "--stretches most is not a number of stretches"),
    ],
)
def test_a_mistake_is_named(run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_two_checkpoints_has_nothing_to_check(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(EVERY, STEPS + 1, EVERY):
        shutil.rmtree(run / "checkpoints" / f"step{step}")
    assert main(["check", "run", "run"]) == 3
    assert "run has 1 valid checkpoint, and no steps between two" in capsys.readouterr().err
