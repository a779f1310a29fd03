"""One batch: what it weighs, what outputs mean, weighted means, precision and clipping."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from tiny import loader, trainer
from torch import nn

from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.step import Meter, Precision, batch_weight, read_outputs, sample_count, to_device

Pair = namedtuple("Pair", ["x", "y"])
CPU = torch.device("cpu")
ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(5)), 4),
        ({"id": "a", "x": [torch.tensor(1.0), torch.zeros(2, 1)]}, 2),
        (Pair(None, torch.zeros(6)), 6),
        ("text", None),
        (torch.tensor(1.0), None),
    ],
)
def test_a_batch_has_the_size_of_its_first_tensor(batch: Any, size: int | None) -> None:
    if size is None:
        with pytest.raises(UserError, match="how many samples"):
            sample_count(batch)
    else:
        assert sample_count(batch) == size


def test_moving_a_batch_keeps_its_containers() -> None:
    moved = to_device({"a": [torch.zeros(1)], "b": Pair(torch.ones(1), "text"), "c": (1,)}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert isinstance(moved["b"], Pair)
    assert (moved["b"].y, moved["c"]) == ("text", (1,))


@pytest.mark.parametrize(
    ("outputs", "rest"),
    [
        (ONE, {}),
        (ONE.reshape(1), {}),
        ({"loss": ONE, "a": 2}, {"loss": ONE, "a": 2}),
        ((ONE, {"a": 2}), {"a": 2}),
        ((ONE, "logits"), {}),
    ],
)
def test_a_model_may_return_a_loss_a_pair_or_a_mapping(outputs: Any, rest: Any) -> None:
    loss, found = read_outputs(outputs)
    assert loss.item() == 1.0
    assert found == rest


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (torch.zeros(3), r"a tensor of shape \(3,\), expected a scalar"),
        ({"los": ONE}, r"without 'loss'; it has \['los'\]"),
        ({"loss": 1.0}, "loss is float"),
        ((ONE, {}, 3), "returned tuple"),
        (None, "returned NoneType"),
    ],
)
def test_other_outputs_are_refused(outputs: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_outputs(outputs)


def test_the_weight_of_a_batch_is_the_outputs_own_or_its_size() -> None:
    assert batch_weight({}, 4) == 4
    assert batch_weight({"weight": 2.5}, 4) == 2.5
    weight = batch_weight({"weight": torch.tensor([3.0], requires_grad=True)}, 4)
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.requires_grad) == (torch.Size(()), False)


def test_means_are_weighted_and_know_which_batches_had_a_metric() -> None:
    meter = Meter(CPU)
    meter.add(
        torch.tensor(1.0), {"a": 10, "weight": 0, "tokens": 9, "text": "x", "flag": True, "row": torch.ones(2)}, 4
    )
    meter.add(torch.tensor([4.0]), {"b": torch.tensor(7), "right": torch.tensor(True)}, 2)
    meter.add(torch.tensor(1.0, dtype=torch.bfloat16), {}, torch.tensor(2))
    assert meter.means() == {"loss": 14 / 8, "a": 10.0, "b": 7.0, "right": 1.0}
    meter.reset()
    assert meter.empty
    assert meter.means() == {}


def test_a_mean_begun_goes_on_after_a_resume() -> None:
    one, two = Meter(CPU), Meter(CPU)
    one.add(torch.tensor(1.0), {"a/b": 3.0}, torch.tensor(3.0))
    two.load_state_dict(one.state_dict())
    for meter in (one, two):
        meter.add(torch.tensor(2.0), {}, 1)
    assert one.means() == two.means() == {"loss": 1.25, "a/b": 3.0}


def form(state: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Of what a file has a place for each: its name, type and shape."""
    entries = [(part, name, one) for part in ("sums", "weights") for name, one in state[part].items()]
    return [
        (part, name, (one.dtype, one.shape) if isinstance(one, torch.Tensor) else int) for part, name, one in entries
    ]


@pytest.mark.parametrize("weight", [3, torch.tensor(3.0)], ids=["number", "tensor"])
def test_a_state_has_one_form_whenever_the_mean_was_told_last(weight: Any) -> None:
    meter, forms = Meter(CPU), []
    for told in (False, True, False, False, True):
        meter.add(torch.tensor(1.5), {"a": 2.0}, weight)
        if told:
            meter.reset()
        forms.append(form(meter.state_dict()))
    assert forms == [forms[0]] * 5


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("weight", [2, torch.tensor(2.0)], ids=["number", "tensor"])
def test_after_a_reset_the_mean_is_of_what_came_since(weight: Any, resumed: bool) -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(float("nan")), {"a": 1.0}, weight)
    meter.reset()
    if resumed:
        state, meter = meter.state_dict(), Meter(CPU)
        meter.load_state_dict(state)
    assert (meter.empty, meter.means()) == (True, {})
    meter.add(torch.tensor(5.0), {"b": 1.0}, weight)
    meter.add(torch.tensor(7.0), {}, weight)
    assert meter.means() == {"loss": 6.0, "b": 1.0}
    assert list(meter.means()) == ["loss", "b"]


def test_a_state_of_the_first_form_held_nothing_but_what_was_counted() -> None:
    meter = Meter(CPU)
    meter.load_state_dict({"sums": {"loss": torch.tensor(6.0)}, "weights": {"loss": 4}})
    assert meter.means() == {"loss": 1.5}


def test_both_kinds_of_clipping_are_refused() -> None:
    with pytest.raises(UserError, match=r"clip_norm and precision\.clip_value are both set"):
        Precision(clip_norm=1.0, clip_value=1.0)


class Wide(nn.Module):
    """A loss whose gradient is known: 3 and 4 for each unit of a batch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.other = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> Any:
        return (self.weight * torch.tensor([3.0, 4.0])).sum() + 100 * self.other.sum()


class Gradients(Callback):
    """Writes down the gradients that the optimizer sees, and those before they were clipped."""

    def __init__(self) -> None:
        self.whole: list[Any] = []
        self.clipped: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.whole.append(model.weight.grad.tolist())

    def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.clipped.append(model.weight.grad.tolist())


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize(
    ("clip", "clipped"),
    [({"clip_norm": 1.0}, [0.6, 0.8]), ({"clip_value": 3.5}, [3.0, 3.5]), ({}, [3.0, 4.0])],
)
def test_clipping_is_of_the_whole_gradients_of_what_is_optimized(clip: Any, clipped: list[float], accum: int) -> None:
    seen = Gradients()
    found = trainer(
        Wide,
        optimizer=lambda model: torch.optim.SGD([model.weight], lr=0.1),
        callbacks=[seen],
        precision=Precision(**clip),
        settings={"max_duration": 2, "grad_accum_steps": accum, "log_interval": 1},
    ).fit(loader(8, 2))
    assert seen.whole == [[3.0, 4.0]] * 2
    assert seen.clipped == [pytest.approx(clipped, rel=1e-5)] * 2
    assert found.metrics.get("train/grad_norm") == (pytest.approx(5.0) if "clip_norm" in clip else None)


def test_bf16_runs_the_forward_under_autocast_and_keeps_the_parameters_whole() -> None:
    seen = set()

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, batch: Any) -> Any:
            out = self.linear(batch[0])
            seen.add((self.training, out.dtype))
            return (out.float().squeeze(-1) - batch[1]).square().mean()

    trained = trainer(Watch, precision=Precision("bf16"), settings={"max_duration": 3, "eval_interval": 2})
    trained.fit(loader(), loader(4))
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
