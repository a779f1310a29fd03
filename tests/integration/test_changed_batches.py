"""A batch size, or whatever makes other batches of an epoch, that changes on a resume: every sample once an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import train

SIZED = ("+experiment=digits_mlp", "device=cpu", "loop.log_interval=1", "loop.eval_interval=1ep",
         "checkpoint.save_interval=null", "checkpoint.save_final=true", "run_dir=run")  # fmt: skip


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def manifest(run: Path) -> dict[str, object]:
    newest = max((run / "checkpoints").glob("step*"), key=lambda path: int(path.name.removeprefix("step")))
    found: dict[str, object] = json.loads((newest / "manifest.json").read_text())
    return found


@pytest.mark.parametrize(
    ("stop", "change"),
    [(7, "data.batch_size=64"), (40, "data.batch_size=16"), (50, "data.batch_size=96"), (9, "loop.grad_accum_steps=3")],
)
def test_each_epoch_has_every_sample_once_after_a_change(tmp_path: Path, stop: int, change: str) -> None:
    first = train("fit", *SIZED, "loop.max_duration=3ep", f"loop.hard_stop={stop}", cwd=tmp_path)
    assert first.code == 0, first.err
    key = change.partition("=")[0]
    more = (*SIZED, "loop.max_duration=3ep", change, f"resume_allow=[{key}]")
    last = train("fit", *more, cwd=tmp_path)
    assert last.code == 0, last.err
    end: Any = manifest(tmp_path / "run")
    assert end["finished"] == "max_duration of 3 epochs reached"
    assert end["progress"]["epoch"] == 3
    assert end["progress"]["samples"] == 3 * 1438
    logged = records(tmp_path / "run")
    evaluated = {record["epoch"] for record in logged if "val/loss" in record and record["step"] != stop}
    assert evaluated == {1.0, 2.0, 3.0}
    rates = [record["train/lr"] for record in logged if "train/lr" in record]
    assert rates[-1] == pytest.approx(0.01 * 3e-3, rel=0.2), "the schedule ends with the training"


def test_a_batch_may_be_smaller_after_a_resume_where_a_step_has_the_same_samples(tmp_path: Path) -> None:
    fixed = (*SIZED, "data.global_batch_size=64", "model.dropout=0", "loop.max_duration=12")
    losses = []
    for name, size in (("straight", 32), ("changed", 8)):
        folder = tmp_path / name
        folder.mkdir()
        assert train("fit", *fixed, "data.batch_size=32", "loop.hard_stop=6", cwd=folder).code == 0
        done = train("fit", *fixed, f"data.batch_size={size}", cwd=folder)
        assert done.code == 0, done.err
        losses.append([one["train/loss"] for one in records(folder / "run") if "train/loss" in one])
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_resume_after_a_change_is_exact_too(tmp_path: Path) -> None:
    changed = ("data.batch_size=64", "resume_allow=[data.batch_size]")
    ends = []
    for name, stops in (("straight", ()), ("stopped", (35, 50))):
        folder = tmp_path / name
        folder.mkdir()
        assert train("fit", *SIZED, "loop.max_duration=3ep", "loop.hard_stop=20", cwd=folder).code == 0
        for stop in stops:
            assert (
                train("fit", *SIZED, "loop.max_duration=3ep", f"loop.hard_stop={stop}", *changed, cwd=folder).code == 0
            )
        assert train("fit", *SIZED, "loop.max_duration=3ep", *changed, cwd=folder).code == 0
        drop = ("time", "train/samples_per_s", "epoch")
        ends.append([{key: v for key, v in one.items() if key not in drop} for one in records(folder / "run")])
    # A hard stop evaluates; all else is the same.
    trained = [[{k: v for k, v in one.items() if not k.startswith("val/")} for one in end] for end in ends]
    assert trained[0] == trained[1]
