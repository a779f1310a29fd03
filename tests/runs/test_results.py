"""What `train validate` leaves behind."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util

from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.running.results import Results
from trainer_cli.runs.metrics import BestSettings
from trainer_cli.runs.validation_rows import ValidationRow


def test_a_row_is_on_disk_as_soon_as_it_is_there_and_nothing_where_nothing_is_evaluated(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    results.finish()
    assert not (tmp_path / "out").exists()
    results.add([ValidationRow("runs/x/checkpoints/step5", 5, "val", {"loss": 0.5, "nll": float("nan")})])
    (line,) = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    values = {"checkpoint": "runs/x/checkpoints/step5", "step": 5, "val/loss": 0.5, "val/nll": "nan"}
    assert values.items() <= json.loads(line).items()
    csv = (tmp_path / "out" / "validation.csv").read_text().splitlines()
    assert csv[1:] == ["runs/x/checkpoints/step5,5,val,0.5,nan"]


def test_the_csv_has_the_newest_row_of_each_checkpoint_and_loader_of_all_evaluations(tmp_path: Path) -> None:
    Results(tmp_path).add([ValidationRow(f"step{step}", step, "val", {"loss": 0.5}) for step in (5, 10)])
    Results(tmp_path).add([ValidationRow("step5", 5, "val", {"loss": 0.25, "f1": 1.0}, "ema")])
    assert (tmp_path / "validation.csv").read_text().splitlines() == [
        "checkpoint,step,loader,average,loss,f1", "step5,5,val,ema,0.25,1.0", "step10,10,val,,0.5,",
    ]  # fmt: skip


F1 = {"metric": "b/f1", "mode": "max"}


@pytest.mark.parametrize(
    ("keep_best", "marked", "note"),
    [
        ({}, ["step3", "3", "a"], "* smallest a/loss, of equal ones the newest"),
        ({"metric": None, "mode": "min"}, ["step3", "3", "a"], "* smallest a/loss, of equal ones the newest"),
        (F1, ["step2", "2", "b"], "* largest b/f1, of equal ones the newest"),
        ({**F1, "mode": "min"}, ["step1", "1", "b"], "* smallest b/f1, of equal ones the newest"),
        ({**F1, "metric": "c/f1"}, ["step3", "3", "a"], "* smallest a/loss, of equal ones the newest"),
    ],
    ids=["no rule", "no metric", "f1", "the least f1", "a metric that was not measured"],
)
def test_the_table_marks_the_best_by_the_rule_of_the_run(
    keep_best: Any, marked: list[str], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path, settings=BestSettings(**keep_best))
    nan = float("nan")
    rows = [("a", 1, 0.5, 1), ("a", 2, nan, 1), ("a", 3, 0.5, 1), ("b", 1, 0.1, 2), ("b", 2, 3, 4)]
    for loader, step, loss, f1 in rows:
        results.add([ValidationRow(f"step{step}", step, loader, {"loss": loss, "f1": f1})])
    results.finish()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4] for line in lines if line.startswith("*  ")] == [marked]
    assert note in lines
    head, first, *_ = (tmp_path / "validation.csv").read_text().splitlines()
    assert (head, first) == ("checkpoint,step,loader,loss,f1", "step1,1,a,0.5,1.0")


@pytest.mark.parametrize(
    ("names", "decides", "width", "colour", "hidden"),
    [
        (["aux_loss", "loss", "f1"], "a/aux_loss", 36, False, "loss, f1"),
        (["aux_loss", "loss", "f1"], "a/aux_loss", 36, True, "loss, f1"),
        (["loss", "aux_loss", "f1"], "a/loss", 34, False, "aux_loss, f1"),
        (["loss", "aux_loss"], "a/loss", 200, True, None),
        (["dice/liver", "liver"], "a/dice/liver", 12, False, "liver"),
    ],
)
def test_what_is_left_out_is_named_by_whole_names(
    names: list[str], decides: str, width: int, colour: bool, hidden: str | None,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    results = Results(tmp_path, settings=BestSettings(metric=decides, mode="min"))
    results.add([ValidationRow("step1", 1, "a", dict.fromkeys(names, 0.5))])
    results.finish()
    printed = " ".join(capsys.readouterr().out.split())
    said = re.search(r"left out, as they do not fit: ([\w/, ]+?) (?:\*|results)", printed)
    assert (said[1] if said else None) == hidden, printed


def test_a_row_is_one_line_on_a_terminal_and_names_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    results = Results(tmp_path, settings=BestSettings(metric="b/recall", mode="max"))
    metrics = {"loss": 1.0, "accuracy": 0.5, "precision": 0.5, "recall": 0.5}
    checkpoints = "runs/a_name/checkpoints"
    results.add(
        [
            ValidationRow(f"{checkpoints}/step{step}", step, loader, metrics, "ema")
            for step in (1, 2)
            for loader in ("a", "b")
        ]
    )
    results.finish()
    common, header, *rows = capsys.readouterr().out.splitlines()[:7]
    assert common == f"{checkpoints}/, average of ema", "once for all rows"
    assert header.split() == ["checkpoint", "step", "loader", "loss", "recall"]
    assert [len(row.split()) for row in rows[:4]] == [5, 5, 5, 6]
    assert rows[4] == "left out, as they do not fit: accuracy, precision"


def test_tensorboard_shows_every_validation_and_the_training(tmp_path: Path) -> None:
    training = TensorBoardLogger()
    training.start(RunFacts(run_dir=tmp_path))
    training.log(Record(step=5, epoch=0.0, time=0.0, metrics={"val/loss": 4.0}))
    training.close()
    for loss in (3.0, 2.0):
        results = Results(tmp_path / "validation")
        results.add([ValidationRow(f"step{step}", step, "val", {"loss": loss}) for step in (5, 10)])
        results.finish()
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    points = {
        run: [(one.step, float(tensor_util.make_ndarray(one.tensor_proto))) for one in shown.Tensors(run, "val/loss")]
        for run in shown.Runs()
    }
    assert points == {
        "tensorboard": [(5, 4.0)],
        "validation/tensorboard/1": [(5, 3.0), (10, 3.0)],
        "validation/tensorboard/2": [(5, 2.0), (10, 2.0)],
    }


def _under_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file/validation"


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (_under_a_file, "is not a folder"),
        # No process may write there, the superuser's neither.
        (lambda tmp_path: Path("/proc/self/validation"), "No such file or directory|is read-only"),
    ],
    ids=["under a file", "in /proc"],
)
def test_results_that_cannot_be_written_are_told_once_and_shown_all_the_same(
    place: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    results = Results(place(tmp_path))
    results.add([ValidationRow("step5", 5, "val", {"loss": 0.25})])
    results.add([ValidationRow("step6", 6, "val", {"loss": 0.5})])
    results.finish()
    (message,) = caplog.messages
    assert re.search(rf"results are printed and not written to .*({why}).*validate\.folder=FOLDER", message)
    shown = capsys.readouterr().out
    assert "0.2500" in shown
    assert "results:" not in shown
