"""The oracle gives each of its verdicts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Result, flip_a_byte

from campaign.kill_points import SYNCHRONOUS, TRAINING
from campaign.oracle import Reference, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

FINISHED = Result(0, "", "run is finished at step 6")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """The undisturbed run, and one of another seed."""
    folders = [tmp_path_factory.mktemp(f"seed{seed}") for seed in (0, 1)]
    return [
        make_reference(folder, *TRAINING, SYNCHRONOUS, f"seed={seed}", disk={}) for seed, folder in enumerate(folders)
    ]


def _verdict(run: Path, reference: Reference, result: Result = FINISHED, announced: int = 6) -> Outcome:
    return verdict_of(run, reference, [announced], lambda: result)


@pytest.mark.parametrize(
    ("disturb", "verdict", "detail"),
    [
        pytest.param(lambda run: None, Verdict.passed, "", id="nothing"),
        pytest.param(
            lambda run: shutil.rmtree(run / "checkpoints/step6"), Verdict.lost, "step 6 was announced", id="gone"
        ),
        pytest.param(
            lambda run: flip_a_byte(run / "checkpoints/step6/rank0.safetensors"),
            Verdict.lost,
            "step 6 was announced, the newest valid is of None",
            id="damaged",
        ),
        pytest.param(
            lambda run: _change_lines(run, lambda lines: lines[:-1]), Verdict.lost, "records of steps", id="no record"
        ),
        pytest.param(
            lambda run: _change_lines(run, lambda lines: [*lines, lines[-1]]),
            Verdict.lost,
            "records of steps",
            id="record twice",
        ),
        pytest.param(
            lambda run: _change_lines(run, lambda lines: [line.replace("loss", "cost") for line in lines]),
            Verdict.diverged,
            "does not end as the undisturbed one",
            id="other record",
        ),
    ],
)
def test_a_disturbed_run_gets_its_verdict(
    disturb: Callable[[Path], None], verdict: Verdict, detail: str, references: list[Reference], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(references[0].run, run)
    disturb(run)
    outcome = _verdict(run, references[0])
    assert outcome.verdict is verdict
    assert detail in outcome.detail


def _change_lines(run: Path, change: Callable[[list[str]], list[str]]) -> None:
    file = run / "metrics.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def test_tensors_of_another_run_are_a_divergence(references: list[Reference]) -> None:
    assert _verdict(references[1].run, references[0]).verdict is Verdict.diverged


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        pytest.param(Result(1, "", "error: no"), Verdict.hard_fail, id="failed"),
        pytest.param(Result(0, "", "resuming at step 4"), Verdict.lost, id="from an older one"),
        pytest.param(Result(0, "", ""), Verdict.lost, id="from step 0"),
    ],
)
def test_the_start_after_a_fault_gets_its_verdict(
    result: Result, verdict: Verdict, references: list[Reference]
) -> None:
    assert _verdict(references[0].run, references[0], result).verdict is verdict


def test_a_hanging_start_is_a_hard_fail(references: list[Reference]) -> None:
    def hang() -> Result:
        raise subprocess.TimeoutExpired("train", 120)

    assert verdict_of(references[0].run, references[0], [6], hang).verdict is Verdict.hard_fail


def test_a_changed_foreign_file_is_lost_work(references: list[Reference], tmp_path: Path) -> None:
    outcome = verdict_of(references[0].run, references[0], [6], lambda: FINISHED, foreign={tmp_path / "notes": b"mine"})
    assert outcome.verdict is Verdict.lost
