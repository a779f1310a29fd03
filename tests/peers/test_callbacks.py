"""Early stopping, timers, averages of weights and states of callbacks."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, Run, Script, fit, make_trainer, rows
from torch import nn

from trainer_cli import (
    EMA,
    SWA,
    Callback,
    ConfigError,
    Duration,
    EarlyStopping,
    LearningRateMonitor,
    ThresholdStopper,
    Trainer,
)


class Scores(Net):
    """Returns `score`: the next of the values at each training step."""

    values: Sequence[float] = ()

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        if self.training:
            self.count = getattr(self, "count", -1) + 1
            outputs["score"] = torch.tensor(float(self.values[min(self.count, len(self.values) - 1)]))
        return outputs


def fit_scored(scores: Sequence[float], stopper: Sequence[Callback], training: bool = False, **loop: Any) -> Run:
    """An epoch is one step with one evaluation or one log."""
    return fit(
        batches=1,
        model=type("ScoresNow", (Scores,), {"values": scores}) if training else Net,
        loop={"max_duration": 10, "eval_interval": None if training else 1, "log_interval": 1, **loop},
        callbacks=[*stopper, *([] if training else [Script(scores)])],
    )


def stopper_of(patience: int, training: bool = False, **more: Any) -> EarlyStopping:
    return EarlyStopping("train/score" if training else "val/score", **{"mode": "min", "patience": patience, **more})


@pytest.mark.parametrize(
    ("scores", "patience", "epoch", "training"),
    [
        *[([6, 5, 5, 5, 5, 5], 3, 4, training) for training in (False, True)],
        *[([6, 5, 4, 4, 3, 3], 1, 3, training) for training in (False, True)],
        *[([6, 5, 6, 5, 5, 5], 3, 4, training) for training in (False, True)],
        ([5, 5, 5], 1, 1, True),
        ([8, 4, 2, 3, 4, 5, 8, 10], 3, 5, False),
    ],
)
def test_early_stopping_waits_for_its_patience(
    scores: Sequence[float], patience: int, epoch: int, training: bool
) -> None:
    run = fit_scored(scores, [stopper_of(patience, training)], training)
    assert run.trainer.progress.step - 1 == epoch
    assert run.result.finished


@pytest.mark.parametrize(
    ("stopper", "scores", "epoch"),
    [
        (ThresholdStopper("val/score", 2.9, "min"), [9, 8, 7, 6, 5, 6, 4, 3, 2, 1], 8),
        (ThresholdStopper("val/score", 15.9, "max"), [9, 4, 2, 16, 32, 64], 3),
    ],
)
def test_a_value_past_a_threshold_ends_the_run(stopper: Callback, scores: Sequence[float], epoch: int) -> None:
    run = fit_scored(scores, [stopper])
    assert run.trainer.progress.step - 1 == epoch


@pytest.mark.parametrize("patiences", [(3, 3), (9, 3)])
def test_the_first_of_two_stoppers_ends_the_run(patiences: Sequence[int]) -> None:
    """`val/score` falls and rises, `val/flat` never changes: whichever runs out first stops."""
    stoppers = [EarlyStopping(f"val/{name}", "min", patience=patiences[name == "flat"]) for name in ("score", "flat")]
    run = fit(
        batches=1,
        loop={"max_duration": 20, "eval_interval": 1},
        callbacks=[*stoppers, Script([8, 4, 2, 3, 4, 5, 8, 10]), Script([0], "val/flat")],
    )
    assert run.trainer.progress.step - 1 == 3


@pytest.mark.parametrize(("interval", "batches", "steps"), [("0.3ep", 10, [3, 6]), ("2ep", 2, [4, 8])])
def test_early_stopping_looks_at_each_evaluation(interval: str, batches: int, steps: Sequence[int]) -> None:
    run = fit(
        batches=batches,
        loop={"max_duration": 30, "eval_interval": interval},
        callbacks=[EarlyStopping("val/score", "min", patience=1), Script([1])],
    )
    assert run.evaluated.steps == steps
    assert run.trainer.progress.step == steps[-1]


@pytest.mark.parametrize(
    ("stopper", "scores", "reason"),
    [
        (stopper_of(2), [10] * 3, "has not been below 10"),
        (ThresholdStopper("val/score", 0.6, "min"), [5, 3, 1, 0.5], "0.6 is required"),
        (ThresholdStopper("val/score", 8, "max"), [1, 2, 5, 10], "8 is required"),
        (stopper_of(3), [1, 0.5, math.nan], "val/score is nan"),
    ],
)
def test_the_reason_of_the_stop_is_logged(stopper: Callback, scores: Sequence[float], reason: str) -> None:
    run = fit_scored(scores, [stopper], max_duration=len(scores) + 2)
    assert reason in run.result.reason


def test_a_run_that_is_not_stopped_ends_with_its_length() -> None:
    run = fit_scored([5, 4, 3], [stopper_of(3)], max_duration=3)
    assert run.result.finished
    assert "val/score" not in run.result.reason


def test_a_resumed_run_knows_the_best_value_and_its_step(folder: Path) -> None:
    first = stopper_of(9)
    fit(folder, batches=1, save={}, loop={"max_duration": 3, "eval_interval": 1}, callbacks=[first, Script([3, 2, 4])])
    second = stopper_of(9)
    state: list[Any] = []

    class Start(Callback):
        def on_train_start(self, *_: Any) -> None:
            state.append(copy.deepcopy(second.state_dict()))

    fit(
        folder,
        batches=1,
        save={},
        loop={"max_duration": 4, "eval_interval": 1},
        callbacks=[second, Script([1]), Start()],
    )
    assert state[0] == first.state_dict()
    assert (first.best, first.state_dict()["since"]["step"]) == (2.0, 2)


@pytest.mark.parametrize("value", [EarlyStopping("val/loss")])
def test_a_stopper_can_be_pickled(value: Any) -> None:
    other = pickle.loads(pickle.dumps(value))
    assert vars(other) == vars(value)


class Slow(Callback):
    """Each step takes 10 ms."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("22s", 22),
        ("12d 34h 56min 65s", 12 * 86400 + 34 * 3600 + 56 * 60 + 65),
        ("365d", 365 * 86400),
        ("6:00:00", None),
        ("60 minutes", None),
        ("00:00:00:22", None),
    ],
)
def test_durations_in_time_are_read(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="is not a duration"):
            Duration.parse(text)
    else:
        assert float(Duration.parse(text).value) == seconds


@pytest.mark.parametrize(("limit", "finished"), [({"max_duration": "0.05s"}, True), ({"max_time": "0.05s"}, False)])
def test_a_time_ends_the_run(limit: Mapping[str, Any], finished: bool) -> None:
    run = fit(loop={"max_duration": 10_000, **limit}, callbacks=[Slow()])
    assert 1 <= run.trainer.progress.step < 10_000
    assert run.result.finished is finished


@pytest.mark.parametrize(("minimum", "least"), [(3, 1), ("2ep", 1)])
def test_a_time_waits_for_the_least_length(minimum: int | str, least: int) -> None:
    run = fit(loop={"max_duration": "0.001s", "min_duration": minimum}, batches=2, callbacks=[Slow()])
    assert run.trainer.progress.step >= 1
    assert run.result.finished
    assert run.trainer.progress.step < least + 1


def test_the_time_of_earlier_processes_counts(folder: Path) -> None:
    steps = []
    for _ in range(2):
        run = fit(folder, save={}, loop={"max_duration": "0.05s"}, callbacks=[Slow()])
        steps.append((run.trainer.progress.step, len(run.trained.batches)))
    assert steps[1] == (steps[0][0], 0)
    assert run.trainer.progress.seconds >= 0.05


class Stateful(Callback):
    """A callback with a state."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([Stateful(111)], [Stateful(222)], [111]), ([Stateful(1)], [], []), ([], [Stateful(5)], [5])],
)
def test_states_of_callbacks_are_restored_by_name(folder: Path, first: Any, second: Any, expected: Any) -> None:
    fit(folder, save={}, loop={"max_duration": 2}, callbacks=first)
    run = fit(folder, save={}, loop={"max_duration": 3}, callbacks=second)
    assert run.trainer.progress.step == 3
    assert [callback.value for callback in run.trainer.get_callbacks(Stateful).values()] == expected


def test_two_callbacks_of_one_class_have_states_of_their_own(folder: Path) -> None:
    first = {"a": Stateful(1), "b": Stateful(2)}
    for callbacks in (first, {"b": Stateful(0), "a": Stateful(0)}):
        trainer = make_trainer(
            folder, save={}, callbacks=callbacks, loop={"max_duration": 2 + (callbacks is not first)}
        )
        trainer.fit(rows(4))
    assert [callbacks[name].value for name in "ab"] == [1, 2]


OF_STEPS = "train/lr/group0", "train/lr/group1"


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
def test_rates_and_settings_of_groups_are_logged(
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
    initial = make_trainer(model=Norm if batch_norm else Net).model.get_parameter("layer.weight").detach()
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
    initial = make_trainer(model=Norm).model.get_parameter("layer.weight").detach()
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
    trained = plain.trainer.model.get_parameter("layer.weight")
    assert torch.equal(weights.trained[-1], trained)
    assert torch.equal(run.trainer.model.get_parameter("layer.weight"), trained)
