"""`train check resume` passes with every callback that ships, in one training."""

from __future__ import annotations

import re

import pytest
from exact_project import Check

import trainer_cli

CALLBACKS = {
    "finite": "{_target_: trainer_cli.CheckFinite, policy: skip}",
    "ema": "{_target_: trainer_cli.EMA, decay: 0.9}",
    "swa": "{_target_: trainer_cli.SWA, start: 2, every: 2}",
    "enough": "{_target_: trainer_cli.ThresholdStopper, metric: val/loss, threshold: 0}",
    "early": "{_target_: trainer_cli.EarlyStopping, patience: 90ep}",
    "exit": "{_target_: trainer_cli.EarlyExit}",
    "skip": "{_target_: trainer_cli.SkipSamples, samples: 8}",
    "part": "{_target_: trainer_cli.SelectiveGrad, share: 0.5, parameters: [hidden.bias]}",
    "flags": "{_target_: trainer_cli.ScopedFlags, train: {torch.backends.cudnn.benchmark: true}}",
    "norms": "{_target_: trainer_cli.Norms, weights: true, per_layer: true}",
    "rates": "{_target_: trainer_cli.LearningRateMonitor}",
    "activations": "{_target_: trainer_cli.ActivationStatistics}",
    "table": "{_target_: trainer_cli.ParameterTable}",
    "states": "{_target_: trainer_cli.SaveCheckpointState, every: 2}",
}


FOLLOWING = """
class Following(Line):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def guess(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.3)
        return super().guess(x - self.mean)
"""


@pytest.mark.slow
def test_every_callback_is_exact_beside_all_others(check: Check) -> None:
    """Also with a model whose buffers follow what it evaluates, and with every option that wants a metric."""
    # Without those whose add-on was deleted.
    nodes = {name: node for name, node in CALLBACKS.items() if re.findall(r"\w+", node)[2] in trainer_cli.__all__}
    added = [f"+callbacks.{name}={node}" for name, node in nodes.items()]
    sparse = (
        ["sparsity=rigl", "sparsity.every=2", "sparsity.stop=90", "sparsity.sparsity=0.5"] if "part" in nodes else []
    )
    wants = ("model._target_=parts.Following", "scheduler=reduce_on_plateau", "checkpoint.keep_best.metric=val/loss")
    report = check(FOLLOWING, *added, *sparse, *wants, "+data.num_workers=0", "loop.log_interval=2", steps=6)
    assert report.exact, report
    assert not report.remarks


@pytest.mark.slow
def test_a_training_that_goes_back_is_exact(check: Check) -> None:
    """A batch of the data is bad: the straight run goes back once, and so does each that is stopped and resumed."""
    code = """
class Bad(Callback):
    def on_train_step_start(self, trainer, model, batch):
        if (trainer.progress.epoch, trainer.progress.batch) == (0, 4):
            batch[1].fill_(float("nan"))
"""
    back = "+callbacks.finite={_target_: trainer_cli.CheckFinite, policy: roll_back}"
    report = check(
        code, back, "+callbacks.bad._target_=parts.Bad", "data.num_workers=0", "loop.log_interval=1", steps=6
    )
    print(report)
    assert report.exact, report


@pytest.mark.slow
def test_a_callback_that_adds_a_parameter_group_is_exact(check: Check) -> None:
    code = """
class Frozen(Line):
    def __init__(self):
        super().__init__()
        self.hidden.requires_grad_(False)


class Unfreeze(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.progress.step == 2:
            model.hidden.requires_grad_(True)
            trainer.optimizer.add_param_group({"params": list(model.hidden.parameters()), "lr": 0.001})
"""
    added = ("model._target_=parts.Frozen", "+callbacks.unfreeze._target_=parts.Unfreeze")
    report = check(code, *added, steps=6)
    assert report.exact, report


@pytest.mark.slow
def test_a_stateful_stream_by_two_workers_with_statistics_and_averages_is_exact(check: Check) -> None:
    """Batch norm and a buffer that follows what is evaluated, an average, and every option that wants a metric."""
    code = f"""{FOLLOWING}

class Normed(Following):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def guess(self, x):
        return super().guess(self.norm(x))


class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.at = self.begin = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        points = Points()
        self.at, self.begin = self.begin, 0
        while self.at * every + first < 40:
            self.at += 1
            yield points[(self.at - 1) * every + first]

    def state_dict(self):
        return {{"at": self.at}}

    def load_state_dict(self, state):
        self.at = self.begin = state["at"]


class Streaming:
    def __init__(self):
        self.train, self.val = Stream(), Points()
"""
    report = check(
        code,
        "model._target_=parts.Normed",
        "data._target_=parts.Streaming",
        "data.num_workers=2",
        "loop.steps_per_epoch=10",
        "+callbacks.ema={_target_: trainer_cli.EMA, decay: 0.9}",
        "+callbacks.early={_target_: trainer_cli.EarlyStopping, patience: 90ep}",
        "scheduler=reduce_on_plateau",
        "checkpoint.keep_best.metric=val/loss",
        "loop.log_interval=2",
    )
    assert report.exact, report
    assert not report.remarks
