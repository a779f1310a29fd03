"""Loss scaling: gradients as without it, overflowing steps left out and counted, the scale gone on with exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, StopAt, everything, loader, same, trainer
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.scheduler_intervals import Scheduled
from trainer_cli.trainer.train_step import TrainStep

OPTIMIZERS: dict[str, Any] = {
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
}


class Spiky(nn.Module):
    """A line whose loss is far too large for a scale at the forwards of `spikes`, counted in a buffer."""

    def __init__(self, spikes: tuple[int, ...] = (1, 4)) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.spikes = spikes
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        if self.training:
            self.forwards += 1
        x, y = batch
        loss = (self.linear(x).squeeze(-1).float() - y).square().mean()
        return loss * (1e37 if self.training and int(self.forwards) in self.spikes else 0.01)


class Steps(Callback):
    """Writes down after each step the gradients, the weights, and the learning rate."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.weights: list[Any] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.gradients.append(model.linear.weight.grad.clone())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.weights.append(model.linear.weight.detach().clone())


def _fit(model: Any = Spiky, *callbacks: Callback, precision: Any = None, **more: Any) -> Any:
    settings = {"max_duration": 6, "log_interval": 1, **more.pop("settings", {})}
    made = trainer(
        model, callbacks=callbacks, precision=Precision(**(precision or {"dtype": "fp16"})), settings=settings, **more
    )
    made.fit(loader(20, 4))
    return made


class Tokens(nn.Module):
    """Its batches count thousands of tokens each, and its gradients pass through 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        loss = (self.linear(x).squeeze(-1).float() - y).square().mean()
        return {"loss": loss, "weight": 8192 * len(y)}


def test_accumulation_makes_no_gradient_larger_than_that_of_one_batch() -> None:
    """The scale leaves room for the gradient of a mean loss, not for one times the tokens."""
    made = _fit(Tokens, precision={"dtype": "fp16", "loss_scale": 1024.0}, settings={"grad_accum_steps": 2})
    assert made.scaler.metrics()["skipped_steps"] == 0
    plain = _fit(Tokens, precision={"dtype": "fp32"}, settings={"grad_accum_steps": 2})
    assert torch.allclose(made.model.linear.weight, plain.model.linear.weight, atol=1e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_is_counted(optimizer: str) -> None:
    seen, logger = Steps(), ListLogger()
    trained = _fit(Spiky, seen, optimizer=OPTIMIZERS[optimizer], loggers=[logger])
    first = trainer(Spiky).model.linear.weight
    assert torch.equal(seen.weights[0], first)
    assert torch.equal(seen.weights[3], seen.weights[2])
    assert not torch.equal(seen.weights[1], first)
    assert not torch.equal(seen.weights[4], seen.weights[3])
    assert [record.metrics["train/skipped_steps"] for record in logger.records] == [1, 1, 1, 2, 2, 2]
    assert [record.metrics["train/loss_scale"] for record in logger.records] == [2**15] * 3 + [2**14] * 3
    assert trained.progress.step == 6
    assert all(torch.isfinite(value).all() for value in trained.model.parameters())


def test_a_schedule_counts_a_step_that_was_left_out() -> None:
    """Also where the very first one is, of which torch's schedulers would complain."""
    seen, plain = Steps(), Steps()
    schedule = Scheduled(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "step")
    _fit(Spiky, seen, schedulers=schedule)
    _fit(lambda: Spiky(()), plain, schedulers=schedule, precision={"dtype": "bf16"})
    assert seen.rates == plain.rates == [0.1 * 0.5**step for step in range(6)]


class Exact(nn.Module):
    """Powers of two, so that no 16-bit float rounds anything; gradients small enough for the largest scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, batch: Any) -> Any:
        return self.linear(torch.ones_like(batch[0])).float().mean() / 256


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1 / 512}, {"clip_value": 1 / 1024}])
@pytest.mark.parametrize("accum", [1, 2, 3])
@pytest.mark.parametrize("scale", ["dynamic", 1024, 0.5])
def test_gradients_are_those_of_no_scale_before_they_are_averaged_and_clipped(
    scale: Any, accum: int, clip: dict[str, float]
) -> None:
    seen, plain = Steps(), Steps()
    settings = {"grad_accum_steps": accum, "max_duration": 3}
    trained = _fit(Exact, seen, precision={"dtype": "fp16", "loss_scale": scale, **clip}, settings=settings)
    other = _fit(Exact, plain, precision={"dtype": "fp32", **clip}, settings=settings)
    assert same(seen.gradients, plain.gradients) == []
    assert same(everything(trained)["model"], everything(other)["model"]) == []


def test_a_fixed_scale_stays_as_it_is_whatever_overflows() -> None:
    logger = ListLogger()
    _fit(Spiky, precision={"dtype": "fp16", "loss_scale": 256}, loggers=[logger])
    assert {record.metrics["train/loss_scale"] for record in logger.records} == {256.0}
    assert logger.records[-1].metrics["train/skipped_steps"] == 2


@pytest.mark.parametrize("stop", [1, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_ends_bit_for_bit_where_going_through_ends(tmp_path: Path, optimizer: str, stop: int) -> None:
    def fit(folder: str, *callbacks: Callback) -> Any:
        saver = CheckpointerCallback(tmp_path / folder)
        return _fit(Spiky, *callbacks, optimizer=OPTIMIZERS[optimizer], checkpoint=saver)

    straight = fit("straight")
    fit("parts", StopAt(stop))
    resumed = fit("parts")
    assert resumed.loaded_step == stop
    assert same(everything(straight), everything(resumed)) == []
    assert everything(resumed)["scaler"] == {"scale": 2.0**14, "steps_held": 2, "skipped_steps": 2}


def test_a_scale_begins_and_doubles_as_the_config_says_and_goes_on_so(tmp_path: Path) -> None:
    """It halves at the steps 1 and 4, and doubles after two without an overflow."""
    logger, more = ListLogger(), ListLogger()
    settings = {"dtype": "fp16", "init_scale": 1024.0, "growth_interval": 2}
    straight = _fit(Spiky, precision=settings, loggers=[logger])
    assert [record.metrics["train/loss_scale"] for record in logger.records] == [512, 512, 1024, 512, 512, 1024]
    saver = CheckpointerCallback(tmp_path)
    _fit(Spiky, StopAt(2), precision=settings, checkpoint=saver)
    resumed = _fit(Spiky, precision=settings, checkpoint=CheckpointerCallback(tmp_path), loggers=[more])
    assert [record.metrics["train/loss_scale"] for record in more.records] == [1024, 512, 512, 1024]
    assert same(everything(straight), everything(resumed)) == []


def test_a_scale_that_only_one_side_has_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, said in (
        ("fp16", ""),
        ("bf16", "has a loss scale, but there is none in this precision: it is dropped"),
        ("fp16", "the checkpoint has no loss scale: scaling starts new"),
    ):
        caplog.clear()
        length = len(list(tmp_path.glob("step*"))) + 1
        saver = CheckpointerCallback(tmp_path)
        _fit(Spiky, precision={"dtype": dtype}, settings={"max_duration": length}, checkpoint=saver)
        assert said in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "fp16", "loss_scale": 0}, "loss_scale is 0, but it is dynamic or a number above 0"),
        ({"dtype": "fp16", "loss_scale": -2.0}, r"loss_scale is -2\.0"),
        ({"dtype": "fp16", "loss_scale": float("nan")}, "loss_scale is nan"),
        ({"dtype": "fp16", "loss_scale": True}, "loss_scale is True"),
        ({"dtype": "fp16", "loss_scale": "static"}, "loss_scale is 'static'"),
        ({"dtype": "bf16", "loss_scale": 1024}, r"loss_scale is 1024, but precision\.dtype is bf16, which needs none"),
    ],
)
def test_a_scale_that_cannot_be_one_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Precision(**settings)


@pytest.mark.parametrize(
    ("bounds", "overflows", "scales"),
    [
        ({}, True, [32768.0, 16384.0, 8192.0, 4096.0]),
        ({"min_loss_scale": 10000.0}, True, [32768.0, 16384.0, 10000.0, 10000.0]),
        ({"init_scale": 4.0, "max_loss_scale": 20.0}, False, [8.0, 16.0, 20.0, 20.0]),
        ({"max_loss_scale": 100.0}, False, [100.0, 100.0, 100.0, 100.0]),
        ({"min_loss_scale": 1e6}, True, [1e6, 1e6, 1e6, 1e6]),
        ({"min_loss_scale": 8.0, "max_loss_scale": 8.0}, True, [8.0, 8.0, 8.0, 8.0]),
    ],
)
def test_a_dynamic_scale_stays_between_its_bounds(
    bounds: dict[str, float], overflows: bool, scales: list[float]
) -> None:
    scaler = Precision(dtype="fp16", growth_interval=1, **bounds).scaler(torch.device("cpu"))
    assert scaler is not None
    first = scaler.metrics()["loss_scale"]
    assert bounds.get("min_loss_scale", 1.0) <= first <= bounds.get("max_loss_scale", 1e6)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    for _ in scales:
        scaler.scaled(weight.sum() * (float("inf") if overflows else 1.0)).backward()
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.metrics()["loss_scale"])
    assert seen == scales


def test_other_formats_have_no_scaler() -> None:
    trained = _fit(Exact, precision={"dtype": "bf16"})
    assert trained.scaler is None
    assert "scaler" not in trained.checkpoint_state()


class Scopes(TrainStep):
    """Enters autocast in the nested ways that a step's helpers do, and records whether it is on."""

    def __init__(self, nested: str) -> None:
        self.nested = nested
        self.seen: list[bool] = []

    def _note(self) -> None:
        self.seen.append(torch.is_autocast_enabled("cpu"))

    def train_batch(self, batch: Any) -> Any:
        self._note()
        if self.nested == "one after the other":
            with self.autocast():
                pass
            loss = self.forward(batch)["loss"]
        elif self.nested == "the same context twice":
            context = self.autocast()
            for _ in range(2):
                with context:
                    self._note()
            loss = self.forward(batch)["loss"]
        else:
            with self.autocast():
                self._note()
                if self.nested == "autocast in autocast":
                    with self.autocast():
                        self._note()
                loss = self.forward(batch)["loss"]
                self._note()
        self._note()
        self.backward(loss)
        return loss


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("nested", "inside"),
    [
        ("one after the other", 0), ("the same context twice", 2), ("forward in autocast", 2),
        ("autocast in autocast", 3),
    ],
)  # fmt: skip
def test_autocast_is_off_after_its_outermost_block(dtype: str, nested: str, inside: int) -> None:
    step = Scopes(nested)
    trained = trainer(step=step, precision=Precision(dtype), settings={"max_duration": 2, "eval_interval": 1})
    trained.fit(loader(), loader(6, shuffle=False))
    assert step.seen == [False, *[dtype != "fp32"] * inside, False] * 2
    assert not torch.is_autocast_enabled("cpu")
