"""One definition of "best", for checkpoints, evaluations, sweeps and values of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_cli.commands.sweep_table import JobStatus, as_table
from trainer_cli.core.checkpoint_config import KeepBestConfig, Mode
from trainer_cli.core.policy import BestRule
from trainer_cli.runs.curves import Columns, Series, best_values, summarize_metrics
from trainer_cli.runs.metrics import best_rule, describe, mode_of, shared_keep_best

NAMES = ["train/loss", "val/loss", "other/loss", "val/f1", "val/accuracy"]


@pytest.mark.parametrize(
    ("keep_best", "names", "expected"),
    [
        (None, NAMES, BestRule("other/loss")),
        ({"metric": None}, NAMES, BestRule("other/loss")),
        ({"metric": "val/f1", "mode": "max"}, NAMES, BestRule("val/f1", Mode.max)),
        ({"metric": "val/f1"}, NAMES, BestRule("val/f1")),
        ({"metric": "val/loss", "mode": "max"}, NAMES, BestRule("val/loss", Mode.max)),
        ({"metric": "train/loss"}, NAMES, BestRule("train/loss")),
        ({"metric": "val/absent"}, NAMES, BestRule("other/loss")),
        (None, ["train/loss", "val/f1"], None),
        (None, [], None),
    ],
)
def test_the_rule_of_the_run_decides_and_else_the_validation_loss(
    keep_best: Any, names: list[str], expected: BestRule | None
) -> None:
    assert best_rule(keep_best, names) == expected


@pytest.mark.parametrize(
    ("metric", "best", "expected"),
    [
        ("val/loss", (None, None), Mode.min),
        ("val/Accuracy", (None, None), Mode.max),
        ("val/score", (None, None), None),
        ("val/score", ("val/score", "max"), Mode.max),
        ("val/loss", ("val/loss", "max"), Mode.max),
        ("other/loss", ("val/loss", "max"), Mode.min),
    ],
)
def test_the_mode_of_the_config_decides_over_the_usual_one(metric: str, best: Any, expected: Mode | None) -> None:
    assert mode_of(metric, *best) == expected


def test_a_rule_is_shared_only_where_all_runs_have_it() -> None:
    first, second = {"metric": "val/f1", "mode": "max"}, {"metric": "val/loss", "mode": "min"}
    assert shared_keep_best([first, dict(first)]) == first
    assert shared_keep_best([first, second]) is None
    assert shared_keep_best([]) is None


def test_a_rule_is_described_with_what_ties_do() -> None:
    assert describe(BestRule("val/f1", Mode.max)) == "largest val/f1, of equal ones the newest"


def test_of_equal_values_of_a_metric_the_newest_is_best(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    values = [0.5, 0.25, 0.25, 0.75]
    records = [{"step": step, "epoch": 0, "time": 0, "val/loss": value} for step, value in enumerate(values, 1)]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    best, _ = summarize_metrics(file, KeepBestConfig())
    assert best["val/loss"]["step"] == 3
    rows = np.arange(4)
    columns = Columns(rows + 1, rows.astype(float), rows.astype(float), {"val/loss": Series(rows, np.array(values))})
    assert best_values(columns, {"val/loss": "min"}) == {"val/loss": (0.25, 3)}


def _job(folder: Path, key: str, f1: float, loss: float, keep_best: str) -> JobStatus:
    (folder / key).mkdir()
    (folder / key / "config.yaml").write_text(f"checkpoint: {{keep_best: {keep_best}}}\n")
    best = {
        "val/loss": {"value": loss, "step": 1, "mode": "min"},
        "val/f1": {"value": f1, "step": 1, "mode": "max"},
    }
    return JobStatus(key, {"seed": key}, folder / key, "finished", best=best)


@pytest.mark.parametrize(
    ("rules", "marked", "note"),
    [
        (["{metric: val/f1, mode: max}"] * 3, ["a", "c"], "* best val/f1, equal in 2 jobs"),
        (["{metric: null, mode: min}"] * 3, ["b"], "* best val/loss"),
        (["{metric: val/f1, mode: max}", "{metric: null}", "{metric: null}"], ["b"], "* best val/loss"),
    ],
    ids=["the rule of all", "no rule", "different rules"],
)
def test_a_sweep_marks_the_best_jobs_by_the_rule_of_its_runs(
    rules: list[str], marked: list[str], note: str, tmp_path: Path
) -> None:
    facts = [("a", 0.9, 0.5), ("b", 0.8, 0.1), ("c", 0.9, 0.6)]
    rows = [_job(tmp_path, *fact, rule) for fact, rule in zip(facts, rules, strict=True)]
    lines = as_table(rows).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*  ")] == marked
    assert note in lines
