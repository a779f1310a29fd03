"""A sample of a validation set that is NaN or raises, and a sample of a batch that raises: who names it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.usefixtures("forked_replays")

PARTS = """
import torch
from torch import nn

class Points(torch.utils.data.Dataset):
    def __init__(self, count, bad=None, label=None):
        self.points = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
        self.labels = (self.points[:, 0] > self.points[:, 1]).long()
        if bad is not None:
            self.points[bad] = float("nan")
        if label is not None:
            self.labels[label] = 7

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]

class Data:
    def __init__(self, bad=None, label=None, val_label=None, is_loader=False):
        self.train, self.val = Points(96, label=label), {"easy": Points(24), "hard": Points(40, bad, val_label)}
        if is_loader:
            self.train = torch.utils.data.DataLoader(self.train, batch_size=8)
            for name, points in self.val.items():
                order = range(len(points) - 1, -1, -1)
                self.val[name] = torch.utils.data.DataLoader(points, batch_size=7, sampler=order)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch):
        points, labels = batch
        return {"loss": nn.functional.cross_entropy(self.linear(points), labels), "seen": float(len(points))}
"""

RUNS = {
    "fine": "batch_size: 8", "nan": "batch_size: 8, bad: 29", "loader": "bad: 29, is_loader: true",
    "raises": "batch_size: 8, label: 55", "evaluation": "batch_size: 8, val_label: 33",
}  # fmt: skip


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run -> what its fit printed. The runs are in the current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("evaluated")
    os.chdir(folder)
    Path("configs").mkdir()
    Path("evaluated.py").write_text(PARTS)
    printed = {}
    for run, data in RUNS.items():
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            code = main([
                "fit", "model=null", "model={_target_: evaluated.Net}", "data=null",
                f"data={{_target_: evaluated.Data, {data}}}", "optimizer=sgd", "optimizer.lr=0.01",
                "loop.max_duration=24", "loop.log_interval=4", "loggers=jsonl", "loop.eval_interval=12", "report=false",
                "checkpoint.save_interval=null", f"run_dir={run}",
            ])  # fmt: skip
        printed[run] = text.getvalue()
        assert code == (run in ("raises", "evaluation")), printed[run]
    yield printed
    os.chdir(before)


@pytest.mark.parametrize("run", ["nan", "loader"])
def test_a_validation_metric_that_is_not_finite_is_reported_once_and_its_sample_is_named(
    output: dict[str, str], capsys: pytest.CaptureFixture[str], run: str
) -> None:
    (warning,) = (line for line in output[run].splitlines() if "warning: " in line)
    command = f"`train replay {run} 12`"
    assert f"hard/loss is nan at step 12: {command} evaluates again, and names the sample." in warning
    assert main(["replay", run, "12"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = lines.index("not finite  hard/loss")
    assert lines[first + 1] == "hard, batch [0], sample 29"
    assert lines[first + 2].startswith("hard, loss of samples alone: 29 nan; the other ")
    assert main(["replay", run, "12", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    (entry,) = step["blamed"]["batches"]
    assert (entry["loader"], entry["names"][entry["not_finite"]["[0]"][0]]) == ("hard", "29")
    assert step["blamed"]["metrics"] == ["hard/loss"]


def test_a_finite_evaluation_is_not_mentioned(output: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "warning" not in output["fine"]
    assert main(["replay", "fine", "12"]) == 0
    text = capsys.readouterr().out
    assert "not finite  nothing" in text
    assert "hard" not in text


def test_data_says_first_in_which_range_integers_are(
    output: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    step = output["raises"].partition("`train replay raises ")[2].partition("`")[0]
    assert main(["data", "raises", step, "--show"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["not finite  nothing", "integers    [1] from 0 to 7 (sample 55)"]


def test_a_search_whose_condition_holds_from_the_beginning_names_the_command_that_finds_the_sample(
    output: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", "nan", "hard/loss is not finite"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the condition holds at step 0 already" in error
    assert "`train replay nan 12` names them" in error
    assert main(["bisect", "nan", "easy/loss > 0"]) == 2
    assert "--first chooses a later step than 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "where"),
    [("raises", "sample 55"), ("evaluation", "hard, sample 33")],
    ids=["step", "evaluation"],
)
def test_a_replay_of_a_step_that_raises_names_the_samples_that_alone_raise(
    output: dict[str, str], capsys: pytest.CaptureFixture[str], run: str, where: str
) -> None:
    name, step = output[run].partition("`train replay ")[2].partition("`")[0].split()
    assert name == run
    assert main(["replay", run, step]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (failed,) = (line for line in lines if line.startswith("failed "))
    assert failed.split(maxsplit=1)[1] == f"{where} raises IndexError: Target 7 is out of bounds; the other 7 do not"
