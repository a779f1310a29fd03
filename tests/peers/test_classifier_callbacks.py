"""Callbacks on a small classifier: each resumes exactly; early stopping; how often hooks are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from classifier import (
    STEPS,
    Classifier,
    assert_same,
    make_trainer,
    saver,
    train_loader,
    val_loader,
    weights,
)
from small_runs import ListLogger, StopAt

import trainer_cli as tc


def made(name: str, *values: object, **settings: object) -> Callable[[], tc.Callback]:
    """By name: a type checker would look for the class of an add-on that was deleted."""
    return lambda: getattr(tc, name)(*values, **settings)


VALIDATING = {
    "ActivationStatistics": made("ActivationStatistics"),
    "AnomalyDetection": made("AnomalyDetection"),
    "BatchSummary": made("BatchSummary"),
    "CheckFinite that raises": made("CheckFinite"),
    "CheckFinite that skips": made("CheckFinite", "skip"),
    "ConfusionMatrix": made("ConfusionMatrix"),
    "DumpActivations": made("DumpActivations", ["classifier"], every=3),
    "DurationProfiler": made("DurationProfiler"),
    "EarlyExit": made("EarlyExit", [lambda trainer: False]),
    "EarlyStopping": made("EarlyStopping", patience="50ep"),
    "EMA": made("EMA", 0.9),
    "EMA every two steps": made("EMA", 0.9, every=2),
    "EMA from step 3 on": made("EMA", 0.9, start=3),
    "LearningRateMonitor": made("LearningRateMonitor"),
    "MemoryMonitor": made("MemoryMonitor"),
    "Norms": made("Norms", weights=True),
    "ParameterTable": made("ParameterTable"),
    "SaveCheckpointState": made("SaveCheckpointState"),
    "ScopedFlags": made("ScopedFlags", fit={"torch.backends.cudnn.benchmark": True}),
    "SelectiveGrad": made("SelectiveGrad", 0.5),
    "SkipSamples": made("SkipSamples", 4),
    "SWA": made("SWA", start=3, every=1),
    "TensorListener": made("TensorListener"),
    "ThresholdStopper": made("ThresholdStopper", "val/loss", -1.0),
    "Throughput": made("Throughput"),
    "TorchProfiler": made("TorchProfiler", wait=1, warmup=1, active=1),
}
TRAINING = {**VALIDATING, "GMP": made("GMP", 0.5, every=2), "Static": made("Static", 0.5)}
THERE = [name for name in TRAINING if name.split()[0] in tc.__all__]
"""Each begins with the name of its class, which is not there if its add-on was deleted."""
# The first start of torch's profiler takes seconds.
NAMES = [pytest.param(name, marks=[pytest.mark.campaign] if name == "TorchProfiler" else []) for name in THERE]
SERIES = [0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


@pytest.mark.parametrize("name", [name for name in THERE if name in VALIDATING])
def test_a_callback_changes_no_evaluation(folder: Path, name: str) -> None:
    """A trainer that only validates gives the metrics that it gives without the callback."""
    rows = []
    for callbacks in ([], [VALIDATING[name]()]):
        trainer = tc.Trainer(
            model=Classifier, loop=tc.ValidationLoop(), callbacks=callbacks, seed=0, device="cpu", run_dir=folder
        )
        rows.append(trainer.validate(val_loader())["val"]["loss"])
    assert rows[0] == rows[1]


def make(name: str, duration: int | str, *more: tc.Callback, logger: ListLogger, folder: Path) -> tc.Trainer:
    """A trainer with one of the callbacks, which evaluates twice an epoch and saves into `folder`."""
    return make_trainer(
        duration,
        callbacks=[TRAINING[name](), *more],
        logger=logger,
        loop={"eval_interval": 4},
        checkpoint=saver(folder / "checkpoints", save_interval=4),
        run_dir=folder,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_run_with_a_callback_resumes_exactly_and_may_be_made_longer(folder: Path, name: str) -> None:
    """Stopped at step 7 and started again, it is as without a stop; a third epoch then logs each further step once."""
    straight, stopped = ListLogger(), ListLogger()
    whole = make(name, "2ep", logger=straight, folder=folder / "straight")
    whole.fit(train_loader(), val_loader())
    first = make(name, 10, StopAt(7), logger=stopped, folder=folder / "stopped")
    assert first.fit(train_loader(), val_loader()).step == 7
    second = make(name, 10, logger=stopped, folder=folder / "stopped")
    assert second.fit(train_loader(), val_loader()).step == 10
    assert_same(weights(whole), weights(second))
    assert straight.stream == stopped.stream
    before = weights(whole)
    whole.loop = tc.TrainingLoop(max_duration="3ep", eval_interval=4, log_interval=1)
    assert whole.fit(train_loader(), val_loader()).step == 3 * STEPS
    logged = [step for step, metrics in straight.stream if "train/loss" in metrics]
    assert logged == list(range(1, 3 * STEPS + 1))
    assert any(not torch.equal(before[key], value) for key, value in weights(whole).items())


class Reported(tc.ValidationCallback):
    """Reports one of the values at each evaluation, in their order; the last one from then on."""

    def __init__(self, values: list[float], steps: int) -> None:
        super().__init__()
        self.values, self.steps = values, steps

    def evaluate(self, trainer: tc.Trainer) -> dict[str, float]:
        # At step 0 the metric's name is looked up.
        number = max(trainer.progress.step // self.steps, 1)
        return {"given": self.values[min(number, len(self.values)) - 1]}


def fit_reported(values: list[float], unit: str, stopper: tc.Callback) -> int:
    """The number of evaluations, one after each step or epoch of two steps, at which the run ended."""
    steps = 2 if unit == "ep" else 1
    trainer = make_trainer(
        "100ep", callbacks=[Reported(values, steps), stopper], loop={"eval_interval": f"1{unit}", "log_interval": None}
    )
    result = trainer.fit(train_loader(4), val_loader())
    assert result.finished
    return result.step // steps


@pytest.mark.parametrize(
    ("values", "unit"), [(values, unit) for values in (SERIES, SERIES[:2]) for unit in ("ep", "st")]
)
def test_patience_is_counted_in_epochs_or_steps(values: list[float], unit: str) -> None:
    stopper = tc.EarlyStopping("validation/given", mode="max", patience=f"3{unit}")
    assert fit_reported(values, unit, stopper) == len(values) + 3


class Counting(tc.Callback):
    """Counts its hooks."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, hook: str) -> None:
        self.counts[hook] = self.counts.get(hook, 0) + 1

    def on_fit_start(self, *args: Any) -> None:
        self.count("fit start")

    def on_fit_end(self, *args: Any) -> None:
        self.count("fit end")

    def on_train_batch_start(self, *args: Any) -> None:
        self.count("batch start")

    def on_train_batch_end(self, *args: Any) -> None:
        self.count("batch end")

    def on_before_forward(self, *args: Any) -> None:
        self.count("forward")

    def on_before_backward(self, *args: Any) -> None:
        self.count("backward")

    def on_after_optimizer_step(self, *args: Any) -> None:
        self.count("optimizer step")

    def on_validate_start(self, *args: Any) -> None:
        self.count("validate start")

    def on_validate_batch_end(self, *args: Any) -> None:
        self.count("validate batch end")

    def on_validate_end(self, *args: Any) -> None:
        self.count("validate end")


@pytest.mark.parametrize("interval", ["1ep", "1st"])
def test_each_hook_is_called_as_often_as_due(interval: str) -> None:
    """Hooks of two epochs of five steps, with an evaluation of one batch at each interval."""
    counting = Counting()
    make_trainer("2ep", callbacks=[counting], loop={"eval_interval": interval}).fit(train_loader(), val_loader())
    steps, evaluations = 2 * STEPS, 2 if interval == "1ep" else 2 * STEPS
    expected = dict.fromkeys(["batch start", "batch end", "backward", "optimizer step"], steps)
    expected["forward"] = steps + evaluations
    expected |= dict.fromkeys(["validate start", "validate batch end", "validate end"], evaluations)
    assert counting.counts == {"fit start": 1, "fit end": 1, **expected}
