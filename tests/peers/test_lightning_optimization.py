"""The claims of Lightning's tests about optimizer steps: accumulation, clipping, steps of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_runs import Counts, Descent, fit, two_optimizers
from torch.optim import lr_scheduler

from trainer_cli import (
    Callback,
    ConfigError,
    Precision,
    Trainer,
    TrainStep,
    UserError,
)


@pytest.mark.parametrize(
    ("batches", "accumulate", "steps", "backwards"),
    [
        *[(count, 1, count, count) for count in (1, 2, 3)],
        (6, 2, 3, 6),
        (6, 3, 2, 6),
        (5, 2, 3, 5),
        *[(count, 1, count, count) for count in (4, 5)],
    ],
)
def test_batches_backwards_and_steps_are_counted(batches: int, accumulate: int, steps: int, backwards: int) -> None:
    counts = Counts()
    loop = {"max_duration": "1ep", "grad_accum_steps": accumulate}
    fit(batches=batches, loop=loop, callbacks=[counts])
    assert (counts.steps, counts.backwards, counts.zeros) == (steps, backwards, steps)


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 1), (1, 4), (2, 4), (3, 4), (3, 1)])
def test_weights_change_with_a_groups_last_batch_alone(accumulate: int, batches: int) -> None:
    weights: list[tuple[int, torch.Tensor]] = []

    class See(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append((trainer.progress.step, model.layer.weight.detach().clone()))

    fit(batches=batches, loop={"max_duration": "2ep", "grad_accum_steps": accumulate}, callbacks=[See()])
    for (step, before), (next_step, after) in pairwise(weights):
        assert torch.equal(before, after) is (step == next_step)


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        (1, ["forward", "backward", "step", "zero_grad"] * 5),
        (3, ["forward", "backward"] * 3 + ["step", "zero_grad"] + ["forward", "backward"] * 2 + ["step", "zero_grad"]),
    ],
)
def test_the_order_of_a_step(accumulate: int, expected: Sequence[str]) -> None:
    calls: list[str] = []

    class Told(Descent):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("zero_grad")
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

    class Order(Callback):
        def on_train_start(self, *_: Any) -> None:
            calls.clear()

        def on_before_forward(self, *_: Any) -> None:
            calls.append("forward")

        def on_after_backward(self, *_: Any) -> None:
            calls.append("backward")

    fit(
        batches=5, loop={"max_duration": "1ep", "grad_accum_steps": accumulate}, val=0, callbacks=[Order()],
        optimizer=lambda model: Told(model.parameters(), lr=0.1),
    )  # fmt: skip
    assert calls == expected


@pytest.mark.parametrize(
    ("settings", "accumulate"),
    [({"clip_norm": 0.05}, 1), ({"clip_norm": 0.05}, 2), ({"clip_value": 1e-10}, 1), ({"clip_value": 1e-3}, 2)],
)
def test_gradients_are_clipped(settings: Mapping[str, float], accumulate: int) -> None:
    counts = Counts()
    loop = {"max_duration": 2, "grad_accum_steps": accumulate}
    fit(precision=Precision(**settings), callbacks=[counts], loop=loop)  # type: ignore[arg-type]
    for gradient in counts.clipped:
        if "clip_norm" in settings:
            assert float(gradient.norm()) == pytest.approx(settings["clip_norm"], rel=1e-4)
        else:
            assert float(gradient.abs().max()) == pytest.approx(settings["clip_value"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"clip_norm": (1, 2)}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "both set"),
    ],
)
def test_wrong_clipping_is_refused(settings: Mapping[str, Any], match: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=match):
        Precision(**settings)


class Alternating(TrainStep):
    """Two optimizers: the first steps each batch, the second each second one."""

    def train_batch(self, batch: Any) -> Any:
        outputs = self.forward(batch)
        self.backward(outputs["loss"], "first")
        self.optimizer_step("first")
        if self.step_idx % 2 == 1:
            again = self.forward(batch)
            self.backward(again["loss"], "second")
            self.optimizer_step("second")
        return outputs


@pytest.mark.parametrize("what", ["steps", "rates", "log"])
def test_a_step_of_the_users_steps_optimizers_as_it_likes(what: str) -> None:
    step = type("Step", (Alternating,), {})()
    run = fit(
        optimizer=two_optimizers(), step=step, loop={"log_interval": 1},
        schedulers=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count),
    )  # fmt: skip
    first, second = run.trainer.optimizers.values()
    if what == "steps":
        assert (first.count, second.count, run.trainer.progress.step) == (4, 2, 4)
    elif what == "rates":
        assert first.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
        assert second.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**2)
    else:
        assert list(run.log.values("train/loss")) == [1, 2, 3, 4]


def test_one_loss_steps_all_optimizers() -> None:
    run = fit(optimizer=two_optimizers())
    assert [optimizer.count for optimizer in run.trainer.optimizers.values()] == [4, 4]


def test_a_step_that_makes_no_backward_is_an_error() -> None:
    class Nothing(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            return self.forward(batch)

    with pytest.raises(UserError, match="has stepped no optimizer"):
        fit(step=Nothing())
