"""Parts of tensors: what two have in common, whether some make a whole, who writes what, and their table."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch

from trainer_cli.layout.parts import PartTable
from trainer_cli.layout.shards import Shard, spread


def rows(shape: tuple[int, ...], *ends: int) -> list[Shard]:
    """The parts between these rows."""
    return [
        Shard(shape, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
        for begin, end in itertools.pairwise((0, *ends))
    ]


PARTS = [
    (Shard.all_of(()), "[] of []"),
    (Shard.all_of((3,)), "[0:3] of [3]"),
    (Shard((8, 2), (4, 0), (4, 2)), "[4:8, 0:2] of [8, 2]"),
    (Shard((3, 2), (3, 0), (0, 2)), "[3:3, 0:2] of [3, 2]"),
]


@pytest.mark.parametrize(("part", "text"), PARTS, ids=[text for _, text in PARTS])
def test_a_part_is_written_as_slices_and_read_back(part: Shard, text: str) -> None:
    assert str(part) == text
    assert Shard.parse(text) == part


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[0:3]",
        "[0:3] of [2]",
        "[2:1] of [3]",
        "[0:3] of [3, 1]",
        "[0:3, 0:1] of [3]",
        "[00:3] of [3]",
        "[0:3] of [3] ",
        "[0:3] of [+3]",
        "[0:3,0:1] of [3, 1]",
        "[0:-1] of [3]",
        "[0:99999999999999999999] of [99999999999999999999]",
        "[0:4294967296, 0:4294967296] of [4294967296, 4294967296]",
    ],
)
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a part of a tensor"):
        Shard.parse(text)


def part_of(shape: tuple[int, ...], chance: random.Random) -> Shard:
    ends = [sorted(chance.sample(range(size + 1), 2)) if size else [0, 0] for size in shape]
    return Shard(shape, tuple(begin for begin, _ in ends), tuple(end - begin for begin, end in ends))


def cut(whole: torch.Tensor, part: Shard) -> torch.Tensor:
    index = tuple(slice(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True))
    return whole[index].contiguous()


def test_runs_move_what_two_parts_have_in_common_as_torch_plans_it() -> None:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chance = random.Random(0)
    for shape in [(), (7,), (4, 6), (3, 4, 5), (2, 3, 1, 4)]:
        whole = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
        for _ in range(25):
            source, target = part_of(shape, chance), part_of(shape, chance)
            stored, read = cut(whole, source).reshape(-1), torch.zeros(target.sizes, dtype=torch.int64)
            flat, places = read.view(-1), []
            for begin, to, count in source.runs(target):
                flat[to : to + count] = stored[begin : begin + count]
                places.append(begin)
            assert places == sorted(places)
            by_torch = torch.zeros(target.sizes, dtype=torch.int64)
            chunk = ChunkStorageMetadata(torch.Size(source.offsets), torch.Size(source.sizes))
            known = TensorStorageMetadata(TensorProperties(), torch.Size(shape), [chunk])
            wanted = [ChunkStorageMetadata(torch.Size(target.offsets), torch.Size(target.sizes))]
            for item in create_read_items_for_chunk_list("w", known, wanted):
                here, there = (
                    tuple(slice(begin, begin + size) for begin, size in zip(offsets, item.lengths, strict=True))
                    for offsets in (item.storage_offsets, item.dest_offsets)
                )
                by_torch[there] = stored.reshape(source.sizes)[here]
            assert torch.equal(read, by_torch), (source, target)


def test_rows_next_to_one_another_are_one_run() -> None:
    assert list(rows((8, 4), 4, 8)[0].runs(Shard((8, 4), (2, 0), (4, 4)))) == [(8, 0, 8)]
    assert list(Shard.all_of(()).runs(Shard.all_of(()))) == [(0, 0, 1)]


def test_parts_of_different_tensors_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="different tensors"):
        list(Shard.all_of((2,)).runs(Shard.all_of((3,))))


CORNERS = [Shard((4, 4), (row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
PINWHEEL = [
    Shard((3, 3), (0, 0), (1, 2)),
    Shard((3, 3), (0, 2), (2, 1)),
    Shard((3, 3), (2, 1), (1, 2)),
    Shard((3, 3), (1, 0), (2, 1)),
    Shard((3, 3), (1, 1), (1, 1)),
]


@pytest.mark.parametrize(
    ("parts", "problem"),
    {
        "0-d": ([Shard.all_of(())], None),
        "empty": ([Shard.all_of((0, 3))], None),
        "rows": (rows((5, 2), 2, 4, 5), None),
        "an empty last part": (rows((3, 2), 1, 2, 3, 3), None),
        "corners": (CORNERS, None),
        "no grid": (PINWHEEL, None),
        "copies": ([*CORNERS, *CORNERS], None),
        "one missing": (CORNERS[1:], "its parts have 12 of its 16 elements"),
        "two shapes": ([Shard.all_of((2,)), Shard.all_of((3,))], "its parts are of 2 different shapes"),
        "none": ([], "its parts are of 0 different shapes"),
        "overlap": ([Shard((4,), (0,), (3,)), Shard((4,), (2,), (2,))], "its parts overlap"),
        "overlap and hole": ([*rows((4,), 2)[:1], Shard((4,), (1,), (2,))], "its parts overlap"),
    }.values(),
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_parts_make_a_whole_or_the_reason_is_said(parts: list[Shard], problem: str | None) -> None:
    assert Shard.why_incomplete(parts) == problem


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_the_largest_tensors_are_shared_out_evenly_and_each_is_written_once(ranks: tuple[int, ...]) -> None:
    sizes = {f"w{number}": 1000 - 13 * number for number in range(40)}
    writer = spread(sizes, ranks)
    assert writer == spread(dict(sizes), ranks)
    assert writer.keys() == sizes.keys()
    load = {rank: sum(sizes[name] for name in writer if writer[name] == rank) for rank in ranks}
    assert set(writer.values()) == set(ranks)
    assert max(load.values()) - min(load.values()) <= max(sizes.values())


# The table of parts: exact there and back, nothing ambiguous passes, and it does not grow with ranks times tensors.


SHAPES = [(64, 8), (8, 64), (64,), (5, 8)]


def tables_of_ranks(ranks: int, tensors: int) -> dict[str, dict[str, Shard]]:
    """The parts in each rank's file, of tensors divided by rows. Short tensors have no part on the last ranks."""
    table: dict[str, dict[str, Shard]] = {}
    for rank in range(ranks):
        parts: dict[str, Shard] = {}
        for number in range(tensors):
            shape = SHAPES[number % len(SHAPES)]
            size = -(-shape[0] // ranks)
            begin = min(rank * size, shape[0])
            if count := min(size, shape[0] - begin):
                parts[f"model/{number}"] = Shard(shape, (begin, *(0 for _ in shape[1:])), (count, *shape[1:]))
        table[f"rank{rank}.safetensors"] = parts
    return table


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_a_table_has_the_parts_of_each_file_and_tensor_and_comes_back_from_json(ranks: int) -> None:
    plain = tables_of_ranks(ranks, 20)
    table = PartTable.of(plain)
    read = PartTable.from_json(json.loads(json.dumps(table.to_json())))
    assert table == plain
    assert read == plain
    by_name = {
        name: {file: parts[name] for file, parts in plain.items() if name in parts}
        for name in plain["rank0.safetensors"]
    }
    assert table.by_name() == by_name
    assert read.by_name() == by_name


def test_tables_with_any_groups_come_back_by_name() -> None:
    chance = random.Random(0)
    plain = {
        f"rank{rank}.safetensors": {
            f"model/{number}": Shard((9,), (chance.randrange(3),), (1,)) for number in chance.sample(range(12), 8)
        }
        for rank in range(6)
    }
    expected: dict[str, dict[str, Shard]] = {}
    for file, parts in plain.items():
        for name, shard in parts.items():
            expected.setdefault(name, {})[file] = shard
    assert PartTable.of(plain).by_name() == expected
    # A manifest that is amended keeps the text of its parts.
    text = json.dumps(PartTable.of(plain).to_json(), sort_keys=True)
    assert json.dumps(PartTable.from_json(json.loads(text)).to_json(), sort_keys=True) == text


def test_files_can_be_chosen_and_renamed() -> None:
    plain = tables_of_ranks(3, 4)
    renamed = PartTable.of(plain).renamed({"rank1.safetensors": "one", "absent": "two"})
    assert renamed == {"one": plain["rank1.safetensors"]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"files": {"a": {"[0:1] of [2]": 1}}, "names": [["w"]]}, "unknown group"),
        ({"files": {"a": {"[0:1] of [2]": -1}}, "names": [["w"]]}, "unknown group"),
        ({"files": {"a": {"[0:1] of [2]": True}}, "names": [["w"], ["v"]]}, "unknown group"),
        ({"files": {"a": {"[0:1] of [2]": 0, "[1:2] of [2]": 0}}, "names": [["w"]]}, "two parts of one tensor"),
        ({"files": {"a": {"[0:1] of [2]": 0, "[1:2] of [2]": 1}}, "names": [["w"], ["w"]]}, "two parts of one"),
        ({"files": {"a": {"[0:1] of [2]": 0}}, "names": [["w", "w"]]}, "two parts of one tensor"),
        ({"files": {"a": {"[0:3] of [2]": 0}}, "names": [["w"]]}, "is not a part of a tensor"),
        ({"files": {"a": {"[0:1] of [2]": 0}}, "names": ["w"]}, "not a list of names"),
        ({"files": {"a": {"[0:1] of [2]": 0}}, "names": [[1]]}, "not a list of names"),
    ],
)
def test_a_table_that_is_ambiguous_or_of_other_values_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartTable.from_json(raw)


def test_a_hole_in_one_tensor_of_a_group_is_found() -> None:
    plain = tables_of_ranks(4, 40)
    names = list(plain["rank0.safetensors"])
    assert PartTable.of(plain).why_uncovered(names, {}) is None
    del plain["rank2.safetensors"]["model/8"]
    assert PartTable.of(plain).why_uncovered(names, {}) == "model/8: its parts have 384 of its 512 elements"
    assert (
        PartTable.of(tables_of_ranks(4, 40)).why_uncovered([*names, "model/tied"], {})
        == "no rank has written model/tied"
    )


def size_of(ranks: int, tensors: int) -> int:
    return len(json.dumps(PartTable.of(tables_of_ranks(ranks, tensors)).to_json()))


def test_the_text_grows_with_ranks_plus_tensors() -> None:
    # 64 rows: with up to 64 ranks each has a row of the large tensors.
    few, more_tensors, more_ranks = size_of(8, 40), size_of(8, 400), size_of(64, 40)
    assert more_tensors - few < 360 * 20
    assert more_ranks - few < 56 * (30 + 3 * 40)
    assert size_of(64, 400) < more_ranks + more_tensors


def test_equal_parts_are_examined_once_for_all_tensors_that_have_them() -> None:
    table = PartTable.of(tables_of_ranks(16, 400))
    # Each shape once.
    assert len({id(parts) for parts in table.by_name().values()}) == len(SHAPES)


def test_names_are_grouped_by_their_parts() -> None:
    whole, half = Shard.all_of((2,)), Shard((4,), (0,), (2,))
    assert PartTable.of({"file": {"a": whole, "b": half, "c": whole}}).groups["file"] == {
        whole: ("a", "c"),
        half: ("b",),
    }
