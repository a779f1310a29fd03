"""The claims of Lightning's tests about optimizer steps: accumulation, clipping, steps of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Counts, Descent, fit, rows, two_optimizers
from torch.optim import lr_scheduler

from trainer_cli import (
    Callback,
    ConfigError,
    Precision,
    Trainer,
    TrainStep,
    UserError,
)

BACKWARD = "test_backward_calls: "
MANUAL = "test_manual_optimization: "
TRAINER = "test_trainer: "


def check_counts(folder: Path, batches: int, accumulate: int, steps: int, backwards: int) -> None:
    counts = Counts()
    loop = {"max_duration": "1ep", "grad_accum_steps": accumulate}
    fit(batches=batches, loop=loop, callbacks=[counts])
    assert (counts.steps, counts.backwards, counts.zeros) == (steps, backwards, steps)


def check_accumulated_gradient(folder: Path, accumulate: int, batch_size: int) -> None:
    """Some batches accumulated give the weights of one batch of all their samples."""
    parts = fit(train=rows(4 * accumulate, batch_size), loop={"grad_accum_steps": accumulate})
    whole = fit(train=rows(4, batch_size * accumulate))
    for one, other in zip(parts.trainer.model.parameters(), whole.trainer.model.parameters(), strict=True):
        assert torch.allclose(one, other)


def check_weights_change_in_steps_alone(folder: Path, accumulate: int, batches: int) -> None:
    weights: list[tuple[int, torch.Tensor]] = []

    class See(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append((trainer.progress.step, model.layer.weight.detach().clone()))

    fit(batches=batches, loop={"max_duration": "2ep", "grad_accum_steps": accumulate}, callbacks=[See()])
    for (step, before), (next_step, after) in pairwise(weights):
        assert torch.equal(before, after) is (step == next_step)


def check_order(folder: Path, accumulate: int, expected: Sequence[str]) -> None:
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


def check_clipped(folder: Path, settings: Mapping[str, float], accumulate: int) -> None:
    counts = Counts()
    loop = {"max_duration": 2, "grad_accum_steps": accumulate}
    fit(precision=Precision(**settings), callbacks=[counts], loop=loop)  # type: ignore[arg-type]
    for gradient in counts.clipped:
        if "clip_norm" in settings:
            assert float(gradient.norm()) == pytest.approx(settings["clip_norm"], rel=1e-4)
        else:
            assert float(gradient.abs().max()) == pytest.approx(settings["clip_value"], rel=1e-4)


def check_refused_precision(folder: Path, settings: Mapping[str, Any], match: str) -> None:
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


def check_own_step(folder: Path, what: str) -> None:
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


def check_several_together(folder: Path) -> None:
    run = fit(optimizer=two_optimizers())
    assert [optimizer.count for optimizer in run.trainer.optimizers.values()] == [4, 4]


def check_step_that_steps_nothing(folder: Path) -> None:
    class Nothing(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            return self.forward(batch)

    with pytest.raises(UserError, match="has stepped no optimizer"):
        fit(step=Nothing())


CLAIMS: list[Claim] = [
    *claims(
        f"{BACKWARD}test_backward_count_simple",
        check_counts,
        {f"{count} batches are {count} backwards": (count, 1, count, count) for count in (1, 2, 3)},
    ),
    *claims(
        f"{BACKWARD}test_backward_count_with_grad_accumulation",
        check_counts,
        {
            "six batches in pairs are three steps": (6, 2, 3, 6),
            "six batches in threes are two steps": (6, 3, 2, 6),
            "a rest at the end of an epoch is a step of its own": (5, 2, 3, 5),
        },
    ),
    *claims(
        f"{TRAINER}test_gradient_accumulation_scheduling_last_batch",
        check_weights_change_in_steps_alone,
        {
            f"of {batches} batches in groups of {size} weights change with a group's last alone": (size, batches)
            for size, batches in ((1, 1), (1, 4), (2, 4), (3, 4), (3, 1))
        },
    ),
    *claims(
        f"{MANUAL}test_manual_optimization_and_accumulated_gradient",
        check_accumulated_gradient,
        {"accumulated batches count as one": (2, 1), "and so do batches of several samples": (4, 3)},
    ),
    *claims(
        f"{TRAINER}test_train_loop_system",
        check_order,
        {
            "each batch is a forward, a backward, a step and a clearing": (
                1,
                ["forward", "backward", "step", "zero_grad"] * 5,
            ),
            "with three accumulated, the third and the last step": (
                3,
                ["forward", "backward"] * 3
                + ["step", "zero_grad"]
                + ["forward", "backward"] * 2
                + ["step", "zero_grad"],
            ),
        },
        difference="Lightning runs forward and backward inside the optimizer's step and clears gradients before a "
        "backward; here the step follows them, and only optimizers that evaluate again get a closure.",
    ),
    *claims(
        "test_hooks: test_on_before_zero_grad_called",
        check_counts,
        {f"gradients are cleared once in each of {count} steps": (count, 1, count, count) for count in (4, 5)},
    ),
    *claims(
        f"{TRAINER}test_gradient_clipping_by_norm",
        check_clipped,
        {
            "gradients are clipped to a norm": ({"clip_norm": 0.05}, 1),
            "accumulated ones as a whole": ({"clip_norm": 0.05}, 2),
        },
    ),
    *claims(
        f"{TRAINER}test_gradient_clipping_by_value",
        check_clipped,
        {
            "gradients are clipped to a value": ({"clip_value": 1e-10}, 1),
            "accumulated ones as a whole": ({"clip_value": 1e-3}, 2),
        },
    ),
    *claims(
        f"{TRAINER}test_invalid_gradient_clip_value",
        check_refused_precision,
        {
            "a pair as a norm is refused": ({"clip_norm": (1, 2)}, "clip_norm"),
            "a norm below zero is refused": ({"clip_norm": -1.0}, "clip_norm"),
        },
    ),
    *claims(
        f"{TRAINER}test_invalid_gradient_clip_algo",
        check_refused_precision,
        {"both kinds at once are refused": ({"clip_norm": 1.0, "clip_value": 1.0}, "both set")},
        difference="There is no name of a kind that could be wrong: each kind has a key, and one of them may be set.",
    ),
    *claims(
        f"{MANUAL}test_step_with_optimizer_closure_with_different_frequencies",
        check_own_step,
        {"two optimizers step at different frequencies": ("steps",)},
    ),
    *claims(f"{MANUAL}test_lr_schedulers", check_own_step, {"each schedule steps with its optimizer": ("rates",)}),
    *claims(f"{MANUAL}test_multiple_optimizers_logging", check_own_step, {"a step of the user's is logged": ("log",)}),
    *claims(
        f"{MANUAL}test_multiple_optimizers_manual_call_counts",
        check_step_that_steps_nothing,
        {"a step that makes no backward is an error": ()},
    ),
    *claims(
        "test_multiple_optimizers: test_multiple_optimizers_automatic_optimization_raises",
        check_several_together,
        {"several optimizers without a step of one's own": ()},
        difference="Lightning refuses them; here one loss steps all of them together, each over its parameters.",
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
