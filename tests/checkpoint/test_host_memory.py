"""Memory for copies of states: aligned, absent from forked children, and no more than the host can spare."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from trainer_cli.checkpoint.format.memory import HostMemory, _control_group_bytes, available_bytes


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


def test_the_memory_that_can_be_had_is_known_here() -> None:
    assert (available_bytes() or 0) > 1_000_000


@pytest.mark.parametrize(
    ("message", "groups", "left"),
    [
        ("0::/\n", {"": ("900", 500, 100)}, [500]),
        ("0::/job/step\n", {"job": ("700", 300, 0), "job/step": ("max", 300, 0)}, [400]),
        ("0::/job/step\n", {"job": ("max", 9, 0), "job/step": ("50", 40, 0)}, [10]),
        ("0::/not/seen/inside\n", {"": ("60", 10, 5)}, [55]),
        ("", {"": ("60", 10, 0)}, [50]),
        ("0::/\n", {}, []),
    ],
    ids=["a container", "a job's limit", "a step's limit", "another path inside",
         "no file of groups", "no group"],
)  # fmt: skip
def test_the_limits_of_every_group_above_the_process_count(
    tmp_path: Path, message: str, groups: dict[str, tuple[str, int, int]], left: list[int]
) -> None:
    for path, (most, now, cached) in groups.items():
        folder = tmp_path / "root" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{now}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    (tmp_path / "own").write_text(message)
    found = list(_control_group_bytes(tmp_path / "root", tmp_path / "own"))
    assert sorted(set(found), reverse=True) == left
