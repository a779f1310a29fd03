"""Page-aligned host memory for the copy of a state, and the amount of memory that is available."""

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
    """Private memory that begins at a page, so that it can be written past the page cache.

    Args:
        size_bytes: rounded up to whole pages.
        pinned: register the memory with CUDA, so that copies from a GPU are asynchronous.

    Raises:
        OSError: the system cannot provide the memory.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False) -> None:
        self.size_bytes = max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # HUGEPAGE: fewer page faults. DONTFORK: a page written after a fork would be duplicated for each data worker.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # A kernel without the advice refuses it, and provides ordinary memory.
            with suppress(OSError):
                if hasattr(mmap, advice):
                    self._map.madvise(getattr(mmap, advice))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        _keep_maps_in_forks()
        _maps.add(self._map)
        self.pid = os.getpid()
        self._pinned = pinned and _cudart().cudaHostRegister(self.tensor.data_ptr(), self.size_bytes, 0) == 0
        if pinned and not self._pinned:
            # CUDA reports the failure again at the next launch of a kernel: launch one here.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def view(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` bytes."""
        return memoryview(self._map)[:size_bytes]

    def touch(self) -> None:
        """Set every byte to zero, so that the system allocates every page now."""
        # By torch, which releases the interpreter's lock meanwhile.
        self.tensor.zero_()

    def close(self) -> None:
        """Unpin the memory. The system gets it back with the last view of it."""
        if self._pinned:
            self._pinned = False
            _cudart().cudaHostUnregister(self.tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_maps_in_fork: list[mmap.mmap] = []


@cache
def _keep_maps_in_forks() -> None:
    """Keep the map objects alive in a forked child, which does not have the mappings (MADV_DONTFORK).

    Deleting an object would unmap its range of addresses, where the child may have other memory by then.
    """
    os.register_at_fork(after_in_child=lambda: _maps_in_fork.extend(_maps))


def available_bytes() -> int | None:
    """Memory that this process can allocate without swapping, within the limits of its control groups; None if
    unknown."""
    limits = (_machine_bytes(), *_control_group_bytes())
    return min([size_bytes for size_bytes in limits if size_bytes is not None], default=None)


def _machine_bytes() -> int | None:
    try:
        return _parse_table(Path("/proc/meminfo").read_text(encoding="ascii"))["MemAvailable:"] * 1024
    except (OSError, KeyError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    except (OSError, ValueError):
        return None


def _control_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Free memory of each control group (version 2) of this process: a container, a batch job, a service."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue
        # In a container the path may be that of the host, while the group itself is mounted at the root.
        group = root / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            try:
                limit = int((folder / "memory.max").read_text(encoding="ascii"))
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                cached = _parse_table((folder / "memory.stat").read_text(encoding="ascii"))["inactive_file"]
            except (OSError, ValueError, KeyError):
                continue
            # Inactive pages of the page cache count as used, but are freed on demand.
            yield max(limit - used + cached, 0)


def _parse_table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
