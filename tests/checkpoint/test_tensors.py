"""The tensors format: every state comes back bit for bit, and no hostile file gets further than its header."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hostile_cases import HEADERS
from hypothesis import given, strategies as st
from states import same, small_state

from trainer_cli import tensor_files
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.format.tree import Undecodable, decode, encode
from trainer_cli.manifest import DamagedCheckpoint, FileEntry, Manifest, UnsavableState
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage.base import ReadableFolder
from trainer_cli.storage.local import LocalStorage
from trainer_cli.tensor_files.header import ELEMENT_BYTES

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def manifest_of(files: Mapping[str, FileEntry], aliases: Mapping[str, Mapping[str, str]] | None = None) -> Manifest:
    return Manifest(
        run_id="r",
        attempt=0,
        step=1,
        epoch=0,
        kind=CheckpointKind.regular,
        reason="",
        files=files,
        aliases=aliases or {},
    )


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


def save(storage: LocalStorage, tree: dict[str, Any]) -> Manifest:
    with storage.writing("step1") as folder:
        aliases = TensorsFormat().plan(tree).write(folder)
        files = dict(folder.files)
        with folder.create("manifest.json") as writer:
            writer.write(b"{}")
        folder.publish()
    return manifest_of(files, aliases)


def load(storage: LocalStorage, manifest: Manifest, only: Sequence[str] | None = None) -> dict[str, Any]:
    with storage.reading("step1") as folder:
        return TensorsFormat().read(folder, manifest, only)


def there_and_back(storage: LocalStorage, tree: dict[str, Any]) -> dict[str, Any]:
    return load(storage, save(storage, tree))


def test_every_element_type_and_shape_comes_back_bit_for_bit(storage: LocalStorage) -> None:
    tree = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (2, 3, 4 * dtype.itemsize), dtype=torch.uint8)
        tensor = raw.view(dtype)
        tree[str(dtype)] = {
            "full": tensor,
            "scalar": tensor[0, 0, 0].clone(),
            "empty": tensor[:, :0],
            "part": tensor[1],
        }
    assert same(there_and_back(storage, tree), tree)


def test_tensors_that_are_not_contiguous_come_back_with_their_values(storage: LocalStorage) -> None:
    base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    tree = {
        "turned": base.permute(3, 1, 0, 2),
        "strided": base[:, ::2, 1:, ::3],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "last": base.contiguous(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "reversed": np.arange(5)[::-1],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    assert same(there_and_back(storage, tree), tree)


def test_what_was_read_owns_its_memory_and_can_be_written(storage: LocalStorage) -> None:
    tree = there_and_back(storage, {"a": torch.ones(4), "b": torch.ones(4), "c": np.ones(3)})
    assert tree["a"].untyped_storage().nbytes() == 16
    tree["a"] += 1
    tree["c"] += 1
    assert tree["b"].sum() == 4


def test_tied_tensors_are_stored_once_and_are_tied_again(storage: LocalStorage) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 4))
    tree = {
        "a": weight,
        "b": weight.detach(),
        "view": weight.detach()[1:],
        "turned": weight.detach().T,
        "same": weight + 0,
    }
    manifest = save(storage, tree)
    assert manifest.aliases == {"rank0.safetensors": {"b": "a"}}
    back = load(storage, manifest)
    assert back["a"] is back["b"]
    assert back["a"].data_ptr() != back["view"].data_ptr()
    assert same(back, {name: value.detach() for name, value in tree.items()})
    assert same(load(storage, manifest, ["b"]), {"b": weight.detach()})


def test_empty_tensors_are_never_tied(storage: LocalStorage) -> None:
    tree = {"a": torch.empty(0), "b": torch.empty(0)}
    assert save(storage, tree).aliases == {}


def test_any_safetensors_reader_can_open_the_file(storage: LocalStorage) -> None:
    tree = small_state(1)
    save(storage, tree)
    path = storage.root / "step1" / "rank0.safetensors"
    read = safetensors.torch.load_file(path)
    assert torch.equal(read["model/weight"], tree["model"]["weight"])
    assert "model/tied" not in read
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_the_file_is_one_run_of_tensors_that_begins_aligned_largest_elements_first(storage: LocalStorage) -> None:
    tree = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in reversed(DTYPES)}
    save(storage, tree)
    data = (storage.root / "step1" / "rank0.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    places = sorted(entry["data_offsets"] for entry in header.values())
    assert all(end == begin for (_, end), (begin, _) in pairwise(places))
    widths = [place[1] - place[0] for place in places]
    assert widths == sorted(widths, reverse=True)
    assert len(data) == 8 + length + places[-1][1]


def test_only_the_wanted_keys_are_given_but_the_whole_file_is_verified(storage: LocalStorage) -> None:
    tree = {"model": {"w": torch.ones(5000)}, "optimizer": {"m": torch.ones(5000)}, "step": 3}
    manifest = save(storage, tree)
    assert same(load(storage, manifest, ["model", "step", "nowhere"]), {"model": tree["model"], "step": 3})
    path = storage.root / "step1" / "rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"rank0\.safetensors"):
        load(storage, manifest, ["model"])


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "a/b is of torch.complex128, .*checkpoint.format=torch_file"),
        (torch.empty(2, dtype=torch.bits8), "a/b is a tensor of torch.bits8"),
        (torch.ones(2).to_sparse(), "a/b is a tensor of .*sparse"),
        (torch.ones(2, device="meta"), "a/b is a tensor without memory"),
        (torch.ones(2).as_subclass(Odd), "a/b is a .*Odd"),
        (torch.nn.UninitializedParameter(), "a/b is a .*UninitializedParameter"),
        (np.array(["x"]), "a/b is an array of <U1"),
        (np.array([object()]), "a/b is an array of object"),
        (np.array([1], dtype=">i4"), "a/b is an array of >i4"),
        (np.array([1], dtype="complex128"), "a/b is of complex128, .*checkpoint.format=torch_file"),
        (np.ma.masked_array([1]), "a/b is a .*MaskedArray"),
        (np.datetime64("2020-01-01"), "a/b is an array of datetime64"),
    ],
)
def test_tensors_that_the_file_cannot_hold_are_refused_before_training(value: Any, message: str) -> None:
    with pytest.raises(UnsavableState, match=message):
        TensorsFormat().plan({"a": {"b": value}})


STATE = b'{"version":1,"state":{"a":{"$":"tensor","v":"a"}}}'


@contextmanager
def forged(
    storage: LocalStorage, tensors: bytes, state: bytes = STATE, aliases: Any = None
) -> Iterator[tuple[ReadableFolder, Manifest]]:
    """A folder of any bytes, with a manifest that fits them: what a hostile hand would write."""
    with storage.writing("step1") as folder:
        for file, content in (("rank0.safetensors", tensors), ("rank0.json", state), ("manifest.json", b"{}")):
            with folder.create(file) as writer:
                writer.write(content)
        files = {name: entry for name, entry in folder.files.items() if name != "manifest.json"}
        folder.publish()
    with storage.reading("step1") as folder:
        yield folder, manifest_of(files, aliases)


U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def file_of(header: bytes, data: bytes = bytes(16), length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def one(data: bytes = bytes(4), **fields: object) -> bytes:
    return file_of(json.dumps({"a": {**U8, **fields}}).encode(), data)


RAW = {
    "nothing": b"",
    "less than a length": bytes(7),
    "a length of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "a length of 200 MB": struct.pack("<Q", 200_000_000) + b"{}",
    "an empty header": file_of(b"", b""),
    "no tensor": file_of(b"{}", b""),
    "bytes of no tensor": file_of(b"{}", b"more"),
    "booleans of 2": one(b"\0\1\2\0", dtype="BOOL"),
}


@pytest.mark.parametrize("name", [*RAW, *HEADERS])
def test_hostile_tensor_files_are_refused(storage: LocalStorage, name: str) -> None:
    content = RAW[name] if name in RAW else file_of(*HEADERS[name])
    state = STATE.replace(b'"v":"a"', b'"v":"w"') if name in HEADERS else STATE
    with (
        forged(storage, content, state) as (folder, manifest),
        pytest.raises(DamagedCheckpoint, match=r"rank0\.safetensors"),
    ):
        TensorsFormat().read(folder, manifest)


def test_a_file_without_tricks_passes_the_same_way(storage: LocalStorage) -> None:
    with forged(storage, one(b"\1\2\3\4")) as (folder, manifest):
        assert TensorsFormat().read(folder, manifest)["a"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("aliases", [{"a": "nowhere"}, {"a": "b", "b": "a"}, {"a": "a"}])
def test_hostile_aliases_are_refused(storage: LocalStorage, aliases: dict[str, str]) -> None:
    with (
        forged(storage, one(), aliases={"rank0.safetensors": aliases}) as (folder, manifest),
        pytest.raises(DamagedCheckpoint),
    ):
        TensorsFormat().read(folder, manifest)


@pytest.mark.parametrize("state", [b"", b"{}", b"[" * 100_000, STATE.replace(b"tensor", b"pickle")])
def test_hostile_small_states_are_refused(storage: LocalStorage, state: bytes) -> None:
    with forged(storage, one(), state) as (folder, manifest), pytest.raises(DamagedCheckpoint, match=r"rank0\.json"):
        TensorsFormat().read(folder, manifest)


def test_an_array_of_a_type_that_numpy_lacks_is_refused(storage: LocalStorage) -> None:
    tensors = one(dtype="BF16", shape=[2])
    with (
        forged(storage, tensors, STATE.replace(b"tensor", b"array")) as (folder, manifest),
        pytest.raises(DamagedCheckpoint),
    ):
        TensorsFormat().read(folder, manifest)


def test_a_file_that_the_manifest_does_not_list_is_not_read(storage: LocalStorage) -> None:
    with forged(storage, one()) as (folder, manifest), pytest.raises(DamagedCheckpoint, match="does not list"):
        TensorsFormat().read(folder, manifest_of({"rank0.json": manifest.files["rank0.json"]}))


def test_every_type_of_element_has_the_size_that_torch_gives_it() -> None:
    assert {code: dtype.itemsize for code, dtype in tensor_files.DTYPES.items()} == ELEMENT_BYTES


# The codec: every state it takes comes back exactly, and every other is refused by its owner's name.


def through_text(tree: dict[str, Any]) -> dict[str, Any]:
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
def test_every_state_comes_back_exactly(tree: dict[str, Any]) -> None:
    assert same(through_text(tree), tree)


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
def test_corner_cases_come_back_exactly(value: Any) -> None:
    assert same(through_text({"x": value, "": value}), {"x": value, "": value})


def test_a_tensor_may_be_called_as_the_header_calls_its_metadata() -> None:
    tree = {"__metadata__": torch.ones(2)}
    assert same(through_text(tree), tree)
    assert "__metadata__" not in encode(tree)[1]


def test_the_schedulers_of_torch_can_be_saved() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ):
        state = scheduler.state_dict()
        assert same(through_text({"scheduler": state})["scheduler"], state)


def test_only_some_keys_can_be_taken() -> None:
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
def test_everything_else_is_refused_by_its_owners_name(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsavableState, match=message) as caught:
        encode(tree)
    assert caught.value.cure


def test_a_state_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
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
def test_hostile_texts_are_refused(text: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(text)


def test_deep_texts_are_refused() -> None:
    nested: object = 1
    for _ in range(200):
        nested = {"$": "tuple", "v": [nested]}
    with pytest.raises(Undecodable, match="deeper"):
        decode(document({"a": nested}))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8")))
def test_any_bytes_are_refused_and_nothing_else_happens(text: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(text)
