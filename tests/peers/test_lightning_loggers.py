"""The claims of Lightning's tests about loggers: files of CSV and of TensorBoard, their opening and closing."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from small_runs import FailIn, ListLogger, fit, make_trainer, rows

from trainer_cli import Callback, CsvLogger


def lines_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_each_record_is_in_the_file_at_once(folder: Path) -> None:
    sizes: list[int] = []

    class See(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            path = folder / "metrics.csv"
            sizes.append(len(lines_of(folder)) if path.stat().st_size else 0)

    fit(folder, run_dir=folder, loggers=[CsvLogger()], callbacks=[See()], loop={"log_interval": 1})
    assert sizes[0] == 0
    assert sizes[1] < sizes[2] < sizes[3]


@pytest.mark.parametrize("path", ["x/y/metrics.csv", "metrics.csv"])
def test_a_csv_file_may_be_elsewhere(folder: Path, path: str) -> None:
    fit(folder, run_dir=folder, loggers=[CsvLogger(path)], loop={"log_interval": 1})
    assert (folder / path).is_file()


def test_a_second_start_continues_the_log(folder: Path) -> None:
    settings = {"run_dir": folder, "loop": {"log_interval": 1}, "save": {}}
    fit(folder, loggers=[CsvLogger()], **settings)
    before = lines_of(folder)
    fit(folder, loggers=[CsvLogger()], **settings)
    assert lines_of(folder) == before
    assert [path.name for path in folder.glob("*.csv")] == ["metrics.csv"]


def test_two_loggers_are_given_the_same_records() -> None:
    other = ListLogger()
    run = fit(loop={"log_interval": 1}, loggers=[other])
    assert [record.metrics for record in other.records] == [record.metrics for record in run.log.records]


@pytest.mark.parametrize("fails", [True, False])
def test_loggers_are_closed(fails: bool) -> None:
    log = ListLogger()
    trainer = make_trainer(loggers=[log], callbacks=[FailIn("on_train_batch_start", 2)] if fails else [])
    if fails:
        with pytest.raises(RuntimeError):
            trainer.fit(rows(4))
    else:
        trainer.fit(rows(4))
    assert log.calls[0] == "start"
    assert log.calls[-1] == "close"


def test_without_loggers_nothing_is_written(folder: Path) -> None:
    trainer = make_trainer(loop={"log_interval": 1})
    result = trainer.fit(rows(4))
    assert "train/loss" in result.metrics
    assert not list(folder.iterdir())


def test_an_evaluation_after_a_fit_is_logged_at_its_last_step() -> None:
    run = fit(loop={"log_interval": 1})
    run.trainer.validate({"again": rows(2)})
    assert list(run.log.values("again/loss")) == [4]
