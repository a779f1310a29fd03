"""NaN in one sample, and NaN that the model makes of one: which sample it is, from the commands that an error names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.exact.replay_command import name_bad_samples
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.usefixtures("forked_replays")

PARTS = """
import torch, trainer_cli
from torch import nn

class Points(torch.utils.data.Dataset):
    def __init__(self, bad=None, low=None):
        self.points = torch.rand(96, 2, generator=torch.Generator().manual_seed(0)) + 0.1
        if bad is not None:
            self.points[bad, 1] = float("nan")
        if low is not None:
            self.points[low, 0] = 0.0

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"image": self.points[index], "label": self.points[index].nan_to_num().sum()}

def with_scale(samples):
    return {**torch.utils.data.default_collate(samples), "scale": torch.ones(3)}

class Data:
    def __init__(self, bad=None, low=None):
        self.train, self.val = Points(bad, low), Points()

class Sum(trainer_cli.TrainStep):
    # Its loss alone is not finite: the model never has it.
    lowest = 0

    def train_batch(self, batch):
        losses = (self.model.linear(batch["image"])[:, 0] - batch["label"]).square()
        self.backward(losses.mean())
        self.optimizer_step()
        self.lowest += batch["image"].min().log()
        return {"loss": losses.detach().mean() + self.lowest}

class Log(nn.Module):
    def __init__(self, gives=False, norm=False):
        super().__init__()
        self.linear, self.gives = nn.Linear(2, 1), gives
        self.norm = nn.BatchNorm1d(2) if norm else None

    def forward(self, batch):
        x = torch.where(batch["image"] == 0, torch.log(batch["image"] - 1), batch["image"])
        x = x if self.norm is None else self.norm(x)
        losses = (self.linear(x)[:, 0] - batch["label"]).square()
        return {"loss": losses.mean(), **({"losses": losses} if self.gives else {})}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that end because their loss is not finite, in the current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("not_finite")
    os.chdir(folder)
    Path("configs").mkdir()
    Path("blemish.py").write_text(PARTS)
    pair = "collate_fn: {_target_: blemish.with_scale, _partial_: true}"
    # It ends, evaluated, before a second record of the loss.
    ended = ("loop.max_duration=1ep", "loop.eval_interval=1ep")
    for name, data, model, *more in (
        ("bad", "bad: 77", ""), ("low", "low: 31", ""), ("pair", f"low: 31, {pair}", ""),
        ("gives", f"low: 31, {pair}", ", gives: true"), ("norm", "bad: 77", ", norm: true"),
        ("ended", "bad: 77", "", "loop.log_interval=100", *ended),
        ("silent", "bad: 77", "", "loop.log_interval=null", *ended),
        ("alone", "low: 31", "", "+step._target_=blemish.Sum"),
    ):  # fmt: skip
        arguments = [
            "fit", "model=null", f"model={{_target_: blemish.Log{model}}}", "data=null",
            f"data={{_target_: blemish.Data, batch_size: 8, {data}}}", "optimizer=sgd", "optimizer.lr=0.01",
            "loop.max_duration=2ep", "loop.log_interval=4", "logging.console=off", "loggers.tensorboard=null",
            "loop.eval_interval=null", "checkpoint.save_interval=null", f"run_dir={name}", *more,
        ]  # fmt: skip
        assert main(arguments) == 1
    yield folder
    os.chdir(before)


def bisected(run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bisect", run, "train/loss is not finite", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("run", "sample"), [("bad", 77), ("low", 31), ("ended", 77), ("silent", 77)])
def test_bisect_finds_the_step_whose_loss_is_not_finite(
    project: Path, capsys: pytest.CaptureFixture[str], run: str, sample: int
) -> None:
    found = bisected(run, capsys)
    (batch,) = found["samples"]["batches"]
    assert sample in [entry["index"] for entry in batch["samples"]]
    assert main(["replay", run, str(found["step"] - 1), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out)["steps"][0]["batches"][0]["loss"], float)


def test_a_replay_names_the_sample_first_then_what_follows_from_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bisected("bad", capsys)["step"]
    assert main(["replay", "bad", str(step)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if "not finite  " in line)
    assert lines[first].split() == ["not", "finite", "batch", "image,", "sample", "77"]
    assert lines[first + 1].strip() == "activation of linear"
    assert any(line.strip() == "of samples alone: 77 nan; the other 7 are finite" for line in lines)


def test_bisect_names_the_sample(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "ended", "train/loss is not finite"]) == 0
    assert capsys.readouterr().out.splitlines()[-5:-3] == [
        "  not finite  batch image, sample 77",
        "              of samples alone: 77 nan; the other 7 are finite",
    ]


def test_of_many_samples_with_such_losses_the_first_are_named() -> None:
    batch = {"rank": 0, "number": 1, "samples": 10, "sample_losses": [float("inf")] * 9 + [1.0]}
    (line,) = name_bad_samples([batch], None)
    assert line.startswith("of samples alone: row 0 inf, row 1 inf, ")
    assert line.endswith(", row 7 inf and 1 more; the other 1 are finite")


def test_where_the_weights_became_so_is_named_instead_of_innocent_samples(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "val/loss is nan at step 12, as the weights are not finite" in Path("ended/train.log").read_text()
    step = bisected("ended", capsys)["step"]
    since = f"parameter linear.weight, since step {step}"
    assert main(["replay", "ended", "12"]) == 0
    assert capsys.readouterr().out.splitlines()[1:-2] == [f"  not finite  {since}", "              val/loss"]
    assert main(["replay", "ended", "1..12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"not finite since step {step}: batch image, sample 77"


def test_a_loss_of_which_nothing_else_is_not_finite_is_named_itself(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bisected("alone", capsys)["step"]
    assert main(["replay", "alone", f"1..{step}"]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == f"not finite since step {step}: the loss"


def test_a_loss_that_the_model_makes_not_finite_is_that_of_a_sample(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bisected("low", capsys)["step"]
    assert main(["replay", "low", str(step)]) == 0
    text = capsys.readouterr().out
    assert "of samples alone: 31 nan; the other 7 are finite" in text
    assert "not finite  activation of linear" in text
    assert main(["replay", "low", str(step), "--per-sample"]) == 0
    text = capsys.readouterr().out
    assert "of each sample: " in text
    assert "31 nan" in text


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("pair", "of each sample: not known: a batch of 8 samples has a tensor of shape (3,), which cannot be split"),
        ("gives", "of samples alone: 31 nan; the other 7 are finite"),
        # The batch puts NaN into the running statistics.
        ("norm", "of samples alone: 77 nan; the other 7 are finite"),
    ],
)
def test_the_losses_of_samples_are_those_of_each_alone_or_those_that_the_model_gives(
    project: Path, capsys: pytest.CaptureFixture[str], run: str, says: str
) -> None:
    step = bisected(run, capsys)["step"]
    assert main(["replay", run, str(step)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_data_says_first_which_values_are_not_finite(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = bisected("bad", capsys)["step"]
    assert main(["data", "bad", f"{step - 1}..{step}", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tops = [lines[number + 1].strip() for number, line in enumerate(lines) if line.startswith("step ")]
    assert tops == ["not finite  nothing", "not finite  image, sample 77: 1 value"]


def test_the_step_that_ended_two_runs_is_compared(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diverge", "ended", "silent"]) == 0
    assert "equal up to step 12" in capsys.readouterr().out
