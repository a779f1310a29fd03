"""One value against one parameter, and a call's arguments against a signature."""

# ruff: noqa: E501
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from trainer_cli.keys.config_keys import list_keys
from trainer_cli.schema.checkpoint_config import Removal
from trainer_cli.signatures.calls import find_misfits, read_parameters
from trainer_cli.values.kinds import kind_of

VALUES: dict[str, Any] = {
    "null": None, "true": True, "0": 0, "7": 7, "2.0": 2.0, "a": "a", "[1]": [1], "{x: 1}": {"x": 1},
    "node": {"_target_": "a.B"}, "object": object(),
}  # fmt: skip
ALWAYS = {"node", "object"}


@pytest.mark.parametrize(
    ("annotation", "admitted"),
    [
        ("int", {"0", "7"}),
        ("float", {"0", "7", "2.0"}),
        ("bool", {"true"}),
        ("str", {"a"}),
        ("None", {"null"}),
        ("int | None", {"0", "7", "null"}),
        ("Optional[float]", {"0", "7", "2.0", "null"}),
        ("typing.Union[int, str]", {"0", "7", "a"}),
        ("list[int]", {"[1]"}),
        ("tuple[float, ...]", {"[1]"}),
        ("Sequence[int]", {"[1]"}),
        ("Sequence[str]", {"a"}),
        ("Iterable[int]", {"[1]", "{x: 1}"}),
        ("dict[str, int]", {"{x: 1}"}),
        ("Mapping", {"{x: 1}"}),
        ("Literal['a', 'b']", {"a"}),
        ("Literal['a', None]", {"a", "null"}),
        ("'int | None'", {"0", "7", "null"}),
        ("float | Tensor", {"0", "7", "2.0"}),
        ("Annotated[int, 'x']", {"0", "7"}),
    ],
)
def test_an_annotation_admits_the_plain_values_of_its_types(annotation: str, admitted: set[str]) -> None:
    plain = kind_of(annotation)
    assert plain is not None
    assert {name for name, value in VALUES.items() if plain.admits(value)} == admitted | ALWAYS


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("list[int]", [1, "x", 2.5], ["x.1 is 'x', but it must be a whole number", "x.2 is 2.5, but it must be a whole number"]),
        ("list[int]", [], []),
        ("list[float]", [1, 2.0], []),
        ("Sequence[int]", [1, True], ["x.1 is true, but it must be a whole number"]),
        ("Sequence[str]", ["a", 3], ["x.1 is 3, but it must be a string"]),
        ("Iterable[int] | None", ["1"], ["x.0 is '1', but it must be a whole number"]),
        ("set[str]", [None], ["x.0 is null, but it must be a string"]),
        ("list[str | None]", [None], []),
        ("tuple[int, int]", [1, 2], []),
        ("tuple[int, int]", [1, "2"], ["x.1 is '2', but it must be a whole number"]),
        ("tuple[int, int]", [1], ["x has 1 value, but it must have 2"]),
        ("tuple[int, str]", [1, 2, 3], ["x has 3 values, but it must have 2"]),
        ("tuple[float, ...]", [1, 2, "3"], ["x.2 is '3', but it must be a number"]),
        ("tuple[float | Tensor, float | Tensor]", [0.9, "x"], ["x.1 is 'x', but it must be a number"]),
        ("int | tuple[int, int]", 3, []),
        ("int | tuple[int, int]", [3, None], ["x.1 is null, but it must be a whole number"]),
        ("list[list[int]]", [[1], [2, "a"], 3], ["x.1.1 is 'a', but it must be a whole number", "x.2 is 3, but it must be a list of whole numbers"]),
        ("dict[str, float]", {"a": 1, "b": "c"}, ["x.b is 'c', but it must be a number"]),
        ("Mapping[str, list[int]]", {"a": [1, "b"]}, ["x.a.1 is 'b', but it must be a whole number"]),
        ("list[Literal['fast', 'slow']]", ["fsat"], ["x.0 is 'fsat', but it must be one of fast, slow"]),
        # Anything goes where the annotation is not understood.
        ("list", [1, "x"], []),
        ("list[Any]", [1, "x"], []),
        ("list[Unheard]", [1, "x"], []),
        ("list[Tensor]", [1], []),
        ("list[int] | list[str]", ["x", 1], []),
        ("list[int] | list", ["x", 1], []),
        ("dict[str, Any]", {"a": "b"}, []),
        ("list[int]", ["???", {"_target_": "a.B"}, object()], []),
        ("dict[str, int]", {"_target_": "a.B", "x": "y"}, []),
    ],
)  # fmt: skip
def test_what_stands_in_lists_and_mappings_is_judged_too(annotation: str, value: Any, expected: list[str]) -> None:
    plain = kind_of(annotation)
    assert plain is not None
    assert [error.what for error in plain.mistakes(value, "x")] == expected
    assert plain.admits(value) == (not expected)


def test_no_key_of_the_config_is_of_a_type_that_the_check_does_not_know() -> None:
    """Such a key, as one of an optional enum, would take anything."""
    assert kind_of(Removal | None) is None
    unknown = [
        one.key for one in list_keys() if not one.is_section and one.kind is not Any and kind_of(one.kind) is None
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "annotation", ["Any", "object", "Unheard | int", "Tensor", "Callable[[int], int]", "type[int]", "a b", "Literal[X]"]
)
def test_a_name_that_is_not_known_admits_anything(annotation: str) -> None:
    assert kind_of(annotation) is None


class Model:
    def __init__(
        self, width: int, depth: int | None = None, *, mode: Literal["fast", "slow"] = "fast", rate: float = 0.1
    ) -> None: ...


def schedule(optimizer: Any, total_steps: int, warmup: int = 0, **rest: Any) -> None: ...


def wrong(target: Any, named: Mapping[str, Any], *positional: Any, **options: Any) -> list[str]:
    takes = read_parameters(target)
    assert takes is not None
    return [str(error) for error in find_misfits("model", target.__name__, takes, positional, named, **options)]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"width": 3}, []),
        ({"width": 3, "depth": None, "rate": 1, "mode": "slow"}, []),
        ({"widht": 3, "width": 3}, ["Model takes no argument 'widht' (model.widht). Did you mean 'width'?"]),
        (
            {"zzz": 3, "width": 3},
            ["Model takes no argument 'zzz' (model.zzz). It takes: width, depth, mode, rate."],
        ),
        ({}, ["Model: missing a required argument: 'width' (model._target_)."]),
        ({"width": "3"}, ["model.width is '3', but it must be a whole number (model.width)."]),
        ({"width": 3.0}, ["model.width is 3.0, but it must be a whole number (model.width). Write 3."]),
        ({"width": True}, ["model.width is true, but it must be a whole number (model.width)."]),
        ({"width": [3]}, ["model.width is [3], but it must be a whole number (model.width)."]),
        ({"width": None}, ["model.width is null, but it must be a whole number (model.width)."]),
        ({"width": 1, "rate": "x"}, ["model.rate is 'x', but it must be a number (model.rate)."]),
        (
            {"width": 1, "mode": "slwo"},
            ["model.mode is 'slwo', but it must be one of fast, slow (model.mode). Did you mean 'slow'?"],
        ),
    ],
)
def test_arguments_that_do_not_fit_are_reported_with_their_key(named: dict[str, Any], expected: list[str]) -> None:
    assert wrong(Model, named) == expected


def test_what_comes_later_is_not_missed() -> None:
    assert wrong(Model, {}, partial=True) == []
    assert wrong(Model, {"width": "x"}, partial=True) != []


def test_positional_arguments_fill_places_and_are_judged() -> None:
    assert wrong(Model, {}, 3, 4) == []
    assert wrong(Model, {}, "3") == ["model._args_.0 is '3', but it must be a whole number (model._args_.0)."]
    assert wrong(Model, {"width": 3}, 3) == ["model.width is given in _args_ too (model.width). Give it once."]
    assert wrong(Model, {}, 1, 2, 3) == ["Model takes at most 2 positional arguments, but _args_ has 3 (model._args_)."]


def test_what_train_supplies_is_neither_missed_nor_given_twice() -> None:
    first = object()
    assert wrong(schedule, {"total_steps": 3, "odd": 1}, first, first=1) == []
    assert wrong(schedule, {"warmup": 1}, first, first=1) == [
        "schedule: missing a required argument: 'total_steps' (model._target_)."
    ]
    assert wrong(schedule, {"total_steps": 1, "optimizer": 2}, first, first=1) == [
        "schedule gets its 'optimizer' from train (model.optimizer). Leave model.optimizer out."
    ]


def test_a_decorator_that_takes_any_names_may_use_those_that_the_function_lacks() -> None:
    def config(method: Any) -> Any:
        """As the configs of transformers: names that __init__ does not have are attributes."""

        @functools.wraps(method)
        def outer(self: Any, **named: Any) -> None:
            method(self, **{key: value for key, value in named.items() if key == "width"})

        return outer

    class Config:
        @config
        def __init__(self, width: int = 3) -> None: ...

    assert wrong(Config, {"width": 4, "num_labels": 2}) == []
    assert wrong(Config, {"width": "x"}) == ["model.width is 'x', but it must be a whole number (model.width)."]


def test_live_annotations_are_read_as_written_ones() -> None:
    def target(a: int | None, b: "float", c: Literal["x"], d: list[int], e: Any, f: int = None) -> None: ...  # type: ignore[assignment]  # noqa: UP037, RUF013

    target.__annotations__ |= {"a": int | None, "d": list[int], "c": Literal["x"]}
    takes = read_parameters(target)
    assert takes is not None
    assert [str(one.kind) for one in takes] == [
        "a whole number or null", "a number", "one of x", "a list of whole numbers", "None", "a whole number or null",
    ]  # fmt: skip


def test_zero_and_one_are_truth_values_of_an_argument() -> None:
    def target(bias: bool) -> None: ...

    (takes,) = read_parameters(target) or ()
    assert [[*takes.mistakes(value, "bias")] == [] for value in (True, 0, 1, 2, "yes")] == [True] * 3 + [False] * 2


def test_a_default_that_contradicts_the_annotation_makes_it_say_nothing() -> None:
    def target(size: int = "auto") -> None: ...  # type: ignore[assignment]

    takes = read_parameters(target)
    assert takes is not None
    assert takes[0].kind is None
