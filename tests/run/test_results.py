"""What `train validate` leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util

from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.run.results import Results, Row


def test_a_row_is_on_disk_as_soon_as_it_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    results.add([Row("runs/x/checkpoints/step5", 5, "val", {"loss": 0.5})])
    (line,) = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    assert {"checkpoint": "runs/x/checkpoints/step5", "step": 5, "val/loss": 0.5}.items() <= json.loads(line).items()
    assert (tmp_path / "out" / "validation.csv").read_text().splitlines()[1:] == ["runs/x/checkpoints/step5,5,val,0.5"]


def test_a_loss_that_is_no_number_is_written_as_a_text(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add([Row("step5", 5, "val", {"loss": float("nan")})])
    assert '"val/loss": "nan"' in (tmp_path / "validation.jsonl").read_text()


def test_the_table_marks_the_smallest_finite_loss_of_each_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path)
    losses = [("a", 1, 0.5), ("a", 2, float("nan")), ("a", 3, 0.5), ("b", 1, 2.0), ("b", 2, 3.0)]
    results.add([Row(f"step{step}", step, loader, {"loss": loss}) for loader, step, loss in losses])
    results.finish()
    marked = [line.split()[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("*  ")]
    assert marked == [["step3", "3", "a"], ["step1", "1", "b"]], "of equal ones the newer"
    head, first, *_ = (tmp_path / "validation.csv").read_text().splitlines()
    assert (head, first) == ("checkpoint,step,loader,loss", "step1,1,a,0.5")


def test_tensorboard_shows_every_validation_and_the_training(tmp_path: Path) -> None:
    training = TensorBoardLogger()
    training.start(RunFacts(run_dir=tmp_path))
    training.log(Record(step=5, epoch=0.0, time=0.0, metrics={"val/loss": 4.0}))
    training.close()
    for loss in (3.0, 2.0):
        results = Results(tmp_path / "validation")
        results.add([Row(f"step{step}", step, "val", {"loss": loss}) for step in (5, 10)])
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


def test_nothing_evaluated_leaves_nothing(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    results.finish()
    assert not (tmp_path / "out").exists()
