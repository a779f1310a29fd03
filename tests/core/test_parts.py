"""The table of parts: exact there and back, nothing ambiguous passes, and it does not grow with ranks times tensors."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from trainer_cli.layout.parts import PartTable
from trainer_cli.layout.shards import Shard

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
