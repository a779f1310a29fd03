"""Optimizers and parameters beyond the usual ones: closures, two modes, complex and sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, everything, loader, same, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.tensors import Norms
from trainer_cli.errors import UserError
from trainer_cli.trainer.find import find_learning_rate
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


# Optimizers that evaluate the loss several times a step.


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, history_size=3)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lbfgs_takes_the_steps_of_a_plain_loop_with_a_closure(accumulated: int) -> None:
    made = trainer(optimizer=_lbfgs, settings={"max_duration": 3, "grad_accum_steps": accumulated})
    model = Line()
    model.load_state_dict(made.model.state_dict())
    optimizer = _lbfgs(model)
    made.fit(loader(8, noise=0))
    batches = [batch for epoch in range(3) for batch in loader(8, noise=0).iterate(epoch)]
    for step in range(3):
        part = batches[step * accumulated : (step + 1) * accumulated]

        def closure(part: Any = part) -> Tensor:
            optimizer.zero_grad()
            loss = sum(model(batch)["loss"] for batch in part) / len(part)
            loss.backward()
            return loss

        optimizer.step(closure)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(made.model.get_parameter(name), parameter)
    assert made.model.calls > 3 * accumulated, "the loss is evaluated again"


@pytest.mark.parametrize("precision", [None, Precision(clip_norm=0.5)], ids=["plain", "clipped"])
def test_a_resume_with_lbfgs_is_exact(tmp_path: Path, precision: Any) -> None:
    straight = _fit(tmp_path / "straight", _lbfgs, precision=precision)
    _fit(tmp_path / "parts", _lbfgs, StopAt(4), precision=precision)
    resumed = _fit(tmp_path / "parts", _lbfgs, precision=precision)
    assert same(everything(straight), everything(resumed)) == []


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


# Optimizers that train other weights than they evaluate.


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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
    often, seldom, logger = Weights(), Weights(), ListLogger()
    settings = {"eval_interval": 1, "log_interval": 1}
    straight = _fit(tmp_path / "straight", averaging, often, settings=settings, loggers=[logger])
    _fit(None, averaging, seldom)
    assert same(often.trained, seldom.trained) == [], "evaluations and saves change nothing of the training"
    assert all(not torch.equal(often.evaluated[step], often.trained[step]) for step in range(2, 8))
    assert torch.equal(straight.model.linear.weight, often.evaluated[8]), "after the fit too"
    state = straight.checkpointer.read(tmp_path / "straight" / "step6")
    assert torch.equal(torch.as_tensor(state["model"]["linear.weight"]), often.evaluated[6])
    logged = next(record.metrics["val/loss"] for record in logger.records if record.step == 6)
    other = trainer(optimizer=averaging)
    assert other.validate(loader(6, shuffle=False), tmp_path / "straight" / "step6")["val"]["loss"] == logged

    _fit(tmp_path / "parts", averaging, StopAt(4), settings=settings)
    again = Weights()
    resumed = _fit(tmp_path / "parts", averaging, again, settings=settings)
    assert same(again.trained, {step: often.trained[step] for step in range(4, 8)}) == []
    assert same(everything(straight), everything(resumed)) == []
    assert "is configured" not in caplog.text, "what an optimizer counts is no setting"


def test_a_callback_that_switches_the_modes_itself_changes_little() -> None:
    class Modes(Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            trainer.optimizer.train()

        def on_train_end(self, trainer: Any, *args: Any) -> None:
            trainer.optimizer.eval()

    def averaging(model: nn.Module) -> torch.optim.Optimizer:
        return Averaging(model.parameters(), 0.1)

    own, ours = Weights(), Weights()
    _fit(None, averaging, Modes(), own, settings={"eval_interval": 2})
    _fit(None, averaging, ours, settings={"eval_interval": 2})
    for weights, expected in ((own.trained, ours.trained), (own.evaluated, ours.evaluated)):
        for step in expected:
            torch.testing.assert_close(weights[step], expected[step])


def test_a_checkpoint_loaded_by_hand_is_evaluated_by_its_evaluated_weights(tmp_path: Path, averaging: Any) -> None:
    straight = _fit(tmp_path, averaging)
    other = trainer(optimizer=averaging)
    other.load_checkpoint(tmp_path / "step8")
    val = loader(6, shuffle=False)
    assert other.validate(val) == straight.validate(val)


def test_a_search_for_a_rate_leaves_an_optimizer_of_two_modes_as_it_was(averaging: Any) -> None:
    made = trainer(optimizer=averaging)
    before = everything(made)["model"]
    before = {name: value.clone() for name, value in before.items()}
    find_learning_rate(made, loader(), steps=4)
    assert same(before, everything(made)["model"]) == []
    assert not made.optimizer.is_training


# Settings that are configured, and those that an optimizer counts.


def test_a_setting_is_compared_with_the_configured_one_however_often_a_checkpoint_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    class Halve(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5

    _fit(tmp_path, sgd)
    made = trainer(optimizer=sgd, callbacks=[Halve()])
    made.fit(loader())
    made.load_checkpoint(tmp_path / "step8")
    assert "is configured" not in caplog.text
    other = trainer(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3))
    other.load_checkpoint(tmp_path / "step8")
    assert "optimizer: lr is 0.1, as in the checkpoint; 0.3 is configured" in caplog.text


# Complex and sparse gradients.


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
    "norms": {"callbacks": [Norms(weights=True)]},
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

    def values(model: nn.Module) -> Iterator[Tensor]:
        for parameter in model.parameters():
            if (gradient := parameter.grad) is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                yield torch.view_as_real(dense) if dense.is_complex() else dense

    class Gradients(Callback):
        def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            norms.append(math.hypot(*(float(value.norm()) for value in values(model))))

        def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            largest = max(float(value.abs().max()) for value in values(model))
            assert largest <= (0.1001 if setting.startswith("clip") else math.inf)

    logger, more = ListLogger(), dict(SETTINGS[setting])
    made = trainer(
        kind,
        callbacks=[*more.pop("callbacks", []), Gradients()],
        loggers=[logger],
        settings={"max_duration": 3, "log_interval": 1, **more.pop("settings", {})},
        **more,
    )
    before = [parameter.detach().clone() for parameter in made.model.parameters()]
    made.fit(loader(12))
    assert all(not torch.equal(*pair) for pair in zip(before, made.model.parameters(), strict=True))
    key = {"norms": "train/norm/gradients", "clip_norm": "train/grad_norm"}.get(setting)
    if key is not None:
        assert [record.metrics[key] for record in logger.records] == pytest.approx(norms, rel=1e-5)


def test_a_step_whose_complex_or_sparse_gradients_are_not_finite_is_skipped() -> None:
    class Plant(Callback):
        def on_train_step_start(self, trainer: Any, model: nn.Module, batch: Any) -> None:
            if trainer.progress.step == 1:
                batch[1].fill_(float("nan"))

    for kind in (Complex, Sparse):
        watch = CheckFinite("skip")
        trainer(kind, callbacks=[Plant(), watch], settings={"max_duration": 3}).fit(loader(12))
        assert watch.times == 1


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear(1), "0.weight"), (nn.LazyBatchNorm1d(affine=False), "0.running_mean")]
)
def test_a_model_with_lazy_modules_is_refused_in_one_sentence(layer: nn.Module, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} has no shape before the model's first forward.*Call the model once"):
        trainer(lambda: nn.Sequential(layer, nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"labelled": loader(), "unlabelled": loader()}, r"there is a mapping \('labelled', 'unlabelled'\) where one"),
        (zip(loader().iterate(0), loader().iterate(0), strict=True), "zip can be iterated only once"),
    ],
    ids=["mapping", "zip"],
)
def test_several_train_loaders_are_refused_in_one_sentence(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer().fit(data)
