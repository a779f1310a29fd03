"""A disk that keeps its promises and no more: at a power cut it loses whatever was not brought to rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.testing.faults import FaultyDisk

PAGE = 4096


class PowerCut(BaseException):
    """The power is gone: no operation happens any more."""


class ForgetfulDisk(FaultyDisk):
    """Remembers what is not at rest; the power is cut at operation number `at`, and `lose` shows what is left."""

    def __init__(self, at: int, seed: int) -> None:
        super().__init__(block_bytes=PAGE)
        self.cut_at = at
        self._random = Random(seed)
        self._content: dict[int, bytes] = {}
        """What is at rest of each file that has changed since, by its number."""
        self._renames: list[tuple[Path, Path]] = []
        """Those that no fsync of the folder followed, oldest first; a swap is among them too."""
        self._swaps: set[tuple[Path, Path]] = set()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._remember(fd)
        return super().write(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._remember(fd)
        super().truncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._content.pop(os.fstat(fd).st_ino, None)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._renames.append((old, new))

    def exchange(self, first: Path, second: Path) -> None:
        super().exchange(first, second)
        self._renames.append((first, second))
        self._swaps.add((first, second))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self._renames = [(old, new) for old, new in self._renames if new.parent != path]

    def lose(self, root: Path) -> None:
        """Garble what is not at rest, and take back the newest renames that are not, some or all of them."""
        for path in [path for path in root.rglob("*") if path.is_file()]:
            before = self._content.get(path.stat().st_ino)
            if before is not None:
                path.write_bytes(self._garbled(before, path.read_bytes()))
        for old, new in reversed(self._renames[self._random.randint(0, len(self._renames)) :]):
            if (old, new) in self._swaps:
                Disk().exchange(old, new)
            elif new.exists() and old.parent.exists() and not old.exists():
                new.rename(old)

    def _remember(self, fd: int) -> None:
        number = os.fstat(fd).st_ino
        if number not in self._content:
            self._content[number] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def _garbled(self, before: bytes, now: bytes) -> bytes:
        """Each page as it was, as it is, or noise; the size too is the old or the new one."""
        size = self._random.choice([len(before), len(now), len(now)])
        pages = range(0, size, PAGE)
        noise = self._random.randbytes(PAGE)
        mixed = b"".join(self._random.choice([before, now, now])[at : at + PAGE].ljust(PAGE, noise[:1]) for at in pages)
        return self._random.choice([mixed, mixed, now, before, noise])[:size]

    def _do(self, name: str, on: Any, act: Callable[[], Any], half: Any = None) -> Any:
        if len(self.operations) + 1 >= self.cut_at:
            raise PowerCut
        return super()._do(name, on, act, half)
