"""Loss scaling: gradients as without it, overflowing steps left out and counted, the scale gone on with exactly."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, assert_resumes_exactly, everything, loader, same, trainer
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep

OPTIMIZERS: dict[str, Any] = {
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
}


class Spiky(nn.Module):
    """A line whose loss is far too large for a scale at the forwards of `spikes`, counted in a buffer."""

    forwards: torch.Tensor

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
    first = trainer(Spiky).model.get_parameter("linear.weight")
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


@pytest.mark.parametrize(
    ("scale", "accum", "clip"),
    [
        ("dynamic", 1, {}), ("dynamic", 2, {"clip_norm": 1 / 512}), ("dynamic", 3, {"clip_value": 1 / 1024}),
        (1024, 1, {"clip_norm": 1 / 512}), (1024, 3, {}), (0.5, 1, {"clip_value": 1 / 1024}),
        (0.5, 2, {"clip_norm": 1 / 512}),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_with_a_scale_ends_bit_for_bit_where_going_through_ends(tmp_path: Path, optimizer: str) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        saver = CheckpointerCallback(folder)
        return _fit(Spiky, *callbacks, optimizer=OPTIMIZERS[optimizer], checkpoint=saver)

    _, resumed = assert_resumes_exactly(fit, tmp_path, 1, 3, 4)
    assert everything(resumed)["scaler"] == {"scale": 2.0**14, "steps_held": 2, "skipped_steps": 2}


def test_a_scale_begins_and_doubles_as_the_config_says_and_goes_on_so(tmp_path: Path) -> None:
    """It halves at the steps 1 and 4, and doubles after two without an overflow."""
    loggers = {"straight": ListLogger(), "parts": ListLogger()}
    precision = {"dtype": "fp16", "init_scale": 1024.0, "growth_interval": 2}

    def fit(folder: Path, *callbacks: Callback) -> Any:
        saver = CheckpointerCallback(folder)
        return _fit(Spiky, *callbacks, precision=precision, checkpoint=saver, loggers=[loggers[folder.name]])

    assert_resumes_exactly(fit, tmp_path, 2)
    for logger in loggers.values():
        assert [record.metrics["train/loss_scale"] for record in logger.records] == [512, 512, 1024, 512, 512, 1024]


def test_a_scale_that_only_one_side_has_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for length, dtype, message in (
        (1, "fp16", ""),
        (2, "bf16", "has a loss scale, but this precision uses none: it is dropped"),
        (3, "fp16", "the checkpoint has no loss scale: scaling starts new"),
    ):
        caplog.clear()
        saver = CheckpointerCallback(tmp_path)
        _fit(Spiky, precision={"dtype": dtype}, settings={"max_duration": length}, checkpoint=saver)
        assert message in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8"}, "precision.dtype is 'fp8', but it must be one of fp32, bf16, fp16"),
        ({"dtype": "fp16", "loss_scale": 0}, "loss_scale is 0, but it must be dynamic or a number above 0"),
        ({"dtype": "fp16", "loss_scale": -2.0}, r"loss_scale is -2\.0"),
        ({"dtype": "fp16", "loss_scale": float("nan")}, "loss_scale is nan"),
        ({"dtype": "fp16", "loss_scale": True}, "loss_scale is True"),
        ({"dtype": "fp16", "loss_scale": "static"}, "loss_scale is 'static'"),
        ({"dtype": "bf16", "loss_scale": 1024}, r"loss_scale is 1024, but precision\.dtype is bf16, which needs none"),
        ({"min_loss_scale": 1.0}, "precision.min_loss_scale applies to a dynamic loss scale, and there is none"),
        ({"dtype": "fp16", "loss_scale": 8, "max_loss_scale": 16.0}, "applies to a dynamic loss scale"),
        (
            {"dtype": "fp16", "loss_scale": 8, "init_scale": 16.0},
            "precision.init_scale applies to a dynamic loss scale",
        ),
        ({"growth_interval": 5}, "precision.growth_interval applies to a dynamic loss scale"),
        ({"dtype": "fp16", "min_loss_scale": 8.0, "max_loss_scale": 4.0}, r"min_loss_scale \(8\) is above"),
        ({"dtype": "fp16", "init_scale": 2.0, "min_loss_scale": 4.0}, r"init_scale \(2\) is not between"),
        ({"dtype": "fp16", "init_scale": 8.0, "max_loss_scale": 4.0}, r"init_scale \(8\) is not between"),
        ({"dtype": "fp16", "growth_interval": 0}, "growth_interval is 0, but it must be a finite number of at least 1"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, r"clip_norm and precision\.clip_value are both set"),
    ],
)
def test_settings_that_make_no_precision_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
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
def test_a_dynamic_scale_stays_between_its_bounds(bounds: dict[str, Any], overflows: bool, scales: list[float]) -> None:
    scaler = Precision(dtype="fp16", growth_interval=1, **bounds).scaler(torch.device("cpu"))
    assert scaler is not None
    first = scaler.metrics()["loss_scale"]
    assert bounds.get("min_loss_scale", 1.0) <= first <= bounds.get("max_loss_scale", 1e6)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    for _ in scales:
        torch.autograd.backward(scaler.scaled(weight.sum() * (float("inf") if overflows else 1.0)))
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
        context = self.autocast()
        for _ in range({"one after the other": 1, "the same context twice": 2}.get(self.nested, 0)):
            with context:
                self._note()
        with self.autocast() if "in autocast" in self.nested else nullcontext():
            if self.nested == "autocast in autocast":
                with self.autocast():
                    self._note()
            outputs = self.forward(batch)
            if "in autocast" in self.nested:
                self._note()
        self._note()
        self.backward(outputs["loss"])
        return outputs["loss"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("nested", "inside"),
    [
        ("one after the other", 1), ("the same context twice", 2), ("forward in autocast", 1),
        ("autocast in autocast", 2),
    ],
)  # fmt: skip
def test_autocast_is_off_after_its_outermost_block(dtype: str, nested: str, inside: int) -> None:
    step = Scopes(nested)
    trained = trainer(step=step, precision=Precision(dtype), settings={"max_duration": 2, "eval_interval": 1})
    trained.fit(loader(), loader(6, shuffle=False))
    assert step.seen == [False, *[dtype != "fp32"] * inside, False] * 2
    assert not torch.is_autocast_enabled("cpu")


class _Cast(Spiky):
    """Parts of it in another type, as `from_pretrained` of bfloat16 files makes the whole model."""

    def __init__(self, dtype: torch.dtype, frozen: bool) -> None:
        super().__init__(())
        self.narrow = nn.Linear(2, 2).to(dtype).requires_grad_(not frozen)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("dtype", "frozen", "warns"),
    [
        (torch.bfloat16, False, True),
        (torch.float16, False, True),
        (torch.bfloat16, True, False),
        (torch.float32, False, False),
        (torch.float64, False, False),
    ],
)
def test_a_fit_names_trained_parameters_of_fewer_than_32_bits(
    precision: str, dtype: torch.dtype, frozen: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(lambda: _Cast(dtype, frozen), precision={"dtype": precision})
    line = f"2 of 4 parameters are trained in {str(dtype)[6:]} (narrow.weight): updates smaller than its precision are"
    assert (line in caplog.text, caplog.text.count("are trained in")) == (warns, int(warns))
