"""The claims of Lightning's tests about logged learning rates, and averages of weights: SWA and EMA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, Run, fit, make_trainer, rows
from torch import nn

from trainer_cli import (
    EMA,
    SWA,
    Callback,
    ConfigError,
    LearningRateMonitor,
    Trainer,
)

OF_STEPS = "train/lr/group0", "train/lr/group1"


@pytest.mark.parametrize(
    ("make", "arguments", "match"), [(SWA, {"start": -1}, "start"), (SWA, {"start": 1.5}, "start")]
)
def test_a_wrong_start_of_an_average_is_refused(make: Any, arguments: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(**arguments)


def sgd_one_cycle(kind: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"betas": (0.8, 0.9)} if kind == "Adam" else {"momentum": 0.8}
    return {
        "optimizer": lambda model: getattr(torch.optim, kind)(
            model.parameters(), lr=0.01, weight_decay=0.1, **settings
        ),
        "schedulers": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=20, base_momentum=0.8, max_momentum=0.8
        ),
    }


@pytest.mark.parametrize(
    ("keys", "expected", "kind", "scheduled"),
    [
        (["lr"], {"train/lr/group0": 0}, "SGD", True),
        (
            ["lr", "momentum", "weight_decay"],
            {"train/lr/group0": 0, "train/momentum/group0": 0.8, "train/weight_decay/group0": 0.1},
            "SGD",
            True,
        ),
        (
            ["lr", "betas", "weight_decay"],
            {"train/lr/group0": 0, "train/betas/group0": 0.8, "train/weight_decay/group0": 0.1},
            "Adam",
            True,
        ),
        (["lr"], {"train/lr/group0": 0.01}, "SGD", False),
        (["momentum"], {"train/momentum/group0": 0.8}, "SGD", False),
        (["betas"], {"train/betas/group0": 0.8}, "Adam", False),
    ],
)
def test_logged_rates_and_settings(
    keys: Sequence[str], expected: Mapping[str, float], kind: str, scheduled: bool
) -> None:
    settings = sgd_one_cycle(kind)
    if not scheduled:
        del settings["schedulers"]
    run = fit(loop={"log_interval": 1}, callbacks=[LearningRateMonitor(keys)], **settings)
    logged = run.log.records[-1].metrics
    rates = {name: value for name, value in logged.items() if name.endswith("/group0")}
    assert rates == {name: pytest.approx(value) if value else rates[name] for name, value in expected.items()}


def test_a_setting_that_no_group_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter group has 'momentum'"):
        make_trainer(
            callbacks=[LearningRateMonitor(["lr", "momentum"])],
            optimizer=lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
        )


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [model.layer.weight], "lr": 0.1}, {"params": [model.layer.bias], "lr": 0.2}], lr=1
    )


@pytest.mark.parametrize(
    ("case", "interval", "names", "count"),
    [
        ("optimizers", 2, ["train/lr/first/group0", "train/lr/second/group0"], 6),
        ("optimizers", 4, ["train/lr/first/group0", "train/lr/second/group0"], 3),
        ("groups", 1, OF_STEPS, 12),
        ("groups", 3, OF_STEPS, 4),
    ],
)
def test_several_optimizers_and_groups_have_a_rate_each(
    case: str, interval: int, names: Sequence[str], count: int
) -> None:
    settings: dict[str, Any] = {"optimizer": two_groups}
    if case == "optimizers":
        settings = {
            "optimizer": {
                "first": lambda model: torch.optim.SGD([model.layer.weight], lr=0.1),
                "second": lambda model: torch.optim.Adam([model.layer.bias], lr=0.2),
            }
        }
    run = fit(loop={"max_duration": 12, "log_interval": interval}, callbacks=[LearningRateMonitor()], **settings)
    values = [run.log.values(name) for name in names]
    assert [len(value) for value in values] == [count] * len(names)
    assert [value[12] for value in values] == [0.1, 0.2]


class Norm(nn.Module):
    """A linear layer after a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        return (self.layer(self.norm(x)).squeeze(-1) - y).square().mean()


class Weights(Callback):
    """Notes the weights after each step, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: list[torch.Tensor] = []
        self.evaluated: dict[int, torch.Tensor] = {}

    def on_train_step_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any) -> None:
        self.trained.append(model.layer.weight.detach().clone())

    def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.evaluated[trainer.progress.step] = model.layer.weight.detach().clone()


def fit_averaged(average: Callback, folder: Path | None = None, steps: int = 12, **more: Any) -> tuple[Run, Weights]:
    """Epochs of four steps, of which each is evaluated."""
    weights = Weights()
    run = fit(
        folder, train=rows(4, 2), val=rows(1, 2), callbacks=[weights, average],
        loop={"max_duration": steps, "eval_interval": 1}, **more,
    )  # fmt: skip
    return run, weights


@pytest.mark.parametrize(
    ("start", "every", "batch_norm", "taken"),
    [
        ("2ep", "1ep", False, [8, 12]),
        ("2ep", "1ep", True, [8, 12]),
        ("1ep", "1ep", False, [4, 8, 12]),
        (6, 2, False, [6, 8, 10, 12]),
        (0, "1ep", False, [0, 4, 8, 12]),
    ],
)
def test_weights_are_averaged_from_an_epoch_on(
    start: str | int, every: str | int, batch_norm: bool, taken: Sequence[int]
) -> None:
    """The evaluated weights are the mean of those after the steps `taken`."""
    _, weights = fit_averaged(SWA(start, every), model=Norm if batch_norm else Net)
    initial = make_trainer(model=Norm if batch_norm else Net).model.layer.weight.detach()
    expected = torch.stack([[initial, *weights.trained][step] for step in taken]).mean(0)
    assert torch.allclose(weights.evaluated[12], expected)


@pytest.mark.parametrize(
    ("decay", "every", "start", "taken"),
    [
        (0.9, 1, 0, range(13)),
        (0.95, 5, 0, [0, 5, 10]),
        (0.9, 1, 10, [10, 11, 12]),
        (0.9, 1, "2ep", [8, 9, 10, 11, 12]),
        (0.9, 5, 5, [5, 10]),
        (0.9999, 1, 0, range(13)),
    ],
)
def test_exponential_averages(decay: float, every: int, start: int | str, taken: Sequence[int]) -> None:
    """The first of the steps `taken` begins the average, each of the others is added with its share."""
    _, weights = fit_averaged(EMA(decay, every, start), model=Norm)
    initial = make_trainer(model=Norm).model.layer.weight.detach()
    after = [initial, *weights.trained]
    expected = after[taken[0]]
    for step in taken[1:]:
        expected = decay * expected + (1 - decay) * after[step]
    assert torch.allclose(weights.evaluated[12], expected)


@pytest.mark.parametrize(
    ("average", "stop"),
    [
        (lambda: SWA("2ep"), 5),
        (lambda: SWA("2ep"), 9),
        (lambda: EMA(0.9), 4),
        (lambda: EMA(0.99, 2), 5),
    ],
)
def test_an_average_is_resumed_exactly(folder: Path, average: Any, stop: int) -> None:
    """A training with an average that is resumed gives the same weights and the same average."""
    _, whole = fit_averaged(average(), model=Norm)
    fit_averaged(average(), folder, stop, model=Norm, save={})
    _, rest = fit_averaged(average(), folder, model=Norm, save={})
    assert torch.equal(whole.trained[-1], rest.trained[-1])
    assert torch.equal(whole.evaluated[12], rest.evaluated[12])


@pytest.mark.parametrize("average", [SWA("1ep")])
def test_the_trained_weights_stay_beside_the_average(average: Callback) -> None:
    run, weights = fit_averaged(average)
    plain = fit(train=rows(4, 2), val=0, loop={"max_duration": 12})
    assert torch.equal(weights.trained[-1], plain.trainer.model.layer.weight)
    assert torch.equal(run.trainer.model.layer.weight, plain.trainer.model.layer.weight)
