"""Every walk through a tree of values knows the same containers, and makes them again as they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from trainer_cli.containers import Container, container_of, rebuild, values_of
from trainer_cli.leaves import map_leaves, walk


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Fields:
    first: Any
    second: Any


class Named(UserDict[str, Any]):
    origin = "none"


CASES = [
    ({"first": 1, "second": 2}, Container.mapping, [".first", ".second"]),
    (OrderedDict(first=1, second=2), Container.mapping, [".first", ".second"]),
    (defaultdict(int, first=1, second=2), Container.mapping, [".first", ".second"]),
    (MappingProxyType({"first": 1, "second": 2}), Container.mapping, [".first", ".second"]),
    (Pair(1, 2), Container.named_tuple, [".first", ".second"]),
    ([1, 2], Container.sequence, ["[0]", "[1]"]),
    ((1, 2), Container.sequence, ["[0]", "[1]"]),
    (Fields(1, 2), Container.dataclass, [".first", ".second"]),
]


@pytest.mark.parametrize(("value", "kind", "ends"), CASES, ids=lambda case: type(case).__name__)
def test_a_container_is_entered_and_made_again_with_its_type(value: Any, kind: Container, ends: list[str]) -> None:
    assert container_of(value) is kind
    assert list(walk(value, "batch")) == [(f"batch{end}", leaf) for end, leaf in zip(ends, (1, 2), strict=True)]
    other = map_leaves(lambda leaf: 10 * leaf, value)
    assert type(other) is type(value)
    assert list(values_of(other)) == [10, 20]
    assert list(values_of(value)) == [1, 2]


@pytest.mark.parametrize("leaf", [None, 1, "text", {1, 2}, Fields, range(3)])
def test_what_is_no_container_is_a_leaf(leaf: Any) -> None:
    assert list(walk(leaf, "batch")) == [("batch", leaf)]
    assert list(values_of(leaf)) == []
    assert rebuild(leaf, []) is leaf


def test_every_kind_of_container_is_among_the_cases() -> None:
    assert {kind for _, kind, _ in CASES} == set(Container)


def test_leaves_are_named_through_all_containers_but_those_that_are_leaves_themselves() -> None:
    tree = {"views": [Pair(1, {"deep": 2}), Fields((3, 4), [])], "name": "x"}
    names = ["views[0].first", "views[0].second.deep", "views[1].first[0]", "views[1].first[1]", "name"]
    assert [name for name, _ in walk(tree)] == names
    assert [name for name, _ in walk(tree, is_leaf=lambda value: isinstance(value, Fields))] == [
        "views[0].first", "views[0].second.deep", "views[1]", "name",
    ]  # fmt: skip


def test_a_mapping_keeps_what_it_has_besides_its_values() -> None:
    named = Named(first=1)
    named.origin = "disk"
    other = map_leaves(str, named)
    assert (other.origin, dict(other), dict(named)) == ("disk", {"first": "1"}, {"first": 1})
