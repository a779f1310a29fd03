"""What is reported of tensors without torch is what torch says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer, make_sync_checkpointer
from trainer_cli.commands.ckpt_inspect import Difference, TensorChange, compare, open_content
from trainer_cli.errors import CheckpointError
from trainer_cli.format import stored
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.layout.naming import MANIFEST_FILE
from trainer_cli.layout.shards import Shard
from trainer_cli.manifest import Manifest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.storage.local import LocalStorage

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def written(path: Path, **tensors: Any) -> Path:
    make_sync_checkpointer().save(tensors, path, metadata=CheckpointMetadata(step=1))
    return path


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the widest type."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def change(tmp_path: Path, before: torch.Tensor, after: torch.Tensor) -> Difference:
    first, second = written(tmp_path / "a", w=before), written(tmp_path / "b", w=after)
    with open_content(first) as a, open_content(second) as b:
        return compare(a, b)


@pytest.mark.parametrize(
    ("dtype", "shape", "block"),
    [
        *((dtype, (5, 7), None) for dtype in [*FLOATS, *FLOATS8, *WHOLE, torch.bool]),
        (torch.bfloat16, (), None),
        (torch.bfloat16, (0, 3), None),
        (torch.float32, (5, 21), 16),
    ],
    ids=str,
)
def test_a_norm_is_that_of_torch(
    tmp_path: Path, dtype: torch.dtype, shape: Any, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block is not None:
        monkeypatch.setattr(stored, "_BLOCK", block)
    torch.manual_seed(1)
    tensor = (torch.randn(shape) * 3).abs().to(dtype)
    with open_content(written(tmp_path / "a", w=tensor)) as content:
        norm = content.tensors["w"].norm()
    assert norm == pytest.approx(float(exact(tensor).norm()), rel=1e-14, abs=0)


@pytest.mark.parametrize("dtype", FLOATS8, ids=str)
def test_every_8_bit_float_has_the_value_that_torch_gives_it(tmp_path: Path, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    with open_content(written(tmp_path / "a", w=every)) as content:
        (block,) = content.tensors["w"].blocks()
    assert torch.equal(torch.from_numpy(block).nan_to_num(nan=9e9), every.double().nan_to_num(nan=9e9))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_norm_that_no_number_reports_makes_no_noise(tmp_path: Path, value: float) -> None:
    with open_content(written(tmp_path / "a", w=torch.tensor([value], dtype=torch.float64))) as content:
        assert not math.isfinite(content.tensors["w"].norm())


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS8, torch.int32], ids=str)
def test_a_relative_change_is_the_norm_of_the_difference_over_the_norm_before(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    before, after = (torch.randn(6, 9).mul(5).to(dtype) for _ in range(2))
    (difference,) = change(tmp_path, before, after).tensors
    expected = (exact(after) - exact(before)).norm() / exact(before).norm()
    assert difference.relative == pytest.approx(float(expected), rel=1e-13)


@pytest.mark.parametrize("format", ["torch_file", "huggingface", "archive"])
def test_every_format_is_looked_into_as_the_default_one(tmp_path: Path, format: str) -> None:
    tied = torch.randn(3, 4)
    model = {"a.weight": tied, "b.weight": tied, "half": torch.ones(5).bfloat16(), "none": torch.zeros(0, 2)}
    state = {"model": model, "optimizer": {"exp_avg": torch.ones(3)}, "loop": {"seen": {1: (2, b"x")}}}
    SyncCheckpointer(format="tensors").save(state, tmp_path / "a")
    SyncCheckpointer(format=format).save(state, tmp_path / "b")
    with open_content(tmp_path / "a") as default, open_content(tmp_path / "b") as other:
        assert default.manifest.format != other.manifest.format
        assert {name: tensor.entry for name, tensor in default.tensors.items()} == {
            name: tensor.entry for name, tensor in other.tensors.items()
        }
        assert (default.aliases, default.states()) == (other.aliases, other.states())
        assert other.tensors["model/a.weight"].norm() == pytest.approx(float(tied.double().norm()), rel=1e-14)
        same = compare(default, other)
    assert (same.same, same.tensors, same.only_first, same.only_second) == (len(default.tensors), [], [], [])


NOT_FINITE = TensorChange("w", why="it differs, and holds NaN or infinity")
CHANGES: dict[str, tuple[torch.Tensor, torch.Tensor, TensorChange | None]] = {
    "the same": (torch.ones(3), torch.ones(3), None),
    "NaN and the same NaN": (torch.tensor([math.nan]), torch.tensor([math.nan]), None),
    "empty": (torch.zeros(0, 2), torch.zeros(0, 2), None),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), TensorChange("w", why="shape [2, 3] -> [3, 2]")),
    "type": (torch.ones(2), torch.ones(2).half(), TensorChange("w", why="type F32 -> F16")),
    "from zero": (torch.zeros(2), torch.ones(2), TensorChange("w", relative=math.inf)),
    "the sign of zero": (torch.zeros(2), -torch.zeros(2), TensorChange("w", relative=0.0)),
    "to NaN": (torch.ones(1), torch.tensor([math.nan]), NOT_FINITE),
    "away from infinity": (torch.tensor([math.inf]), torch.ones(1), NOT_FINITE),
}


@pytest.mark.parametrize(("before", "after", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_change_without_a_number_is_reported_in_words(
    tmp_path: Path, before: torch.Tensor, after: torch.Tensor, expected: TensorChange | None
) -> None:
    difference = change(tmp_path, before, after)
    assert difference.tensors == ([] if expected is None else [expected])
    assert difference.same == (1 if expected is None else 0)


def test_the_largest_change_comes_first_after_those_without_a_number(tmp_path: Path) -> None:
    before = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(2), "d": torch.ones(1)}
    after = {"a": torch.tensor([1.5]), "b": torch.tensor([4.0]), "c": torch.ones(3), "e": torch.ones(1)}
    with (
        open_content(written(tmp_path / "x", **before)) as first,
        open_content(written(tmp_path / "y", **after)) as second,
    ):
        difference = compare(first, second)
    assert [entry.name for entry in difference.tensors] == ["c", "b", "a"]
    assert (difference.only_first, difference.only_second, difference.same) == (["d"], ["e"], 0)


def by_ranks(root: Path, states: list[dict[str, Any]], **facts: Any) -> Path:
    """As several processes would write it: each its own files."""
    with LocalStorage(root).writing("step1") as folder:
        for rank, state in enumerate(states):
            replace(TensorsFormat().plan(state), rank=rank).write(folder)
        facts = {"world_size": len(states), "files": folder.files, **facts}
        manifest = Manifest(run_id="r", attempt=1, step=1, epoch=0, kind=CheckpointKind.regular, reason="x", **facts)
        with folder.create(MANIFEST_FILE) as sink:
            sink.write(manifest.to_bytes())
        folder.publish()
    return root / "step1"


def test_the_tensors_of_every_rank_are_there(tmp_path: Path) -> None:
    states = [{"w": torch.full((4,), float(rank + 1)), f"own{rank}": torch.ones(1)} for rank in range(2)]
    with open_content(by_ranks(tmp_path, states)) as content:
        norms = {name: tensor.norm() for name, tensor in content.tensors.items()}
        assert norms == {"w": 2.0, "own0": 1.0, "w@rank1": 4.0, "own1": 1.0}
        assert set(content.states()) == {"rank0", "rank1"}


def test_parts_of_a_tensor_are_one_tensor(tmp_path: Path) -> None:
    """A matrix of which two ranks have rows, one of which two have columns, and a count that both have."""
    whole = {"rows": torch.arange(10.0).reshape(5, 2), "columns": torch.ones(2, 4), "count": torch.tensor(3.0)}
    shards = {
        "rows": [Shard((5, 2), (0, 0), (3, 2)), Shard((5, 2), (3, 0), (2, 2))],
        "columns": [Shard((2, 4), (0, 0), (2, 2)), Shard((2, 4), (0, 2), (2, 2))],
        "count": [Shard.all_of(()), Shard.all_of(())],
    }
    files = {f"rank{rank}.safetensors": {name: two[rank] for name, two in shards.items()} for rank in range(2)}
    states: list[dict[str, Any]] = [{}, {}]
    for rank, state in enumerate(states):
        for name, tensor in whole.items():
            begins, sizes = shards[name][rank].offsets, shards[name][rank].sizes
            state[name] = tensor[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))].clone()
    other = written(tmp_path / "whole", **{**whole, "count": torch.tensor(4.0)})
    with open_content(by_ranks(tmp_path, states, shards=files)) as parts, open_content(other) as second:
        assert {name: (tensor.entry.shape, tensor.entry.size_bytes) for name, tensor in parts.tensors.items()} == {
            "rows": ((5, 2), 40),
            "columns": ((2, 4), 32),
            "count": ((), 4),
        }
        difference = compare(parts, second)
        assert [(change.name, change.relative) for change in difference.tensors] == [("count", 1 / 3)]
        assert (difference.same, difference.only_first, difference.only_second) == (2, [], [])
        assert parts.tensors["rows"].norm() == pytest.approx(285**0.5)


def test_what_is_looked_at_is_not_removed_meanwhile(tmp_path: Path) -> None:
    path = written(tmp_path / "step1", w=torch.ones(2))
    storage = LocalStorage(tmp_path)
    with open_content(path):
        assert not storage.remove("step1")
    assert storage.remove("step1")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = by_ranks(tmp_path, [{}], format="stone")
    with pytest.raises(CheckpointError, match="format 'stone'"), open_content(path):
        pass
