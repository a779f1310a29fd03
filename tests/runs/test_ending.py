"""What `train fit` prints at its end about the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_cli.addons.view.report_runs import summary as report_summary
from trainer_cli.addons.view.report_sweep import rank_metrics
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.running.ending import print_outcome
from trainer_cli.runs.run import Run
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.steps.run_status import RunStatus

RISING = """# @package _global_
model: {_target_: rising.Net, in_features: 2, out_features: 1}
data: {_target_: rising.Data, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 0.1, maximize: true}
loop: {max_duration: 4, eval_interval: 1}
checkpoint: {save_interval: 2, pre_train_checkpoint: false}
report: false
device: cpu
"""
RISING_MODULE = """
import torch

class Net(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()

class Data:
    def __init__(self):
        self.train = self.val = [torch.ones(2) for index in range(4)]
"""


@pytest.mark.parametrize(
    ("override", "best", "better"),
    [
        ("loop.eval_interval=1", "step2", "step 1 (val/loss "),
        ("loop.eval_interval=2", "step2", None),
        ("checkpoint.keep_best.metric=val/loss", "step1", None),
        ("loop.eval_interval=3", "step4", "step 3 (val/loss "),
    ],
)
def test_the_end_names_a_better_step_that_was_not_kept(
    override: str,
    best: str,
    better: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/rising.yaml").write_text(RISING)
    (tmp_path / "rising.py").write_text(RISING_MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "experiment=rising", override]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = "best checkpoint " if better is None else "best of the kept"
    assert any(line.startswith(f"  {title} runs/rising/checkpoints/{best} (val/loss ") for line in lines)
    named = [line.split(maxsplit=3)[3] for line in lines if line.startswith("  better, not kept")]
    assert [line.startswith(better or "") for line in named] == [True] * (better is not None)
    assert all(line.endswith("; checkpoint.keep_best.metric=val/loss keeps the best") for line in named)


@pytest.mark.parametrize(
    ("overrides", "best", "measured"),
    [
        ([], "step2", "val/loss"),
        (["callbacks=early_stopping", "callbacks.early_stopping={metric: val/loss, mode: max}"], "step4", "val/loss"),
        (
            ["+callbacks.stop={_target_: trainer_cli.EarlyStopping, metric: val/own, mode: max}"],
            "step4",
            "val/own",
        ),
        (
            ["+callbacks.guard={_target_: trainer_cli.ThresholdStopper, metric: val/loss, threshold: 9, mode: max}"],
            "step2",
            "val/loss",
        ),
        (["scheduler=reduce_on_plateau", "scheduler.metric=val/own", "+scheduler.mode=min"], "step2", "val/own"),
    ],
    ids=["the loss", "the largest loss", "a metric of early stopping", "a threshold", "a metric of a schedule"],
)
def test_what_the_run_watches_is_best_wherever_the_best_is_named(
    overrides: list[str],
    best: str,
    measured: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/rising.yaml").write_text(RISING.replace("rising.", "watched."))
    returned = "loss = super().forward(batch).square().mean()\n        return {'loss': loss, 'own': loss + 1}"
    module = RISING_MODULE.replace("return super().forward(batch).square().mean()", returned)
    (tmp_path / "watched.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "experiment=rising", *overrides]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (named,) = (row[-3:-1] for row in rows if row[:2] == ["best", "checkpoint"] or row[:2] == ["best", "of"])
    assert named == [f"runs/rising/checkpoints/{best}", f"({measured}"]
    assert main(["ckpt", "ls", "runs/rising"]) == 0
    header, *listed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert header[4] == measured
    assert [row[0] for row in listed if "best" in row] == [best]
    assert main(["ckpt", "show", "runs/rising@best"]) == 0
    assert capsys.readouterr().out.split()[1] == f"runs/rising/checkpoints/{best}"
    record = Run(Path("runs/rising")).record(now=0.0)
    assert record is not None
    assert rank_metrics([record])[0] == measured


def test_the_demo_keeps_its_best_and_needs_no_further_save_for_it() -> None:
    config = compose(["experiment=digits"]).config
    assert config.checkpoint.keep_best.metric == "val/loss"
    assert config.checkpoint.ephemeral_save_interval == config.loop.eval_interval
    assert compose([]).config.checkpoint.keep_best.metric is None


def test_the_end_the_table_and_the_report_say_what_was_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/rising.yaml").write_text(RISING)
    (tmp_path / "rising.py").write_text(RISING_MODULE)
    monkeypatch.chdir(tmp_path)
    for name, overrides in (("plain", []), ("late", ["callbacks=ema", "callbacks.ema.start=3"])):
        assert main(["fit", "rising", f"name={name}", *overrides]) == 0
        is_average = name == "late"
        row = "  evaluated        the average of ema, not the trained weights"
        assert (row in capsys.readouterr().out.splitlines()) is is_average
        summary = json.loads((tmp_path / f"runs/{name}/summary.json").read_text())
        assert summary["average"] == ("ema" if is_average else None)
        assert main(["validate", "trust=[rising]", f"ckpt=runs/{name}/checkpoints/step*"]) == 0
        table = capsys.readouterr().out.splitlines()
        # At step 2 the average has not begun.
        assert ["average of ema" in line for line in table if "/step" in line] == [False, is_average]
        assert [" weights " in line for line in table if " loader " in line] == [is_average]
        rows = map(json.loads, (tmp_path / f"runs/{name}/validation/validation.jsonl").read_text().splitlines())
        assert [row.get("average") for row in rows] == [None, summary["average"]]
        record = Run(Path("runs") / name).record(now=0.0)
        assert record is not None
        facts = next(block["items"] for block in report_summary([record], [name], [], []) if block["kind"] == "facts")
        evaluated = [text for title, text, *_ in facts if title == "evaluated"]
        assert evaluated == ["the average of ema, not the trained weights"] * is_average


def test_the_end_shows_twelve_metrics_with_four_digits_those_with_a_best_value_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"train/loss": 1.0, **{f"val/m{number}": 1.23456e-6 for number in range(20)}, "val/loss": 0.000123456}
    best = {"val/loss": {"value": 0.0001, "step": 2}}
    outcome = Outcome(status=RunStatus.stopped, reason="SIGTERM", step=4, wall_time_s=1.0, best_metrics=best)
    print_outcome(RunDir("runs/x"), outcome, metrics)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["  val/loss         0.0001235  (best 0.0001 at step 2)", "  val/m0           1.235e-06"]
    assert lines[13:15] == ["  val/m10          1.235e-06", "  and 9 more metrics in runs/x/summary.json"]
