"""How a model is called with a batch, and the message where the two do not fit each other."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from trainer_cli import Trainer, TrainingLoop
from trainer_cli.batches.contents import describe_batch
from trainer_cli.errors import UserError
from trainer_cli.messages import Logging
from trainer_cli.outputs.model_call import explain_error, make_arguments
from trainer_cli.schema.sections import ModelCall

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
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
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
            call(torch.utils.data.DataLoader(data, batch_size=None))
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
    loader = torch.utils.data.DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
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
