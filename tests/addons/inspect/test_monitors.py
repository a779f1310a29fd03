"""Callbacks that log: what they report is right, is there at log steps alone, and changes nothing."""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ListLogger, Noisy, everything, loader, on, same, trainer
from torch import nn

import trainer_cli
from trainer_cli.addons.inspect import profiling
from trainer_cli.addons.inspect.profiling import DurationProfiler, MemoryMonitor, Throughput, TorchProfiler, peak_tflops
from trainer_cli.addons.inspect.tensors import ActivationStatistics, DumpActivations, Norms, TensorListener
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.learning_rate_monitor import LearningRateMonitor, ParameterTable, parameter_table
from trainer_cli.outputs.model_call import _observers
from trainer_cli.trainer.hooks import Callback


class Observed(Noisy):
    """Shows its hidden activations, and counts tokens."""

    def forward(self, batch: Any) -> Any:
        trainer_cli.observe("hidden/first", self.body[0](batch[0]))
        loss, outputs = super().forward(batch)
        return {"loss": loss, "mae": outputs["mae"], "tokens": 5 * len(batch[1])}


class Truth(Callback):
    """What the monitors are to report, computed by hand after the fact."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, float]] = {}
        self.hooks: dict[int, int] = {}

    def on_before_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: Any) -> None:
        named = model.named_parameters()
        self.gradients[trainer.progress.step + 1] = {n: float(p.grad.norm()) for n, p in named if p.grad is not None}

    def on_after_optimizer_step(self, trainer: Any, model: nn.Module, optimizer: Any) -> None:
        named = model.named_parameters()
        self.weights[trainer.progress.step + 1] = {n: float(p.detach().norm()) for n, p in named if p.requires_grad}

    def on_after_forward(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any) -> None:
        if model.training:
            self.hooks[trainer.progress.step + 1] = sum(len(one._forward_hooks) for one in model.modules())


MONITORS: dict[str, Callable[[], Callback]] = {
    "norms": lambda: Norms(weights=True, per_layer=True),
    "throughput": lambda: Throughput(flops=True, peak_tflops=0.001),
    "memory": MemoryMonitor,
    "rates": lambda: LearningRateMonitor(["lr", "momentum"]),
    "durations": DurationProfiler,
    "activations": lambda: ActivationStatistics(["body.*"], ["mean", "max"]),
    "dumps": lambda: DumpActivations(["body.0", "body.4"], every=4),
    "tensors": lambda: TensorListener(["hidden/*"]),
    "profile": lambda: TorchProfiler(wait=1, warmup=1, active=2),
    "table": ParameterTable,
}


def _fit(folder: Path | None, callbacks: dict[str, Callback], logger: ListLogger) -> Any:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        trained = [one for one in model.parameters() if one.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained[:2], "lr": 0.02}, {"params": trained[2:]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.5)

    made = trainer(
        Observed, callbacks=callbacks, loggers=[logger], run_dir=folder, optimizer=optimizer,
        settings={"max_duration": 9, "log_interval": 4, "eval_interval": 3, "grad_accum_steps": 2},
    )  # fmt: skip
    made.fit(loader(20), loader(6, shuffle=False))
    return made


@pytest.mark.parametrize("most", [1, 2, 7, 10_000])
def test_durations_of_a_run_without_logs_are_summed_up_on_the_way(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_MOST_MARKS", most)
    # Each mark a second after the one before.
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    logger, durations = ListLogger(), DurationProfiler()
    kept: list[int] = []
    watch = on(on_train_batch_end=lambda *arguments: kept.append(len(durations._marks)))
    trainer(callbacks=[durations, watch], loggers=[logger], settings={"max_duration": 9}).fit(loader(20))
    (metrics,) = [record.metrics for record in logger.records if "train/time/data" in record.metrics]
    parts = {name: metrics[f"train/time/{name}"] for name in ("data", "forward", "backward", "optimizer", "rest")}
    assert parts == {"data": 1.0, "forward": 1.0, "backward": 1.0, "optimizer": 1.0, "rest": 4.0}
    assert max(kept) <= most + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ListLogger, Truth, Path]:
    """One training with every monitor."""
    folder, logger, truth = tmp_path_factory.mktemp("run"), ListLogger(), Truth()
    callbacks = {name: make() for name, make in MONITORS.items()}
    return _fit(folder, {**callbacks, "truth": truth}, logger), logger, truth, folder


def _at(logger: ListLogger, step: int) -> Mapping[str, float]:
    return next(record.metrics for record in logger.records if record.step == step)


def test_monitors_change_nothing_of_the_training(run: Any) -> None:
    bare = ListLogger()
    without = _fit(None, {}, bare)
    assert same(everything(without)["model"], everything(run[0])["model"]) == []
    own = {key for record in bare.records for key in record.metrics}
    shown = [(step, {k: v for k, v in metrics.items() if k in own}) for step, metrics in run[1].stream]
    assert [row for row in shown if row[1]] == bare.stream


def test_everything_is_logged_on_log_steps_alone(run: Any) -> None:
    logger, truth = run[1], run[2]
    added = {
        record.step for record in logger.records for key in record.metrics if key.count("/") == 2 and "train" in key
    }
    assert added == {4, 8, 9}, "the last step is logged too"
    assert truth.hooks == {step: {4: 5 + 2, 8: 5 + 2, 9: 5}.get(step, 0) for step in range(1, 10)}


def test_norms_are_those_of_all_parameters_and_of_each_layer(run: Any) -> None:
    for step in (4, 8, 9):
        metrics = _at(run[1], step)
        for kind, found in (("gradients", run[2].gradients[step]), ("weights", run[2].weights[step])):
            assert metrics[f"train/norm/{kind}"] == pytest.approx(math.hypot(*found.values()), rel=1e-5)
            layer = [value for name, value in found.items() if name.startswith("body.1.")]
            assert metrics[f"train/norm/{kind}/body.1"] == pytest.approx(math.hypot(*layer), rel=1e-5)


def test_rates_and_flops_follow_from_the_counts(run: Any) -> None:
    metrics = _at(run[1], 8)
    assert metrics["train/throughput/tokens_per_s"] == pytest.approx(5 * metrics["train/samples_per_s"], rel=1e-6)
    # Forward (body.0 is called twice), and the gradients of both weights and of the input of body.4.
    per_sample = 2 * (16 + 16 + 8) + 2 * (16 + 8 + 8)
    flops = per_sample * metrics["train/samples_per_s"] / 1e12
    assert metrics["train/throughput/tflops_per_s"] == pytest.approx(flops, rel=1e-6)
    assert metrics["train/throughput/mfu"] == pytest.approx(flops / 0.001, rel=1e-6)
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("some chip") is None


def test_every_group_has_its_rate_and_the_parts_of_a_step_a_time(run: Any) -> None:
    metrics = _at(run[1], 4)
    assert (metrics["train/lr/group0"], metrics["train/lr/group1"]) == (0.02, 0.01)
    assert metrics["train/momentum/group1"] == 0.5
    parts = [metrics[f"train/time/{part}"] for part in ("data", "forward", "backward", "optimizer", "rest")]
    assert all(part > 0 for part in parts)
    assert metrics["train/time/evaluation"] > 0
    assert 0 < metrics["train/memory/host_peak"] < 64


def test_activations_are_summed_up_and_dumped(run: Any) -> None:
    folder = run[3] / "activations"
    assert sorted(path.name for path in folder.iterdir()) == ["step4.npz", "step8.npz"]
    dumped = np.load(folder / "step8.npz")
    assert {name: dumped[name].shape for name in dumped} == {"body.0": (4, 8), "body.4": (4, 1)}
    metrics = _at(run[1], 8)
    assert metrics["train/activations/body.4/mean"] == pytest.approx(float(dumped["body.4"].mean()), rel=1e-5)
    assert metrics["train/activations/body.0/max"] == pytest.approx(float(dumped["body.0"].max()), rel=1e-5)
    norm = float(np.linalg.norm(dumped["body.0"]))
    assert metrics["train/tensors/hidden/first/norm"] == pytest.approx(norm, rel=1e-5)
    assert _observers == []


def test_the_trace_is_one_that_a_browser_opens(run: Any) -> None:
    (file,) = (run[3] / "profile").iterdir()
    assert file.name == "trace-step4.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"aten::addmm", "ProfilerStep#2", "ProfilerStep#3"} <= names


def test_the_table_counts_shared_parameters_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    rows = [line.split() for line in parameter_table(model, 1)]
    assert [row[:3] for row in rows[1:]] == [
        ["0", "12", "12"],
        ["1", "3", "3"],
        ["2", "6", "0"],
        ["(model)", "21", "15"],
    ]
    assert [row.split()[:2] for row in parameter_table(model, 0)[1:]] == [["(model)", "21"]]
    with caplog.at_level(logging.INFO):
        trainer(callbacks=[ParameterTable()]).fit(loader())
    assert any("(model)" in line for line in caplog.messages)


def test_hooks_do_not_stay_after_an_error() -> None:
    class Fails(Callback):
        def on_before_backward(self, *args: Any) -> None:
            raise RuntimeError("no more")

    callbacks = [ActivationStatistics(["body.*"]), TensorListener(), DumpActivations(["*"], every=1), Throughput(True)]
    made = trainer(Observed, callbacks=[*callbacks, Fails()], settings={"log_interval": 1})
    with pytest.raises(RuntimeError, match="no more"):
        made.fit(loader())
    assert not [one for one in made.model.modules() if one._forward_hooks]
    assert _observers == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_tensors_of_a_compiled_model_are_the_same_before_and_after_a_resume(tmp_path: Path) -> None:
    def fit(folder: Path, logger: ListLogger, **settings: Any) -> None:
        torch.compiler.reset()
        made = trainer(
            Noisy,
            callbacks=[ActivationStatistics(["body.*"]), DumpActivations(["body.0"], every=2)],
            compile={"backend": "aot_eager"},
            checkpoint=CheckpointerCallback(folder),
            settings={"log_interval": 3, **settings},
            loggers=[logger],
            run_dir=folder,
        )
        # Batches of one size: a recompilation for another one would compile the hooks that are there then.
        made.fit(loader(12, 4))

    whole, parts = ListLogger(), ListLogger()
    fit(tmp_path / "whole", whole)
    # The first step of the second part is logged, and a step of the first one is not.
    for stop in (2, None):
        fit(tmp_path / "parts", parts, hard_stop=stop)
    assert parts.stream == whole.stream
    assert parts.steps("train/activations/body.0/mean") == [3, 6]
    assert sorted(path.name for path in (tmp_path / "parts/activations").iterdir()) == [
        "step2.npz", "step4.npz", "step6.npz",
    ]  # fmt: skip
