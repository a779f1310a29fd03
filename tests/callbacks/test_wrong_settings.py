"""A setting that a callback cannot use is refused when it is made, or where the training begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tiny import Line, Noisy, loader, trainer

import trainer_cli as t
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.errors import ConfigError, UserError

FLAG = "torch.backends.cudnn.benchmark"


def _fit(model: Any = Line, **more: Any) -> None:
    trainer(model, **more).fit(loader(12))


def _attach(*callbacks: Any) -> None:
    trainer(callbacks=list(callbacks))


# The call, and words of its error.
MADE: list[tuple[Callable[[], Any], str]] = [
    (partial(t.EMA, decay=1.0), "decay is 1.0"),
    (partial(t.EMA, decay=math.nan), "decay is nan"),
    (partial(t.EMA, every=0), "every is 0"),
    (partial(t.EMA, every=2.5), r"every is 2\.5"),
    (partial(t.EMA, start="soon"), "start: 'soon' is not a duration"),
    (partial(t.EarlyStopping, mode="least"), "mode is 'least', but it must be auto, min or max"),
    (partial(t.EarlyStopping, min_delta=-1), "min_delta is -1"),
    (partial(t.EarlyStopping, min_delta=math.nan), "min_delta is nan"),
    (partial(t.EarlyStopping, patience="soon"), "'soon' is not a duration; expected a number of evaluations"),
    (partial(t.EarlyStopping, patience=0), "must be at least 1"),
    (partial(t.EarlyStopping, patience="0ep"), "more than zero"),
    (partial(t.ThresholdStopper, "val/loss", 1.0, "most"), "mode is 'most'"),
    (partial(t.ThresholdStopper, "val/loss", math.nan), "threshold is nan"),
    (partial(t.ThresholdStopper, "val/loss", True), "threshold is true"),
    (partial(t.EarlyExit, [3]), "3 is not a function of the trainer"),
    (partial(t.CheckFinite, policy="stop"), "policy is 'stop'"),
    (partial(t.CheckFinite, max_times=-1), "max_times is -1"),
    (partial(t.CheckFinite, max_times=True), "max_times is true"),
    (partial(t.SaveCheckpointState, states=["modle"]), "states"),
    (partial(t.SaveCheckpointState, states="all"), "states"),
    (partial(t.SaveCheckpointState, states=[]), "states"),
    (partial(t.SaveCheckpointState, every="often"), "every"),
    (partial(t.TextSamples, length=0), "length is 0"),
    (partial(t.TextSamples, temperature=-0.5), r"temperature is -0\.5"),
    (partial(t.TextSamples, every=0), "every is 0"),
    (partial(type("Evaluates", (ValidationCallback,), {}), 0), "every is 0"),
    (partial(t.TensorListener, statistics=["median"]), "'median' is not a statistic"),
    (partial(t.DumpActivations, ["*"], every=0), "every is 0"),
    (partial(t.Throughput, peak_tflops=-1), "peak_tflops is -1"),
    (partial(t.TorchProfiler, active=0), "active is 0"),
    (partial(t.ParameterTable, -1), "depth is -1"),
    (partial(t.SelectiveGrad, 1.5), r"share is 1\.5, but it must be above 0 and at most 1"),
    (partial(t.ScopedFlags, fit={"os.sep": "x"}), "'os.sep' is not an attribute of torch"),
    (partial(t.ScopedFlags, fit={f"{FLAG}s": True}), f"there is no '{FLAG}s'"),
    (partial(t.ScopedFlags, fit={"torch.nowhere.flag": True}), "there is no 'torch.nowhere.flag'"),
    (partial(t.ScopedFlags, fit={"torch.load": 1}), "is a function or a class"),
    (partial(t.ScopedFlags, fit={FLAG: 1}), "is False, so it cannot be 1"),
    (partial(t.Static, 1.0), r"sparsity is 1\.0"),
    (partial(t.Static, 0.5, init="first"), "init is 'first'"),
    (partial(t.Static, 0.5, distribution="even"), "distribution is 'even'"),
    (partial(t.Static, {"*": 0.5}, distribution="erk"), "needs one number"),
    (partial(t.SET, 0.5, drop_fraction=1.5), r"drop_fraction is 1\.5"),
    (partial(t.SET, 0.5, every=0), "every: 0 is not a duration"),
]
USED: list[tuple[Callable[[], Any], str]] = [
    (lambda: _fit(callbacks=[t.EMA(start="10s")]), r"start is 10s, which is not a number of steps"),
    (lambda: _fit(callbacks=[t.SaveCheckpointState()]), "this trainer saves none"),
    (lambda: _attach(t.ActivationStatistics(["nowhere.*"])), "no module matches"),
    (lambda: _attach(t.LearningRateMonitor("rate")), "no parameter group has 'rate'"),
    (lambda: _attach(t.TorchProfiler(), t.TorchProfiler()), "there are two TorchProfilers"),
    (lambda: _fit(Noisy, sparsity=t.Static(0.5, parameters=["*.bias"])), "no parameter has a mask"),
    (lambda: _fit(Noisy, sparsity=t.Static({"body.0.*": 0.5})), r"no glob of sparsity matches body\.4\.weight"),
    (lambda: _fit(Noisy, sparsity=t.GMP(0.5, stop="30min")), r"sparsity\.stop is needed as a number of steps"),
    (lambda: _fit(Noisy, sparsity=t.GMP(0.5, start=4, stop=4)), "stops changing at step 4"),
    (lambda: _fit(sparsity=t.Static(0.5), callbacks={"sparsity": t.EMA()}), "two callbacks are called 'sparsity'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [*MADE, *USED], ids=[words for _, words in [*MADE, *USED]])
def test_it_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, UserError), match=words):
        call()
