"""Metrics with a state of their own that a model returns: each evaluation counts its own samples alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import ListLogger, StopInEvaluation, trainer
from torch import Tensor, nn

from trainer_cli.trainer.hooks import Callback


class Count:
    """How many samples were seen since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen = 0

    def update(self, values: Tensor) -> None:
        self.seen += len(values)

    def compute(self) -> Any:
        return float(self.seen)


class CountModule(Count, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.reset()


class Several(Count):
    """Computes a mapping, as a collection of metrics does."""

    def compute(self) -> Any:
        return {"seen": float(self.seen)}


class Holder(nn.Module):
    """Returns a metric that it holds as a submodule, or in a container of its own; in evaluations alone, or always."""

    def __init__(self, metric: Any, place: str, *, in_training: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.in_training = in_training
        self.held: Any
        if place == "submodule":
            self.held = nn.ModuleDict({"count": metric})
        else:
            self.held = {"dict": {"count": metric}, "list": [metric], "attribute": [metric]}[place]

    def forward(self, batch: Any) -> Any:
        metric = self.held[0] if isinstance(self.held, list) else self.held["count"]
        metric.update(batch[0])
        outputs = {"loss": self.layer(batch[0]).square().mean()}
        return outputs | {"count": metric} if self.in_training or not self.training else outputs


DATA = torch.utils.data.TensorDataset(torch.ones(10, 1))
METRICS = {
    "module, submodule": (CountModule, "submodule"), "module in a dict": (CountModule, "dict"),
    "module in a list": (CountModule, "list"), "object in a dict": (Count, "dict"), "object": (Count, "list"),
}  # fmt: skip


def _fit(model: nn.Module, *callbacks: Callback, val: Any = None, **more: Any) -> list[float]:
    logger = ListLogger()
    settings = {"max_duration": 3, "eval_interval": 1, **more.pop("settings", {})}
    made = trainer(lambda: model, callbacks=callbacks, loggers=[logger], settings=settings, **more)
    made.fit(torch.utils.data.DataLoader(DATA, 5), val or {"a": DATA, "b": DATA})
    return [value for record in logger.records for key, value in record.metrics.items() if "/count" in key]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("at_start", [False, True])
def test_each_evaluation_of_each_loader_counts_its_own_samples(name: str, at_start: bool) -> None:
    kind, place = METRICS[name]
    values = _fit(Holder(kind(), place), settings={"eval_at_start": at_start})
    assert values == [10.0] * (6 + 2 * at_start)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_only_evaluations_update_counts_each_of_them(name: str) -> None:
    kind, place = METRICS[name]

    class EvalOnly(Holder):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch) if not self.training else self.layer(batch[0]).square().mean()

    assert _fit(EvalOnly(kind(), place)) == [10.0] * 6


@pytest.mark.parametrize("name", METRICS)
def test_an_evaluation_after_an_interrupted_one_counts_its_own_samples(name: str) -> None:
    kind, place = METRICS[name]
    model, logger = Holder(kind(), place), ListLogger()
    loader = torch.utils.data.DataLoader(DATA, 5)
    settings = {"max_duration": 3, "eval_interval": 1}
    made = trainer(lambda: model, callbacks=[StopInEvaluation(2, 1)], loggers=[logger], settings=settings)
    assert not made.fit(loader, loader).finished
    made.fit(loader, loader)
    assert [record.metrics["val/count"] for record in logger.records if "val/count" in record.metrics] == [10.0] * 3


def test_what_a_metric_computes_may_be_a_mapping() -> None:
    assert _fit(Holder(Several(), "dict")) == [10.0] * 6


def test_validate_counts_each_checkpoint_alone() -> None:
    made = trainer(lambda: Holder(Count(), "dict"))
    for _ in range(2):
        assert made.validate(DATA)["val"]["count"] == 10.0
