"""Memory for a copy of a state: page-aligned, got once, shared with nobody but who writes it, pinned for a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which Python does not name; older systems refuse it."""
_POPULATED_AT_ONCE = 1 << 26
_BRIEF = 32 * 1024
_move_briefly = ctypes.PyDLL(None).memmove
_move_briefly.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_briefly.restype = ctypes.c_void_p
_move = ctypes.CDLL(None).memmove
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move.restype = ctypes.c_void_p
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_map.restype = ctypes.c_void_p
_unmap = ctypes.CDLL(None).munmap
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_advise = ctypes.CDLL(None).madvise
_advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_compare.restype = ctypes.c_int


class Memory:
    """So many bytes, aligned to pages. `close` gives them back once nothing uses them.

    Args:
        shared: another process shall be able to map them, by the descriptor `file`; where the system refuses that,
            there is none.
        inherited: forked workers see it as it was, as they see all that torch gets.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False, shared: bool = False, inherited: bool = False) -> None:
        self.size_bytes = max(-(-size_bytes // _PAGE), 1) * _PAGE
        self.file = _file_in_memory(self.size_bytes) if shared else None
        self._closing = None if self.file is None else weakref.finalize(self, os.close, self.file)
        self._closed = False
        mapped = _mapped(self.file, self.size_bytes)
        if inherited:
            _inherited[ctypes.addressof(mapped)] = mapped
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self._bytes = self.tensor.numpy().data
        # Forked data workers must not hold a copy of a state: where it is private each page written later would be
        # copied for them, and where it is shared they would keep it when it is given back.
        for advice in ("MADV_HUGEPAGE",) if inherited else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            _advise(self.address, self.size_bytes, getattr(mmap, advice, -1))
        _memories.add(self)
        _watch_forks()
        self._pinned = pinned and _pin(self.address, self.size_bytes)

    def view(self, size_bytes: int) -> memoryview:
        """The first bytes of it."""
        return self._bytes[:size_bytes]

    def part(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor with storage of its own, of another's type, shape and strides, over a part of it; the memory stays
        as long as that does."""
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=like.nbytes, offset=offset)
        # Its very strides: for a dimension of one they may be any, and kernels go by them.
        return raw.view(like.dtype).as_strided(like.shape, like.stride())

    def put(self, content: bytes, offset: int = 0) -> None:
        """Copy a few bytes in."""
        self._bytes[offset : offset + len(content)] = content

    def copy(self, source: int, size_bytes: int, offset: int) -> None:
        """Copy what lies at an address in; more than a little without the interpreter's lock."""
        (_move_briefly if size_bytes <= _BRIEF else _move)(self.address + offset, source, size_bytes)

    def differs(self, source: int, size_bytes: int, offset: int) -> bool:
        """Whether what lies at an address has other bytes than these."""
        return bool(_compare(self.address + offset, source, size_bytes))

    def populate(self) -> None:
        """Have the system find all of it now, which takes longer than to copy; without the interpreter's lock. What
        lies in it stays."""
        for start in range(0, self.size_bytes if sys.platform == "linux" else 0, _POPULATED_AT_ONCE):
            # Between two pieces others get at the address space, and somebody may have closed this.
            if self._closed:
                return
            _advise(self.address + start, min(_POPULATED_AT_ONCE, self.size_bytes - start), _POPULATE_WRITE)

    def close(self) -> None:
        """Let go. The memory itself goes with the last view of it, here and in a process that maps it."""
        self._closed = True
        self.close_file()
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]

    def close_file(self) -> None:
        """Let nobody else map it from here on."""
        self.file = None
        if self._closing is not None:
            self._closing()


def is_inherited(address: int) -> bool:
    """Whether an address is in memory that was got to be inherited, though nobody holds it but tensors."""
    return any(start <= address < start + len(mapped) for start, mapped in _inherited.items())


_memories: weakref.WeakSet[Memory] = weakref.WeakSet()
_inherited: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_ubyte]] = weakref.WeakValueDictionary()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_files)


def _close_files() -> None:
    """A forked data worker would keep what is given back."""
    for memory in list(_memories):
        memory.close_file()


def _file_in_memory(size_bytes: int) -> int | None:
    """A file without a name, or None where there can be none of that size."""
    try:
        file = os.memfd_create("trainer-cli", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size_bytes)
        except BaseException:
            os.close(file)
            raise
    except (OSError, AttributeError) as error:
        logger.debug("%s bytes cannot be shared with another process: %s", size_bytes, error)
        return None
    return file


def _mapped(file: int | None, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Memory of a file or of nobody else, which goes with whatever looks at it last.

    Not by Python's `mmap`: that keeps a descriptor of its own, which forked workers would inherit.
    """
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file is None else mmap.MAP_SHARED
    address = _map(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, how, -1 if file is None else file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{size_bytes:,} bytes of memory cannot be had")
    mapped = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(mapped, _unmapped, os.getpid(), address, size_bytes).atexit = False
    return mapped


def _unmapped(owner: int, address: int, size_bytes: int) -> None:
    """In a forked worker other memory may lie there by now."""
    if os.getpid() == owner:
        _unmap(address, size_bytes)


def _pin(address: int, size_bytes: int) -> bool:
    """Have the driver copy straight into it. Without that, copies are slower and wait."""
    return bool(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0) == 0)  # type: ignore[no-untyped-call]


def available_bytes() -> int | None:
    """The memory that can still be had without swapping, by this process under its limits; None where nobody knows."""
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


@dataclass(frozen=True, slots=True)
class _Names:
    """Of the files in which a control group tells its limit, what is used of it, and how much of that only caches."""

    limit: str
    used: str
    cached: str


_SECOND = _Names("memory.max", "memory.current", "inactive_file")
_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _of_the_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What is left in each control group that this process is in: those of a container, a batch job, a service."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, base = (_FIRST, root / "memory") if controllers else (_SECOND, root)
        # A container may be told its path as it is outside, and see its own group at the base.
        group = base / path.lstrip("/")
        for folder in (group, *(above for above in group.parents if above.is_relative_to(base))):
            left = _left_in(folder, names)
            if left is not None:
                yield left


def _left_in(group: Path, names: _Names) -> int | None:
    try:
        limit = int((group / names.limit).read_text(encoding="ascii"))
        used = int((group / names.used).read_text(encoding="ascii"))
        cached = _table((group / "memory.stat").read_text(encoding="ascii"))[names.cached]
    except (OSError, ValueError, KeyError):
        return None
    return max(limit - used + cached, 0)


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
