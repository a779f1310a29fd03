"""The tensors format: every tensor comes back bit for bit, and no hostile file gets further than its header."""

from __future__ import annotations

import json
import struct
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hostile_cases import HEADERS
from states import same, small_state

from trainer_cli.format import file_layout as tensor_file
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.manifest import DamagedCheckpoint, Manifest, UnsavableState
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage.local import LocalStorage
from trainer_cli.tensor_files.header import ELEMENT_BYTES

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def manifest_of(files, aliases=None) -> Manifest:
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
def storage(tmp_path):
    return LocalStorage(tmp_path / "checkpoints")


def save(storage, tree) -> Manifest:
    with storage.writing("step1") as folder:
        aliases = TensorsFormat().plan(tree).write(folder)
        files = dict(folder.files)
        with folder.create("manifest.json") as writer:
            writer.write(b"{}")
        folder.publish()
    return manifest_of(files, aliases)


def load(storage, manifest, only=None):
    with storage.reading("step1") as folder:
        return TensorsFormat().read(folder, manifest, only)


def there_and_back(storage, tree):
    return load(storage, save(storage, tree))


def test_every_element_type_and_shape_comes_back_bit_for_bit(storage):
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


def test_tensors_that_are_not_contiguous_come_back_with_their_values(storage):
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


def test_what_was_read_owns_its_memory_and_can_be_written(storage):
    tree = there_and_back(storage, {"a": torch.ones(4), "b": torch.ones(4), "c": np.ones(3)})
    assert tree["a"].untyped_storage().nbytes() == 16
    tree["a"] += 1
    tree["c"] += 1
    assert tree["b"].sum() == 4


def test_tied_tensors_are_stored_once_and_are_tied_again(storage):
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


def test_empty_tensors_are_never_tied(storage):
    tree = {"a": torch.empty(0), "b": torch.empty(0)}
    assert save(storage, tree).aliases == {}


def test_any_safetensors_reader_can_open_the_file(storage):
    tree = small_state(1)
    save(storage, tree)
    path = storage.root / "step1" / "rank0.safetensors"
    read = safetensors.torch.load_file(path)
    assert torch.equal(read["model/weight"], tree["model"]["weight"])
    assert "model/tied" not in read
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_the_file_is_one_run_of_tensors_that_begins_aligned_largest_elements_first(storage):
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


def test_only_the_wanted_keys_are_given_but_the_whole_file_is_verified(storage):
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
def test_tensors_that_the_file_cannot_hold_are_refused_before_training(value, message):
    with pytest.raises(UnsavableState, match=message):
        TensorsFormat().plan({"a": {"b": value}})


STATE = b'{"version":1,"state":{"a":{"$":"tensor","v":"a"}}}'


@contextmanager
def forged(storage, tensors: bytes, state: bytes = STATE, aliases=None):
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
def test_hostile_tensor_files_are_refused(storage, name):
    content = RAW[name] if name in RAW else file_of(*HEADERS[name])
    state = STATE.replace(b'"v":"a"', b'"v":"w"') if name in HEADERS else STATE
    with (
        forged(storage, content, state) as (folder, manifest),
        pytest.raises(DamagedCheckpoint, match=r"rank0\.safetensors"),
    ):
        TensorsFormat().read(folder, manifest)


def test_a_file_without_tricks_passes_the_same_way(storage):
    with forged(storage, one(b"\1\2\3\4")) as (folder, manifest):
        assert TensorsFormat().read(folder, manifest)["a"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("aliases", [{"a": "nowhere"}, {"a": "b", "b": "a"}, {"a": "a"}])
def test_hostile_aliases_are_refused(storage, aliases):
    with (
        forged(storage, one(), aliases={"rank0.safetensors": aliases}) as (folder, manifest),
        pytest.raises(DamagedCheckpoint),
    ):
        TensorsFormat().read(folder, manifest)


@pytest.mark.parametrize("state", [b"", b"{}", b"[" * 100_000, STATE.replace(b"tensor", b"pickle")])
def test_hostile_small_states_are_refused(storage, state):
    with forged(storage, one(), state) as (folder, manifest), pytest.raises(DamagedCheckpoint, match=r"rank0\.json"):
        TensorsFormat().read(folder, manifest)


def test_an_array_of_a_type_that_numpy_lacks_is_refused(storage):
    tensors = one(dtype="BF16", shape=[2])
    with (
        forged(storage, tensors, STATE.replace(b"tensor", b"array")) as (folder, manifest),
        pytest.raises(DamagedCheckpoint),
    ):
        TensorsFormat().read(folder, manifest)


def test_a_file_that_the_manifest_does_not_list_is_not_read(storage):
    with forged(storage, one()) as (folder, manifest), pytest.raises(DamagedCheckpoint, match="does not list"):
        TensorsFormat().read(folder, manifest_of({"rank0.json": manifest.files["rank0.json"]}))


def test_every_type_of_element_has_the_size_that_torch_gives_it() -> None:
    assert {code: dtype.itemsize for code, dtype in tensor_file.DTYPES.items()} == ELEMENT_BYTES
