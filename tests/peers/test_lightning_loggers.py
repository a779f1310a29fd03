"""The claims of Lightning's tests about loggers: files of CSV and of TensorBoard, their opening and closing."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from peer_claims import Claim, claims, each, try_claim
from small_runs import FailIn, ListLogger, Logs, fit, make_trainer, rows

from trainer_cli import Callback, CsvLogger, TensorBoardLogger

CSV = "test_csv: "
TENSORBOARD = "test_tensorboard: "


def lines_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def check_csv(folder: Path, what: str) -> None:
    settings = {"run_dir": folder, "loop": {"log_interval": 1, "max_duration": 3}, "save": {}}
    fit(folder, loggers=[CsvLogger()], callbacks=[Logs("on_train_batch_end", {"a": 0.01})], **settings)
    first = lines_of(folder)
    if what == "rows":
        assert [line["step"] for line in first if line["metric"] == "a"] == ["1", "2", "3"]
        assert {line["value"] for line in first if line["metric"] == "a"} == {"0.01"}
        return
    settings["loop"] = {"log_interval": 1, "max_duration": 4}
    fit(folder, loggers=[CsvLogger()], callbacks=[Logs("on_train_batch_end", {"b": 1.0})], **settings)
    second = lines_of(folder)
    if what == "appended":
        assert second[: len(first)] == first
        assert len(second) > len(first)
    else:
        assert [line["step"] for line in second if line["metric"] == "b"] == ["4"]
        assert set(second[0]) == {"step", "epoch", "time", "metric", "value"}


def check_written_at_once(folder: Path) -> None:
    sizes: list[int] = []

    class See(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            path = folder / "metrics.csv"
            sizes.append(len(lines_of(folder)) if path.stat().st_size else 0)

    fit(folder, run_dir=folder, loggers=[CsvLogger()], callbacks=[See()], loop={"log_interval": 1})
    assert sizes[0] == 0
    assert sizes[1] < sizes[2] < sizes[3]


def check_csv_place(folder: Path, path: str) -> None:
    fit(folder, run_dir=folder, loggers=[CsvLogger(path)], loop={"log_interval": 1})
    assert (folder / path).is_file()


def check_rerun_of_loggers(folder: Path) -> None:
    settings = {"run_dir": folder, "loop": {"log_interval": 1}, "save": {}}
    fit(folder, loggers=[CsvLogger()], **settings)
    before = lines_of(folder)
    fit(folder, loggers=[CsvLogger()], **settings)
    assert lines_of(folder) == before
    assert [path.name for path in folder.glob("*.csv")] == ["metrics.csv"]


def check_two_loggers(folder: Path) -> None:
    other = ListLogger()
    run = fit(loop={"log_interval": 1}, loggers=[other])
    assert [record.metrics for record in other.records] == [record.metrics for record in run.log.records]


def check_closed(folder: Path, fails: bool) -> None:
    log = ListLogger()
    trainer = make_trainer(loggers=[log], callbacks=[FailIn("on_train_batch_start", 2)] if fails else [])
    if fails:
        with pytest.raises(RuntimeError):
            trainer.fit(rows(4))
    else:
        trainer.fit(rows(4))
    assert log.calls[0] == "start"
    assert log.calls[-1] == "close"


def check_no_logger(folder: Path) -> None:
    trainer = make_trainer(loop={"log_interval": 1})
    result = trainer.fit(rows(4))
    assert "train/loss" in result.metrics
    assert not list(folder.iterdir())


def check_logged_after_fit(folder: Path) -> None:
    run = fit(loop={"log_interval": 1})
    run.trainer.validate({"again": rows(2)})
    assert list(run.log.values("again/loss")) == [4]


def check_tensorboard(folder: Path, path: str) -> None:
    logger = TensorBoardLogger(path)
    fit(folder, run_dir=folder, loggers=[logger], loop={"log_interval": 1})
    (file,) = (folder / path).glob("events*")
    assert b"train/loss" in file.read_bytes()


def check_hparams(folder: Path) -> None:
    fit(folder, run_dir=folder, loggers=[TensorBoardLogger()], loop={"log_interval": 1}, hparams={"my_rate": 0.25})
    content = b"".join(path.read_bytes() for path in (folder / "tensorboard").rglob("events*"))
    assert b"my_rate" in content


CLAIMS: list[Claim] = [
    *claims(f"{CSV}test_log_metrics", check_csv, {"each value has a row with its step": ("rows",)}),
    *claims(f"{CSV}test_append_metrics_file", check_csv, {"a resumed run appends to the file": ("appended",)}),
    *claims(f"{CSV}test_append_columns", check_csv, {"a new metric needs no new file": ("new",)}),
    *claims(f"{CSV}test_flush_n_steps", check_written_at_once, {"each record is in the file at once": ()}),
    *claims(
        f"{CSV}test_named_version", check_csv_place, {"the file may be in a folder of its own": ("x/y/metrics.csv",)}
    ),
    *claims(f"{CSV}test_no_name", check_csv_place, {"it may be beside the checkpoints": ("metrics.csv",)}),
    *claims(
        f"{CSV}test_automatic_versioning",
        check_rerun_of_loggers,
        {"a second start in the same folder": ()},
        difference="Lightning numbers versions; here a folder is one run's, so its file goes on and holds no "
        "step twice.",
    ),
    *claims(
        "test_distributed_logging: test_logger_after_fit_predict_test_calls",
        check_logged_after_fit,
        {"an evaluation after a fit is logged at its last step": ()},
    ),
    *claims(
        "test_train_loop_logging: test_log_on_train_start",
        check_two_loggers,
        {"two loggers are given the same records": ()},
    ),
    *claims(
        "test_trainer: test_trainer_calls_logger_finalize_on_exception",
        check_closed,
        {"loggers are closed after an exception": (True,), "loggers are closed after a fit": (False,)},
    ),
    *claims(
        "test_barebones: test_barebones_disables_logging", check_no_logger, {"without loggers nothing is written": ()}
    ),
    *claims(
        f"{TENSORBOARD}test_tensorboard_log_metrics",
        check_tensorboard,
        {"metrics are in a file of events": ("tensorboard",)},
        is_long=True,
    ),
    *claims(
        f"{TENSORBOARD}test_tensorboard_log_sub_dir",
        check_tensorboard,
        {"the file may be in a folder of its own": ("a/b",)},
        is_long=True,
    ),
    *claims(
        f"{TENSORBOARD}test_tensorboard_log_hyperparams", check_hparams, {"hyperparameters are in it": ()}, is_long=True
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
