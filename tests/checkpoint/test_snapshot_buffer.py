"""The copy of a state: byte for byte what is written from the state itself, whatever happens to the state later."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import small_state

from trainer_cli.checkpoint.host_memory import HostMemory
from trainer_cli.checkpoint.snapshot import Snapshot, SnapshotBuffer
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.schema.checkpoint_config import DigestAlgorithm
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.folder import StagedFolder

Written = tuple[dict[str, bytes], dict[str, Mapping[str, str]]]


def capture(buffer: SnapshotBuffer, tree: Mapping[str, Any], trained: Iterable[torch.Tensor] = ()) -> Snapshot:
    return buffer.capture(TensorsFormat().plan(tree), trained)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Have files written into a new folder; their contents, and what the format noted."""

    def write(put: Any) -> Written:
        path = tmp_path / str(len(os.listdir(tmp_path)))
        path.mkdir()
        folder = StagedFolder(path, Disk(), DigestAlgorithm.xxh3_128)
        record = put(folder)
        return {one.name: one.read_bytes() for one in path.iterdir()}, record

    return write


def odd_state() -> dict[str, Any]:
    """Tensors of all layouts: sliced, transposed, conjugated, empty, scalar, of every size of element, tied."""
    base = torch.arange(24.0).reshape(4, 6)
    tied = torch.ones(3, dtype=torch.float64)
    return {
        "model": {
            "slice": base[1:, 2:], "turned": base.T, "whole": base, "conj": torch.complex(base, base).conj(),
            "neg": torch.complex(base, base).conj().imag, "empty": torch.empty(0, 3), "scalar": torch.tensor(3),
            "half": torch.ones(5, dtype=torch.bfloat16), "bits": torch.tensor([True, False]),
            "tied": tied, "again": tied, "wide": torch.ones(2, 1).expand(2, 7),
        },
        "numpy": {"fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "number": np.float32(1.5)},
    }  # fmt: skip


@pytest.mark.parametrize("tree", [small_state(4), odd_state(), {}, {"a": 1}], ids=["small", "odd", "empty", "none"])
def test_a_snapshot_has_the_bytes_that_are_written_from_the_state_itself(tree: dict[str, Any], write: Any) -> None:
    assert write(capture(SnapshotBuffer(), tree).write) == write(TensorsFormat().plan(tree).write)


def test_whatever_is_written_to_the_state_later_is_not_in_the_snapshot(write: Any) -> None:
    linear, norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(linear, norm)
    array, words = np.zeros(2), ["as it was"]
    tree = {"model": model.state_dict(), "array": array, "words": words}
    expected = write(TensorsFormat().plan(tree).write)
    snapshot = capture(SnapshotBuffer(), tree)
    model(torch.randn(5, 3))
    linear.weight.data[1] = 7
    linear.bias.detach().numpy()[:] = 3
    torch.utils.dlpack.from_dlpack(norm.weight.detach())[:] = 9
    array += 1
    words[0] = "changed"
    assert write(snapshot.write) == expected


def test_one_buffer_serves_every_save_and_grows_with_the_state(write: Any) -> None:
    buffer, addresses = SnapshotBuffer(), set()
    for step in range(3):
        tree = {"a": torch.full((5000,), float(step)), "n": step}
        assert write(capture(buffer, tree).write) == write(TensorsFormat().plan(tree).write)
        assert buffer._memory is not None
        addresses.add(buffer._memory.tensor.data_ptr())
    assert len(addresses) == 1
    assert next(iter(addresses)) % mmap.PAGESIZE == 0
    held = buffer.held_bytes
    larger = {"a": torch.ones(9_000)}
    assert write(capture(buffer, larger).write) == write(TensorsFormat().plan(larger).write)
    assert held < buffer.held_bytes < 9_000 * 4 + 4 * mmap.PAGESIZE
    buffer.close()
    assert buffer.held_bytes == 0


def forms() -> dict[str, Any]:
    """States of which each is like the one before it in all but one thing."""
    one, other, square = torch.ones(3), torch.zeros(3), torch.arange(4.0).reshape(2, 2)
    return {
        "first": {"a": {"x": one, "y": other}, "n": 1},
        "another value": {"a": {"x": one + 1, "y": other}, "n": 2},
        "tied": {"a": {"x": one, "y": one}, "n": 2},
        "untied": {"a": {"x": one, "y": other}, "n": 2},
        "another shape": {"a": {"x": one, "y": other.reshape(1, 3)}, "n": 2},
        "another type": {"a": {"x": one, "y": other.double()}, "n": 2},
        "another name": {"a": {"x": one, "z": other}, "n": 2},
        "another order": {"a": {"z": other, "x": one}, "n": 2},
        "an array": {"a": {"z": other, "x": np.ones(3)}, "n": 2},
        "turned": {"a": {"z": square, "x": square.T}, "n": 2},
        "not turned": {"a": {"z": square, "x": square}, "n": 2},
        "turned again": {"a": {"z": square, "x": square.T}, "n": 2},
        "two of a name": {"a": {"x": one}, "a/x": other},
        "and once more": {"a/x": other, "a": {"x": one}},
        "nested": {"a": {"p": {"x": one}, "q": {"y": other}}},
        "nested, another value": {"a": {"p": {"x": one}, "q": {"y": one + 1}}},
        "moved": {"a": {"p": {"x": one, "y": other}, "q": {}}},
        "grown": {"a": {"p": {"x": one, "y": other}, "q": {"x": other + 1}}},
        "not nested": {"a": {"p": one, "q": other}},
        "half nested": {"a": {"p": one, "q": {"y": other}}},
        "a number as key": {"a": {1: one}},
        "an equal one": {"a": {True: one}},
        "the mark of a tag": {"a": {"$": one}},
        "nothing": {},
    }


def test_states_of_all_forms_can_follow_one_another(write: Any) -> None:
    buffer, states = SnapshotBuffer(), list(forms().values())
    for state in [*states, *reversed(states)]:
        assert write(capture(buffer, state).write) == write(TensorsFormat().plan(state).write)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_the_trained_tensors_must_be_finite(value: float) -> None:
    trained, frozen = torch.full((70_000,), 3.0), torch.full((3,), value)
    buffer = SnapshotBuffer()
    for last, finite in ((1.0, True), (value, False)):
        trained[-1] = last
        snapshot = capture(buffer, {"model": {"trained": trained, "frozen": frozen}}, [trained])
        trained[-1] = 1.0
        assert snapshot.is_finite() is finite


def test_where_there_is_no_memory_the_error_says_so_and_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> HostMemory:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("trainer_cli.checkpoint.snapshot.HostMemory", refuse)
    buffer = SnapshotBuffer()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        capture(buffer, odd_state())
    assert buffer.held_bytes == 0


def test_trained_tensors_that_the_state_holds_as_copies_are_examined_too() -> None:
    trained = torch.tensor([1.0, float("nan")])
    assert not capture(SnapshotBuffer(), {"w": torch.zeros(2)}, [trained]).is_finite()
    assert capture(SnapshotBuffer(), {"w": torch.zeros(2)}, [torch.ones(2)]).is_finite()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_memory_of_its_own(write: Any) -> None:
    buffer, tree = SnapshotBuffer(), {"w": torch.ones(50_000)}
    expected = write(capture(buffer, tree).write)
    child = os.fork()
    if child == 0:
        os._exit(0 if write(capture(buffer, tree).write) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Memory for copies of states: aligned, and absent from forked children.


@pytest.mark.parametrize("size", [0, 1, 4096, 100_001])
def test_memory_begins_at_a_page_and_is_as_large_as_asked_for(size: int) -> None:
    memory = HostMemory(size)
    assert memory.tensor.data_ptr() % mmap.PAGESIZE == 0
    assert size <= memory.size_bytes == memory.tensor.nbytes < size + 2 * mmap.PAGESIZE
    memory.view(size)[:] = bytes([7]) * size
    assert bool((memory.tensor[:size] == 7).all())
    memory.close()


def test_a_kernel_that_knows_no_advice_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 987)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(987)
    assert HostMemory(5000).size_bytes >= 5000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_none_of_it_and_ends_well() -> None:
    memory = HostMemory(32 << 20)
    memory.tensor.zero_()
    address = memory.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        del memory
        areas = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        os._exit(int(any(int(start, 16) <= address < int(end, 16) for start, end in areas)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
