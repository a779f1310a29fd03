"""Page-aligned host memory for the copy of a state."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
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
        # By NumPy, which releases the interpreter's lock meanwhile as torch does, and starts no threads for it.
        self.tensor.numpy().fill(0)

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
