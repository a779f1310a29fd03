"""Page-aligned host memory for the copy of a state, and how much memory this process can still get."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch


class HostMemory:
    """`size_bytes` of private memory that begins at a page, so that it can be written past the page cache.

    Args:
        pinned: register it with CUDA, so that copies from a GPU are asynchronous.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False) -> None:
        self.size_bytes = max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # DONTFORK: a page that is written after a fork would otherwise be duplicated for each data worker.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # A kernel that does not know one refuses it, and provides ordinary memory.
            with suppress(OSError):
                if hasattr(mmap, advice):
                    self._map.madvise(getattr(mmap, advice))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        _keep_in_children()
        _maps.add(self._map)
        self.pid = os.getpid()
        self._pinned = pinned and _cudart().cudaHostRegister(self.tensor.data_ptr(), self.size_bytes, 0) == 0
        if pinned and not self._pinned:
            # CUDA reports the failure again at the next launch of a kernel: launch one here.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def view(self, size_bytes: int) -> memoryview:
        """The first bytes."""
        return memoryview(self._map)[:size_bytes]

    def touch(self) -> None:
        """Have the system allocate every page now; what the memory held is lost. Other threads run meanwhile."""
        self.tensor.zero_()

    def close(self) -> None:
        """Unpin it. The memory is returned to the system with the last view of it."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self.tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_kept: list[mmap.mmap] = []


@cache
def _keep_in_children() -> None:
    """A forked child does not have the mapping. It must never unmap the range, where it may have other memory by then,
    so it keeps the objects alive."""
    os.register_at_fork(after_in_child=lambda: _kept.extend(_maps))


def available_bytes() -> int | None:
    """The memory that this process can still get without swapping, within its control groups' limits; None if the
    system does not say."""
    return min([value for value in (_of_the_machine(), *_of_the_groups()) if value is not None], default=None)


def _of_the_machine() -> int | None:
    try:
        return _table(Path("/proc/meminfo").read_text(encoding="ascii"))["MemAvailable:"] * 1024
    except (OSError, KeyError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    except (OSError, ValueError):
        return None


def _of_the_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What is left in each control group (version 2) that holds this process: a container, a batch job, a service."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue
        # A container may read its path as it is outside, and find its own group at the root.
        group = root / path.lstrip("/")
        for folder in (group, *(above for above in group.parents if above.is_relative_to(root))):
            try:
                limit = int((folder / "memory.max").read_text(encoding="ascii"))
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                cached = _table((folder / "memory.stat").read_text(encoding="ascii"))["inactive_file"]
            except (OSError, ValueError, KeyError):
                continue
            yield max(limit - used + cached, 0)


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
