"""The N-th call of this process that changes files in the current folder fails, once or for good.

    python faulty_files.py AT ERRNO once|forever CALLS ARGUMENT ...

runs `train` with these arguments so, and writes into the file CALLS what was called.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NEW_SPACE = ("open", "write", "pwrite", "mkdir", "link", "symlink", "rename", "fsync")
_CHANGES = (*_NEW_SPACE[:-1], "ftruncate", "unlink", "rmdir")
FAILS: dict[int, tuple[str, ...]] = {
    errno.EIO: (*_CHANGES, "fsync"),
    errno.ENOSPC: _NEW_SPACE,
    errno.EDQUOT: _NEW_SPACE,
    errno.EROFS: _CHANGES,
}
"""Which calls may end with an error."""


class FileFaults:
    """Counts the calls that change files below a folder, and fails from number `at` on those that may.

    Args:
        at: from 1; 0: none fails.
        persistent: whether all later ones fail too.
    """

    def __init__(self, folder: Path, at: int, number: int, *, persistent: bool) -> None:
        self.folder, self.at, self.number, self.persistent = f"{folder}/", at, number, persistent
        self.calls: list[str] = []
        self._struck = False
        self._lock = threading.Lock()

    def meet(self, name: str, on: Any) -> None:
        """Count a call, and raise its error."""
        path = self._path(on)
        if not path.startswith(self.folder):
            return
        with self._lock:
            self.calls.append(f"{name} {os.path.relpath(path, self.folder)}")
            is_due = self.at and len(self.calls) >= self.at and (self.persistent or not self._struck)
            if not is_due or name not in FAILS[self.number]:
                return
            self._struck = True
        raise OSError(self.number, os.strerror(self.number), None if isinstance(on, int) else os.fspath(on))

    def _path(self, on: Any) -> str:
        if isinstance(on, int):
            return os.readlink(f"/proc/self/fd/{on}")
        return os.path.abspath(os.fsdecode(on))

    def install(self) -> None:
        """Have all calls of this process counted."""
        for name in (*_CHANGES, "fsync"):
            if name != "open":
                setattr(os, name, self._counted(name, getattr(os, name)))
        os.replace, os.remove = self._counted("rename", os.replace), self._counted("unlink", os.remove)
        opened = os.open

        def open_descriptor(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.meet("open", path)
            return opened(path, flags, *arguments, **named)

        os.open = open_descriptor
        builtins.open = io.open = self._open(io.open)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(on: Any, *arguments: Any, **named: Any) -> Any:
            self.meet(name, arguments[-1] if name in ("link", "symlink") else on)
            return call(on, *arguments, **named)

        return counted

    def _open(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        meet = self.meet

        class CountedFile(io.FileIO):
            """A file whose writes are counted."""

            def write(self, data: Any, /) -> int:
                meet("write", self.fileno())
                return super().write(data)

            def truncate(self, size: int | None = None, /) -> int:
                meet("ftruncate", self.fileno())
                return super().truncate(size)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **named: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return opened(file, mode, buffering, *text, **named)
            meet("open", file)
            raw = CountedFile(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **named)

        return open_file


def main(at: str, number: str, how_long: str, calls: str, *arguments: str) -> int:
    """Run `train` with the fault."""
    from trainer_cli.commands import command_line as command

    faults = FileFaults(Path.cwd(), int(at), int(number), persistent=how_long == "forever")
    opened = io.open
    faults.install()
    # As in a new process: the entry is `main` without arguments.
    sys.argv = ["train", *arguments]
    try:
        return command.main()
    finally:
        with opened(calls, "w", encoding="utf-8") as file:
            file.writelines(f"{call}\n" for call in faults.calls)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
