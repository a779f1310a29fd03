"""One batch: what it weighs, what outputs mean, weighted means, precision and clipping."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny import loader, on, trainer
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_cli.batches.contents import tensors_of, to_device
from trainer_cli.batches.samples import sample_count
from trainer_cli.errors import UserError
from trainer_cli.outputs.metrics import WeightedMeans
from trainer_cli.outputs.returned import read_outputs, returned_weight
from trainer_cli.trainer.precision import Precision

Pair = namedtuple("Pair", ["x", "y"])

CPU = torch.device("cpu")

ONE = torch.tensor(1.0)


@dataclass(frozen=True)
class Record:
    name: str
    x: torch.Tensor


class Own(UserDict[str, Any]):
    """A mapping of the user's own, with an attribute."""

    note = ""


class ReadOnly(Mapping[str, Any]):
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Movable:
    """A class of some library, which moves itself."""

    def __init__(self, device: str = "cpu") -> None:
        self.x = torch.zeros(3, device=device)

    def to(self, device: torch.device) -> Movable:
        return Movable(str(device))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(5)), 4),
        ({"id": "a", "x": [torch.tensor(1.0), torch.zeros(2, 1)]}, 2),
        (Pair(None, torch.zeros(6)), 6),
        (Record(name="a", x=torch.zeros(7)), 7),
        (Own(x=torch.zeros(5)), 5),
        (ReadOnly({"x": torch.zeros(5)}), 5),
        (pack_sequence([torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(1, 2)]), 3),
        ("text", None),
        (Record, None),
        (torch.tensor(1.0), None),
    ],
)
def test_a_batch_has_the_size_of_its_first_tensor(batch: Any, size: int | None) -> None:
    if size is None:
        with pytest.raises(UserError, match="how many samples"):
            sample_count(batch)
    else:
        assert sample_count(batch) == size


META = torch.device("meta")


def test_moving_a_batch_keeps_its_containers() -> None:
    own = Own(b=Pair(torch.ones(1), "text"))
    own.note = "kept"
    batch = {
        "list": [torch.zeros(1)], "own": own, "tuple": (1,), "record": Record("a", torch.ones(2)),
        "read only": ReadOnly({"x": torch.ones(1)}), "default": defaultdict(list, x=[torch.ones(1)]),
        "movable": Movable(),
    }  # fmt: skip
    moved = to_device(batch, META)
    assert moved["list"][0].is_meta
    assert (type(moved["own"]), type(moved["own"]["b"]), moved["own"].note) == (Own, Pair, "kept")
    assert moved["own"]["b"].x.is_meta
    assert (moved["own"]["b"].y, moved["tuple"]) == ("text", (1,))
    assert (type(moved["record"]), moved["record"].name, moved["record"].x.is_meta) == (Record, "a", True)
    assert type(moved["read only"]) is ReadOnly
    assert moved["read only"]["x"].is_meta
    assert moved["default"].default_factory is list
    assert moved["default"]["x"][0].is_meta
    assert moved["movable"].x.is_meta
    assert not any(tensor.is_meta for tensor in tensors_of(batch)), "the batch itself is as it was"
    assert len(list(tensors_of(moved))) == len(list(tensors_of(batch))) == 6
    assert all(tensor.is_meta for tensor in tensors_of(moved))


def test_packed_sequences_stay_packed() -> None:
    packed = pack_sequence([torch.zeros(4, 2), torch.zeros(3, 2)])
    moved = to_device([packed], torch.device("cpu"))[0]
    assert isinstance(moved, PackedSequence)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert len(list(tensors_of(packed))) >= 1


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
        ((torch.zeros(4, 3), ONE), r"second part is the loss, .* Return the loss first: `return loss, outputs`\."),
        (({"logits": ONE}, ONE), "second part is the loss"),
        ((torch.zeros(4, 3), torch.zeros(4)), r"a tensor of shape \(4, 3\), expected a scalar"),
        (None, "returned NoneType"),
    ],
)
def test_other_outputs_are_refused(outputs: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_outputs(outputs)


@pytest.mark.parametrize("paired", [False, True])
def test_the_weight_of_a_batch_is_a_number_or_a_scalar_that_needs_no_gradient(paired: bool) -> None:
    def read(outputs: Any) -> Any:
        return returned_weight((ONE, outputs) if paired else outputs)

    assert (read({}), read(ONE), read([ONE])) == (None, None, None)
    assert read({"weight": 2.5}) == 2.5
    weight = read({"weight": torch.tensor([3.0], requires_grad=True)})
    assert (weight.shape, weight.requires_grad) == (torch.Size(()), False)
    assert read({"weight": ONE.bfloat16()}).dtype == torch.float32
    with pytest.raises(UserError, match=r"weight in the outputs has the shape \(4,\), expected a number"):
        read({"weight": torch.ones(4)})


def test_means_are_weighted_and_know_which_batches_had_a_metric() -> None:
    meter = WeightedMeans(CPU)
    meter.add(
        torch.tensor(1.0), {"a": 10, "weight": 0, "tokens": 9, "text": "x", "flag": True, "row": torch.ones(2)}, 4
    )
    meter.add(torch.tensor([4.0]), {"b": torch.tensor(7)}, 2)
    meter.add(torch.tensor(1.0, dtype=torch.bfloat16), {}, torch.tensor(2))
    assert meter.means() == {"loss": 14 / 8, "a": 10.0, "b": 7.0}
    meter.reset()
    assert meter.empty
    assert meter.means() == {}


@pytest.mark.parametrize(
    ("value", "mean"),
    [
        (2, 2.0), (2.5, 2.5), (np.float32(2.5), 2.5), (np.float64(2.5), 2.5), (np.float16(2.5), 2.5),
        (np.int64(2), 2.0),
        (torch.tensor(2.5), 2.5), (torch.tensor(2.5).bfloat16(), 2.5), (torch.tensor(2), 2.0),
        (True, None), (np.bool_(True), None), (torch.tensor(True), None), (torch.tensor([2.5]), None),
        (torch.ones(1, 1), None), (torch.tensor(1j), None), (1j, None), ("2.5", None), (None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("weight", [4, torch.tensor(4.0)], ids=["number", "tensor"])
def test_metrics_are_the_numbers_without_dimensions(value: Any, mean: float | None, weight: Any) -> None:
    """A tensor of one element is one by chance: the logits of a last batch of one sample."""
    meter = WeightedMeans(CPU)
    meter.add(ONE, {"value": value}, weight)
    meter.add(ONE, {"value": value}, weight)
    assert meter.means() == ({"loss": 1.0} if mean is None else {"loss": 1.0, "value": mean})


class TensorsMade(TorchDispatchMode):
    """Names the operations that put a number of the host into a tensor, or read one back."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("lift", "_local_scalar", "scalar_tensor", "aten.full", "aten.item")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [4, torch.tensor(4.0)], ids=["number", "tensor"])
def test_counting_a_batch_neither_copies_to_the_device_nor_waits_for_it(weight: Any) -> None:
    meter, outputs = WeightedMeans(CPU), {"a": 0.5, "b": np.float32(2), "c": torch.tensor(1.0), "d": 3}
    meter.add(ONE, outputs, weight)
    with TensorsMade() as made:
        meter.add(ONE, outputs, weight)
    assert made.found == []
    with TensorsMade() as made:
        int(torch.as_tensor(3.0))
    assert made.found, "the check sees what it is for"


def test_a_mean_begun_goes_on_after_a_resume() -> None:
    one, two = WeightedMeans(CPU), WeightedMeans(CPU)
    one.add(torch.tensor(1.0), {"a/b": 3.0}, torch.tensor(3.0))
    two.load_state_dict(one.state_dict())
    for meter in (one, two):
        meter.add(torch.tensor(2.0), {}, 1)
    assert one.means() == two.means() == {"loss": 1.25, "a/b": 3.0}


@pytest.mark.parametrize("weight", [3, torch.tensor(3.0)], ids=["number", "tensor"])
def test_a_state_has_one_form_whenever_the_mean_was_reported_last(weight: Any) -> None:
    """The names, types and shapes for which a file has places are always the same."""
    meter, forms = WeightedMeans(CPU), []
    for reported in (False, True, False, False, True):
        meter.add(torch.tensor(1.5), {"a": 2.0}, weight)
        if reported:
            meter.reset()
        state = meter.state_dict()
        forms.append([
            (part, name, getattr(value, "dtype", int), getattr(value, "shape", None))
            for part in ("sums", "weights") for name, value in state[part].items()
        ])  # fmt: skip
    assert forms == [forms[0]] * 5


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("weight", [2, torch.tensor(2.0)], ids=["number", "tensor"])
def test_after_a_reset_the_mean_is_of_what_came_since(weight: Any, resumed: bool) -> None:
    meter = WeightedMeans(CPU)
    meter.add(torch.tensor(float("nan")), {"a": 1.0}, weight)
    meter.reset()
    if resumed:
        state, meter = meter.state_dict(), WeightedMeans(CPU)
        meter.load_state_dict(state)
    assert (meter.empty, meter.means()) == (True, {})
    meter.add(torch.tensor(5.0), {"b": 1.0}, weight)
    meter.add(torch.tensor(7.0), {}, weight)
    assert meter.means() == {"loss": 6.0, "b": 1.0}
    assert list(meter.means()) == ["loss", "b"]


def test_a_state_of_the_first_form_held_nothing_but_what_was_counted() -> None:
    meter = WeightedMeans(CPU)
    meter.load_state_dict({"sums": {"loss": torch.tensor(6.0)}, "weights": {"loss": 4}})
    assert meter.means() == {"loss": 1.5}


def test_a_loss_that_depends_on_nothing_trained_is_refused() -> None:
    class Cut(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch[0]).mean().detach()

    with pytest.raises(UserError, match="the loss depends on no parameter that is trained"):
        trainer(lambda: Cut(2, 1)).fit(loader())


class Wide(nn.Module):
    """A loss whose gradient is known: 3 and 4 for each unit of a batch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.other = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> Any:
        return (self.weight * torch.tensor([3.0, 4.0])).sum() + 100 * self.other.sum()


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize(
    ("clip", "clipped"),
    [({"clip_norm": 1.0}, [0.6, 0.8]), ({"clip_value": 3.5}, [3.0, 3.5]), ({}, [3.0, 4.0])],
)
def test_clipping_is_of_the_whole_gradients_of_what_is_optimized(clip: Any, clipped: list[float], accum: int) -> None:
    before: list[Any] = []
    after: list[Any] = []
    result = trainer(
        Wide,
        optimizer=lambda model: torch.optim.SGD([model.weight], lr=0.1),
        callbacks=[on(
            on_before_optimizer_step=lambda trainer, model, optimizer: before.append(model.weight.grad.tolist()),
            on_after_optimizer_step=lambda trainer, model, optimizer: after.append(model.weight.grad.tolist()),
        )],
        precision=Precision(**clip),
        settings={"max_duration": 2, "grad_accum_steps": accum, "log_interval": 1},
    ).fit(loader(8, 2))  # fmt: skip
    assert before == [[3.0, 4.0]] * 2
    assert after == [pytest.approx(clipped, rel=1e-5)] * 2
    assert result.metrics.get("train/grad_norm") == (pytest.approx(5.0) if "clip_norm" in clip else None)


def test_bf16_runs_the_forward_under_autocast_and_keeps_the_parameters_whole() -> None:
    seen = set()

    class Watch(nn.Linear):
        def forward(self, batch: Any) -> Any:
            out = super().forward(batch[0])
            seen.add((self.training, out.dtype))
            return (out.float().squeeze(-1) - batch[1]).square().mean()

    settings = {"max_duration": 3, "eval_interval": 2}
    trained = trainer(lambda: Watch(2, 1), precision=Precision("bf16"), settings=settings)
    trained.fit(loader(), loader(4))
    assert seen == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
