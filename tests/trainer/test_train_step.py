"""One batch: how a model is called with it, what it weighs, in parts, its means, precision, clipping and errors."""

from __future__ import annotations

from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_parts import data_loader, present
from tiny import Line, assert_resumes_exactly, everything, loader, on, recorder, same, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_cli import Trainer, TrainingLoop
from trainer_cli.batches.contents import describe_batch, tensors_of, to_device
from trainer_cli.batches.samples import sample_count
from trainer_cli.batches.split import split_batch
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError, TrainError, UserError
from trainer_cli.messages import Logging
from trainer_cli.outputs.metrics import WeightedMeans
from trainer_cli.outputs.model_call import explain_error, make_arguments
from trainer_cli.outputs.returned import read_outputs, returned_weight
from trainer_cli.schema.sections import LoopConfig, ModelCall
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.tensor_errors import help_for
from trainer_cli.trainer.train_step import TrainStep

Pair = namedtuple("Pair", ["x", "y"])

CPU = torch.device("cpu")

ONE = torch.tensor(1.0)


@dataclass(frozen=True)
class Record:
    name: str
    x: torch.Tensor


class OwnMapping(UserDict[str, Any]):
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
        (OwnMapping(x=torch.zeros(5)), 5),
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
    own = OwnMapping(b=Pair(torch.ones(1), "text"))
    own.note = "kept"
    batch = {
        "list": [torch.zeros(1)], "own": own, "tuple": (1,), "record": Record("a", torch.ones(2)),
        "read only": ReadOnly({"x": torch.ones(1)}), "default": defaultdict(list, x=[torch.ones(1)]),
        "movable": Movable(),
    }  # fmt: skip
    moved = to_device(batch, META)
    assert moved["list"][0].is_meta
    assert (type(moved["own"]), type(moved["own"]["b"]), moved["own"].note) == (OwnMapping, Pair, "kept")
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


class TensorsMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names the operations that put a number of the host into a tensor, or read one back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


# Batches in parts: the gradient of the whole, and the same result after memory has run out.


class Narrow(nn.Module):
    """Has memory for so many samples; beyond, the forward fails halfway, or the backward does."""

    def __init__(self, most: int, *, in_backward: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)
        self.most, self.in_backward, self.sizes = most, in_backward, list[int]()

    def forward(self, batch: Any) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        hidden = self.first(x)
        if self.training:
            self.norm.eval()  # Its statistics would depend on the parts.
            present(self.norm.num_batches_tracked).add_(1)
        hidden = self.dropout(self.norm(hidden))
        if self.training and len(x) > self.most:
            if not self.in_backward:
                _fail()
            hidden.register_hook(_fail)
        error = self.last(hidden).squeeze(-1) - y
        return {"loss": error.square().mean(), "mae": error.abs().mean(), "tokens": len(x)}


def _fail(gradient: Any = None) -> None:
    raise torch.OutOfMemoryError("it is too large")


def _fit(model: nn.Module, microbatch: Any, **more: Any) -> Any:
    settings = {"max_duration": 5, "microbatch": microbatch, **more.pop("settings", {})}
    made = trainer(model, settings=settings, lr=0.05, **more)
    made.fit(loader(24, 8))
    return made


def _model(*args: Any, **named: Any) -> Narrow:
    torch.manual_seed(1)
    return Narrow(*args, **named)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_batch_that_ran_out_of_memory_is_trained_in_halves_with_the_same_result(
    in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _fit(_model(99), None)
    halved = _fit(_model(3, in_backward=in_backward), "auto")
    assert halved.model.sizes == [8, 4, *[2] * (4 * 5)]
    for name, value in whole.model.state_dict().items():
        if name != "norm.num_batches_tracked":
            assert torch.allclose(value, halved.model.state_dict()[name], atol=1e-6), name
    assert int(halved.model.norm.num_batches_tracked) == 4 * 5, "buffers are as before the failed batch"
    assert (halved.progress.step, halved.progress.samples, halved.progress.tokens) == (5, 40, 40)
    assert [one.message for one in caplog.records if "out of memory" in one.message] == [
        f"out of memory with {n} samples at once: the batch is trained in parts of {n // 2}" for n in (8, 4)
    ]


def test_a_retry_draws_the_same_random_numbers_as_a_first_try() -> None:
    fixed, halved = _fit(_model(99, dropout=0.5), 4), _fit(_model(4, dropout=0.5), "auto")
    assert same(everything(fixed)["model"], everything(halved)["model"]) == []
    assert same(everything(fixed)["rng"], everything(halved)["rng"]) == []


def test_a_fixed_size_has_the_gradient_of_the_whole_batch_with_accumulation_too() -> None:
    whole = _fit(_model(99), None, settings={"grad_accum_steps": 2})
    parts = _fit(_model(99), 3, settings={"grad_accum_steps": 2})
    assert set(parts.model.sizes) == {3, 2}
    assert torch.allclose(whole.model.first.weight, parts.model.first.weight, atol=1e-6)
    assert parts.progress.tokens == whole.progress.tokens


def test_the_size_that_fits_is_resumed(tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit(_model(4), "auto", callbacks=callbacks, checkpoint=CheckpointerCallback(folder, save_interval=2))

    _, resumed = assert_resumes_exactly(fit, tmp_path, 2)
    assert resumed.model.sizes == [4] * 6


def test_no_memory_for_one_sample_ends_the_training() -> None:
    with pytest.raises(TrainError, match="no memory for one sample: it is too large"):
        _fit(_model(0), "auto")


class Own(TrainStep):
    def train_batch(self, batch: Any) -> Any:
        return super().train_batch(batch)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loop\.microbatch is auto, and loop\.grad_accum_steps is above 1"):
        LoopConfig(microbatch="auto", grad_accum_steps=2)
    with pytest.raises(ConfigError, match="microbatch is 0"):
        LoopConfig(microbatch=0)
    with pytest.raises(UserError, match="Own has a train_batch of its own"):
        _fit(Line(), 2, step=Own())
    with pytest.raises(UserError, match=r"has a tensor of shape \(3,\), which cannot be split"):
        list(split_batch({"x": torch.zeros(4, 2), "y": torch.zeros(3)}, 4, 2))
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "pair": (torch.arange(4), 7), "one": torch.tensor(1)}
    parts = [part for part, _ in split_batch(batch, 4, 3)]
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d"]]
    assert [part["pair"][1] for part in parts] == [7, 7]


def test_hooks_see_each_part_and_one_step() -> None:
    book: list[str] = []
    _fit(_model(99), 4, callbacks=[recorder(book)], settings={"max_duration": 1})
    hooks = [hook for hook in book if hook in ("on_after_backward", "on_after_optimizer_step")]
    assert hooks == ["on_after_backward", "on_after_backward", "on_after_optimizer_step"]


# How a model is called with a batch, and the message where the two do not fit each other.


PAIR = [torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)]

NAMED = {"x": PAIR[0], "y": PAIR[1]}

Point = namedtuple("Point", "x y")


class Parts(nn.Module):
    """A model whose forward takes the parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x) * scale, y)


class Whole(nn.Module):
    """A model that takes one tensor, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


@pytest.mark.parametrize(
    ("how", "batch", "args", "kwargs"),
    [
        ("batch", PAIR, [PAIR], {}),
        ("batch", NAMED, [NAMED], {}),
        ("args", PAIR, PAIR, {}),
        ("args", tuple(PAIR), PAIR, {}),
        ("args", Point(*PAIR), PAIR, {}),
        ("kwargs", NAMED, [], NAMED),
    ],
)
def test_the_arguments_of_a_call(how: str, batch: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    found = make_arguments(ModelCall(how), batch)
    assert [id(one) for one in found[0]] == [id(one) for one in args]
    assert {name: id(one) for name, one in found[1].items()} == {name: id(one) for name, one in kwargs.items()}


@pytest.mark.parametrize(
    ("how", "batch", "message"),
    [
        ("args", PAIR[0], "needs a list or tuple as a batch, and here it is float32[4, 3]. Set model_call=batch."),
        ("args", NAMED, "here it is {x: float32[4, 3], y: int64[4]}. Set model_call=kwargs."),
        ("kwargs", PAIR, "needs a mapping as a batch, and here it is [float32[4, 3], int64[4]]. Set model_call=args."),
    ],
)
def test_a_batch_without_such_parts_is_refused(how: str, batch: Any, message: str) -> None:
    with pytest.raises(UserError) as refused:
        make_arguments(ModelCall(how), batch)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ((PAIR[0], [PAIR[1], "a", 3]), "(float32[4, 3], [int64[4], str, int])"),
        ({"a": {"b": PAIR[1]}}, "{a: {b: int64[4]}}"),
        ([1] * 9, "[int, int, int, int, int, int, int, int, …]"),
        (dict.fromkeys("abcdefghi", 1.0), "{" + ", ".join(f"{key}: float" for key in "abcdefgh") + ", …}"),
    ],
)
def test_the_structure_of_a_batch(batch: Any, text: str) -> None:
    assert describe_batch(batch) == text


@pytest.mark.parametrize(
    ("how", "batch", "message"),
    [
        (
            "batch",
            PAIR,
            "Parts.forward cannot be called with a batch: missing 1 required positional argument: 'y'\n"
            "  batch:   [float32[4, 3], int64[4]]\n"
            "  forward: (x, y, scale=1.0)\n"
            "Set model_call=args. It returns a loss, (loss, outputs), or a mapping with 'loss'.",
        ),
        ("batch", NAMED, "Set model_call=kwargs."),
        ("args", [*PAIR, 1.0, 2], "takes from 3 to 4 positional arguments but 5 were given"),
        ("kwargs", {"x": PAIR[0], "label": PAIR[1]}, "got an unexpected keyword argument 'label'"),
        ("kwargs", {"x": PAIR[0], "label": PAIR[1]}, "Give the model a forward that takes what is in the batch."),
    ],
)
def test_a_call_that_cannot_be_bound_names_batch_signature_and_cure(how: str, batch: Any, message: str) -> None:
    model = Parts()
    args, kwargs = make_arguments(ModelCall(how), batch)
    with pytest.raises(TypeError) as raised:
        model(*args, **kwargs)
    told = explain_error(raised.value, model, batch, args, kwargs)
    assert isinstance(told, UserError)
    assert message in str(told)


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)


class Lightning(Unwritten):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).sum()


class LightningModule(Lightning):
    """With the forward of Lightning's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("how", ["batch", "args", "kwargs"])
@pytest.mark.parametrize(
    ("model", "cure"),
    [
        (Unwritten, "Define forward(self, batch)"),
        (Lightning, "forward(self, batch) compute what training_step"),
        (LightningModule, "forward(self, batch) compute what training_step"),
    ],
)
def test_a_model_without_a_forward_is_refused_with_the_way_to_write_it(how: str, model: Any, cure: str) -> None:
    trainer = Trainer(
        model=model,
        model_call=how,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_duration=1),
        logging=Logging(console="off"),
    )
    data = [NAMED] if how == "kwargs" else [PAIR]
    for call in (trainer.fit, trainer.validate):
        with pytest.raises(UserError, match=f"{model.__name__} has no forward") as caught:
            call(data_loader(data, batch_size=None))
        assert cure in str(caught.value)


BATCH_OF_LISTS = {"x": [torch.zeros(4), torch.zeros(4)], "y": PAIR[1]}


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs", "note"),
    [
        (
            Whole(), PAIR, [PAIR], {},
            "The model was called with the whole batch:\n"
            "  batch:   [float32[4, 3], int64[4]]\n"
            "  forward: (x)\n"
            "If forward takes its parts, set model_call=args; forward returns the loss.",
        ),
        (
            Parts(), BATCH_OF_LISTS, [], BATCH_OF_LISTS,
            "The lists of the samples were put together element by element:\n"
            "  batch:   {x: [float32[4], float32[4]], y: int64[4]}\n"
            "  forward: (x, y, scale=1.0)\n"
            "Give tensors in the samples, or a data.collate_fn.",
        ),
    ],
    ids=["the whole batch", "lists of samples"],
)  # fmt: skip
def test_an_error_inside_a_model_carries_a_note_of_what_it_was_called_with(
    model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any], note: str
) -> None:
    with pytest.raises(TypeError) as raised:
        model(*args, **kwargs)
    assert explain_error(raised.value, model, batch, args, kwargs) is raised.value
    assert raised.value.__notes__ == [note]


@pytest.mark.parametrize("error", [TypeError("can only add str"), ValueError("a list_of"), KeyError("x")], ids=repr)
def test_an_error_that_does_not_name_the_batchs_type_is_the_models_own(error: Exception) -> None:
    assert explain_error(error, Whole(), PAIR, [PAIR], {}) is error
    assert not hasattr(error, "__notes__")


def test_an_error_of_the_models_own_stays_as_it_is() -> None:
    class Wrong(Parts):
        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$") as raised:
        Wrong()(*PAIR)
    assert explain_error(raised.value, Wrong(), PAIR, PAIR, {}) is raised.value
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(("how", "data"), [("args", "pairs"), ("kwargs", "mappings")])
def test_training_and_evaluation_call_the_model_alike(how: str, data: str) -> None:
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    samples = [({"x": a, "y": b} if data == "mappings" else (a, b)) for a, b in zip(x, y, strict=True)]
    loader = data_loader(samples, batch_size=4)
    trainer = Trainer(
        model=Parts,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        loop=TrainingLoop(max_duration=2),
        model_call=how,
        seed=0,
        device="cpu",
        logging=Logging(console="off"),
    )
    result = trainer.fit(loader, loader)
    assert result.step == 2
    with torch.no_grad():
        expected = trainer.model(x, y).item()
    assert trainer.validate(loader)["val"]["loss"] == pytest.approx(expected, abs=1e-6)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(UserError, match=r"model_call is 'arg', but it must be one of batch, args, kwargs .*'args'"):
        Trainer(model=Parts, model_call="arg")


# An error of torch about the tensors of a batch names them, and how to change them.


X = torch.zeros(2, 3)
NESTED = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("forward", "batch", "parts"),
    [
        (lambda model, batch: model(batch[0]), (X.double(), X), ["batch[0] is float64", ".to(torch.float32)"]),
        (lambda model, batch: model(batch["x"]), {"x": X.double()}, ["batch['x'] is float64", ".astype('float32')"]),
        (lambda model, batch: model(batch[0]), (X.long(), X), ["batch[0] is int64", ".to(torch.float32)"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.zeros(2)),
         ["batch[1] is float32", "must be int64", ".long()"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.zeros(2).int()),
         ["batch[1] is int32", "must be int64"]),
        (lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), (X, torch.zeros(2)), ["must be int64"]),
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.tensor([0, 4])),
         ["the label 4 of batch[1] is no class", "0 to N - 1"]),
        *((lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (X, torch.tensor([0, 4]), other),
           ["the label 4 of batch[1] is no class"])
          for other in (X.to_sparse(), NESTED, X.to("meta"))),
        (lambda model, batch: F.embedding(batch, torch.zeros(3, 3)), torch.zeros(2), ["batch is float32", "int64"]),
        (lambda model, batch: model(batch[0].to("meta")), (X, X), ["model and batch are on cpu", "device=x.device"]),
        (lambda model, batch: nn.Conv1d(3, 3, 1)(batch), torch.zeros(1, 3, 3).double(), ["batch is float64"]),
    ],
)  # fmt: skip
def test_the_tensor_of_the_batch_is_named_with_what_to_do(forward: Any, batch: Any, parts: list[str]) -> None:
    model = nn.Linear(3, 4)
    with pytest.raises((RuntimeError, IndexError)) as raised:
        forward(model, batch)
    line = help_for(raised.value, model, batch)
    assert line is not None
    assert line.startswith("help: ")
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_an_error_of_another_kind_gets_no_help() -> None:
    model = nn.Linear(3, 4)
    for error in (RuntimeError("the line is broken"), IndexError("list index out of range")):
        assert help_for(error, model, (X.double(), X)) is None


class Sum(nn.Linear):
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch).sum()


class Nothing(nn.Linear):
    def forward(self, batch: Tensor) -> Any:
        super().forward(batch).sum()


def test_the_error_of_a_step_has_the_help_as_a_note() -> None:
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        trainer(Sum(4, 1)).fit(data_loader([torch.zeros(4).double()] * 4, batch_size=2))
    assert any(note.startswith("help: the model is float32, and batch is float64.") for note in raised.value.__notes__)


def test_a_forward_that_returns_nothing_is_named_with_its_place() -> None:
    line = Nothing.forward.__code__.co_firstlineno
    with pytest.raises(UserError, match=rf"Nothing\.forward, .*test_train_step\.py:{line}, returns nothing"):
        trainer(Nothing(4, 1)).fit(data_loader([torch.zeros(4)] * 4, batch_size=2))
