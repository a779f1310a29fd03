"""Memory for copies of states: aligned, and absent from forked children."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from trainer_cli.checkpoint.host_memory import HostMemory


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
