"""EMA and SWA: the average of the weights is evaluated in their place, is saved with them, and is given to others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, Noisy, everything, loader, same, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.export import ExportFormat
from trainer_cli.core.load_options import WEIGHTS, LoadOptions
from trainer_cli.errors import UserError
from trainer_cli.runs.export import average, export_one, strip
from trainer_cli.trainer.hooks import Callback

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


def _trained(path: Path) -> dict[str, torch.Tensor]:
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


def test_a_compiled_model_and_a_plain_one_continue_each_others_average(tmp_path: Path) -> None:
    straight = everything(_fit({"ema": EMA(0.9)}))
    for length, compiled in ((3, True), (6, False), (8, True)):
        model = (lambda: torch.compile(Noisy(), backend="eager")) if compiled else Noisy
        made = _fit({"ema": EMA(0.9)}, tmp_path, model, settings={"max_duration": length})
    assert made.loaded_step == 6
    resumed = everything(made)
    for state in ("model", "optimizer"):
        assert same(resumed[state], straight[state]) == []
    assert list(resumed["callbacks"]["ema"]["average"]) == list(straight["callbacks"]["ema"]["average"])


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
        "more: averaged in the checkpoint, but not trained here",
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


@pytest.mark.parametrize("ema", [None, "its own", "none"])
def test_export_strip_and_average_give_what_was_evaluated(run: tuple[str, Path], tmp_path: Path, ema: str) -> None:
    name, folder = run
    source = folder / "step4"
    ema = name if ema == "its own" else ema
    expected = _trained(source) if ema == "none" else _evaluated(source, name)
    assert same(_trained(source), _evaluated(source, name)) != []
    exported = export_one(source, ExportFormat.torch, tmp_path / "weights.pt", ema=ema)
    stripped = strip(source, tmp_path / "stripped1", ema=ema)
    mean = average([source, source], tmp_path / "mean1", ema=ema)
    assert same(torch.load(tmp_path / "weights.pt"), expected) == []
    for written in ("stripped1", "mean1"):
        assert same(_trained(tmp_path / written), expected) == []
    assert {each.average for each in (exported, stripped, mean)} == {None if ema == "none" else name}
    assert make_sync_checkpointer().manifest(tmp_path / "stripped1").average is None


def test_a_mean_of_averages_and_of_trained_weights_is_refused(run: tuple[str, Path], tmp_path: Path) -> None:
    _fit({}, tmp_path / "plain", settings={"max_duration": 4})
    both = [run[1] / "step4", tmp_path / "plain" / "step4"]
    with pytest.raises(UserError, match="--ema none"):
        average(both, tmp_path / "mean1")
    average(both, tmp_path / "mean1", ema="none")


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
