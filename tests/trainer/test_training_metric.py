"""A logged training metric decides: which checkpoints are kept, when the run ends, how the rate falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, Noisy, assert_resumes_exactly, loader, recorder, trainer
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping, ThresholdStopper
from trainer_cli.errors import UserError
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.policy.rules import BestRule, SaveRules
from trainer_cli.policy.simulation import Simulation
from trainer_cli.policy.stopping import Limits
from trainer_cli.steps.intervals import Duration, Interval, StepCounts


class Scripted(nn.Module):
    """Its losses are given, step by step; the step is counted in a buffer."""

    step: torch.Tensor

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.weight, self.losses = nn.Parameter(torch.zeros(())), losses
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        loss = self.losses[min(int(self.step), len(self.losses) - 1)]
        if self.training:
            self.step += 1
        return {"loss": self.weight * 0 + loss, "parts/first": loss}


LOSSES = (9.0, 7.0, 6.0, 4.0, 5.0, 5.0, 1.0, 5.0, 6.0, 6.0, 8.0, 8.0)
"""Means of two: 8, 5, 5, 3, 6, 8."""


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def _best(**more: Any) -> dict[str, Any]:
    return {"metric": "train/loss", "mode": "min", "count": 1, **more}


def _fit(folder: Path | None, *callbacks: Any, model: Any = None, logger: Any = None, **more: Any) -> Any:
    settings = {"max_duration": 12, "log_interval": 2, **more.pop("settings", {})}
    saver = {"save_interval": None, **more.pop("saver", {})}
    made = trainer(
        model or (lambda: Scripted(*LOSSES)), callbacks=list(callbacks), loggers=[logger or ListLogger()],
        run_dir=folder, settings=settings,
        checkpoint=None if folder is None else CheckpointerCallback(folder / "ckpt", **saver), **more,
    )  # fmt: skip
    return made, made.fit(loader(16))


def test_the_best_by_a_training_metric_is_kept(tmp_path: Path) -> None:
    _fit(tmp_path, saver={"keep_best": _best(), "max_checkpoints": 1})
    kept = {path.name: json.loads((path / "manifest.json").read_text()) for path in (tmp_path / "ckpt").glob("step*")}
    assert sorted(kept) == ["step12", "step8"]
    assert kept["step8"]["metrics"]["train/loss"] == 3.0
    assert kept["step8"]["reason"] == "train/loss 3 is the best"


@pytest.mark.parametrize(
    ("callback", "step", "reason"),
    [
        (lambda: EarlyStopping("train/loss", patience=2), 12, "train/loss has not been below 3 (step 8) for 2 logs"),
        (
            lambda: EarlyStopping("train/loss", patience="2st"),
            6,
            "train/loss has not been below 5 (step 4) for 2 steps",
        ),
        (lambda: EarlyStopping("train/parts/first", mode="max", patience=2), 6, "train/parts/first has not been above"),
        (lambda: ThresholdStopper("train/loss", 4.0), 8, "train/loss is 3"),
    ],
)
def test_a_training_metric_ends_the_run(callback: Any, step: int, reason: str, tmp_path: Path) -> None:
    more = {"settings": {"max_duration": 14}, "saver": {"keep_best": _best(count=9)}}
    _, result = _fit(tmp_path, callback(), **more)
    assert (result.step, result.finished) == (step, True)
    assert result.reason.startswith(reason)
    _, again = _fit(tmp_path, callback(), **more)
    assert (again.step, again.reason) == (step, result.reason)


def test_a_metric_that_is_not_finite_ends_the_run_at_its_log() -> None:
    _, result = _fit(None, EarlyStopping("train/parts/first", "min"), model=lambda: Jumping())
    assert (result.step, result.reason) == (4, "train/parts/first is inf")


class Jumping(Scripted):
    """A metric that is infinite at the fourth step."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        return {**outputs, "parts/first": float("inf") if self.step == 4 else 1.0}


def test_a_rate_falls_by_a_training_metric() -> None:
    logger = ListLogger()
    _fit(None, logger=logger, schedulers=Scheduled(_plateau, metric="train/loss"))
    rates = {record.step: record.metrics["train/lr"] for record in logger.records if "train/lr" in record.metrics}
    assert rates == pytest.approx({2: 0.1, 4: 0.1, 6: 0.1, 8: 0.05, 10: 0.05, 12: 0.025})


def test_a_resume_is_exact_with_every_option_that_takes_one(tmp_path: Path) -> None:
    loggers = {"straight": ListLogger(), "parts": ListLogger()}

    def fit(folder: Path, *callbacks: Any) -> Any:
        return _fit(
            folder, EarlyStopping("train/loss", patience=6), *callbacks, model=Noisy, logger=loggers[folder.name],
            saver={"keep_best": _best(count=2)}, schedulers=Scheduled(_plateau, metric="train/loss"),
        )[0]  # fmt: skip

    assert_resumes_exactly(fit, tmp_path, 1, 2, 4, 7)
    assert loggers["straight"].stream == loggers["parts"].stream
    kept = [sorted(path.name for path in (tmp_path / name / "ckpt").glob("step*")) for name in loggers]
    assert kept[0] == kept[1]


NEEDS: dict[str, Any] = {
    "keep_best": lambda metric: {"saver": {"keep_best": _best(metric=metric)}},
    "early stopping": lambda metric: {"callback": EarlyStopping(metric, "min")},
    "threshold": lambda metric: {"callback": ThresholdStopper(metric, 1.0, "min")},
    "plateau": lambda metric: {"schedulers": Scheduled(_plateau, metric=metric)},
}


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize(
    ("metric", "settings", "message"),
    [
        ("train/los", {}, r"'train/los', which the run does not report.*train/loss"),
        ("train/loss", {"log_interval": None}, r"loop\.log_interval is null"),
    ],
    ids=["unknown", "no logs"],
)
def test_a_training_metric_that_is_not_reported_is_refused_before_the_first_step(
    name: str, metric: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    needs, book = NEEDS[name](metric), list[str]()
    callbacks = [needs.pop("callback")] if "callback" in needs else []
    with pytest.raises(UserError, match=message):
        _fit(tmp_path, *callbacks, recorder(book), settings=settings, **needs)
    assert "on_after_optimizer_step" not in book


@pytest.mark.parametrize("metric", ["train/lr", "train/samples_per_s", "train/loss", "train/parts/first"])
def test_all_that_the_loop_logs_may_be_named(metric: str) -> None:
    assert _fit(None, EarlyStopping(metric, "min", patience=99))[1].step == 12


def test_a_plan_names_the_logs_that_may_save() -> None:
    def every(steps: int) -> Interval:
        return Interval(Duration.parse(steps), 10)

    setting = Simulation(
        limits=Limits(every(10)), save=SaveRules(keep_best=BestRule("train/loss")), eval_intervals=[every(5)],
        log_interval=every(3),
    )  # fmt: skip
    line = setting.run(StepCounts(epoch_batches=10))
    assert (line.evaluations, line.may_save) == ([5, 10], [3, 6, 9])
