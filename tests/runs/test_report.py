"""Which of a metric's values is its best, and what summary.json says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainer_cli.core.checkpoint_config import KeepBestConfig, Mode
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.runs.curves import summarize_metrics
from trainer_cli.runs.fit import print_outcome
from trainer_cli.runs.metrics import MODES
from trainer_cli.runs.run_dir import Outcome, RunDir, RunStatus

NO_RULE = KeepBestConfig()


def metrics_of(folder: Path, *records: Mapping[str, float]) -> Path:
    """A metrics.jsonl with a record at step 1, 2 and so on."""
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=folder))
    for step, metrics in enumerate(records, 1):
        logger.log(Record(step=step, epoch=0.0, time=0.0, metrics=metrics))
    logger.close()
    return folder / "metrics.jsonl"


@pytest.mark.parametrize("name", ["loss", "nll", "wer", "bpb", "perplexity", "error_rate", "rmse", "PPL"])
def test_the_best_of_what_is_worse_when_larger_is_the_smallest(tmp_path: Path, name: str) -> None:
    file = metrics_of(tmp_path, {f"val/{name}": 2.0}, {f"val/{name}": 1.0}, {f"val/{name}": 3.0})
    assert summarize_metrics(file, NO_RULE)[0] == {f"val/{name}": {"value": 1.0, "step": 2, "mode": "min"}}


@pytest.mark.parametrize("name", ["accuracy", "f1", "auroc", "bleu"])
def test_the_best_of_what_is_better_when_larger_is_the_largest(tmp_path: Path, name: str) -> None:
    file = metrics_of(tmp_path, {f"val/{name}": 2.0}, {f"val/{name}": 3.0}, {f"val/{name}": 1.0})
    assert summarize_metrics(file, NO_RULE)[0] == {f"val/{name}": {"value": 3.0, "step": 2, "mode": "max"}}


@pytest.mark.parametrize("name", ["score", "neg_loss", "gain_per_token"])
def test_a_metric_of_unknown_direction_has_no_best_but_a_last_value(tmp_path: Path, name: str) -> None:
    file = metrics_of(tmp_path, {f"val/{name}": 2.0}, {f"val/{name}": 1.0})
    assert summarize_metrics(file, NO_RULE)[0] == {}
    assert summarize_metrics(file, NO_RULE)[1] == {f"val/{name}": 1.0}


@pytest.mark.parametrize(("mode", "step"), [(Mode.min, 2), (Mode.max, 1)])
def test_keep_best_reports_the_direction_of_a_metric_that_the_table_lacks(
    tmp_path: Path, mode: Mode, step: int
) -> None:
    file = metrics_of(tmp_path, {"val/score": 2.0, "val/other": 1.0}, {"val/score": 1.0, "val/other": 2.0})
    best = summarize_metrics(file, KeepBestConfig(metric="val/score", mode=mode))[0]
    assert list(best) == ["val/score"]
    assert (best["val/score"]["step"], best["val/score"]["mode"]) == (step, mode)


def test_names_in_the_table_are_as_they_are_looked_up() -> None:
    assert all(name == name.lower() and "/" not in name for name in MODES)


def test_a_value_that_is_not_finite_is_never_best_and_is_reported_as_last(tmp_path: Path) -> None:
    nan, infinity = float("nan"), float("inf")
    file = metrics_of(tmp_path, {"val/accuracy": nan}, {"val/accuracy": 0.5}, {"val/accuracy": infinity})
    assert summarize_metrics(file, NO_RULE)[0]["val/accuracy"]["step"] == 2
    assert summarize_metrics(file, NO_RULE)[1] == {"val/accuracy": infinity}


def test_a_torn_line_hides_no_other(tmp_path: Path) -> None:
    file = metrics_of(tmp_path, {"val/loss": 2.0})
    file.write_text(f'{{"val/loss": 1.0}}\n[1]\n{file.read_text()}{{"step": 2, "val/lo', "utf-8")
    assert summarize_metrics(file, NO_RULE)[1] == {"val/loss": 2.0}


def test_the_summary_of_a_run_with_nan_is_read_by_a_strict_parser(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run.create("name: run\n", [], {"run_id": "a"}):
        run.begin_attempt(name="run", start_step=0, now=0.0, environment={})
        file = metrics_of(run.path, {"val/loss": float("nan")})
        outcome = Outcome(
            status=RunStatus.finished,
            reason="enough",
            step=1,
            wall_time_s=1.0,
            best_metrics=summarize_metrics(file, NO_RULE)[0],
            last_metrics=summarize_metrics(file, NO_RULE)[1],
            throughput={"samples_per_s": float("inf")},
        )
        run.end_attempt(outcome, now=1.0)
    summary = strictly_parsed(run.summary_file.read_text("utf-8"))
    assert (summary["best_metrics"], summary["last_metrics"]) == ({}, {"val/loss": "nan"})


def strictly_parsed(text: str) -> Any:
    """JSON without the constants that Python's parser takes and the standard lacks."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_best_and_the_pinned_are_reported_however_many_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [{"name": f"step{step}", "why": "permanent"} for step in range(900, 0, -100)]
    kept[0]["why"], kept[5]["why"], kept[7]["why"] = "final", "val/loss 0.1 is the best", "pinned"
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=900, wall_time_s=1.0, checkpoints=kept)
    print_outcome(RunDir(tmp_path), outcome, {})
    line = next(line for line in capsys.readouterr().out.splitlines() if "checkpoints  " in line)
    message = "step900 (final), step400 (val/loss 0.1 is the best), step200 (pinned), step800 (permanent) and 5 more"
    assert line.split(maxsplit=1)[1] == message


def test_tensorboard_is_named_where_it_has_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=9, wall_time_s=1.0)
    print_outcome(RunDir(tmp_path), outcome, {})
    assert "next:" not in capsys.readouterr().out
    (tmp_path / "tensorboard").mkdir()
    print_outcome(RunDir(tmp_path), outcome, {})
    assert capsys.readouterr().out.endswith(f"next:\n  tensorboard --logdir {tmp_path.parent}\n")
