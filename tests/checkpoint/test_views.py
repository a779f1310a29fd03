"""Tensors that view one memory are stored once, have the right values, and share memory again after a load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fake_ranks import form_of, parted, rank_of, save_as
from hypothesis import given, settings, strategies as st
from known_formats import FORMATS, OF_RANKS
from states import restore_model, same
from torch.distributed.tensor import Shard

from trainer_cli.checkpoint.checkpointer import AsyncCheckpointer, SyncCheckpointer, make_sync_checkpointer
from trainer_cli.checkpoint.fill_state import move_tensors
from trainer_cli.checkpoint.snapshot import SnapshotBuffer
from trainer_cli.dtensor import local_of, targets_of
from trainer_cli.format.base import Format
from trainer_cli.format.readable import check_readable
from trainer_cli.format.sharded import SMALL_BYTES, ShardedFormat, TensorsFormat, decode_own, encode_own
from trainer_cli.format.tree import Undecodable, decode, encode
from trainer_cli.format.views import extent_of
from trainer_cli.manifest import DamagedCheckpoint
from trainer_cli.storage.local import LocalStorage

SHARING: dict[str, Format] = {
    **{name: FORMATS[name] for name in ("tensors", "archive none", "torch_file") if name in FORMATS},
    "sharded": ShardedFormat(0, 1),
}


def flat(count: int = 20) -> torch.Tensor:
    return torch.arange(float(count))


def stored_bytes(**tensors: torch.Tensor) -> int:
    layout = TensorsFormat().plan({"model": tensors})
    return layout.image_bytes - len(layout.header)


def there_and_back(format: Format, tree: dict[str, Any], only: list[str] | None = None) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        SyncCheckpointer(format=format).save(tree, Path(folder) / "step1")
        return SyncCheckpointer(format=format).read(Path(folder) / "step1", only)


def view_table() -> dict[str, tuple[dict[str, torch.Tensor], int]]:
    """Tensors, and the elements that are stored of them."""
    whole, matrix, dataset = flat(), flat().reshape(4, 5), flat(10_000)
    words = torch.arange(8, dtype=torch.int32)
    return {
        "two parts beside the whole": ({"a": whole[:10], "b": whole[10:], "whole": whole}, 20),
        "a transposed weight": ({"w": matrix, "t": matrix.t()}, 20),
        "the transposed one first": ({"t": matrix.t(), "row": matrix[1]}, 20),
        "a row, a column and a block": ({"w": matrix, "r": matrix[1], "c": matrix[:, 1], "b": matrix[1:3, ::2]}, 20),
        "another shape": ({"w": matrix, "flat": matrix.view(-1), "deep": matrix.view(2, 2, 5)}, 20),
        "windows that overlap": ({"a": whole[2:8], "b": whole[5:12]}, 10),
        "a chain of windows": ({"a": whole[:5], "c": whole[8:14], "b": whole[4:9]}, 14),
        "a slice of a large storage": ({"a": dataset[500:510], "first": dataset[500:503]}, 10),
        "tied views": ({"w": matrix, "r": matrix[1], "again": matrix[1]}, 20),
        "a parameter and what it holds": ({"w": torch.nn.Parameter(matrix), "r": matrix.detach()[1]}, 20),
        "parts that touch": ({"a": whole[:10], "b": whole[10:]}, 20),
        "parts of another storage": ({"a": whole[:10], "b": whole.clone()[:10]}, 20),
        "columns without the matrix": ({"a": matrix[:, :3], "b": matrix[:, 2:]}, 24),
        "an expanded row": ({"w": matrix, "e": matrix[0].expand(3, 5)}, 35),
        "windows of unfold": ({"w": whole[:6], "u": whole[:6].unfold(0, 3, 1)}, 18),
        "two types of one storage": ({"i": words, "f": words.view(torch.float32)}, 16),
    }


@pytest.mark.parametrize("name", view_table())
def test_overlapping_memory_is_stored_once(name: str) -> None:
    tensors, elements = view_table()[name]
    assert stored_bytes(**tensors) == 4 * elements
    found = there_and_back(TensorsFormat(), {"model": tensors})["model"]
    assert same(found, {key: tensor.detach() for key, tensor in tensors.items()})


@pytest.mark.parametrize("format", SHARING)
@pytest.mark.parametrize("only", [["model"], ["callbacks"]])
def test_a_part_of_a_state_is_loaded_with_the_memory_that_it_views(format: str, only: list[str]) -> None:
    whole = flat()
    tree = {"model": {"a": whole[:12]}, "callbacks": {"mine": {"b": whole[8:], "whole": whole}}}
    assert same(there_and_back(SHARING[format], tree, only), {only[0]: tree[only[0]]})


def test_the_name_of_stored_memory_is_no_name_of_the_state() -> None:
    whole = flat()
    tree = {"a": whole[:12], "b": whole[8:], "a#storage": flat(3)}
    assert same(there_and_back(TensorsFormat(), tree), tree)


def test_a_state_without_views_is_written_as_before() -> None:
    tree = {"model": {"w": flat(), "tied": flat(), "part": flat()[3:]}}
    assert encode(tree)[0] == encode(tree, share_views=False)[0]


def test_the_copy_of_a_state_holds_views_once_and_is_written_as_the_state(tmp_path: Path) -> None:
    matrix = torch.ones(40, 50)
    tree = {"model": {"w": matrix, "t": matrix.t(), "r": matrix[1:]}}
    SyncCheckpointer().save(tree, tmp_path / "sync")
    checkpointer = AsyncCheckpointer()
    checkpointer.save(tree, tmp_path / "async")
    checkpointer.close()
    names = ("rank0.safetensors", "rank0.json")
    one, other = ([(tmp_path / kind / name).read_bytes() for name in names] for kind in ("sync", "async"))
    assert one == other
    assert len(one[0]) < 1.6 * matrix.nbytes


@pytest.mark.parametrize("trained", [(0, 12), (0, 20), (8, 20), (0, 4)])
@pytest.mark.parametrize("place", [2, 6, 15])
def test_a_trained_view_is_examined_and_its_neighbours_are_not(trained: tuple[int, int], place: int) -> None:
    whole = flat()
    parameter = whole[slice(*trained)]
    layout = TensorsFormat().plan({"model": {"p": parameter, "a": whole[:12], "b": whole[8:]}})
    whole[place] = torch.nan
    buffer = SnapshotBuffer()
    assert buffer.capture(layout, [parameter, parameter[:1]]).is_finite() is not (trained[0] <= place < trained[1])
    buffer.close()


class Views(torch.nn.Module):
    """Parameters and a buffer that are views of one memory."""

    row: torch.Tensor
    memory: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        memory = torch.full((12,), value)
        self.weight = torch.nn.Parameter(memory[:8].view(2, 4))
        self.register_buffer("row", self.weight.detach()[1])
        self.register_buffer("memory", memory)


@pytest.mark.parametrize("format", SHARING)
def test_live_views_are_filled_and_stay_views(format: str) -> None:
    saved, live = Views(1.0), Views(0.0)
    with torch.no_grad():
        saved.weight[1, 2] = 5
    restore_model(live, there_and_back(SHARING[format], {"model": saved.state_dict()})["model"])
    assert same(dict(live.state_dict()), dict(saved.state_dict()))
    with torch.no_grad():
        live.weight[1, 3] = 7
    assert live.row.tolist() == [1, 1, 5, 7]
    assert live.memory[7] == 7


@pytest.mark.parametrize("location", [None, "cpu", "meta", {"cpu": "meta"}, lambda storage, _: storage.clone()])
def test_views_that_are_moved_still_share_memory(location: Any) -> None:
    whole = flat()
    moved = move_tensors({"a": whole[:12], "b": whole[8:]}, location)
    assert (moved["a"].shape, moved["b"].storage_offset()) == ((12,), 8)
    assert moved["a"].untyped_storage()._cdata == moved["b"].untyped_storage()._cdata


# Several ranks


def rank_tree(mesh: Any, rank: int) -> dict[str, Any]:
    large = flat(SMALL_BYTES).reshape(4, -1)
    return {
        "model": {"w": large, "t": large.t(), "small": large[1, :4], "sharded": parted(flat(8), mesh, Shard(0))},
        "rng": {"whole": (own := flat() + rank), "part": own[3:]},
    }


@pytest.mark.parametrize("format", OF_RANKS)
def test_several_ranks_store_a_view_once_and_load_it(tmp_path: Path, format: str) -> None:
    manifest = save_as(tmp_path, [2], rank_tree, format=format)
    if format == "tensors":
        assert sum(file.size_bytes for file in manifest.files.values()) < 1.5 * 4 * SMALL_BYTES
    SyncCheckpointer().verify(tmp_path / "step1")
    for rank in range(2):
        with rank_of(rank, [2]) as mesh:
            wanted = rank_tree(mesh, rank)
            checkpointer = make_sync_checkpointer(format=form_of(rank, 2, format))
            found = checkpointer.read(tmp_path / "step1", targets=targets_of(wanted["model"]))
            assert same(local_of(found["model"].pop("sharded")), local_of(wanted["model"].pop("sharded")))
            assert same(found, wanted)
    found["model"]["t"][2, 1] = -1
    found["rng"]["part"][0] = -1
    assert (found["model"]["w"][1, 2], found["model"]["small"][2], found["rng"]["whole"][3]) == (-1, -1, -1)


def test_views_of_one_process_become_parts_of_sharded_tensors(tmp_path: Path) -> None:
    matrix = flat(24).reshape(4, 6)
    model = {"w": matrix, "t": matrix.t(), "row": matrix[1]}
    make_sync_checkpointer().save({"model": model}, tmp_path / "step1")
    for rank in range(2):
        with rank_of(rank, [2]) as mesh:
            live = {name: parted(tensor.clone(), mesh, Shard(0)) for name, tensor in model.items()}
            checkpointer = make_sync_checkpointer(format=form_of(rank, 2))
            found = checkpointer.read(tmp_path / "step1", targets=targets_of(live))["model"]
            for name in model:
                assert same(local_of(found[name]), local_of(live[name]))


def test_what_a_rank_saves_for_itself_shares_views() -> None:
    whole = flat(5000)
    text = encode_own({"rng": {"whole": whole, "part": whole[1:]}})
    assert len(text) < 2 * whole.nbytes  # In base64.
    found = decode_own(text)["rng"]
    found["part"][0] = -1
    assert found["whole"][1] == -1


# Hostile files


def view(**changed: Any) -> bytes:
    raw = {"name": "v", "base": "a", "offset": 0, "shape": [2], "strides": [1], **changed}
    text = encode({"a": flat(), "v": 0})[0]
    return text.replace(b'"v":0', f'"v":{{"$":"view","v":{list(raw.values())}}}'.replace("'", '"').encode())


@pytest.mark.parametrize(
    "changed",
    [
        {"base": "nowhere"}, {"base": "v"}, {"base": 1}, {"name": 1}, {"name": "a"}, {"offset": 19}, {"offset": -1},
        {"offset": 0.0}, {"shape": [21]}, {"shape": [2**62], "strides": [0]}, {"shape": [0]}, {"shape": [2, 2]},
        {"shape": [5, 5], "strides": [1, 1]}, {"strides": [20]}, {"strides": [-1]}, {"strides": 1}, {"shape": ["2"]},
    ],
)  # fmt: skip
def test_a_view_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    assert decode(view()).tree({"a": flat()})["v"].tolist() == [0, 1]
    with pytest.raises((Undecodable, KeyError)):
        decode(view(**changed)).tree({"a": flat()})


def test_a_view_outside_of_what_is_stored_is_damage(tmp_path: Path) -> None:
    layout = TensorsFormat().plan({"a": flat(), "v": 0})

    class Forged(TensorsFormat):
        def plan(self, tree: Any, *, shapes_only: bool = False) -> Any:
            return replace(layout, text=view(offset=19))

    SyncCheckpointer(format=Forged()).save({}, tmp_path / "step1")
    manifest = SyncCheckpointer().manifest(tmp_path / "step1")
    with LocalStorage(tmp_path).reading("step1") as folder:
        for act in (check_readable, TensorsFormat().read):
            with pytest.raises(DamagedCheckpoint, match="lies outside of 'a'"):
                act(folder, manifest)


# Random sets of views


@st.composite
def view_of(draw: st.DrawFn, size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides of a view: dense blocks for the most part, turned, thinned out or expanded."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if draw(st.integers(0, 3)) == 0:
        strides = [stride * draw(st.integers(0, 3)) for stride in strides]
    order = draw(st.permutations(range(len(shape))))
    extent = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if extent > size:
        return 0, (), ()
    offset = draw(st.integers(0, size - extent))
    return offset, tuple(shape[index] for index in order), tuple(strides[index] for index in order)


SIZE = 24
a_view = st.tuples(st.integers(0, 1), st.booleans(), view_of(SIZE))
"""The number of the storage, whether another type is viewed, and where."""


def expected(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors that share what the rule says and nothing else, and the bytes to store; by looking at each element."""
    elements: dict[str, list[tuple[Any, ...]]] = {}
    for name, tensor in tensors.items():
        order = torch.arange(SIZE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        elements[name] = [(*key, place) for place in order.tolist()]
    dense = [set(one) for one in elements.values() if len(set(one)) == len(one) == 1 + max(one)[2] - min(one)[2]]
    regions: list[set[Any]] = []
    for one in dense:
        touched = [region for region in regions if region & one]
        regions = [region for region in regions if not region & one] + [one.union(*touched)]
    of_region: dict[int, list[str]] = {}
    for name, places in elements.items():
        where = next((at for at, region in enumerate(regions) if set(places) <= region), -1)
        is_nested = extent_of(tensors[name].shape, tensors[name].stride()) is not None
        of_region.setdefault(where if is_nested else -1, []).append(name)
    result: dict[str, torch.Tensor] = {}
    stored: dict[Any, int] = {}
    for region, names in of_region.items():
        memory = None if region == -1 else tensors[names[0]].as_strided((SIZE,), (1,), 0).clone()
        alone: dict[Any, torch.Tensor] = {}
        for name in names:
            tensor = tensors[name]
            place = (elements[name][0][:2], tensor.storage_offset(), tensor.shape, tensor.stride())
            if memory is None:
                result[name] = alone.setdefault(place, tensor.contiguous().clone())
                stored[place] = tensor.nbytes
            else:
                result[name] = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                stored[region] = len(regions[region]) * tensor.element_size()
    return {name: result[name] for name in tensors}, sum(stored.values())


@settings(max_examples=60)
@given(
    st.lists(a_view, min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.int16]),
    st.sampled_from([*SHARING.values(), *(format for name, format in FORMATS.items() if name == "huggingface")]),
    st.booleans(),
)
def test_any_views_have_their_values_share_memory_and_are_stored_once(
    places: list[Any], dtype: torch.dtype, format: Format, in_background: bool
) -> None:
    storages = [torch.arange(SIZE).to(dtype), torch.arange(100, 100 + SIZE).to(dtype)]
    other = {torch.float32: torch.int32, torch.int16: torch.bfloat16}[dtype]
    tensors = {}
    for index, (storage, is_other, (offset, shape, strides)) in enumerate(places):
        memory = storages[storage].view(other) if is_other else storages[storage]
        tensors[f"t{index}"] = memory.as_strided(shape, strides, offset)
    wanted, size_bytes = expected(tensors)
    assert stored_bytes(**tensors) == size_bytes
    with TemporaryDirectory() as folder:
        checkpointer = (AsyncCheckpointer if in_background else SyncCheckpointer)(format=format)
        checkpointer.save({"model": tensors}, Path(folder) / "step1")
        checkpointer.close()
        found = SyncCheckpointer(format=format).read(Path(folder) / "step1")["model"]
    assert same(found, tensors)
    for name in tensors if format.name != "huggingface" else ():
        for tree in (found, wanted):
            tree[name].zero_()
        assert same(found, wanted), name
