"""What the constructor and the calls of a trainer accept and refuse, and what its hooks get."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FailIn, ListLogger, Net, fit, make_trainer, rows
from torch import Tensor, nn

from trainer_cli import (
    Callback,
    CheckFinite,
    NotFiniteError,
    Precision,
    Trainer,
    TrainingLoop,
    UserError,
    ValidationLoop,
    add_global_callback,
    make_async_checkpointer,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Wrong(Net):
    """Its loss is not a finite number."""

    value = float("nan")

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return super().forward(batch)["loss"] + self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_training(value: float) -> None:
    model = type("Wrong", (Wrong,), {"value": value})
    with pytest.raises(NotFiniteError, match="not finite at step 1"):
        fit(model=model, callbacks=[CheckFinite()], loop={"log_interval": 1}, val=None)


@pytest.mark.parametrize(
    ("slot", "value", "message"),
    [
        ("callbacks", [3], "callbacks.*expected Callback, got int"),
        ("checkpoint", 3, "checkpoint: expected Callback, got int"),
        ("loggers", [3], "loggers.*expected Logger, got int"),
        ("logging", 3, "logging: expected Logging, got int"),
        ("loop", 3, "loop: expected TrainingLoop, got int"),
        ("model", 3, "model: expected Module, got int"),
        ("optimizer", 3, "optimizer: expected Optimizer, got int"),
        ("precision", 3, "precision: expected Precision, got int"),
        ("seed", "x", "seed is 'x', but it must be a whole number"),
        ("step", 3, "step: expected TrainStep, got int"),
        ("strategy", 3, "strategy: expected Strategy, got int"),
        ("callbacks", [ListLogger()], "expected Callback, got ListLogger"),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_expected(slot: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(**{"model": Net, "optimizer": sgd, "device": "cpu", slot: value})


class Counter(Callback):
    """Counts steps; its state is saved."""

    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += self.by

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Gradients(Callback):
    """Notes the norm of the gradients after each backward, before the optimizer's step and after it."""

    def __init__(self) -> None:
        self.scaled: list[float] = []
        self.unscaled: list[float] = []
        self.clipped: list[float] = []

    @staticmethod
    def norm(model: nn.Module) -> float:
        gradients = [value.grad.float().flatten() for value in model.parameters() if value.grad is not None]
        return float(torch.cat(gradients).norm())

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self.scaled.append(self.norm(model))

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.unscaled.append(self.norm(model))

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.clipped.append(self.norm(model))


def test_gradients_are_unscaled_and_clipped_before_the_step() -> None:
    gradients = Gradients()
    precision = Precision(dtype="fp16", loss_scale=64.0, clip_norm=0.01)
    fit(precision=precision, callbacks=[gradients], val=None)
    assert gradients.scaled == pytest.approx([64 * norm for norm in gradients.unscaled], rel=1e-2)
    assert min(gradients.unscaled) > 0.01
    assert gradients.clipped == pytest.approx([0.01] * 4, rel=1e-2)


def test_an_error_in_a_hook_names_callback_and_hook() -> None:
    with pytest.raises(ZeroDivisionError, match="on_train_start failed") as caught:
        fit(callbacks=[FailIn("on_train_start", error=ZeroDivisionError)], val=None)
    notes = " ".join(caught.value.__notes__)
    assert "FailIn" in notes
    assert "on_train_start" in notes


@pytest.mark.parametrize("act", ["fit", "validate"])
def test_what_is_no_loader_is_refused(act: str) -> None:
    trainer = make_trainer()
    with pytest.raises(UserError, match="int is neither a dataset nor a loader"):
        trainer.fit(3) if act == "fit" else trainer.validate(3)


def test_what_differs_on_purpose_stands_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/moving.md").read_text(encoding="utf-8")
    assert TrainingLoop().settings.max_duration == "10ep"
    assert "10 epochs (`loop.max_duration=10ep`)" in page
    kinds: tuple[Any, ...] = (Trainer, TrainingLoop)
    for kind in kinds:
        with pytest.raises((TypeError, UserError), match=r"argument without a name|positional argument"):
            kind(Net)
    assert "`Trainer` and `TrainingLoop` are given by name" in " ".join(page.split())
    with closing(make_async_checkpointer()) as checkpointer:
        checkpointer.save({"value": 1}, "step1")
        assert multiprocessing.active_children() == []
        assert any(thread.name.startswith("checkpoint-writer") for thread in threading.enumerate())
    assert "by a thread from a copy of the state" in page


def test_what_is_no_path_is_refused() -> None:
    trainer: Any = make_trainer()
    for paths in (3, [3]):
        with pytest.raises(UserError, match="expected the path of a checkpoint, got int"):
            trainer.validate_all(rows(1), paths)
    with pytest.raises(UserError, match="expected the path of a checkpoint, got int"):
        trainer.fit(rows(1), ckpt_path=3)


def test_a_trainer_whose_loop_only_validates_does_not_fit() -> None:
    trainer = Trainer(model=Net, optimizer=sgd, loop=ValidationLoop(), device="cpu")
    with pytest.raises(UserError, match="loop is a ValidationLoop, so this trainer can only validate"):
        trainer.fit(rows(2))


def test_global_callbacks_are_found_by_their_class() -> None:
    first, second, everywhere = Counter(1), Counter(2), Counter(3)
    handle = add_global_callback(everywhere)
    try:
        trainer = make_trainer(callbacks=[first, CheckFinite(), second])
    finally:
        handle.remove()
    assert trainer.get_callback(Counter) is first
    assert list(trainer.get_callbacks(Counter).values()) == [first, second, everywhere]
    assert list(make_trainer().get_callbacks(Counter)) == []


def test_scopes_come_before_the_name() -> None:
    class Scoped(Callback):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            with trainer.name_scope("a"), trainer.name_scope("b"):
                assert trainer.name_scope_path == "a/b/"
                trainer.log_metrics({"c": 1.0})

    assert fit(callbacks=[Scoped()], val=None).log.values("a/b/c") != {}


class Exceptions(Callback):
    """Notes the exceptions that hooks are called with, and fails in one of these."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, BaseException]] = []

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self.noted.append(("train", exception))

    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self.noted.append(("fit", exception))
        raise ValueError("in the hook")


def test_an_error_in_an_exception_hook_replaces_nothing() -> None:
    noted = Exceptions()
    with pytest.raises(ZeroDivisionError) as caught:
        fit(callbacks=[FailIn("on_train_batch_end", error=ZeroDivisionError), noted], val=None)
    assert [(where, error is caught.value) for where, error in noted.noted] == [("train", True), ("fit", True)]
    texts = [caught.value.__context__, caught.value.__cause__, *getattr(caught.value, "__notes__", [])]
    assert "in the hook" in " ".join(map(str, texts))
