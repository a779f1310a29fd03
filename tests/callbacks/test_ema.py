"""EMA: the average of what is trained, evaluated in its place, saved with it, and gone on with bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, Noisy, StopAt, StopInEvaluation, everything, loader, same, trainer
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.core.load_options import LoadOptions
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback

EVERY_TWO = {"max_duration": 8, "eval_interval": 2}


class Weights(Callback):
    """Writes down the model's state after each step, and as evaluations see it."""

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


def _fit(ema: EMA, *callbacks: Callback, folder: Path | None = None, model: Any = Noisy, **more: Any) -> Any:
    made = trainer(
        model,
        callbacks={"ema": ema, **{type(one).__name__: one for one in callbacks}},
        settings=more.pop("settings", EVERY_TWO),
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=2),
        **more,
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


@pytest.mark.parametrize(("every", "start"), [(1, 0), (3, 0), (1, 4), (2, "1ep"), (3, 5)])
def test_the_average_follows_the_weights(every: int, start: Any) -> None:
    seen, ema = Weights(), EMA(0.7, every=every, start=start)
    _fit(ema, seen)
    first = {"1ep": 3}.get(start, start)
    expected = dict(seen.after[first])
    for step in range(first + 1, 9):
        if step % every == 0:
            expected = {
                name: torch.lerp(value, seen.after[step][name], 1 - 0.7) if value.is_floating_point() else value
                for name, value in expected.items()
            }
    average = ema.state_dict()["average"]
    trained = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.4.weight", "body.4.bias"]
    assert list(average) == trained
    assert same(average, {name: expected[name] for name in average}) == []


@pytest.mark.parametrize("make", [lambda: EMA(0.5), lambda: SWA(2, 1)])
def test_several_optimizers_make_one_update_a_step(make: Any) -> None:
    def of(*parts: int) -> Any:
        return lambda model: torch.optim.SGD([one for part in parts for one in model.body[part].parameters()], lr=0.1)

    one, two = make(), make()
    _fit(one, optimizer=of(0, 1, 4))
    _fit(two, optimizer={"first": of(0, 1), "second": of(4)})
    assert same(one.state_dict(), two.state_dict()) == []


def test_every_evaluation_sees_the_average_and_training_never() -> None:
    seen, bare, ema = Weights(), Weights(), EMA(0.5, start=3)
    _fit(ema, seen)
    trainer(Noisy, callbacks=[bare], settings=EVERY_TWO).fit(loader(), loader(6, shuffle=False))
    assert same(seen.after, bare.after) == []
    assert same(seen.evaluated[2, "loader"], bare.evaluated[2, "loader"]) == []
    for place in ("loader", "downstream"):
        found, plain = seen.evaluated[8, place], bare.evaluated[8, place]
        average = ema.state_dict()["average"]
        assert same({name: found[name] for name in average}, average) == []
        rest = [name for name in found if name not in average]
        assert rest == ["frozen", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"]
        assert same({name: found[name] for name in rest}, {name: plain[name] for name in rest}) == []
        assert same(found, plain)


@pytest.mark.parametrize("where", ["on_validate_batch_end", "on_enter_validate", "run_validation"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_weights_come_back_bit_for_bit_whatever_happens_in_an_evaluation(where: str, error: Any) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise error("in the evaluation")

    seen = Weights()
    made = trainer(Noisy, callbacks=[EMA(0.5), seen, type("Fails", (Callback,), {where: fail})()], settings=EVERY_TWO)
    with pytest.raises(error, match="in the evaluation"):
        made.fit(loader(), loader(6))
    assert len(seen.after) == 3
    assert same(_copy(made.model), seen.after[-1]) == []


@pytest.mark.parametrize("settings", [{"every": 1}, {"every": 3}, {"start": 5}, {"start": "2ep", "every": 2}])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_resume_ends_bit_for_bit_where_going_through_ends(
    tmp_path: Path, settings: dict[str, Any], stop: int
) -> None:
    logs = [ListLogger(), ListLogger()]
    straight = everything(_fit(EMA(0.8, **settings), folder=tmp_path / "a", loggers=[logs[0]], run_dir=tmp_path))
    _fit(EMA(0.8, **settings), StopAt(stop), folder=tmp_path / "b", loggers=[logs[1]], run_dir=tmp_path)
    resumed = _fit(EMA(0.8, **settings), folder=tmp_path / "b", loggers=[logs[1]], run_dir=tmp_path)
    assert resumed.loaded_step == stop
    assert same(straight, everything(resumed)) == []
    assert logs[0].stream == logs[1].stream


def test_an_evaluation_that_was_broken_off_is_made_up_with_the_same_average(tmp_path: Path) -> None:
    logs = [ListLogger(), ListLogger()]
    straight = everything(_fit(EMA(0.8), folder=tmp_path / "a", loggers=[logs[0]], run_dir=tmp_path))
    _fit(EMA(0.8), StopInEvaluation(4), folder=tmp_path / "b", loggers=[logs[1]], run_dir=tmp_path)
    resumed = _fit(EMA(0.8), folder=tmp_path / "b", loggers=[logs[1]], run_dir=tmp_path)
    assert same(straight, everything(resumed)) == []
    assert logs[0].stream == logs[1].stream


def test_evaluating_its_checkpoints_gives_what_the_training_measured(tmp_path: Path) -> None:
    log = ListLogger()
    _fit(EMA(0.9), folder=tmp_path, loggers=[log], run_dir=tmp_path)
    steps = [2, 4, 6, 8]
    only = trainer(Noisy, optimizer=None, callbacks={"ema": EMA(0.9)}, seed=7)
    rows = only.validate_all(loader(6, shuffle=False), [tmp_path / f"step{step}" for step in steps])
    measured = {record.step: record.metrics["val/loss"] for record in log.records}
    assert {row.step: row.metrics["loss"] for row in rows} == {step: measured[step] for step in steps}
    plain = trainer(Noisy, optimizer=None).validate(loader(6, shuffle=False), tmp_path / "step8")
    assert plain["val"]["loss"] != measured[8]


def test_a_checkpoint_without_an_average_is_evaluated_with_its_weights(tmp_path: Path) -> None:
    trainer(Noisy, checkpoint=CheckpointerCallback(tmp_path / "bare")).fit(loader())
    _fit(EMA(0.9), folder=tmp_path / "ema")
    only = trainer(Noisy, optimizer=None, callbacks={"ema": EMA(0.9)})
    paths = [tmp_path / "ema" / "step8", tmp_path / "bare" / "step6"]
    found = only.validate_all(loader(6, shuffle=False), paths)[1].metrics
    plain = trainer(Noisy, optimizer=None).validate(loader(6, shuffle=False), paths[1])
    assert found == plain["val"]


def test_a_fork_averages_from_the_weights_it_begins_with(tmp_path: Path) -> None:
    first = _fit(EMA(0.9), folder=tmp_path)
    forked, seen = EMA(0.9, every=100), Weights()
    made = trainer(Noisy, callbacks={"ema": forked, "seen": seen}, seed=3, settings={"max_duration": 1})
    made.fit(loader(), ckpt_path=tmp_path / "step8", load=LoadOptions(states=["model"]))
    average = forked.state_dict()["average"]
    assert same(average, first.callbacks["ema"].state_dict()["average"]) == []
    assert same(first.model.state_dict(), average)


def test_one_that_is_new_on_a_resume_is_reported_and_begins_with_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(Noisy, checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 4}).fit(loader())
    new = EMA(0.9, every=100)
    made = _fit(new, folder=tmp_path)
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
    made = _fit(ema, folder=tmp_path, model=Tied)
    average = ema.state_dict()["average"]
    assert {name: value.dtype for name, value in average.items()} == {
        "one.weight": torch.float32,
        "short": torch.float32,
    }
    assert made.model.other.weight is made.model.one.weight
    assert not torch.equal(average["short"], average["short"].bfloat16().float())
    again = _fit(EMA(0.999), folder=tmp_path, model=Tied, settings={**EVERY_TWO, "max_duration": 9})
    straight = _fit(EMA(0.999), model=Tied, settings={**EVERY_TWO, "max_duration": 9})
    assert same(everything(straight), everything(again)) == []


def test_a_compiled_model_and_a_plain_one_go_on_with_each_others_average(tmp_path: Path) -> None:
    straight = _fit(EMA(0.9))
    for length, compiled in ((3, True), (6, False), (8, True)):
        made = _fit(
            EMA(0.9),
            folder=tmp_path,
            model=(lambda: torch.compile(Noisy(), backend="eager")) if compiled else Noisy,
            settings={**EVERY_TWO, "max_duration": length},
        )
    assert made.loaded_step == 6
    found, wanted = everything(made), everything(straight)
    for part in ("model", "optimizer"):
        assert same(found[part], wanted[part]) == []
    assert list(found["callbacks"]["ema"]["average"]) == list(wanted["callbacks"]["ema"]["average"])


def test_an_average_that_does_not_fit_is_in_the_table(tmp_path: Path) -> None:
    class Spoil(Callback):
        def postprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            average = state["callbacks"]["ema"]["average"]
            average["body.0.bias"] = torch.zeros(3)
            average["body.0.weight"] = average["body.0.weight"].double()
            average["more"] = average.pop("body.4.bias")

    _fit(EMA(0.9), Spoil(), folder=tmp_path, settings={"max_duration": 1})
    ema = EMA(0.9)
    with pytest.raises(UserError) as caught:
        _fit(ema, folder=tmp_path)
    for row in (
        "body.0.bias: has shape (8,) in this model, but (3,) in the checkpoint",
        "body.0.weight: is torch.float64 in the checkpoint, but torch.float32 here",
        "more: averaged in the checkpoint, but not trained here",
        "body.4.bias: missing in the checkpoint",
    ):
        assert row in str(caught.value)
    assert ema.state_dict() == {"average": {}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decay": 1.0}, "decay is 1.0"),
        ({"decay": float("nan")}, "decay is nan"),
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, r"every is 2\.5"),
        ({"start": "soon"}, "start: 'soon' is not a duration"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EMA(**settings)


def test_a_start_without_a_number_of_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"start is 10s, which is not a number of steps"):
        _fit(EMA(start="10s"))
