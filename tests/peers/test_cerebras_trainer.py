"""The claims of the Trainer of Cerebras' ModelZoo about its constructor, its hooks and its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import FailIn, ListLogger, Net, fit, make_trainer, rows
from torch import Tensor, nn

from trainer_cli import (
    Callback,
    CheckFinite,
    EarlyExit,
    NotFiniteError,
    Precision,
    Trainer,
    UserError,
    ValidationLoop,
    add_global_callback,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check_early_exit(folder: Path) -> None:
    early = EarlyExit()
    with pytest.raises(UserError, match="3 is no function"):
        early.register(3)  # type: ignore[arg-type]
    handle = early.register(lambda trainer: trainer.progress.step == 2)
    assert fit(callbacks=[early], val=None).result.step == 2
    handle.remove()
    assert fit(callbacks=[early], val=None).result.step == 4


class Wrong(Net):
    """Its loss is not a finite number."""

    value = float("nan")

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        return super().forward(batch)["loss"] + self.value


def check_loss(folder: Path, value: float) -> None:
    model = type("Wrong", (Wrong,), {"value": value})
    with pytest.raises(NotFiniteError, match="not finite at step 1"):
        fit(model=model, callbacks=[CheckFinite()], loop={"log_interval": 1}, val=None)


def check_type(folder: Path, slot: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(**{"model": Net, "optimizer": sgd, "device": "cpu", slot: value})


def check_saver_is_last(folder: Path) -> None:
    trainer = make_trainer(folder, save={}, callbacks=[Callback(), CheckFinite()])
    assert list(trainer.callbacks)[-1] == "checkpoint"


def check_optimizer_of_another_model(folder: Path) -> None:
    with pytest.raises(UserError, match="the optimizer cannot hold its parameters"):
        Trainer(model=Net, optimizer=sgd(Net()), device="cpu")


def check_only_validates(folder: Path) -> None:
    trainer = Trainer(model=Net, device="cpu")
    assert trainer.validate(rows(2))["val"]["loss"] > 0
    with pytest.raises(UserError, match="no optimizer"):
        trainer.fit(rows(2))


def check_schedulers(folder: Path) -> None:
    with pytest.raises(UserError, match="schedulers: expected a schedule, got int"):
        fit(schedulers=3, val=None)


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


def check_two_of_one_class(folder: Path) -> None:
    fit(folder, loop={"max_duration": 3}, save={}, callbacks=[Counter(1), Counter(10)], val=None)
    again = [Counter(1), Counter(10)]
    fit(folder, loop={"max_duration": 4}, save={}, callbacks=again, val=None)
    assert [one.count for one in again] == [4, 40]


class Gradients(Callback):
    """Notes the norm of the gradients after each backward, before the optimizer's step and after it."""

    def __init__(self) -> None:
        self.scaled: list[float] = []
        self.unscaled: list[float] = []
        self.clipped: list[float] = []

    @staticmethod
    def norm(model: nn.Module) -> float:
        gradients = [one.grad.float().flatten() for one in model.parameters() if one.grad is not None]
        return float(torch.cat(gradients).norm())

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self.scaled.append(self.norm(model))

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.unscaled.append(self.norm(model))

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Any) -> None:
        self.clipped.append(self.norm(model))


def check_scaled_and_clipped(folder: Path) -> None:
    gradients = Gradients()
    precision = Precision(dtype="fp16", loss_scale=64.0, clip_norm=0.01)
    fit(precision=precision, callbacks=[gradients], val=None)
    assert gradients.scaled == pytest.approx([64 * norm for norm in gradients.unscaled], rel=1e-2)
    assert min(gradients.unscaled) > 0.01
    assert gradients.clipped == pytest.approx([0.01] * 4, rel=1e-2)


def check_misspelt_hook(folder: Path) -> None:
    class Misspelt(Callback):
        def on_train_batch_ends(self) -> None: ...

    with pytest.raises(UserError, match=r"on_train_batch_ends.*on_train_batch_end"):
        make_trainer(callbacks=[Misspelt()])


def check_error_in_a_hook(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="on_train_start failed") as caught:
        fit(callbacks=[FailIn("on_train_start", error=ZeroDivisionError)], val=None)
    notes = " ".join(caught.value.__notes__)
    assert "FailIn" in notes
    assert "on_train_start" in notes


def check_no_loader(folder: Path, act: str) -> None:
    trainer = make_trainer()
    with pytest.raises(UserError, match="int is neither a dataset nor a loader"):
        trainer.fit(3) if act == "fit" else trainer.validate(3)


def check_no_path(folder: Path) -> None:
    trainer = make_trainer()
    for paths in (3, [3]):
        with pytest.raises(UserError, match="expected the path of a checkpoint, got int"):
            trainer.validate_all(rows(1), paths)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected the path of a checkpoint, got int"):
        trainer.fit(rows(1), ckpt_path=3)  # type: ignore[arg-type]


def check_loop_of_evaluations(folder: Path) -> None:
    trainer = Trainer(model=Net, optimizer=sgd, loop=ValidationLoop(), device="cpu")
    with pytest.raises(UserError, match="loop is a ValidationLoop, so this trainer can only validate"):
        trainer.fit(rows(2))


def check_changed_call(folder: Path) -> None:
    class Doubled(Net):
        seen: Any = None

        def forward(self, batch: Any, factor: float = 1.0) -> Any:
            type(self).seen = (batch[0].clone(), factor)
            return super().forward(batch)

    class Change(Callback):
        def on_before_forward(self, trainer: Trainer, model: nn.Module, batch: Any, args: Any, kwargs: Any) -> None:
            args[0] = (args[0][0] + 5, args[0][1])
            kwargs["factor"] = 2.0

    fit(model=Doubled, callbacks=[Change()], loop={"max_duration": 1}, val=None)
    assert Doubled.seen[0].tolist() == [[5.0, 5.5]]
    assert Doubled.seen[1] == 2.0


def check_callbacks_by_class(folder: Path) -> None:
    first, second, everywhere = Counter(1), Counter(2), Counter(3)
    handle = add_global_callback(everywhere)
    try:
        trainer = make_trainer(callbacks=[first, CheckFinite(), second])
    finally:
        handle.remove()
    assert trainer.get_callback(Counter) is first
    assert list(trainer.get_callbacks(Counter).values()) == [first, second, everywhere]
    assert list(make_trainer().get_callbacks(Counter)) == []


def check_names_of_loaders(folder: Path) -> None:
    assert list(make_trainer().validate([rows(1), rows(2)])) == ["validate_0", "validate_1"]


class Iterations(Callback):
    """Notes the steps, counted from 1, that are the first, the last, or logged."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        self.logged: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        step = trainer.progress.step + 1
        self.first += [step] if trainer.is_first_iteration else []
        self.last += [step] if trainer.is_final_iteration else []
        self.logged += [step] if trainer.is_log_step else []


def check_iterations(folder: Path) -> None:
    noted = Iterations()
    fit(callbacks=[noted], loop={"max_duration": 5, "log_interval": 2}, val=None)
    assert (noted.first, noted.last, noted.logged) == ([1], [5], [2, 4, 5])


def check_name_scope(folder: Path) -> None:
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


def check_exceptions(folder: Path) -> None:
    noted = Exceptions()
    with pytest.raises(ZeroDivisionError) as caught:
        fit(callbacks=[FailIn("on_train_batch_end", error=ZeroDivisionError), noted], val=None)
    assert [(where, error is caught.value) for where, error in noted.noted] == [("train", True), ("fit", True)]
    told = [caught.value.__context__, caught.value.__cause__, *getattr(caught.value, "__notes__", [])]
    assert "in the hook" in " ".join(map(str, told))


class Extra(Callback):
    """Adds to the state of a checkpoint, and takes it back."""

    loaded: Any = None

    def on_save_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        state["extra"] = {"text": "saved"}

    def postprocess_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        state["extra"]["text"] += ", postprocessed"

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        self.loaded = state["extra"]


def check_state_from_hooks(folder: Path) -> None:
    fit(folder, loop={"max_duration": 1}, save={}, callbacks=[Extra()], val=None)
    extra = Extra()
    fit(folder, loop={"max_duration": 2}, save={}, callbacks=[extra], val=None)
    assert extra.loaded == {"text": "saved, postprocessed"}


ORDER = (
    *("on_before_forward", "on_after_forward", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_after_optimizer_step"),
    *("on_before_optimizer_zero_grad", "on_after_optimizer_zero_grad"),
    *("on_before_scheduler_step", "on_after_scheduler_step"),
)


def check_order(folder: Path) -> None:
    calls: list[str] = []
    hooks = {hook: (lambda self, *arguments, hook=hook: calls.append(hook)) for hook in ORDER}
    noting = type("Noting", (Callback,), hooks)()
    schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # noqa: E731
    fit(callbacks=[noting], schedulers=schedule, loop={"max_duration": 1}, val=None)
    assert tuple(calls) == ORDER


def check_hook_of_a_loop(folder: Path) -> None:
    class Probes(Callback):
        calls: list[str] = []  # noqa: RUF012
        validation_hooks = ("probe",)

        def on_probe_start(self, *arguments: Any) -> None:
            self.calls.append("start")

        def on_probe_batch_end(self, *arguments: Any) -> None:
            self.calls.append("batch")

        def on_probe_end(self, *arguments: Any) -> None:
            self.calls.append("end")

    trainer = make_trainer(callbacks=[Probes()])
    trainer.validate(rows(2), loop=ValidationLoop(hook="probe"))
    assert Probes.calls == ["start", "batch", "batch", "end"]


def check_all_pairs(folder: Path) -> None:
    trainer = fit(folder, loop={"max_duration": 3}, save={"save_interval": 1}, val=None).trainer
    loaders = {"a": rows(1), "b": rows(2)}
    pairs = trainer.validate_all(loaders, [folder / "checkpoints" / "step1", str(folder / "checkpoints" / "step[23]")])
    assert [(row.step, row.loader) for row in pairs] == [(step, name) for step in (1, 2, 3) for name in ("a", "b")]
    with pytest.raises(FileNotFoundError, match="matches no valid checkpoint"):
        trainer.validate_all(loaders, str(folder / "none" / "step*"))


INIT = "trainer.py: __init__"
CLAIMS: list[Claim] = [
    *claims(
        "callbacks/early_stopping.py",
        check_early_exit,
        {"a function is registered, and its handle takes it back; what cannot be called is refused": ()},
    ),
    *claims(
        "loop.py: ValidationLoop(hook=)",
        check_hook_of_a_loop,
        {"a loop with a hook of its own calls hooks of this name": ()},
    ),
    *claims(
        "callbacks/loss.py: CheckLoss",
        check_loss,
        {"a loss of NaN ends the training": (float("nan"),), "an infinite loss ends the training": (float("inf"),)},
    ),
    *claims(
        f"{INIT} type checks",
        check_type,
        {
            f"{slot}={value!r} is refused with what was expected": (slot, value, message)
            for slot, value, message in [
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
            ]
        },
    ),
    *claims(
        INIT,
        check_type,
        {"a logger among the callbacks is told": ("callbacks", [ListLogger()], "expected Callback, got ListLogger")},
        difference="It is refused rather than warned of, since nothing would be written by it.",
    ),
    *claims(INIT, check_saver_is_last, {"what saves is the last callback": ()}),
    *claims(
        INIT,
        check_optimizer_of_another_model,
        {"an optimizer as an instance beside a function that makes the model is refused": ()},
    ),
    *claims(INIT, check_only_validates, {"without an optimizer a fit is refused, and a validation works": ()}),
    *claims(INIT, check_schedulers, {"schedulers=3 is refused with its name": ()}),
    *claims(INIT, check_two_of_one_class, {"two callbacks of one class have states of their own": ()}),
    *claims(
        "trainer.py: backward",
        check_scaled_and_clipped,
        {"the loss is scaled, and gradients are unscaled and clipped before the optimizer's step": ()},
    ),
    *claims("trainer.py: call", check_misspelt_hook, {"a misspelt hook is refused": ()}),
    *claims(
        "trainer.py: call",
        check_error_in_a_hook,
        {"an exception in a hook keeps its type, and tells the callback and the hook": ()},
    ),
    *claims("trainer.py: fit", check_no_loader, {"what is no loader is refused": ("fit",)}),
    *claims("trainer.py: validate", check_no_loader, {"what is no loader is refused": ("validate",)}),
    *claims("trainer.py: validate_all", check_no_path, {"what is no path is refused": ()}),
    *claims(
        "trainer.py: validate_all",
        check_all_pairs,
        {"each checkpoint of paths and globs has a row for each loader; a glob without a match is an error": ()},
    ),
    *claims("trainer.py: fit", check_loop_of_evaluations, {"a trainer whose loop only validates does not fit": ()}),
    *claims("trainer.py: forward", check_changed_call, {"on_before_forward changes the call in place": ()}),
    *claims(
        "trainer.py: get_callback, get_callbacks",
        check_callbacks_by_class,
        {"callbacks are found by their class, the global ones too": ()},
    ),
    *claims(
        "trainer.py: get_val_dataloader_scope",
        check_names_of_loaders,
        {"several loaders without names are validate_0 and validate_1": ()},
    ),
    *claims(
        "trainer.py: is_first_iteration, is_final_iteration, is_log_step",
        check_iterations,
        {"they are true at their steps": ()},
    ),
    *claims("trainer.py: name_scope", check_name_scope, {"scopes within scopes come before the name, as a/b/": ()}),
    *claims(
        "trainer.py: on_exception",
        check_exceptions,
        {"hooks of training and fit are called with the exception, and an error in a hook does not replace it": ()},
    ),
    *claims(
        "trainer.py: save_checkpoint",
        check_state_from_hooks,
        {"hooks add to the saved state, change it, and take it back": ()},
    ),
    *claims(
        "trainer.py: training_step",
        check_order,
        {"forward, backward, optimizer, gradients and schedules come in this order": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
