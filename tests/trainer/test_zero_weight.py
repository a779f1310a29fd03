"""A batch of weight 0 counts for nothing: in means, gradients and checks, whatever its loss is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, on, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.outputs.metrics import WeightedMeans, weighted
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep

VOID = -1.0


class Targets:
    """Samples of a position and a target; VOID stands for none, in all samples of some batches of two."""

    def __init__(self, *void_batches: int, length: int = 12) -> None:
        self.void_batches, self.length = void_batches, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 12, 1.0]), torch.tensor(VOID if index // 2 in self.void_batches else float(index))


KINDS = {"number": int, "int tensor": torch.tensor, "float tensor": lambda count: torch.tensor(float(count))}


class Masked(nn.Module):
    """The mean over the targets that there are; NaN over none, and its gradients too if `divides`."""

    def __init__(self, kind: str, divides: bool) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.kind, self.divides = kind, divides

    def forward(self, batch: Any) -> Any:
        x, y = batch
        known = y != VOID
        count = int(known.sum())
        errors = (self.line(x).squeeze(-1) - y).square() * known
        loss = errors.sum() / known.sum() if self.divides or count else errors.sum() + math.nan
        return {"loss": loss, "mae": float(loss.detach()), "weight": KINDS[self.kind](count)}


def _fit(kind: str, divides: bool, *void: int, callbacks: Any = (), **settings: Any) -> tuple[Any, Any, list[Tensor]]:
    logger, precision, gradients = ListLogger(), settings.pop("precision", None), []
    keep = on(on_before_optimizer_step=lambda trainer, model, _: gradients.append(model.line.weight.grad.clone()))
    made = trainer(
        lambda: Masked(kind, divides), lr=0.01, callbacks=[keep, *callbacks], loggers=[logger],
        settings={"max_duration": "1ep", "log_interval": 1, "eval_interval": "1ep", **settings},
        precision=precision,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(Targets(*void), 2)  # type: ignore[arg-type]
    made.fit(data, data)
    return made, logger.records, gradients


def test_a_step_of_weight_zero_gives_frozen_parameters_no_gradient() -> None:
    """A gradient of zero is one that weight decay and moments act upon."""
    gradients: list[Any] = []

    def make() -> nn.Module:
        model = Masked("number", divides=False)
        model.line.bias.requires_grad_(False)
        return model

    keep = on(on_before_optimizer_step=lambda trainer, model, _: gradients.append(model.line.bias.grad))
    made = trainer(make, callbacks=[keep], settings={"max_duration": 2})
    made.fit(torch.utils.data.DataLoader(Targets(0, 1), 2))  # type: ignore[arg-type]
    assert gradients == [None, None]


@pytest.mark.parametrize("divides", [False, True], ids=["NaN loss", "NaN gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_weight_zero_adds_nothing_to_an_accumulated_step(kind: str, divides: bool) -> None:
    """Batches 1 and 2 of the first step, the first of the second."""
    made, records, gradients = _fit(kind, divides, 1, 2, 3, grad_accum_steps=3)
    model = made.model
    torch.manual_seed(0)
    fresh = Masked(kind, divides)
    fresh(next(iter(torch.utils.data.DataLoader(Targets(), 2))))["loss"].backward()  # type: ignore[arg-type]
    assert torch.allclose(gradients[0], fresh.line.weight.grad)
    assert all(torch.isfinite(value).all() for value in (*gradients, *model.parameters()))
    assert all(math.isfinite(value) for record in records for value in record.metrics.values())


@pytest.mark.parametrize("scale", [1e-50, 1e50])
def test_weights_of_one_step_are_no_measure_for_those_of_the_next(scale: float) -> None:
    """In units of the first step, these weights would be too large or too small for the gradients of the others."""
    trained = []
    for factor in (1.0, scale):
        weights = iter([1.0, 3.0, factor, 3 * factor, 1.0, 3.0])
        make = type("Weighted", (Masked,), {
            "forward": lambda self, batch, weights=weights: {**Masked.forward(self, batch), "weight": next(weights)}
        })  # fmt: skip
        made = trainer(lambda make=make: make("number", False), lr=0.01, settings={
            "max_duration": 3, "grad_accum_steps": 2,
        })  # fmt: skip
        made.fit(torch.utils.data.DataLoader(Targets(), 2))  # type: ignore[arg-type]
        trained.append(made.model.line.weight)
    torch.testing.assert_close(*trained)


@pytest.mark.parametrize("policy", [None, "raise", "skip"])
@pytest.mark.parametrize("divides", [False, True], ids=["NaN loss", "NaN gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_weight_zero_neither_change_weights_nor_end_the_run(
    kind: str, divides: bool, policy: str | None
) -> None:
    callbacks = [] if policy is None else [CheckFinite(policy)]
    made, records, gradients = _fit(kind, divides, 0, 3, 4, callbacks=callbacks)
    assert made.progress.step == 6
    assert [index for index, gradient in enumerate(gradients) if not gradient.any()] == [0, 3, 4]
    if policy:
        assert callbacks[0].times == 0
    losses = [record.metrics["train/loss"] for record in records if "train/loss" in record.metrics]
    assert [index for index, loss in enumerate(losses) if math.isnan(loss)] in ([0, 3, 4], [])
    assert math.isfinite(records[-1].metrics["val/loss"])
    assert records[-1].metrics["val/loss"] == pytest.approx(records[-1].metrics["val/mae"])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"microbatch": 1}) for kind in KINDS),
        ("number", {"precision": Precision("fp16", loss_scale=1.0)}),
    ],
)
def test_weight_zero_adds_nothing_in_parts_of_a_batch_and_with_a_loss_scale(
    kind: str, settings: dict[str, Any]
) -> None:
    made, _, gradients = _fit(kind, True, 0, 2, **settings)
    assert not gradients[0].any()
    assert all(torch.isfinite(value).all() for value in made.model.parameters())
    assert made.scaler is None or made.scaler.metrics()["skipped_steps"] == 0


class Twice(TrainStep):
    """Weighs each loss itself."""

    def train_batch(self, batch: Any) -> Any:
        outputs = self.forward(batch)
        self.backward(outputs["loss"] * math.nan, weight=0)
        self.backward(self.forward(batch)["loss"], weight=1)
        return {**outputs, "loss": outputs["loss"].detach()}


@pytest.mark.parametrize("accum", [1, 2])
def test_a_step_of_ones_own_may_give_weight_zero(accum: int, tmp_path: Path) -> None:
    made = trainer(
        Masked("number", False), step=Twice(), callbacks=[CheckFinite()], lr=0.01,
        settings={"max_duration": 2, "grad_accum_steps": accum}, checkpoint=CheckpointerCallback(tmp_path),
    )  # fmt: skip
    made.fit(torch.utils.data.DataLoader(Targets(), 2))  # type: ignore[arg-type]
    assert all(torch.isfinite(value).all() for value in made.model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_means_leave_out_values_of_weight_zero(kind: str, bad: float) -> None:
    meter = WeightedMeans(torch.device("cpu"))
    for weight, value in ((2, 1.0), (0, bad), (2, 3.0)):
        loss = torch.tensor(value)
        meter.add(loss, {"number": value, "tensor": loss}, KINDS[kind](weight))
    assert meter.means() == {"loss": 2.0, "number": 2.0, "tensor": 2.0}
    assert meter.loss_is_finite
    for value in (bad, torch.tensor(bad)):
        assert float(weighted(value, KINDS[kind](0))) == 0
        assert not math.isfinite(float(weighted(value, KINDS[kind](2))))
