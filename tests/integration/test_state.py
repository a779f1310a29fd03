"""Everything that a training remembers, through the command: killed, gone on with, ended early, evaluated again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import names, records, train
from compare import assert_same_run, metrics

from trainer_cli.commands.command_line import main

ALL = (
    "experiment=digits_mlp",
    "callbacks=[ema,early_stopping]",
    "callbacks.ema.decay=0.9",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=0.5",
    "precision=fp16",
    "model.dropout=0.1",
    "scheduler=null",
    "+scheduler.warm._target_=torch.optim.lr_scheduler.LinearLR",
    "+scheduler.warm.total_iters=30",
    "+scheduler.decay._target_=torch.optim.lr_scheduler.OneCycleLR",
    "+scheduler.decay.max_lr=0.01",
    "loop.max_duration=3ep",
    "loop.eval_interval=10",
    "loop.log_interval=7",
    "checkpoint.save_interval=10",
    "+callbacks.interrupt._target_=interrupts.Interrupt",
)
"""fp16 with a loss scale, two schedules, an average that is evaluated, and an end that nobody knows beforehand."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    done = train("fit", *ALL, "run_dir=run", cwd=folder)
    assert done.code == 0, done.err
    return folder / "run"


def test_it_ends_early_and_a_second_start_has_nothing_to_do(straight: Path) -> None:
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["step"] < 135
    assert "val/loss has not been below" in summary["reason"]
    before = names(straight / "checkpoints")
    again = train("fit", *ALL, "run_dir=run", cwd=straight.parent)
    assert (again.code, "nothing to do" in again.out) == (0, True), again.err
    assert names(straight / "checkpoints") == before


@pytest.mark.parametrize("interrupt", ["SIGTERM train 24 0", "SIGKILL train 33 0", "SIGTERM validate 20 3"])
def test_a_resume_ends_early_at_the_same_step_with_the_same_bits(
    straight: Path, tmp_path: Path, interrupt: str
) -> None:
    first = train("fit", *ALL, "run_dir=run", cwd=tmp_path, INTERRUPT=interrupt)
    assert first.code == (75 if "SIGTERM" in interrupt else -9), first.err
    done = train("fit", *ALL, "run_dir=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert_same_run(tmp_path / "run", straight)


def test_validate_gives_the_numbers_of_the_training(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", f"ckpt={straight}/checkpoints/step*", "validate.folder=out", "trust=[interrupts]"]) == 0
    rows = records(tmp_path / "out" / "validation.jsonl")
    measured = {record["step"]: record["val/loss"] for record in metrics(straight) if "val/loss" in record}
    assert len(rows) > 3
    for row in rows:
        if row["step"] in measured:
            assert row["val/loss"] == measured[row["step"]]
