"""A training step of a user's own: several losses and optimizers, accumulated, scaled and clipped by the base class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_parts import present
from tiny import ListLogger, assert_resumes_exactly, loader, recorder, same, trainer
from torch import Tensor, nn
from torch.optim import SGD, Adam

from trainer_cli import Trainer, TrainStep, optimizer_factory
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.optim.optimizers import parameters_of
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision


class Two(nn.Module):
    """Two lines; the second one's loss depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(2, 1)

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        first = self.one(x).squeeze(-1)
        return (first - y).square().mean(), (first + self.two(x).squeeze(-1) - y).square().mean()

    def forward(self, batch: Any) -> Tensor:
        return self.losses(batch)[1]


def _losses(step: TrainStep, batch: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(step.model, Two)
    return step.model.losses(batch)


class Both(TrainStep):
    """One loss for each optimizer; the base class steps both."""

    def train_batch(self, batch: Any) -> Any:
        one, two = _losses(self, batch)
        self.backward(two, "two", weight=self.batch_size)
        self.backward(_losses(self, batch)[0], "one")
        return {"loss": one + two, "own": one}


class Alternating(TrainStep):
    def train_batch(self, batch: Any) -> Any:
        for name, index in (("one", 0), ("two", 1)):
            loss = _losses(self, batch)[index]
            self.backward(loss, name)
            self.optimizer_step(name)
        return loss


class Forgetful(TrainStep):
    def train_batch(self, batch: Any) -> Any:
        loss = self.forward(batch)
        loss.backward()
        return loss


class Leaving(Both):
    def update(self) -> None:
        self.optimizer_step("one")


class Unknown(TrainStep):
    def train_batch(self, batch: Any) -> Any:
        self.backward(self.forward(batch), "onne")


class Seldom(TrainStep):
    """Steps one of its optimizers at every second step, and counts."""

    count = 0

    def train_batch(self, batch: Any) -> Any:
        self.count += 1
        one, two = _losses(self, batch)
        self.backward(one, "one")
        if self.count % 2 == 0:
            self.backward(two.detach() + _losses(self, batch)[1], "two")
        return one

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


OPTIMIZERS = {
    "one": optimizer_factory(Adam, params="one.*", lr=0.01),
    "two": optimizer_factory(SGD, params=["two.weight", "two.bias"], lr=0.1, momentum=0.9),
}


def _fit(step: TrainStep | None, precision: dict[str, Any] | None = None, **more: Any) -> Any:
    made = trainer(
        Two, optimizer=OPTIMIZERS, step=step, precision=Precision(**(precision or {})),
        settings=more.pop("settings", {}),
        **more,
    )  # fmt: skip
    made.fit(loader(16, 4, noise=0))
    return made


def _by_hand(accum: int = 1, clip: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    optimizers = [OPTIMIZERS["one"](model), OPTIMIZERS["two"](model)]
    batches = [batch for epoch in range(6) for batch in loader(16, 4, noise=0).iterate(epoch)]
    for step in range(6):
        for batch in batches[step * accum : (step + 1) * accum]:
            one, two = model.losses(batch)
            torch.autograd.backward(two / accum, inputs=list(model.two.parameters()), retain_graph=True)
            torch.autograd.backward(one / accum, inputs=list(model.one.parameters()))
        for optimizer in optimizers:
            if clip is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("accum", "clip"), [(1, None), (1, 0.1), (2, 0.1), (4, None)])
def test_each_loss_changes_its_own_parameters_as_by_hand(accum: int, clip: float | None, dtype: str) -> None:
    precision = {"clip_norm": clip, "dtype": dtype} | ({"loss_scale": 1024.0} if dtype == "fp16" else {})
    made = _fit(Both(), precision, settings={"grad_accum_steps": accum})
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made.model.state_dict(), _by_hand(accum, clip).state_dict(), **tolerance)


class Several(TrainStep):
    """Calls `backward` for each of some losses of the same batch."""

    def __init__(self, parts: int, name: str | None, *, shares_graph: bool) -> None:
        self.parts, self.name, self.shares_graph = parts, name, shares_graph

    def train_batch(self, batch: Any) -> Any:
        losses = [*_losses(self, batch), self.model.get_parameter("one.weight").square().sum()][: self.parts]
        for index, loss in enumerate(losses):
            again = loss if self.shares_graph else [*_losses(self, batch), loss][index]
            self.backward(again, self.name, retain_graph=self.shares_graph)
        return torch.stack(losses).sum().detach()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("shares_graph", [False, True])
@pytest.mark.parametrize("name", [None, pytest.param("only", marks=pytest.mark.campaign)])
@pytest.mark.parametrize(("size", "accum"), [(16, 1), pytest.param(8, 2, marks=pytest.mark.campaign), (4, 4)])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_several_losses_of_a_batch_add_up_as_in_a_loop_by_hand(
    parts: int, size: int, accum: int, name: str | None, shares_graph: bool, dtype: str
) -> None:
    made = trainer(
        Two, optimizer={"only": lambda model: SGD(model.parameters(), lr=0.1)},
        step=Several(parts, name, shares_graph=shares_graph), precision=Precision(dtype),
        settings={"max_duration": 3, "grad_accum_steps": accum},
    )  # fmt: skip
    by_hand = Two()
    by_hand.load_state_dict(made.model.state_dict())
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    made.fit(loader(48, size, noise=0, shuffle=False))
    for batch in loader(48, 16, noise=0, shuffle=False).iterate(0):
        for loss in [*by_hand.losses(batch), by_hand.one.weight.square().sum()][:parts]:
            torch.autograd.backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made.model.state_dict(), by_hand.state_dict(), **tolerance)


class Hessian(SGD):
    """Divides gradients by an estimate of the Hessian's diagonal, as AdaHessian does, which needs their graph."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        gradients = [parameter.grad for parameter in parameters]
        with torch.enable_grad():
            products = torch.autograd.grad(gradients, parameters, [torch.ones_like(value) for value in gradients])
        with torch.no_grad():
            for parameter, gradient, product in zip(parameters, gradients, products, strict=True):
                parameter.sub_(0.1 * gradient / (product.abs() + 1))


class Penalized(TrainStep):
    """A loss and the norm of its gradients, which needs their graph, for an optimizer that needs it too."""

    def train_batch(self, batch: Any) -> Any:
        loss = _penalized(self.forward(batch), self.model)
        self.backward(loss, create_graph=True)
        return loss.detach()


def _penalized(loss: Tensor, model: nn.Module) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("accum", [1, 2])
def test_second_order_steps_are_those_of_a_loop_by_hand(accum: int) -> None:
    made = trainer(
        Two, optimizer=lambda model: Hessian(model.parameters(), lr=0.1), step=Penalized(),
        settings={"max_duration": 3, "grad_accum_steps": accum},
    )  # fmt: skip
    model = Two()
    model.load_state_dict(made.model.state_dict())
    optimizer = Hessian(model.parameters(), lr=0.1)
    made.fit(loader(24, 8 // accum, noise=0, shuffle=False))
    batches = [*loader(24, 8 // accum, noise=0, shuffle=False).iterate(0)]
    for step in range(3):
        optimizer.zero_grad()
        for batch in batches[step * accum : (step + 1) * accum]:
            torch.autograd.backward(_penalized(model(batch), model) / accum, create_graph=True)
        optimizer.step()
    torch.testing.assert_close(made.model.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)


class Centers(nn.Module):
    """A loss with parameters, a buffer that it changes, and a mode."""

    seen: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("weight", torch.tensor(0.7))

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.weight * (features - self.centers).square().mean()


class Holding(TrainStep):
    """Holds a loss with centers, a temperature, and a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        self.criterion, self.temperature = Centers(), nn.Parameter(torch.tensor(2.0))
        self.teacher = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5)).requires_grad_(False).eval()
        self.plain = nn.BCEWithLogitsLoss()
        for parameter in self.teacher.parameters():
            parameter.fill_(0.3)

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        assert not self.teacher[1].training
        values = self.criterion(self.model.get_submodule("one")(batch[0])) * self.temperature
        return outputs + values + self.teacher(batch[0]).mean()

    def train_batch(self, batch: Any) -> Any:
        loss = self.loss(self.forward(batch), batch)
        self.backward(loss)
        return loss


@pytest.mark.parametrize("accum", [1, 2])
def test_what_a_step_holds_is_trained_as_in_a_loop_by_hand_and_resumed(accum: int, tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        made = trainer(
            Two, optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), step=Holding(),
            settings={"max_duration": 6, "grad_accum_steps": accum, "eval_interval": 2},
            callbacks=[EMA(0.5), *callbacks], checkpoint=CheckpointerCallback(folder, save_interval=2),
        )  # fmt: skip
        made.fit(loader(48, 8 // accum, noise=0, shuffle=False), loader(8, noise=0))
        return made

    made, _ = assert_resumes_exactly(fit, tmp_path, 3)
    torch.manual_seed(0)
    model, step = Two(), Holding()
    step.model = model
    optimizer = SGD([*model.parameters(), *step.criterion.parameters(), step.temperature], lr=0.05, momentum=0.9)
    batches = [*loader(48, 8 // accum, noise=0, shuffle=False).iterate(0)]
    for number in range(6):
        optimizer.zero_grad()
        for batch in batches[number * accum : (number + 1) * accum]:
            torch.autograd.backward(step.loss(model(batch), batch) / accum)
        optimizer.step()
    expected = {**model.state_dict(), "train_step.temperature": step.temperature}
    expected |= {f"train_step.criterion.{name}": value for name, value in step.criterion.state_dict().items()}
    expected |= {f"train_step.teacher.{name}": value for name, value in step.teacher.state_dict().items()}
    torch.testing.assert_close(dict(made.model.state_dict()), expected)
    assert made.step.criterion.seen == 6 * accum
    state = made.checkpointer.read(tmp_path / "straight" / "step6")
    assert sorted(state["model"]) == sorted(expected)


class Taught(TrainStep):
    def __init__(self, *, frozen: bool) -> None:
        self.teacher = nn.Linear(2, 1).requires_grad_(not frozen)

    def train_batch(self, batch: Any) -> Any:
        with torch.no_grad():
            goal = self.teacher(batch[0]).mean()
        loss = self.forward(batch) + goal
        self.backward(loss)
        return loss


@pytest.mark.parametrize("frozen", [False, True])
def test_a_teacher_of_a_step_is_in_optimizer_and_averages_unless_it_is_frozen(frozen: bool) -> None:
    optimizer = optimizer_factory(SGD, lr=0.1)
    made = trainer(Two, optimizer=optimizer, step=Taught(frozen=frozen), callbacks={"ema": EMA(0.5)})
    made.fit(loader())
    names = {"train_step.teacher.weight", "train_step.teacher.bias"}
    parameters = dict(made.model.named_parameters())
    trained = {id(parameter) for group in present(made.optimizer).param_groups for parameter in group["params"]}
    assert {name for name in names if id(parameters[name]) in trained} == (set() if frozen else names)
    assert names & set(made.callbacks["ema"].state_dict()["average"]) == (set() if frozen else names)


def test_what_a_step_holds_is_moved_and_stays_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    model: nn.Module = Two()
    step = Holding()
    Trainer(model=model, step=step, device="meta")
    assert {value.device.type for value in step.criterion.buffers()} == {"meta"}
    # Another trainer of the same model has a step without modules, and one of an earlier step has others.
    plain = trainer(Two())
    model = plain.model
    assert not any(name.startswith("train_step") for name in model.state_dict())
    holding = trainer(model, step=Holding())
    assert holding.model is model
    assert "train_step.temperature" in model.state_dict()
    trainer(model, step=holding.step)
    assert [name for name in model.state_dict() if "train_step.train_step" in name] == []
    trainer(model)
    assert not any(name.startswith("train_step") for name in model.state_dict())


class Weighted(TrainStep):
    """Holds no parameters: weights of classes."""

    def __init__(self, weight: float | None = 2.0) -> None:
        self.criterion = nn.BCEWithLogitsLoss(None if weight is None else torch.tensor([weight]))


def test_a_checkpoint_without_what_the_step_holds_is_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Any] = []
    for weights in ((None, 2.0), (2.0, None)):
        folder = tmp_path / str(len(ends))
        for weight, length in zip(weights, (3, 6), strict=True):
            saver = CheckpointerCallback(folder)
            made = trainer(step=Weighted(weight), settings={"max_duration": length}, checkpoint=saver)
            made.fit(loader())
        assert (made.loaded_step, made.progress.step) == (3, 6)
        ends.append(made.model.get_submodule("linear").state_dict())
    assert same(*ends) == []
    assert [each for each in caplog.messages if "has no" in each] == [
        "the checkpoint has no train_step.criterion.weight: as they were made"
    ]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"losses": [Centers()]}, r"OddStep.losses contains parameters .* Use torch.nn.ModuleList"),
        ({"losses": {"a": Centers()}}, "OddStep.losses contains parameters"),
        ({"scales": (nn.Parameter(torch.ones(1)),)}, "OddStep.scales contains parameters"),
        ({"lazy": nn.LazyLinear(2)}, "lazy.weight has no shape before"),
    ],
)
def test_parameters_that_a_step_hides_are_refused(attributes: dict[str, Any], message: str) -> None:
    step = type("OddStep", (TrainStep,), {})()
    vars(step).update(attributes)
    with pytest.raises(UserError, match=message):
        trainer(step=step)


def test_what_a_step_may_hide_and_a_name_that_is_taken() -> None:
    step = TrainStep()
    model = Two()
    vars(step).update(
        losses=[Centers().requires_grad_(False), nn.BCEWithLogitsLoss()], part=model.one, whole=nn.Sequential(model),
        names={"a": 1}, again=model.one.weight,
    )  # fmt: skip
    assert "train_step" not in dict(trainer(model, step=step).model.named_modules())
    model.train_step = nn.Linear(1, 1)
    trainer(model, step=step, optimizer=lambda model: SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="the model has an attribute 'train_step'"):
        trainer(model, step=Holding())


class Masked(nn.Module):
    """A mean over the known values of a batch, which weighs as much as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        x, known = batch
        weight = known.sum()
        return {"loss": ((self.w * x - 1).square() * known).sum() / weight.clamp(min=1), "weight": weight}


class OwnWeight(TrainStep):
    """How a step of a user's own says the weight of a batch: by the model, by `backward`, by what it returns."""

    def __init__(self, how: str) -> None:
        self.how = how

    def train_batch(self, batch: Any) -> Any:
        outputs = (self.model if "itself" in self.how else self.forward)(batch)
        weight = outputs["weight"]
        if "mapped" in self.how:
            outputs = {"loss": outputs["loss"]}
        given = {"passed": weight, "zero": 0, "other": weight + 1}
        for kind in self.how.split(" and "):
            self.backward(outputs["loss"], weight=given.get(kind.split()[0]), retain_graph=True)
        return outputs


@pytest.mark.parametrize(
    ("how", "factor"),
    [("forward", 1), ("passed", 1), ("passed mapped", 1), ("passed and passed", 2), ("zero and passed", 1),
     ("passed and zero", 1), ("passed itself", 1), ("returned itself", None), ("passed and other", None)],
)  # fmt: skip
def test_the_weight_of_a_batch_weighs_gradients_and_means_or_is_refused(how: str, factor: int | None) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, torch.arange(6) < torch.tensor([1, 6, 2, 5, 0, 6, 3, 4])[:, None])
    ends = []
    for size, accum in ((8, 1), (2, 4), (1, 8)):
        made = trainer(
            Masked, step=OwnWeight(how), settings={"max_duration": 1, "grad_accum_steps": accum, "log_interval": 1}
        )
        if accum > 1 and factor is None:
            said = "weighted by the number of samples" if how == "returned itself" else "one batch have the weights"
            with pytest.raises(UserError, match=said):
                made.fit(torch.utils.data.DataLoader(data, batch_size=size))
            continue
        result = made.fit(torch.utils.data.DataLoader(data, batch_size=size))
        ends.append([made.model.get_parameter("w").item(), result.metrics["train/loss"]])
    model = Masked()
    loss = model(data[:])["loss"]
    loss.backward()
    if factor is not None:
        assert ends[0][0] == pytest.approx(1 - 0.1 * factor * present(model.w.grad).item(), rel=1e-5)
        assert [loss for _, loss in ends] == pytest.approx([loss.item()] * 3, rel=1e-5)
    assert ends == [pytest.approx(ends[0], rel=1e-5)] * len(ends)


def test_an_evaluation_has_the_weights_of_the_model_where_the_gradients_have_those_of_samples() -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, torch.arange(6) < torch.tensor([1, 6, 2, 5, 1, 6, 3, 4])[:, None])
    settings = {"max_duration": 2, "grad_accum_steps": 2, "eval_interval": 1}
    made = trainer(Masked, step=OwnWeight("samples itself mapped"), settings=settings)
    val = [torch.utils.data.DataLoader(data, batch_size=size) for size in (8, 3)]
    metrics = made.fit(torch.utils.data.DataLoader(data, batch_size=2), dict(zip("ab", val, strict=True))).metrics
    assert metrics["a/loss"] == pytest.approx(metrics["b/loss"], rel=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_optimizers_may_be_stepped_in_turn(dtype: str) -> None:
    logger = ListLogger()
    made = _fit(Alternating(), {"dtype": dtype, "clip_norm": 1.0}, settings={"log_interval": 2}, loggers=[logger])
    assert made.progress.step == 6
    assert {"train/lr/one", "train/lr/two", "train/grad_norm/one"} <= set(logger.records[0].metrics)
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_the_hooks_are_called_for_each_backward_and_each_step() -> None:
    book: list[str] = []
    _fit(Alternating(), callbacks=[recorder(book)], settings={"max_duration": 1})
    turn = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_after_optimizer_step",
            "on_before_optimizer_zero_grad", "on_after_optimizer_zero_grad"]  # fmt: skip
    begin = book.index("on_before_backward")
    assert book[begin : begin + 12] == turn * 2


def test_one_loss_may_have_several_optimizers() -> None:
    made = _fit(None)
    first = trainer(Two).model.state_dict()
    assert not any(torch.equal(value, first[name]) for name, value in made.model.state_dict().items())


@pytest.mark.parametrize(
    ("step", "settings", "message"),
    [
        (Alternating(), {"grad_accum_steps": 2}, "Step it in update"),
        (Forgetful(), {}, r"Forgetful has stepped no optimizer.*self.backward"),
        (Leaving(), {}, "Leaving.update left gradients of the optimizer 'two'"),
        (Unknown(), {}, r"no optimizer 'onne'\. Did you mean 'one'"),
    ],
)
def test_a_step_that_would_train_wrongly_is_refused(step: TrainStep, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _fit(step, settings=settings)


def test_an_optimizer_that_steps_seldom_and_a_count_survive_a_resume(tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        saver = CheckpointerCallback(folder)
        return _fit(Seldom(), callbacks=callbacks, checkpoint=saver, settings={"max_duration": 8})

    _, resumed = assert_resumes_exactly(fit, tmp_path, 3)
    assert resumed.step.count == 8


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"a": "one.*", "b": "one.bias"}, "one.bias is in two optimizers, a and b"),
        ({"a": "three.*", "b": None}, "'three..' matches no trained parameter"),
        ({"a": None, "b": None}, "a and b have no params"),
    ],
)
def test_globs_give_a_parameter_to_one_optimizer(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parameters_of(Two(), chosen)


def test_the_optimizer_without_params_has_the_rest() -> None:
    model = Two()
    model.one.bias.requires_grad_(False)
    found = parameters_of(model, {"a": None, "b": ["two.*"]})
    assert found == {"a": ["one.weight"], "b": ["two.weight", "two.bias"]}


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        ({"optimizer": OPTIMIZERS["one"]}, "called 'optimizer'"),
        ({"a/b": OPTIMIZERS["one"]}, "called 'a/b'"),
        (
            {"a": OPTIMIZERS["one"], "b": optimizer_factory(SGD, lr=0.1)},
            "a parameter is in two optimizers, a and b. .* by `params` of optimizer_factory",
        ),
        ({"a": optimizer_factory(SGD, params="onne.*", lr=0.1)}, r"optimizer\.params: 'onne\.\*' matches no trained"),
        ({"a": 3}, "optimizer.a: expected Optimizer, got int"),
        ({"a": OPTIMIZERS["one"]}, "no optimizer has the parameter two.weight"),
        (
            {"a": OPTIMIZERS["one"], "b": optimizer_factory(SGD, params="two.bias", lr=0.1)},
            r"no optimizer has the parameter two\.weight .*Leave out params of one optimizer",
        ),
        ({"a": lambda model: SGD(model.one.parameters(), lr=0.1)}, "no optimizer has the parameter two.weight"),
    ],
)
def test_optimizers_of_the_library_are_checked(optimizers: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trainer(Two, optimizer=optimizers)


def test_a_frozen_parameter_needs_no_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(Two, optimizer={"a": OPTIMIZERS["one"]}, freeze=["two.*"])
    assert len(made.optimizers["a"].param_groups[0]["params"]) == 2
    assert not caplog.messages


def test_parameters_that_a_single_optimizer_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer(Two, optimizer=OPTIMIZERS["one"])
    assert [
        "lacks 2 trained parameters, which will not change: two.weight, two.bias." in each for each in caplog.messages
    ] == [True]


class InBackward(TrainStep):
    """Steps the optimizer for each parameter as soon as its gradient is there, which then frees its memory."""

    hooked = False

    def train_batch(self, batch: Any) -> Any:
        if not self.hooked:
            self.hooked = True
            for parameter in self.model.parameters():
                cast("Any", parameter).register_post_accumulate_grad_hook(self.step_one)
        return super().train_batch(batch)

    def update(self) -> None:
        assert all(parameter.grad is None for parameter in self.model.parameters())
        super().update()

    def step_one(self, parameter: torch.Tensor) -> None:
        (optimizer,) = self.trainer.optimizers.values()
        optimizer.step()
        parameter.grad = None


def test_an_optimizer_may_step_in_the_backward_and_resumes_exactly(tmp_path: Path) -> None:
    def fit(kind: type[TrainStep], folder: Path, *callbacks: Callback) -> Any:
        made = trainer(
            step=kind(), callbacks=callbacks, checkpoint=CheckpointerCallback(folder, save_interval=3),
            settings={"max_duration": 8}, optimizer=lambda model: Adam(model.parameters(), lr=0.1),
            schedulers=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=1),
        )  # fmt: skip
        made.fit(loader())
        return made

    straight, _ = assert_resumes_exactly(partial(fit, InBackward), tmp_path, 4)
    plain = fit(TrainStep, tmp_path / "plain")
    assert same(plain.model.state_dict(), straight.model.state_dict()) == []


def test_a_setting_may_be_kept_of_one_optimizer_alone(tmp_path: Path) -> None:
    _fit(Both(), checkpoint=CheckpointerCallback(tmp_path))
    faster = {
        "one": optimizer_factory(Adam, params="one.*", lr=0.5),
        "two": optimizer_factory(SGD, params="two.*", lr=0.7, momentum=0.9),
    }
    made = trainer(Two, optimizer=faster, step=Both(), checkpoint=CheckpointerCallback(tmp_path))
    made.fit(loader(16, 4, noise=0), keep_settings=["two.lr"])
    assert [optimizer.param_groups[0]["lr"] for optimizer in made.optimizers.values()] == [0.01, 0.7]
