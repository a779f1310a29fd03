"""The codec: every state it takes comes back exactly, and every other is refused by its owner's name."""

from __future__ import annotations

import collections
import json
import math
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import same

from trainer_cli.format.tree import Undecodable, decode, encode
from trainer_cli.manifest import UnsavableState


def there_and_back(tree):
    text, leaves = encode(tree)
    decoder = decode(text)
    assert set(decoder.wanted) == set(leaves)
    return decoder.tree({name: torch.as_tensor(leaf) for name, leaf in leaves.items()})


any_text = st.text(st.characters(exclude_categories=()))
keys = st.one_of(any_text, st.integers(), st.booleans(), st.none(), st.binary(), st.floats(allow_nan=False))
scalars = st.one_of(keys, st.floats())
arrays = st.builds(
    lambda values, kind: np.array(values, dtype=kind),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from(["float32", "int64", "uint8", "bool"]),
)
tensors = st.builds(
    lambda values, kind: torch.tensor(values, dtype=kind),
    st.lists(st.integers(0, 100), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
values = st.recursive(
    st.one_of(scalars, arrays, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(any_text, inner, max_size=4),
        st.dictionaries(st.one_of(keys, st.tuples(keys, keys)), inner, max_size=4),
        st.dictionaries(any_text, inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=20,
)


@given(st.dictionaries(any_text, values, max_size=5))
def test_every_state_comes_back_exactly(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**53, -(2**63), 10**400, 0.1, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308,
        "", "ä\n\0", "\ud83d\ude00", "\ud83d", "$", b"", b"\xff", [], {}, (), ((), [()]), {"$": 1},
        {"$": "int", "v": "1"},
        {1: 2, "1": 3}, {None: 1, True: 2, (1, "a"): 3, b"x": 4, 1.5: 5}, torch.Size([2, 3]),
        collections.Counter({3: 2, "a": 1}), np.float64(1.5), np.int32(7), np.bool_(True),
        np.zeros((2, 0, 3)), np.array(3.0), np.asfortranarray(np.arange(6).reshape(2, 3)),
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, {1: torch.ones(1), "1": torch.zeros(1)},
        {"a~1b": torch.ones(1), "a/b": torch.zeros(1)}, {"__metadata__": torch.ones(1)},
        {"\ud800": torch.ones(1), "?": torch.zeros(1)},
    ],
)  # fmt: skip
def test_corner_cases_come_back_exactly(value):
    assert same(there_and_back({"x": value, "": value}), {"x": value, "": value})


def test_a_tensor_may_be_called_as_the_header_calls_its_metadata():
    tree = {"__metadata__": torch.ones(2)}
    assert same(there_and_back(tree), tree)
    assert "__metadata__" not in encode(tree)[1]


def test_the_schedulers_of_torch_can_be_saved():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ):
        state = scheduler.state_dict()
        assert same(there_and_back({"scheduler": state})["scheduler"], state)


def test_only_some_keys_can_be_taken():
    text, _ = encode({"a": torch.ones(1), "b": torch.ones(1), "c": 3})
    decoder = decode(text, ["b", "c", "nowhere"])
    assert list(decoder.wanted) == ["b"]


class Custom:
    pass


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"callbacks": {"ema": {"decay": {1, 2}}}}, r"callbacks/ema/decay is a set, which cannot be saved"),
        ({"callbacks": {"ema": [0, frozenset()]}}, "callbacks/ema/1 is a frozenset"),
        ({"a": {"b": Custom()}}, r"a/b is a .*Custom"),
        ({"a": Custom}, "a is a type"),
        ({"a": 1j}, "a is a complex"),
        ({"a": Text("x")}, "a is a .*Text"),
        ({"a": pathlib.Path("x")}, "a is a pathlib"),
        ({"a": lambda: 0}, "a is a function"),
        ({"a": bytearray(b"")}, "a is a bytearray"),
        ({"a": collections.defaultdict(int)}, "a is a collections.defaultdict"),
        ({"a": torch.float32}, "a is a torch.dtype"),
        ({"a": {"b": {frozenset(): 1}}}, r"a/b has the key frozenset\(\)"),
        ({"a": {(1, frozenset()): 1}}, "a has the key"),
        ({3: 1}, "top-level key 3"),
        ({"\ud800": {"x": {1}}}, "is a set"),
    ],
)
def test_everything_else_is_refused_by_its_owners_name(tree, message):
    with pytest.raises(UnsavableState, match=message) as caught:
        encode(tree)
    assert caught.value.cure


def test_a_state_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsavableState, match=r"a/0/0/0.* deeper than.*flat list"):
        encode({"a": loop})


def document(state: object) -> bytes:
    return json.dumps({"version": 1, "state": state}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"{}", b"\xff", b"NaN", b"[" * 100_000, b'{"version": 1, "state": []}',
        b'{"version": 2, "state": {}}', b'{"version": 1, "state": {"a": NaN}}', b"1" * 5000,
        document({"a": {"$": "unknown", "v": 1}}),
        document({"a": {"$": ["x"], "v": 1}}),
        document({"a": {"$": "tuple", "v": {}}}),
        document({"a": {"$": "tuple"}}),
        document({"a": {"$": "tuple", "v": [], "w": 1}}),
        document({"a": {"$": "int", "v": 5}}),
        document({"a": {"$": "int", "v": "x"}}),
        document({"a": {"$": "float", "v": "1.0"}}),
        document({"a": {"$": "bytes", "v": "?"}}),
        document({"a": {"$": "str", "v": "/w=="}}),
        document({"a": {"$": "size", "v": [-1]}}),
        document({"a": {"$": "size", "v": ["a"]}}),
        document({"a": {"$": "dict", "v": [[1]]}}),
        document({"a": {"$": "dict", "v": [[[], 1]]}}),
        document({"a": {"$": "dict", "v": [[{"$": "tuple", "v": [[]]}, 1]]}}),
        document({"a": {"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]}}),
        b'{"version":1,"state":{"a":' + b'{"a":' * 70 + b"1" + b"}" * 72,
        b'{"version":1,"state":{"a":' + b'{"$":"tuple","v":[' * 5000 + b"]}" * 5000 + b"}}",
        b'{"version":1,"state":{"a":' + b'{"$":"dict","v":[[' * 300 + b"1,1" + b"]]}" * 300 + b"}}",
        document({"a": {"$": "dict", "v": [[1, 1], [1, 2]]}}),
        document({"a": {"$": "tensor", "v": 1}}),
    ],
)  # fmt: skip
def test_hostile_texts_are_refused(text):
    with pytest.raises(Undecodable):
        decode(text)


def test_deep_texts_are_refused():
    nested: object = 1
    for _ in range(200):
        nested = {"$": "tuple", "v": [nested]}
    with pytest.raises(Undecodable, match="deeper"):
        decode(document({"a": nested}))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8")))
def test_any_bytes_are_refused_and_nothing_else_happens(text):
    with pytest.raises(Undecodable):
        decode(text)
