"""A disk that keeps its promises and no more: at a power cut it loses whatever was not brought to rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from faulty_disk import FaultyDisk

from trainer_cli.storage.disk import Disk, delete_tree

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
        self._renames: list[tuple[Path, Path, bytes | None]] = []
        """Those that no fsync of the folder followed, oldest first, with the content of a file that was replaced; swaps
        too."""
        self._swaps: set[tuple[Path, Path]] = set()
        self._created: set[Path] = set()
        """New files and folders that no fsync of their folder followed, by their present paths."""

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._created.add(path)

    def open_new(self, path: Path) -> int:
        fd = super().open_new(path)
        self._created.add(path)
        return fd

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
        replaced = new.read_bytes() if new.is_file() else None
        super().rename(old, new)
        self._renames.append((old, new, replaced))
        self._created = {_moved(path, old, new) for path in self._created if path != new}
        if replaced is not None:
            # The name exists in any case, with the old content or with the new.
            self._created.discard(new)

    def exchange(self, first: Path, second: Path) -> None:
        super().exchange(first, second)
        self._renames.append((first, second, None))
        self._swaps.add((first, second))
        self._created = {
            _moved(path, first, second) if path.is_relative_to(first) else _moved(path, second, first)
            for path in self._created
        } - {first, second}

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self._renames = [rename for rename in self._renames if rename[1].parent != path]
        self._created = {created for created in self._created if created.parent != path}

    def lose(self, root: Path, *, everything: bool = False) -> None:
        """Garble what is not at rest, and take back the newest names and renames that are not, some or all of them.

        Args:
            everything: all that may be lost is lost, instead of a random part.
        """
        for path in [path for path in root.rglob("*") if path.is_file()]:
            before = self._content.get(path.stat().st_ino)
            if before is not None:
                path.write_bytes(before if everything else self._garbled(before, path.read_bytes()))
        for path in sorted(self._created):
            if everything or self._random.random() < 0.5:
                delete_tree(Disk(), path)
        first = 0 if everything else self._random.randint(0, len(self._renames))
        for old, new, replaced in reversed(self._renames[first:]):
            if (old, new) in self._swaps:
                Disk().exchange(old, new)
            elif new.exists() and old.parent.exists() and not old.exists():
                new.rename(old)
                if replaced is not None:
                    new.write_bytes(replaced)

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


def _moved(path: Path, old: Path, new: Path) -> Path:
    """The path after `old` was renamed."""
    return new / path.relative_to(old) if path.is_relative_to(old) else path
