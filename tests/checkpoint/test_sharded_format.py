"""States of which each rank has a part: written by any number of ranks, read by any other, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import form_of, parted, rank_of, save_as
from known_formats import OF_RANKS
from states import same
from thread_ranks import ThreadGroup, on_ranks
from torch.distributed.tensor import Partial, Replicate, Shard

from trainer_cli import dtensor
from trainer_cli.checkpoint.checkpointer import SyncCheckpointer, make_sync_checkpointer
from trainer_cli.dtensor import is_dtensor, local_of, targets_of
from trainer_cli.format import sharded
from trainer_cli.format.readable import check_readable
from trainer_cli.format.sharded import SMALL_BYTES, ShardedFormat, TensorsFormat, decode_own
from trainer_cli.format.tree import Undecodable
from trainer_cli.layout.parts import PartTable
from trainer_cli.layout.shards import Shard as Part
from trainer_cli.manifest import DamagedCheckpoint, Manifest, UnsavableState
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.folder import LocalReadableFolder
from trainer_cli.tensor_files.elements import new_tensor
from trainer_cli.tensor_files.verified_file import VerifiedFile

LARGE = SMALL_BYTES // 4 + 1


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))).mul(100).to(dtype)


WEIGHTS: dict[str, tuple[torch.Tensor, Any]] = {
    "even": (random(8, 4), Shard(0)),
    "uneven": (random(5, 3), Shard(0)),
    "fewer rows than ranks": (random(2, 3), Shard(0)),
    "one row": (random(1, 7, dtype=torch.bfloat16), Shard(0)),
    "columns": (random(3, 10), Shard(1)),
    "middle": (random(2, 6, 3), Shard(1)),
    "empty": (random(0, 4), Shard(0)),
    "no columns": (random(4, 0), Shard(0)),
    "booleans": (random(9) > 50, Shard(0)),
    "on every rank": (random(4, 4), Replicate()),
    "0-d": (torch.tensor(3.5), None),
    "plain": (random(6), None),
    "plain and empty": (random(0, 2), None),
    "plain and large": (random(LARGE), None),
    "also large": (random(2, LARGE, dtype=torch.float64), None),
}
"""What the ranks have together, and how it is shared out: None is a plain tensor."""


def state(mesh: Any = None, rank: int = 0, *, filled: bool = True) -> dict[str, Any]:
    """The state of one rank; without a mesh that of one process."""

    def own(whole: torch.Tensor, placement: Any) -> Any:
        whole = whole.clone() if filled else torch.zeros_like(whole)
        return whole if mesh is None or placement is None else parted(whole, mesh, placement)

    model = {name: own(*one) for name, one in WEIGHTS.items()}
    return {
        "model": {**model, "tied": model["uneven"], "tied and plain": model["plain and large"]},
        "optimizer": {
            "state": {
                name: {"exp_avg": own(*one), "step": torch.tensor(7.0)} for name, one in WEIGHTS.items() if one[1]
            },
        },
        "progress": {"step": 7, "seen": (1, None)},
        "rng": {"torch": torch.arange(rank, rank + 5)},
        "data": {"position": rank, "seen": np.arange(rank)},
    }


def local(tree: Any) -> Any:
    """The parts of one rank as plain tensors."""
    if isinstance(tree, Mapping):
        return {key: local(value) for key, value in tree.items()}
    return local_of(tree)


def load_as(
    root: Path, world_size: int, rank: int, mesh: Any, name: str = "step1", format: str = "tensors"
) -> dict[str, Any]:
    targets = targets_of(state(mesh, filled=False)["model"])
    checkpointer = make_sync_checkpointer(format=form_of(rank, world_size, format))
    return checkpointer.read(root / name, targets=targets)


def manifest_of(path: Path) -> Manifest:
    return Manifest.parse((path / "manifest.json").read_bytes())


@pytest.mark.parametrize("format", OF_RANKS)
def test_a_state_keeps_its_bits_from_one_rank_to_two_to_four_to_three_to_one(tmp_path: Path, format: str) -> None:
    make_sync_checkpointer(format=format).save(state(), tmp_path / "of1")
    before = "of1"
    for world_size in (2, 4, 3):
        loaded: dict[int, Any] = {}

        def tree(mesh: Any, rank: int) -> Any:
            found = loaded[rank] = load_as(tmp_path, world_size, rank, mesh, before, format)  # noqa: B023
            wanted = state(mesh, rank)
            assert same(local(found["model"]), local(wanted["model"]))
            assert same(local(found["optimizer"]), local(wanted["optimizer"]))
            assert found["progress"] == wanted["progress"]
            assert all(
                is_dtensor(found["model"][name]) is (placement is not None) for name, (_, placement) in WEIGHTS.items()
            )
            assert found["model"]["tied"] is found["model"]["uneven"]
            own = {key: state(rank=rank)[key] for key in ("rng", "data")}
            return {**{key: value for key, value in found.items() if key != "ranks"}, **own}

        save_as(tmp_path, [world_size], tree, f"of{world_size}", format)
        alone = make_sync_checkpointer().read(tmp_path / f"of{world_size}")
        assert same(
            alone.pop("ranks"), [{key: state(rank=rank)[key] for key in ("rng", "data")} for rank in range(world_size)]
        )
        assert same(alone, state_order(alone))
        before = f"of{world_size}"


def state_order(like: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one process, its keys in the order of another."""
    return {key: state()[key] for key in like}


@pytest.mark.parametrize("format", OF_RANKS)
@pytest.mark.parametrize(("saved", "reading", "ranks"), [(2, 2, None), (2, 3, [0, 1]), (1, 2, [])])
def test_a_rank_gets_what_it_saved_for_itself_or_among_others_what_each_saved(
    tmp_path: Path, saved: int, reading: int, ranks: list[int] | None, format: str
) -> None:
    if saved == 1:
        make_sync_checkpointer(format=format).save(state(), tmp_path / "step1")
    else:
        save_as(tmp_path, [saved], state, format=format)
    with rank_of(1, [reading]) as mesh:
        found = load_as(tmp_path, reading, 1, mesh, format=format)
    own = state(rank=1 if ranks is None else 0)
    assert same((found["rng"], found["data"]), (own["rng"], own["data"]))
    others = found.get("ranks")
    assert (None if others is None else [one["data"]["position"] for one in others]) == ranks


def read_files(monkeypatch: pytest.MonkeyPatch, read: Any) -> list[str]:
    """The files whose content was read."""
    files: list[str] = []
    enter = VerifiedFile.__enter__

    def noted(file: VerifiedFile) -> VerifiedFile:
        files.append(file.path.name)
        return enter(file)

    with monkeypatch.context() as patch:
        patch.setattr(VerifiedFile, "__enter__", noted)
        read()
    return files


def of_rank(mesh: Any, rank: int) -> dict[str, Any]:
    """A sharded model whose plain tensors are all small, as under FSDP."""
    whole = state(mesh, rank)
    return {**whole, "model": {name: whole["model"][name] for name in WEIGHTS if "large" not in name}}


def test_at_the_same_number_of_ranks_each_reads_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as(tmp_path, [2], of_rank)
    with rank_of(1, [2]) as mesh:
        read = read_files(monkeypatch, lambda: load_as(tmp_path, 2, 1, mesh))
    # Of what is in rank 0's file, rank 1 needs no element, but the types of the tensors of which it has none.
    assert sorted(read) == ["rank0.json", "rank0.safetensors", "rank1.own.json", "rank1.safetensors"]
    taken: list[str] = []
    take = VerifiedFile.read

    def read_part(file: VerifiedFile, parts: Any) -> None:
        taken.append(file.path.name)
        take(file, parts)

    monkeypatch.setattr(VerifiedFile, "read", read_part)
    with rank_of(1, [2]) as mesh:
        load_as(tmp_path, 2, 1, mesh)
    assert taken.count("rank0.safetensors") == 2  # The two parts of its header.


@pytest.mark.parametrize(("saved", "configured"), [("tensors", "archive"), ("archive", "tensors")])
def test_a_rank_reads_either_format_whichever_it_saves(tmp_path: Path, saved: str, configured: str) -> None:
    def read(group: ThreadGroup) -> Any:
        checkpointer = SyncCheckpointer(format=configured)
        checkpointer.join(group)
        return checkpointer.read(tmp_path / "step1")

    pytest.importorskip("trainer_cli.addons.formats")
    save_as(tmp_path, [2], state, format=saved)
    for rank, found in enumerate(on_ranks(2, read)):
        assert same(found, state(rank=rank))


def test_a_rank_reads_each_archive_that_it_needs_once_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def archives(read: Callable[[], Any]) -> list[str]:
        return [file for file in read_files(monkeypatch, read) if file.endswith(".gz")]

    save_as(tmp_path, [3], of_rank, format="archive")
    every = ["rank0.tar.gz", "rank1.tar.gz", "rank2.tar.gz"]
    with rank_of(1, [3]) as mesh:
        assert archives(lambda: load_as(tmp_path, 3, 1, mesh, format="archive")) == every[:2]
    assert archives(lambda: make_sync_checkpointer().read(tmp_path / "step1")) == every
    folder = LocalReadableFolder(tmp_path / "step1", Disk())
    assert archives(lambda: check_readable(folder, manifest_of(tmp_path / "step1"))) == every


def test_a_replicated_state_is_written_once_and_its_large_tensors_by_all_ranks(tmp_path: Path) -> None:
    def tree(mesh: Any, rank: int) -> dict[str, Any]:
        return {"model": {f"w{number}": random(LARGE + number) for number in range(8)}, "progress": {"step": 1}}

    manifest = save_as(tmp_path, [4], tree)
    stored = [name for parts in manifest.shards.values() for name in parts]
    assert sorted(stored) == sorted(f"model/w{number}" for number in range(8))
    assert [len(manifest.shards[f"rank{rank}.safetensors"]) for rank in range(4)] == [2, 2, 2, 2]
    alone = TensorsFormat().plan(tree(None, 0))
    headers = sum(file.size_bytes % 4096 + 4096 for file in manifest.files.values())
    assert sum(file.size_bytes for file in manifest.files.values()) <= alone.total_bytes + headers


def test_small_tensors_of_a_replicated_state_are_those_of_rank_0(tmp_path: Path) -> None:
    """Such as the statistics of a batch norm, which differ from rank to rank."""
    save_as(tmp_path, [2], lambda mesh, rank: {"model": {"mean": torch.full((3,), float(rank))}})
    assert make_sync_checkpointer().read(tmp_path / "step1")["model"]["mean"].tolist() == [0, 0, 0]


def test_of_a_sharded_state_each_rank_keeps_its_own_small_tensors(tmp_path: Path) -> None:
    def tree(mesh: Any, rank: int) -> dict[str, Any]:
        return {"model": {"w": parted(random(4, 4), mesh, Shard(0)), "mean": torch.full((3,), float(rank))}}

    save_as(tmp_path, [2], tree)
    for rank in range(2):
        with rank_of(rank, [2]):
            found = make_sync_checkpointer(format=ShardedFormat(rank, 2)).read(tmp_path / "step1")
            assert found["model"]["mean"].tolist() == [rank] * 3


def test_shards_that_several_ranks_have_are_written_once_by_ranks_that_share_them_out(tmp_path: Path) -> None:
    def tree(mesh: Any, rank: int) -> dict[str, Any]:
        return {"model": {f"w{number}": parted(random(6, 4), mesh, Replicate(), Shard(0)) for number in range(4)}}

    manifest = save_as(tmp_path, [2, 2], tree)
    parts = [(name, part) for of_file in manifest.shards.values() for name, part in of_file.items()]
    assert len(parts) == len(set(parts)) == 8
    assert [len(manifest.shards[f"rank{rank}.safetensors"]) for rank in range(4)] == [2, 2, 2, 2]
    assert same(
        make_sync_checkpointer().read(tmp_path / "step1", ["model"]),
        {"model": {f"w{number}": random(6, 4) for number in range(4)}},
    )


def test_a_mesh_of_one_rank_writes_the_bytes_of_one_process() -> None:
    with rank_of(0, [1]) as mesh:
        layout = TensorsFormat().plan(state(mesh))
    alone = TensorsFormat().plan(state())
    assert (layout.text, layout.header, layout.parts) == (alone.text, alone.header, {})


def test_a_manifest_names_the_parts_only_where_there_are_several_ranks(tmp_path: Path) -> None:
    make_sync_checkpointer().save(state(), tmp_path / "of1")
    assert b"shards" not in (tmp_path / "of1/manifest.json").read_bytes()
    save_as(tmp_path, [2], state, "of2")
    manifest = manifest_of(tmp_path / "of2")
    assert str(manifest.shards["rank1.safetensors"]["model/uneven"]) == "[3:5, 0:3] of [5, 3]"
    assert replace(manifest) == Manifest.parse(manifest.to_bytes())


FILES = {
    "tensors": ["rank0.json", "rank1.own.json", "rank1.safetensors"],
    "archive": ["rank0.tar.gz", "rank1.tar.gz"],
}


@pytest.mark.parametrize(("format", "file"), [(format, file) for format, files in FILES.items() for file in files])
def test_a_damaged_file_that_a_rank_needs_is_named(tmp_path: Path, format: str, file: str) -> None:
    save_as(tmp_path, [2], state, format=format)
    path = tmp_path / "step1" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with rank_of(1, [2]) as mesh, pytest.raises(DamagedCheckpoint, match=file):
        load_as(tmp_path, 2, 1, mesh, format=format)


MISNAMED: dict[str, tuple[Any, str]] = {
    "no archive": (lambda files: {}, "it has no archive"),
    "a rank missing": (
        lambda files: {"rank0.tar.gz": files["rank0.tar.gz"]},
        "does not list it|holds 'rank0.own.json'",
    ),
    "a number of 5000 digits": (lambda files: {f"rank{'1' * 5000}.tar": files["rank0.tar.gz"]}, "it has no archive"),
    "swapped": (
        lambda files: dict(zip(files, reversed(files.values()), strict=True)),
        "bytes instead of|digest differs",
    ),
}


@pytest.mark.parametrize("change", MISNAMED)
def test_archives_that_the_manifest_names_wrongly_are_refused(tmp_path: Path, change: str) -> None:
    save_as(tmp_path, [2], state, format="archive")
    edit, why = MISNAMED[change]
    manifest = manifest_of(tmp_path / "step1")
    altered = replace(manifest, files=edit(manifest.files), shards={}, aliases={})
    with pytest.raises(DamagedCheckpoint, match=why):
        check_readable(LocalReadableFolder(tmp_path / "step1", Disk()), altered)


def rewritten(path: Path, **changes: Any) -> None:
    manifest = replace(manifest_of(path), **changes)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: {**parts, "model/even": Part((8, 4), (0, 0), (3, 4))}, "has 28 of its 32 elements"),
        (lambda parts: {name: one for name, one in parts.items() if name != "model/0-d"}, None),
        (lambda parts: {**parts, "model/0-d": Part((1,), (0,), (1,))}, "different shapes"),
    ],
    ids=["hole", "a copy fewer", "other shape"],
)
def test_parts_that_do_not_make_a_whole_are_refused(tmp_path: Path, change: Any, said: str | None) -> None:
    save_as(tmp_path, [2], state)
    parts = manifest_of(tmp_path / "step1").shards
    rewritten(tmp_path / "step1", shards={**parts, "rank0.safetensors": change(parts["rank0.safetensors"])})
    if said is None:
        assert same(make_sync_checkpointer().read(tmp_path / "step1", ["model"]), {"model": state()["model"]})
        return
    with pytest.raises(DamagedCheckpoint, match=said.replace("has", "have")):
        make_sync_checkpointer().read(tmp_path / "step1")


def test_a_part_of_another_size_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    save_as(tmp_path, [2], lambda mesh, rank: {"model": {"w": parted(random(4, 4), mesh, Shard(0))}})
    whole = {"model/w": Part.all_of((4, 4))}
    rewritten(tmp_path / "step1", shards={"rank0.safetensors": whole})
    with pytest.raises(DamagedCheckpoint, match="'model/w' is another part of the tensor than the manifest says"):
        make_sync_checkpointer().read(tmp_path / "step1")


def test_states_that_differ_between_ranks_are_not_committed() -> None:
    parts = {"rank0.safetensors": {"model/w": Part((4,), (0,), (2,))}}
    assert PartTable.of(parts).why_uncovered(["model/w"], {}) == "model/w: its parts have 2 of its 4 elements"
    assert PartTable({}).why_uncovered(["model/w", "model/v"], {"model/w": "model/u"}) == "no rank has written model/w"
    whole = {"rank1.safetensors": {"model/w": Part.all_of((4,))}}
    assert PartTable.of(whole).why_uncovered(["model/w", "model/tied"], {"model/tied": "model/w"}) is None


def test_partial_sums_and_formats_of_one_process_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor

    with rank_of(0, [2]) as mesh:
        sums = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsavableState, match="model/w is a tensor whose ranks hold partial sums"):
            ShardedFormat(0, 2).plan({"model": {"w": sums}})
        half = parted(random(4, 4), mesh, Shard(0))
        with pytest.raises(UnsavableState, match=r"model/w is \[0:2, 0:4\] of \[4, 4\] here"):
            TensorsFormat().plan({"model": {"w": half}})


def test_a_rank_holds_no_more_than_it_needs(tmp_path: Path) -> None:
    """Of one process's file too: each rank reads all of it, and keeps its rows."""
    make_sync_checkpointer().save({"model": {"w": random(64, 1024)}}, tmp_path / "of1")
    with rank_of(2, [4]) as mesh:
        live = {"w": parted(torch.zeros(64, 1024), mesh, Shard(0))}
        made: list[int] = []

        def make(*args: Any) -> torch.Tensor:
            made.append(0)
            return new_tensor(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded, "new_tensor", make)
            patch.setattr(torch, "empty", lambda *args, _empty=torch.empty, **more: _noted(made, _empty(*args, **more)))
            checkpointer = make_sync_checkpointer(format=ShardedFormat(2, 4))
            found = checkpointer.read(tmp_path / "of1", targets=targets_of(live))
        assert torch.equal(local_of(found["model"]["w"]), random(64, 1024)[32:48])
        assert sum(made) == 16 * 1024 * 4


def _noted(made: list[int], tensor: torch.Tensor) -> torch.Tensor:
    made.append(tensor.nbytes)
    return tensor


def test_the_states_of_a_parameter_are_for_the_tensors_of_its_name() -> None:
    with rank_of(0, [2]) as mesh:
        live = {"a.w": parted(random(4, 4), mesh, Shard(0)), "b": torch.ones(2)}
        targets = targets_of(live, lambda name: name.removeprefix("net."))
        assert targets is not None
        for keys in (
            ("model", "a.w"),
            ("optimizer", "state", "a.w", "exp_avg"),
            ("callbacks", "ema", "average", "net.a.w"),
        ):
            assert targets(keys, (4, 4)) is not None
        assert targets(("optimizer", "state", "a.w", "step"), ()) is None
        assert targets(("model", "b"), (2,)) is None
    assert targets_of({"b": torch.ones(2)}) is None


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"state": 1, "tensors": "", "aliases": {}}', b'{"state": "{}", "tensors": "x"}']
)
def test_what_is_not_what_a_rank_saved_for_itself_is_refused(text: bytes) -> None:
    with pytest.raises(Undecodable, match="what a rank saved for itself is not what was written"):
        decode_own(text)


# A sharded tensor that no checkpoint can have is refused with the cure.


def distributed(placement: Any, *boxes: int) -> Any:
    chunks = [SimpleNamespace(offsets=(0,), sizes=(size,)) for size in boxes]
    mesh = SimpleNamespace(mesh=torch.tensor([0, 1]), get_coordinate=lambda: (0,))
    return SimpleNamespace(placements=(placement,), shape=(4,), device_mesh=mesh, __create_chunk_list__=lambda: chunks)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (distributed(Partial()), "x is a tensor whose ranks hold partial sums"),
        (distributed(Shard(0), 1, 1), "x is sharded in pieces"),
    ],
)
def test_what_no_checkpoint_can_have_says_how_to_distribute_it(
    leaf: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtensor, "local_of", lambda _: torch.zeros(2))
    with pytest.raises(UnsavableState, match=message) as caught:
        dtensor.part_of("x", leaf)
    assert "tensor.redistribute(placements=[…])" in str(caught.value)


def test_a_part_in_a_format_of_whole_tensors_names_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor, "local_of", lambda _: torch.zeros(2))
    monkeypatch.setattr(dtensor, "is_dtensor", lambda _: True)
    with pytest.raises(UnsavableState, match="only the formats tensors and archive save parts") as caught:
        dtensor.undistributed({"x": distributed(Shard(0), 2)})
    assert caught.value.cure == "Set checkpoint.format=tensors."
