"""Optimizers and parameters beyond the usual ones: closures, two modes, added groups, fused kernels, odd gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import Line, ListLogger, assert_resumes_exactly, everything, loader, make_sgd, on, same, trainer
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop

from trainer_cli import WarmupCosine, optimizer_factory
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.optim.optimizers import can_be_fused
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision


def _fit(
    folder: Path | None, optimizer: Any, *callbacks: Callback, length: int = 8, model: Any = Line, **more: Any
) -> Any:
    made = trainer(
        model,
        optimizer=optimizer,
        callbacks=callbacks,
        settings={"max_duration": length, **more.pop("settings", {})},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=3, save_async=False),
        **more,
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


def _lbfgs(model: nn.Module, search: str | None = None) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, history_size=3, line_search_fn=search)


# A line search compares the losses that the closure returns; without one only the gradients matter.
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_lbfgs_takes_the_steps_of_a_plain_loop_with_a_closure(accumulated: int, search: str | None) -> None:
    make = partial(_lbfgs, search=search)
    made = trainer(optimizer=make, settings={"max_duration": 3, "grad_accum_steps": accumulated})
    model = Line()
    model.load_state_dict(made.model.state_dict())
    optimizer = make(model)
    made.fit(loader(8, noise=0))
    batches = [batch for epoch in range(3) for batch in loader(8, noise=0).iterate(epoch)]
    for step in range(3):
        part = batches[step * accumulated : (step + 1) * accumulated]

        def closure(part: Any = part) -> Any:
            optimizer.zero_grad()
            loss: Any = sum(model(batch)["loss"] for batch in part) / len(part)
            loss.backward()
            return loss

        optimizer.step(cast("Any", closure))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(made.model.get_parameter(name), parameter)
    assert cast("Line", made.model).calls > 3 * accumulated, "the loss is evaluated again"


class TwoLosses(SGD):
    """Evaluates the loss twice before it steps."""

    losses: list[tuple[float, float]]

    def step(self, closure: Any) -> None:  # type: ignore[override]
        self.losses.append((float(closure()), float(closure())))
        super().step()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_closure_returns_first_the_loss_that_the_step_was_trained_on(accumulated: int) -> None:
    def fail_once(made: Any, *more: Any) -> None:
        # Before the step, or in the middle of it, if it has several batches.
        if made.model.calls == 5:
            raise ZeroDivisionError

    make: Any = type("Noting", (TwoLosses,), {"losses": []})
    made = trainer(
        optimizer=lambda model: make(model.parameters(), lr=0.01),
        callbacks=[on(on_after_backward=fail_once)],
        settings={"grad_accum_steps": accumulated},
    )
    with pytest.raises(ZeroDivisionError):
        made.fit(loader(8))
    made.fit(loader(8))
    assert len(make.losses) == 6
    assert [first for first, _ in make.losses] == pytest.approx([second for _, second in make.losses])


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware SGD (Foret et al.): its order of moves and calls of the closure is `plan`."""

    plan = ""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.losses: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        moves: list[Any] = []
        for act in self.plan.split():
            if act == "call":
                self.losses.append(float(torch.enable_grad()(closure)()))
            elif act == "clear":
                self.zero_grad()
            elif act == "zero":
                self.zero_grad(set_to_none=False)
            elif act == "back":
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.data.sub_(move)
            else:
                moves = [0.3 * parameter.grad for parameter in parameters if parameter.grad is not None]
                for parameter, move in zip(parameters, moves, strict=True):
                    # The first changes a version of the parameter that torch counts, the second does not.
                    (parameter if act == "move" else parameter.data).add_(move)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


PLANS = ("move clear call back", "data clear call back", "move call back", "data call back", "clear call",
         "call move clear call back", "zero call", "call call", "call data call back call", "move call move call",
         )  # fmt: skip


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_a_closure_computes_the_gradients_of_the_present_weights_in_any_order_of_calls(
    plan: str, accumulated: int
) -> None:
    kind: Any = type("Planned", (Sharp,), {"plan": plan})
    made = trainer(
        optimizer=lambda model: kind(model.parameters()),
        settings={"max_duration": 4, "grad_accum_steps": accumulated},
    )
    model = Line()
    model.load_state_dict(made.model.state_dict())
    optimizer = kind(model.parameters())
    made.fit(loader(8, 8 // accumulated, noise=0, shuffle=False))
    (batch,) = loader(8, 8, noise=0, shuffle=False).iterate(0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = model(batch)["loss"]
        loss.backward()
        return loss

    for _ in range(4):
        closure()
        optimizer.step(closure)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(made.model.get_parameter(name), parameter)
    assert cast("Any", made.optimizer).losses == pytest.approx(optimizer.losses)


def test_a_closure_that_an_optimizer_needs_but_does_not_require_is_named() -> None:
    class Optional(SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None, "sharpness-aware minimization requires a closure"

    class Required(Optional):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            super().step(closure)

    with pytest.raises(UserError, match=r"Optional.step needs a closure.*`def step\(self, closure\)"):
        trainer(optimizer=lambda model: Optional(model.parameters())).fit(loader())
    trainer(optimizer=lambda model: Required(model.parameters())).fit(loader())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"precision": Precision("fp16")}, "the loss cannot be scaled"),
        ({"callbacks": [CheckFinite("skip")]}, "the loss cannot be scaled"),
        (
            {
                "optimizer": {
                    "a": lambda m: torch.optim.LBFGS([m.linear.weight]),
                    "b": lambda m: torch.optim.SGD([m.linear.bias]),
                }
            },
            "it must be the only optimizer",
        ),
    ],
)
def test_what_a_closure_cannot_do_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"a step of LBFGS evaluates the loss several times, and {reason}"):
        trainer(**{"optimizer": _lbfgs, **more}).fit(loader())


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
def test_without_the_fused_kernel_the_weights_are_those_of_a_plain_loop_bit_for_bit(kind: Any) -> None:
    for fused in (None, False):
        settings: dict[str, Any] = {} if fused is None else {"fused": fused}
        make = optimizer_factory(kind, lr=0.05, **settings)
        made = trainer(optimizer=make, settings={"max_duration": 6})
        assert made.optimizer is not None
        assert bool(made.optimizer.defaults["fused"]) is (fused is None)
    model = Line()
    model.load_state_dict(made.model.state_dict())
    optimizer = kind(model.parameters(), lr=0.05)
    made.fit(loader(24, 4, noise=0, shuffle=False))
    for batch in loader(24, 4, noise=0, shuffle=False).iterate(0):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    assert same(made.model.state_dict(), model.state_dict()) == []


class Rateless(SGD):
    """Has a rate of its own: none in its groups, or one that is None."""

    def __init__(self, params: Any, *, absent: bool) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None
            if absent:
                del group["lr"]

    def step(self, closure: Any = None) -> Any:
        groups = [group.copy() for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step()
        for group, before in zip(self.param_groups, groups, strict=True):
            del group["lr"]
            group.update(before)


@pytest.mark.parametrize("absent", [False, True])
def test_an_optimizer_without_a_rate_trains_and_logs_none(tmp_path: Path, absent: bool) -> None:
    logger, make = ListLogger(), lambda model: Rateless(model.parameters(), absent=absent)

    def fit(folder: Path, *callbacks: Callback) -> Any:
        loggers = [logger] if folder.name == "straight" else []
        return _fit(folder, make, *callbacks, settings={"log_interval": 1}, loggers=loggers)

    assert_resumes_exactly(fit, tmp_path, 4)
    assert len(logger.records) == 8
    assert all("train/loss" in record.metrics and "train/lr" not in record.metrics for record in logger.records)


def test_a_schedule_of_an_optimizer_without_a_rate_is_refused() -> None:
    made = trainer(
        optimizer=lambda model: Rateless(model.parameters(), absent=True), schedulers=lambda o: WarmupCosine(o, 6)
    )
    with pytest.raises(UserError, match="Rateless has no learning rate for a schedule to change"):
        made.fit(loader())


class Averaging(torch.optim.Optimizer):
    """SGD that trains weights between those that it steps and their mean, and evaluates the mean."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, *, mode_in_groups: bool = True) -> None:
        mode = {"train_mode": False} if mode_in_groups else {}
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, **mode})
        self.mode_in_groups, self.is_training = mode_in_groups, False

    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if training == (group["train_mode"] if self.mode_in_groups else self.is_training):
                continue
            if self.mode_in_groups:
                group["train_mode"] = training
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)
        self.is_training = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0].get("train_mode", self.is_training), "step in the mode of an evaluation"
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                mean = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                mean.lerp_(z, 1 / (group["k"] + 1))
                parameter.copy_(mean.lerp(z, 1 - group["beta"]))
            group["k"] += 1


@pytest.fixture(params=[True, False], ids=["mode in the groups", "mode in an attribute"])
def averaging(request: pytest.FixtureRequest) -> Any:
    return lambda model: Averaging(model.parameters(), 0.1, mode_in_groups=request.param)


class Weights(Callback):
    """Keeps the weights that each step begins with, and those that are evaluated."""

    def __init__(self) -> None:
        self.trained: dict[int, Tensor] = {}
        self.evaluated: dict[int, Tensor] = {}

    def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
        self.trained[trainer.progress.step] = model.linear.weight.detach().clone()

    def on_validate_start(self, trainer: Any, model: Any, *args: Any) -> None:
        self.evaluated[trainer.progress.step] = model.linear.weight.detach().clone()


def test_evaluations_and_checkpoints_have_the_evaluated_weights_and_training_goes_on_exactly(
    tmp_path: Path, averaging: Any, caplog: pytest.LogCaptureFixture
) -> None:
    weights, logger, seldom = {"straight": Weights(), "parts": Weights()}, ListLogger(), Weights()

    def fit(folder: Path, *callbacks: Callback) -> Any:
        loggers = [logger] if folder.name == "straight" else []
        settings = {"eval_interval": 1, "log_interval": 1}
        return _fit(folder, averaging, weights[folder.name], *callbacks, settings=settings, loggers=loggers)

    straight, _ = assert_resumes_exactly(fit, tmp_path, 4)
    assert "is configured" not in caplog.text, "what an optimizer counts is no setting"
    often = weights["straight"]
    assert same(weights["parts"].trained, often.trained) == []
    _fit(None, averaging, seldom)
    assert same(often.trained, seldom.trained) == [], "evaluations and saves change nothing of the training"
    assert all(not torch.equal(often.evaluated[step], often.trained[step]) for step in range(2, 8))
    assert torch.equal(straight.model.linear.weight, often.evaluated[8]), "after the fit too"
    state = straight.checkpointer.read(tmp_path / "straight" / "step6")
    assert torch.equal(torch.as_tensor(state["model"]["linear.weight"]), often.evaluated[6])
    logged = next(record.metrics["val/loss"] for record in logger.records if record.step == 6)
    other = trainer(optimizer=averaging)
    assert other.validate(loader(6, shuffle=False), tmp_path / "straight" / "step6")["val"]["loss"] == logged


def test_a_callback_that_switches_the_modes_itself_changes_little() -> None:
    modes = on(
        on_train_start=lambda trainer, *_: trainer.optimizer.train(),
        on_train_end=lambda trainer, *_: trainer.optimizer.eval(),
    )
    twice, once = Weights(), Weights()
    for callbacks in ([modes, twice], [once]):
        _fit(None, lambda model: Averaging(model.parameters(), 0.1), *callbacks, settings={"eval_interval": 2})
    for switched, expected in ((twice.trained, once.trained), (twice.evaluated, once.evaluated)):
        torch.testing.assert_close([switched[step] for step in expected], list(expected.values()))


def test_a_checkpoint_loaded_by_hand_is_evaluated_by_its_evaluated_weights(tmp_path: Path, averaging: Any) -> None:
    straight = _fit(tmp_path, averaging)
    other = trainer(optimizer=averaging)
    other.load_checkpoint(tmp_path / "step8")
    val = loader(6, shuffle=False)
    assert other.validate(val) == straight.validate(val)


def test_a_search_for_a_rate_leaves_an_optimizer_of_two_modes_as_it_was(averaging: Any) -> None:
    made = trainer(optimizer=averaging)
    before = copy.deepcopy(everything(made)["model"])
    pytest.importorskip("trainer_cli.addons.auto.find").find_learning_rate(made, loader(), steps=4)
    assert same(before, everything(made)["model"]) == []
    assert not cast("Any", made.optimizer).is_training


def test_a_setting_is_compared_with_the_configured_one_however_often_a_checkpoint_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, make_sgd)
    halve = on(on_train_batch_end=lambda made, *_: made.optimizer.param_groups[0].update(lr=made.progress.step))
    made = trainer(optimizer=make_sgd, callbacks=[halve])
    made.fit(loader())
    made.load_checkpoint(tmp_path / "step8")
    assert "is configured" not in caplog.text
    other = trainer(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    other.load_checkpoint(tmp_path / "step8")
    assert "optimizer: lr is 0.1, as in the checkpoint; 0.3 is configured" in caplog.text


class Complex(Line):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))

    def forward(self, batch: Any) -> Any:
        return super().forward(((batch[0].to(torch.complex64) @ self.turn).abs(), batch[1]))


class Sparse(Line):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 2, sparse=True)

    def forward(self, batch: Any) -> Any:
        return super().forward((batch[0] + self.words((batch[0][:, 0] * 4).long()), batch[1]))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {},
    "skip": {"callbacks": [CheckFinite("skip")]},
    "go back": {"callbacks": [CheckFinite("roll_back")]},
    "fp16": {"precision": Precision("fp16", loss_scale=8.0)},
    "clip_norm": {"precision": Precision(clip_norm=0.1)},
    "clip_value": {"precision": Precision(clip_value=0.1)},
    "accumulation": {"settings": {"grad_accum_steps": 2}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [Complex, Sparse])
def test_complex_and_sparse_gradients_are_checked_clipped_and_logged(kind: Any, setting: str) -> None:
    norms: list[float] = []
    largest: list[float] = []

    def values(model: nn.Module) -> Iterator[Tensor]:
        for parameter in model.parameters():
            if (gradient := parameter.grad) is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                yield torch.view_as_real(dense) if dense.is_complex() else dense

    gradients = on(
        on_before_optimizer_step=lambda trainer, model, optimizer: norms.append(
            math.hypot(*(float(value.norm()) for value in values(model)))
        ),
        on_after_optimizer_step=lambda trainer, model, optimizer: largest.extend(
            float(value.abs().max()) for value in values(model)
        ),
    )
    logger, more = ListLogger(), dict(SETTINGS[setting])
    if setting == "norms":
        more["callbacks"] = [pytest.importorskip("trainer_cli.addons.inspect.tensors").Norms(weights=True)]
    made = trainer(
        kind,
        callbacks=[*more.pop("callbacks", []), gradients],
        loggers=[logger],
        settings={"max_duration": 3, "log_interval": 1, **more.pop("settings", {})},
        **more,
    )
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    made.fit(loader(12))
    assert all(not torch.equal(*pair) for pair in zip(before, made.model.parameters(), strict=True))
    assert max(largest) <= (0.1001 if setting.startswith("clip") else math.inf)
    key = {"norms": "train/norm/gradients", "clip_norm": "train/grad_norm"}.get(setting)
    if key is not None:
        assert [record.metrics[key] for record in logger.records] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("kind", [Complex, Sparse])
def test_a_step_whose_complex_or_sparse_gradients_are_not_finite_is_skipped(kind: Any) -> None:
    def plant(trainer: Any, model: nn.Module, batch: Any) -> None:
        if trainer.progress.step == 1:
            batch[1].fill_(float("nan"))

    watch = CheckFinite("skip")
    trainer(kind, callbacks=[on(on_train_step_start=plant), watch], settings={"max_duration": 3}).fit(loader(12))
    assert watch.times == 1


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear(1), "0.weight"), (nn.LazyBatchNorm1d(affine=False), "0.running_mean")]
)
def test_a_model_with_lazy_modules_is_refused_in_one_sentence(layer: nn.Module, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} has no shape before the model's first forward.*Call the model once"):
        trainer(lambda: nn.Sequential(layer, nn.Linear(1, 1)))


Own = type("Own", (AdamW,), {})
# An optimizer, a function that makes a model, settings, and whether the optimizer steps in one kernel.
FUSED: dict[str, tuple[Any, Callable[[], nn.Module], dict[str, Any], bool]] = {
    **{kind.__name__: (kind, lambda: nn.Linear(2, 1), {}, True) for kind in (Adam, AdamW, SGD, Adagrad)},
    **{f"no kernel: {kind.__name__}": (kind, lambda: nn.Linear(2, 1), {}, False) for kind in (RMSprop, LBFGS, Own)},
    "null is not a choice": (SGD, lambda: nn.Linear(2, 1), {"fused": None, "foreach": None}, True),
    **{
        f"chosen: {setting}": (SGD, lambda: nn.Linear(2, 1), setting, False)
        for setting in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True})
    },
    "first gradients at different steps: SGD": (SGD, lambda: nn.Linear(2, 1), {"momentum": 0.9}, False),
    "no values": (SGD, lambda: nn.Linear(2, 1, device="meta"), {}, False),
    "complex": (SGD, lambda: nn.Linear(2, 1, dtype=torch.complex64), {}, False),
    "sparse gradients": (SGD, lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)), {}, False),
}


@pytest.mark.parametrize("name", FUSED)
def test_an_optimizer_steps_in_one_kernel_where_there_is_one_and_nothing_was_chosen(name: str) -> None:
    kind, make, settings, fused = FUSED[name]
    model = make()
    parameters = list(model.parameters())
    assert can_be_fused(kind, settings, [{"params": parameters}], model) is fused
    assert can_be_fused(kind, {}, [{"params": parameters, **settings}], model) is fused


@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
def test_a_fused_kernel_of_torch_steps_on_the_cpu(kind: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


class _Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, as those do that look ahead or sharpen."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class _Shared(_Wrapper):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state = self.base.state


class _Owned(_Wrapper):
    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class _Several(_Wrapper):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.all = [self.__dict__.pop("base")]

    def step(self, closure: Any = None) -> Any:
        return self.all[0].step(closure)


@pytest.mark.parametrize(
    ("kind", "is_saved"), [(_Wrapper, False), (_Several, False), (_Shared, True), (_Owned, True), (SGD, True)]
)
def test_an_optimizer_within_another_is_saved_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, is_saved: bool
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(model.parameters())
        return optimizer

    whole = _fit(None, make)
    _fit(tmp_path, make, settings={"hard_stop": 3})
    resumed = _fit(tmp_path, make)
    assert (same(everything(resumed), everything(whole)) == []) is is_saved
    assert ("steps by an optimizer of its own (SGD) whose state is not in" in caplog.text) is not is_saved


@pytest.mark.parametrize("kind", [_Wrapper, _Several, _Shared, _Owned])
def test_a_fit_from_step_0_and_a_trial_leave_no_state_in_an_optimizer_within_another(kind: Any) -> None:
    made = _fit(None, lambda model: kind(model.parameters()))
    first = copy.deepcopy(everything(made))
    made.fit(loader(), loader(6, shuffle=False), ckpt_path=None)
    assert same(everything(made), first) == []
