"""metrics.csv: a row per metric and step, cut back on a resume."""

from __future__ import annotations

import csv
from pathlib import Path

from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.text_files import CsvLogger


def _write(folder: Path, *steps: int) -> None:
    logger = CsvLogger()
    logger.start(RunFacts(run_dir=folder))
    for step in steps:
        logger.log(Record(step, step / 4, 1e9 + step, {"train/loss": 1 / 3, 'odd,"name"': float("nan")}))
    logger.flush(durable=True)
    logger.close()


def _rows(folder: Path) -> list[tuple[str, str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [(row["step"], row["metric"], row["value"]) for row in csv.DictReader(file)]


def test_each_metric_of_a_step_has_a_row_with_its_exact_value(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2)
    assert _rows(tmp_path) == [
        (step, *row) for step in "12" for row in (("train/loss", repr(1 / 3)), ('odd,"name"', "nan"))
    ]


def test_a_resume_drops_later_rows_and_a_torn_one_and_writes_no_second_header(tmp_path: Path) -> None:
    _write(tmp_path, 1, 2, 3)
    with open(tmp_path / "metrics.csv", "ab") as file:
        file.write(b"2,0.5,1")
    CsvLogger().rewind(tmp_path, 2)
    _write(tmp_path, 3, 10)
    assert [row[0] for row in _rows(tmp_path)] == ["1", "1", "2", "2", "3", "3", "10", "10"]
    CsvLogger().rewind(tmp_path, -1)
    assert _rows(tmp_path) == []
