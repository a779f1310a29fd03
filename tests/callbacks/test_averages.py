"""EMA and SWA: the average of the weights is evaluated in their place, is saved with them, and is given to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import BodyAndHead, ListLogger, Noisy, assert_resumes_exactly, everything, loader, on, same, trainer
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.loads.options import WEIGHTS, LoadOptions
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.train_step import TrainStep

EVERY_TWO = {"max_duration": 8, "eval_interval": 2}
AVERAGES: dict[str, Callable[[], Any]] = {"ema": lambda: EMA(0.5), "swa": lambda: SWA(1, 1)}
TRAINED = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.4.weight", "body.4.bias"]


class Weights(Callback):
    """Records the model's state after each step, and as evaluations see it."""

    def __init__(self) -> None:
        self.after: list[dict[str, Any]] = []
        self.evaluated: dict[tuple[int, str], dict[str, Any]] = {}

    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        self.after.append(_copy(trainer.model))

    def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.after.append(_copy(model))

    def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None:
        self.evaluated[(trainer.progress.step, "loader")] = _copy(model)

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        self.evaluated[(trainer.progress.step, "downstream")] = _copy(trainer.model)


def _copy(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _fit(callbacks: dict[str, Callback], folder: Path | None = None, model: Any = Noisy, **more: Any) -> Any:
    made = trainer(
        model,
        callbacks=callbacks,
        settings={**EVERY_TWO, **more.pop("settings", {})},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=2, save_async=False),
        **more,
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


def _trained(path: Path) -> Any:
    return make_sync_checkpointer().load(path)["model"]


def _average(path: Path, name: str) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = make_sync_checkpointer().load(path)["callbacks"][name]["average"]
    return values


def _evaluated(path: Path, name: str) -> dict[str, torch.Tensor]:
    """What evaluations of a checkpoint see."""
    return {**_trained(path), **_average(path, name)}


@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, "1ep"), (3, 5)])
def test_an_ema_follows_the_weights(every: int, start: Any) -> None:
    weights, ema = Weights(), EMA(0.7, every=every, start=start)
    _fit({"ema": ema, "weights": weights})
    first = {"1ep": 3}.get(start, start)
    expected = dict(weights.after[first])
    for step in range(first + 1, 9):
        if step % every == 0:
            expected = {
                name: torch.lerp(value, weights.after[step][name], 1 - 0.7) if value.is_floating_point() else value
                for name, value in expected.items()
            }
    values = ema.state_dict()["average"]
    assert list(values) == TRAINED
    assert same(values, {name: expected[name] for name in values}) == []


@pytest.mark.parametrize(
    ("average", "warned"),
    [
        (
            EMA(0.999),
            "99 % of the average of EMA will be the first weights, after 8 updates: a smaller decay, such as 0.7,",
        ),
        (EMA(0.75), "10 % of the average of EMA will be the first weights, after 8 updates"),
        (EMA(0.74), None),
        (
            EMA(0.6, every=2),
            "12 % of the average of EMA will be the first weights, after 4 updates: a smaller decay, such as 0.5,",
        ),
        (
            EMA(0.5, start=5),
            "12 % of the average of EMA will be the first weights, after 3 updates: a smaller decay, such as 0.4,",
        ),
        (EMA(0.999, every=9), "after 0 updates: a smaller `every` averages the last ones"),
        (EMA(0.999, start=9), None),
        (SWA("1ep", "2ep"), None),
    ],
)
def test_an_average_that_is_long_for_the_run_is_a_warning_at_its_beginning(
    average: Any, warned: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        _fit({"average": average}, tmp_path)
    assert caplog.text.count("the first weights") == (warned is not None)
    assert (warned or "") in caplog.text


@pytest.mark.parametrize(
    ("steps", "every", "decay", "advised"),
    [(200, 1, 0.99, "0.98"), (229, 1, 0.99, "0.98"), (300, 1, 0.999, "0.992"), (1000, 1, 0.999, "0.997"),
     (10, 1, 0.9, "0.7"), (4, 2, 0.5, "0.3"), (4000, 1, 0.9999, "0.9994"), (2, 1, 0.9, "0.3"), (1, 1, 0.9, "0.1")],
)  # fmt: skip
def test_the_advised_decay_gives_no_warning(
    steps: int, every: int, decay: float, advised: str, caplog: pytest.LogCaptureFixture
) -> None:
    EMA(decay, every=every)._warn_if_long(0, 0, steps)
    assert f"such as {advised}, averages" in caplog.text
    caplog.clear()
    EMA(float(advised), every=every)._warn_if_long(0, 0, steps)
    assert caplog.text == ""


@pytest.mark.parametrize(("start", "every", "steps"), [("2ep", "1ep", [6, 9, 12]), (5, 2, [5, 6, 8, 10, 12])])
def test_an_swa_is_the_average_of_torch(start: Any, every: Any, steps: list[int]) -> None:
    class AsTorch(Callback):
        model: Any = None

        def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.step in steps:
                self.model = self.model or AveragedModel(model, use_buffers=True)
                self.model.update_parameters(model)

    reference, weights = AsTorch(), Weights()
    _fit({"swa": SWA(start, every), "torch": reference, "weights": weights}, settings={"max_duration": "4ep"})
    for name, value in reference.model.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(weights.evaluated[12, "loader"][name], value)


@pytest.mark.parametrize("make", AVERAGES.values(), ids=AVERAGES)
def test_several_optimizers_make_one_update_a_step(make: Any) -> None:
    def of(*parts: int) -> Any:
        return lambda model: torch.optim.SGD([value for at in parts for value in model.body[at].parameters()], lr=0.1)

    alone, beside = make(), make()
    _fit({"average": alone}, optimizer=of(0, 1, 4))
    _fit({"average": beside}, optimizer={"first": of(0, 1), "second": of(4)})
    assert same(alone.state_dict(), beside.state_dict()) == []


def test_every_evaluation_sees_the_average_and_training_never() -> None:
    seen, bare, ema = Weights(), Weights(), EMA(0.5, start=3)
    _fit({"ema": ema, "weights": seen})
    _fit({"weights": bare})
    assert same(seen.after, bare.after) == []
    assert same(seen.evaluated[2, "loader"], bare.evaluated[2, "loader"]) == []
    values = ema.state_dict()["average"]
    for evaluation in ("loader", "downstream"):
        state, plain = seen.evaluated[8, evaluation], bare.evaluated[8, evaluation]
        assert same({name: state[name] for name in values}, values) == []
        rest = [name for name in state if name not in values]
        assert rest == ["frozen", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"]
        assert same({name: state[name] for name in rest}, {name: plain[name] for name in rest}) == []
        assert same(state, plain)


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_validate_batch_end", RuntimeError),
        ("on_enter_validate", KeyboardInterrupt),
        ("run_validation", RuntimeError),
    ],
)
def test_the_weights_come_back_bit_for_bit_after_an_error_in_an_evaluation(hook: str, error: Any) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise error("in the evaluation")

    weights, fails = Weights(), type("Fails", (Callback,), {hook: fail})()
    made = trainer(Noisy, callbacks=[EMA(0.5), weights, fails], settings=EVERY_TWO)
    with pytest.raises(error, match="in the evaluation"):
        made.fit(loader(), loader(6))
    assert len(weights.after) == 3
    assert same(_copy(made.model), weights.after[-1]) == []


def test_evaluating_checkpoints_gives_what_the_training_measured(tmp_path: Path) -> None:
    log = ListLogger()
    _fit({"ema": EMA(0.9)}, tmp_path / "ema", loggers=[log], run_dir=tmp_path)
    trainer(Noisy, checkpoint=CheckpointerCallback(tmp_path / "bare")).fit(loader())
    only = trainer(Noisy, optimizer=None, callbacks={"ema": EMA(0.9)}, seed=7)
    paths = [*(tmp_path / f"ema/step{step}" for step in (2, 4, 6, 8)), tmp_path / "bare/step6"]
    *rows, bare = only.validate_all(loader(6, shuffle=False), paths)
    measured = {record.step: record.metrics["val/loss"] for record in log.records}
    assert {row.step: row.metrics["loss"] for row in rows} == measured
    # A checkpoint without an average is evaluated with its weights.
    assert bare.metrics == trainer(Noisy, optimizer=None).validate(loader(6, shuffle=False), paths[-1])["val"]


@pytest.mark.parametrize("kind", AVERAGES)
def test_the_trained_weights_of_a_checkpoint_are_evaluated_on_demand(kind: str, tmp_path: Path) -> None:
    made = _fit({kind: AVERAGES[kind]()}, tmp_path)
    val, newest = loader(6, shuffle=False), tmp_path / "step8"
    average = made.validate(val, newest)
    trained = made.validate(val, newest, load=LoadOptions(states=["model"], average=False))
    assert trained == trainer(Noisy).validate(val, newest) != average
    assert made.validate(val, newest) == average
    for call in (made.validate, made.predict):
        with pytest.raises(UserError, match="no effect on the present weights"):
            call(val, None, load=LoadOptions(states=["model"], average=False))


def test_a_fork_averages_from_the_weights_it_begins_with(tmp_path: Path) -> None:
    first = _fit({"ema": EMA(0.9)}, tmp_path)
    forked = EMA(0.9, every=100)
    made = trainer(Noisy, callbacks={"ema": forked}, seed=3, settings={"max_duration": 1})
    made.fit(loader(), ckpt_path=tmp_path / "step8", load=LoadOptions(states=["model"]))
    values = forked.state_dict()["average"]
    assert same(values, first.callbacks["ema"].state_dict()["average"]) == []
    assert same(first.model.state_dict(), values)


def test_one_that_is_new_on_a_resume_is_reported_and_begins_with_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit({}, tmp_path, settings={"max_duration": 4})
    new = EMA(0.9, every=100)
    made = _fit({"ema": new}, tmp_path)
    assert "callback 'ema' has state, but the checkpoint has none for it: it starts new" in caplog.text
    assert same(new.state_dict()["average"], dict(made.model.named_parameters()))
    assert made.loaded_step == 4


class Tied(nn.Module):
    """Half its parameters in 16 bits; two that are one; one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        return ((self.other(self.one(x)) * self.short.float() * self.frozen).sum(-1) - y).square().mean()


def test_tied_weights_are_averaged_once_16_bits_in_32_and_frozen_ones_not(tmp_path: Path) -> None:
    ema = EMA(0.999)
    made = _fit({"ema": ema}, tmp_path, Tied)
    values = ema.state_dict()["average"]
    assert {name: value.dtype for name, value in values.items()} == dict.fromkeys(
        ("one.weight", "short"), torch.float32
    )
    assert made.model.other.weight is made.model.one.weight
    assert not torch.equal(values["short"], values["short"].bfloat16().float())
    again = _fit({"ema": EMA(0.999)}, tmp_path, Tied, settings={"max_duration": 9})
    straight = _fit({"ema": EMA(0.999)}, None, Tied, settings={"max_duration": 9})
    assert same(everything(straight), everything(again)) == []


def test_an_average_that_does_not_fit_is_in_the_table(tmp_path: Path) -> None:
    class Spoil(Callback):
        def postprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            values = state["callbacks"]["ema"]["average"]
            values["body.0.bias"] = torch.zeros(3)
            values["body.0.weight"] = values["body.0.weight"].double()
            values["more"] = values.pop("body.4.bias")

    _fit({"ema": EMA(0.9), "spoil": Spoil()}, tmp_path, settings={"max_duration": 1})
    ema = EMA(0.9)
    with pytest.raises(UserError) as caught:
        _fit({"ema": ema}, tmp_path)
    for row in (
        "body.0.bias: has shape (8,) in this model, but (3,) in the checkpoint",
        "body.0.weight: is torch.float64 in the checkpoint, but torch.float32 here",
        "more: averaged in the checkpoint, but no parameter of this model",
        "body.4.bias: missing in the checkpoint",
    ):
        assert row in str(caught.value)
    assert ema.state_dict() == {"average": {}}


@pytest.fixture(scope="module", params=AVERAGES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name of the callback, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    _fit({request.param: AVERAGES[request.param]()}, folder, settings={"max_duration": 4})
    return request.param, folder


def test_the_manifest_names_the_callback_whose_average_was_evaluated(run: tuple[str, Path]) -> None:
    name, folder = run
    assert make_sync_checkpointer().manifest(folder / "step4").average == name


@pytest.mark.parametrize("callbacks", [{}, {"ema": EMA(0.5, start=4)}], ids=["no average", "one that has not begun"])
def test_where_weights_were_evaluated_no_average_is_named(callbacks: dict[str, Callback], tmp_path: Path) -> None:
    _fit(callbacks, tmp_path, settings={"max_duration": 2})
    assert make_sync_checkpointer().manifest(tmp_path / "step2").average is None
    assert b'"average"' not in (tmp_path / "step2" / "manifest.json").read_bytes()


def test_of_several_averages_the_last_is_evaluated_and_named(tmp_path: Path) -> None:
    class Looks(Callback):
        def on_validate_start(self, trainer: Any, model: nn.Module, loader: Any, loop: Any) -> None:
            self.seen = model.state_dict()["body.0.weight"].clone()

    ema, swa, looks = EMA(0.5), SWA(1, 1), Looks()
    made = _fit({"ema": ema, "swa": swa, "looks": looks}, tmp_path, settings={"max_duration": 4})
    first, last = (each.state_dict()["average"]["body.0.weight"] for each in (ema, swa))
    assert torch.equal(looks.seen, last)
    assert not any(torch.equal(other, last) for other in (first, made.model.state_dict()["body.0.weight"]))
    assert make_sync_checkpointer().manifest(tmp_path / "step4").average == "swa"


@pytest.fixture
def exports() -> Any:
    """What writes weights alone; the module of an add-on."""
    return pytest.importorskip("trainer_cli.addons.formats.export_run")


@pytest.mark.parametrize("ema", [None, "its own", "none"])
def test_export_strip_and_average_give_what_was_evaluated(
    run: tuple[str, Path], tmp_path: Path, ema: str, exports: Any
) -> None:
    name, folder = run
    source = folder / "step4"
    ema = name if ema == "its own" else ema
    expected = _trained(source) if ema == "none" else _evaluated(source, name)
    assert same(_trained(source), _evaluated(source, name)) != []
    exported = exports.export_one(source, exports.ExportFormat.torch, tmp_path / "weights.pt", ema=ema)
    stripped = exports.strip(source, tmp_path / "stripped1", ema=ema)
    mean = exports.average([source, source], tmp_path / "mean1", ema=ema)
    assert same(torch.load(tmp_path / "weights.pt"), expected) == []
    for written in ("stripped1", "mean1"):
        assert same(_trained(tmp_path / written), expected) == []
    assert {each.average for each in (exported, stripped, mean)} == {None if ema == "none" else name}
    assert make_sync_checkpointer().manifest(tmp_path / "stripped1").average is None


def test_a_mean_of_averages_and_of_trained_weights_is_refused(
    run: tuple[str, Path], tmp_path: Path, exports: Any
) -> None:
    _fit({}, tmp_path / "plain", settings={"max_duration": 4})
    both = [run[1] / "step4", tmp_path / "plain" / "step4"]
    with pytest.raises(UserError, match="--ema none"):
        exports.average(both, tmp_path / "mean1")
    exports.average(both, tmp_path / "mean1", ema="none")


@pytest.mark.parametrize("takes_average", [True, False])
def test_a_run_that_begins_with_its_weights_begins_with_what_was_evaluated(
    run: tuple[str, Path], takes_average: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name, source = run[0], run[1] / "step4"
    caplog.set_level("INFO")
    fresh = trainer(Noisy, settings={"max_duration": 1})
    fresh.load_checkpoint(source, LoadOptions(WEIGHTS.states, average=takes_average))
    expected = _evaluated(source, name) if takes_average else _trained(source)
    assert same(everything(fresh)["model"], expected) == []
    assert (f"the average of callback '{name}'" in caplog.text) is takes_average


def test_a_fork_of_everything_keeps_weights_and_average_apart(run: tuple[str, Path]) -> None:
    name, source = run[0], run[1] / "step4"
    fresh = trainer(Noisy, callbacks={name: AVERAGES[name]()}, settings={"max_duration": 6})
    fresh.load_checkpoint(source)
    assert same(everything(fresh)["model"], _trained(source)) == []
    assert same(fresh.callbacks[name].state_dict()["average"], _average(source, name)) == []


@pytest.mark.parametrize(
    ("states", "expected", "named", "measured"),
    [
        (["model"], "evaluated", False, True),
        (["model", "callbacks"], "trained", True, True),
        (["model", "optimizer"], "trained", False, False),
    ],
)
def test_a_copy_of_states_has_the_metrics_of_the_weights_that_are_in_it(
    states: list[str], expected: str, named: bool, measured: bool, tmp_path: Path
) -> None:
    copies = SaveCheckpointState(states, folder=str(tmp_path / "copies"))
    _fit({"ema": EMA(0.5), "copies": copies}, tmp_path / "run", settings={"max_duration": 4})
    source, copy = tmp_path / "run" / "step4", tmp_path / "copies" / "step4"
    assert same(_trained(copy), _evaluated(source, "ema") if expected == "evaluated" else _trained(source)) == []
    manifest = make_sync_checkpointer().manifest(copy)
    assert (manifest.average == "ema", "val/loss" in manifest.metrics) == (named, measured)


def _all(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _trained_ones(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)


def _trains(part: str, value: bool) -> Callable[[Any, Any], None]:
    return lambda trainer, model: model.get_submodule(part).requires_grad_(value)


def _add(trainer: Any, model: Any) -> None:
    model.body.requires_grad_(True)
    trainer.optimizer.add_param_group({"params": list(model.body.parameters())})


class InTurn(TrainStep):
    """Switches `requires_grad` inside a step, as that of a GAN does."""

    def train_batch(self, batch: Any) -> Any:
        losses = {}
        for name, other in (("head", "body"), ("body", "head")):
            self.model.get_submodule(name).requires_grad_(True)
            self.model.get_submodule(other).requires_grad_(False)
            losses[name] = self.model(batch)
            self.backward(losses[name], name)
            self.optimizer_step(name)
        return {"loss": losses["head"]}


_IN_TURN = {
    "step": InTurn,
    "optimizer": {
        "body": lambda model: torch.optim.SGD(model.body.parameters(), lr=0.1),
        "head": lambda model: torch.optim.SGD(model.head.parameters(), lr=0.1),
    },
}
CHANGES: dict[str, tuple[bool, dict[str, Any], str, Any]] = {
    "unfrozen at the end of a step": (False, {"optimizer": _all}, "on_train_batch_end", _trains("body", True)),
    "unfrozen before a step": (False, {"optimizer": _all}, "on_train_batch_start", _trains("body", True)),
    "unfrozen as a new group": (False, {"optimizer": _trained_ones}, "on_train_batch_end", _add),
    "unfrozen as a new group before a step": (False, {"optimizer": _trained_ones}, "on_train_batch_start", _add),
    "frozen": (True, {"optimizer": _all}, "on_train_batch_end", _trains("body", False)),
    "frozen by a schedule": (True, {"optimizer": _all, "freeze": {"body.*": 4}}, "on_fit_end", None),
    "switched in each step": (True, _IN_TURN, "on_fit_end", None),
    "switched in each step, and frozen as built": (False, _IN_TURN, "on_fit_end", None),
}
"""What changes at step 4 of which parts are trained: whether the body is trained at first, arguments of the trainer,
and a hook with what it does."""


def _fit_changing(folder: Path, *callbacks: Callback, change: str, average: Any, steps: int = 8) -> Any:
    trained, more, hook, act = CHANGES[change]
    hooks = {hook: lambda trainer, model, *_: act(trainer, model) if trainer.progress.step == 4 else None}
    more = {**more, "step": more["step"]()} if "step" in more else more
    parts = {str(number): callback for number, callback in enumerate(callbacks)}
    made = trainer(
        lambda: BodyAndHead(trained),
        callbacks={**({"change": on(**hooks)} if act else {}), "average": average(), **parts},
        settings={"max_duration": steps, "eval_interval": 3},
        checkpoint=CheckpointerCallback(folder, save_async=False),
        **more,
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


_KINDS: dict[str, tuple[Any, list[int], Any]] = {
    "ema": (lambda: EMA(0.7), list(range(9)), cast("Any", get_ema_multi_avg_fn)(0.7)),
    "ema from 3": (lambda: EMA(0.7, start=3), list(range(3, 9)), cast("Any", get_ema_multi_avg_fn)(0.7)),
    "ema from 5": (lambda: EMA(0.7, start=5), list(range(5, 9)), cast("Any", get_ema_multi_avg_fn)(0.7)),
    "swa": (lambda: SWA(2, 2), [2, 4, 6, 8], None),
    "swa from 6": (lambda: SWA(6, 2), [6, 8], None),
}
"""The callback, the steps at which it is updated, and the average of torch."""


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_frozen_or_unfrozen_is_averaged_as_by_torch_from_the_start(
    change: str, kind: str, tmp_path: Path
) -> None:
    average, steps, multi_avg_fn = _KINDS[kind]
    reference: list[Any] = []

    def update(trainer: Any, *_: Any) -> None:
        if trainer.progress.step in steps:
            if not reference:
                reference.append(AveragedModel(trainer.model, multi_avg_fn=multi_avg_fn))
            reference[0].update_parameters(trainer.model)

    weights = Weights()
    made = _fit_changing(
        tmp_path, on(on_fit_start=update, on_train_batch_end=update), weights, change=change, average=average
    )
    expected = dict(reference[0].module.state_dict())
    torch.testing.assert_close(weights.evaluated[8, "loader"], expected, rtol=1e-5, atol=1e-6)
    assert set(made.callbacks["average"].state_dict()["average"]) == set(expected)


@pytest.mark.parametrize("kind", ["ema from 5", "swa"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_average_of_changing_parts_is_exact_after_a_stop(change: str, kind: str, tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit_changing(folder, *callbacks, change=change, average=_KINDS[kind][0])

    for stop in (4, 7):
        straight, _ = assert_resumes_exactly(fit, tmp_path / str(stop), stop)
    fresh = trainer(lambda: BodyAndHead(CHANGES[change][0]), optimizer=None, callbacks={"average": _KINDS[kind][0]()})
    (row,) = fresh.validate_all(loader(6, shuffle=False), tmp_path / "7/straight/step8")
    assert row.metrics["loss"] == straight.loading.last_metrics()["val/loss"]
    forked = trainer(lambda: BodyAndHead(True), callbacks={"average": _KINDS[kind][0]()})
    forked.load_checkpoint(tmp_path / "7/straight/step8", LoadOptions(states=["model", "callbacks"]))
    assert same(straight.callbacks["average"].state_dict(), forked.callbacks["average"].state_dict()) == []


def _hooked(name: str) -> Callable[[nn.Module], nn.Module]:
    return lambda module: getattr(nn.utils, name)(module)


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 4),
    "square": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv1d(8, 8, 3),
    "transposed": lambda: nn.ConvTranspose1d(8, 8, 3),
}
_NORMS: dict[str, Callable[[Any], nn.Module]] = {
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": _hooked("spectral_norm"),
}


class Normed(nn.Module):
    """A layer with a norm of its weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 8), layer

    def forward(self, batch: Any) -> Any:
        hidden = self.first(batch[0]).tanh()
        if not isinstance(self.layer, nn.Linear):
            hidden = hidden[:, :, None].repeat(1, 1, 5)
        return (self.layer(hidden).flatten(1).mean(1) - batch[1]).square().mean()


def _spectral_norm(layer: Any) -> float:
    weight = layer.weight.detach()
    dim = 1 if isinstance(layer, nn.ConvTranspose1d) else 0
    return float(torch.linalg.matrix_norm(weight.movedim(dim, 0).flatten(1), 2))


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("norm", _NORMS)
@pytest.mark.parametrize("layer", _LAYERS)
def test_an_average_has_the_spectral_norm_that_the_model_has(
    layer: str, norm: str, average: str, tmp_path: Path, exports: Any
) -> None:
    seen: list[float] = []
    weights = Weights()

    def look(trainer: Any, model: Any, *_: Any) -> None:
        seen.append(_spectral_norm(model.layer))

    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit(
            {"average": AVERAGES[average](), **{str(at): callback for at, callback in enumerate(callbacks)}},
            folder,
            lambda: Normed(_NORMS[norm](_LAYERS[layer]())),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
        )

    # After the first batch, whose forward has computed a weight that a hook keeps as an attribute.
    fit(tmp_path / "a", on(on_validate_end=look), weights)
    assert seen == pytest.approx([1.0] * len(seen), abs=2e-3)
    # Buffers and weights are back after an evaluation.
    bare = Weights()
    _fit(
        {"bare": bare},
        None,
        lambda: Normed(_NORMS[norm](_LAYERS[layer]())),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    )
    assert same(bare.after, weights.after) == []
    assert_resumes_exactly(fit, tmp_path, 5)
    exports.export_one(tmp_path / "a/step8", exports.ExportFormat.torch, tmp_path / "weights.pt", ema="average")
    assert same(torch.load(tmp_path / "weights.pt"), weights.evaluated[8, "loader"]) == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, _hooked("weight_norm")], ids=["parametrized", "hook"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_weight_norms_are_averaged_as_by_torch(kind: str, norm: Any) -> None:
    make, steps, multi_avg_fn = _KINDS[kind]
    reference: list[Any] = []
    losses: list[tuple[float, float]] = []

    def update(trainer: Any, *_: Any) -> None:
        if trainer.progress.step in steps:
            if not reference:
                reference.append(_copy(trainer.model))
            else:
                count = len(reference)
                reference.append(
                    {
                        name: torch.lerp(reference[-1][name], value, 0.3 if kind == "ema" else 1 / (count + 1))
                        for name, value in _copy(trainer.model).items()
                    }
                )

    def look(trainer: Any, model: Any, outputs: Any, batch: Any, *_: Any) -> None:
        plain = Normed(norm(nn.Linear(8, 4)))
        plain.load_state_dict(reference[-1])
        losses.append((float(outputs[0] if isinstance(outputs, tuple) else outputs), float(plain(batch).detach())))

    callbacks = {"average": make(), "torch": on(on_fit_start=update, on_train_batch_end=update)}
    _fit(
        {**callbacks, "look": on(on_validate_batch_end=look)},
        None,
        lambda: Normed(norm(nn.Linear(8, 4))),
        settings={"eval_interval": 8},
    )
    assert multi_avg_fn is None or kind == "ema"
    assert losses
    assert all(ours == pytest.approx(plain, rel=1e-5) for ours, plain in losses)


def test_a_mean_of_checkpoints_has_the_spectral_norm_of_its_weights(tmp_path: Path, exports: Any) -> None:
    def make() -> Normed:
        return Normed(parametrizations.spectral_norm(nn.Linear(8, 8)))

    _fit({}, tmp_path, make, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    exports.average([tmp_path / f"step{step}" for step in (2, 4, 6, 8)], tmp_path / "mean1")
    model = make()
    model.load_state_dict(_trained(tmp_path / "mean1"))
    assert _spectral_norm(model.eval().layer) == pytest.approx(1.0, abs=1e-3)


def test_a_spectral_norm_that_follows_another_parametrization_is_refused() -> None:
    def make() -> Normed:
        return Normed(parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(8, 8))))

    with pytest.raises(UserError, match="its spectral norm follows another parametrization"):
        _fit({"ema": EMA(0.5)}, None, make)
