"""The program of the writer process: carries out operations on files in the order in which they come.

    python -I -S carrier.py DISK_PY        with a socket as its standard input

Of the standard library alone, so that it is there at once, small, and nothing of the user's is imported twice. It
outlives whoever sends: what was sent is carried out, whether or not anybody is left to be told. After an operation
that failed none is tried until the sender begins anew.

Every packet is a list in JSON: the operation and what it is about. A descriptor travels with those marked +:

    open FILE +      that file is called so from here on          close FILE
    share +          the sender's memory                          unshare      it is given back
    write FILE AT START SIZE         of the shared memory         copy FILE AT SIZE +   the beginning of a file
    truncate FILE SIZE, fsync FILE, write_back FILE START SIZE, fsync_dir PATH, rename PATH PATH
    hold +           what is locked stays so until all is over    begin        close all, forget what failed
    end              answer what failed, if anything did
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PACKET = 1 << 16
_BLOCK = 1 << 26
"""So much is asked of the disk at once. Where it refuses midway, no more than this is written twice."""
FOR_THE_TRAINING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_WITH_FILE = ("open", "share", "hold", "copy")
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_DIRECT = getattr(os, "O_DIRECT", 0)


class Carrier:
    """What is open here, and what failed first."""

    def __init__(self, channel: socket.socket, disk: Any) -> None:
        self.channel = channel
        self.disk = disk
        self.failure: list[object] = []
        self._memory: mmap.mmap | None = None
        self._files: dict[int, int] = {}
        self._held: list[int] = []
        self._always: dict[str, Callable[..., None]] = {
            "open": self._open, "close": self._close, "share": self._share, "unshare": self._unshare,
            "hold": self._held.append, "begin": self._begin, "end": self._end,
        }  # fmt: skip
        self._unless_failed: dict[str, Callable[..., None]] = {
            "write": self._write, "copy": self._copy,
            "truncate": self._of_file("truncate"), "fsync": self._of_file("fsync"),
            "write_back": self._of_file("write_back"), "fsync_dir": disk.fsync_dir, "rename": disk.rename,
        }  # fmt: skip

    def next(self) -> bool:
        """Carry out one more; False where nobody sends any more."""
        packet, files, _, _ = socket.recv_fds(self.channel, PACKET, 1)
        if not packet:
            return False
        name, *args = json.loads(packet)
        try:
            if (name in _WITH_FILE) != bool(files):
                raise OSError(errno.EBADF, "A descriptor was lost", name)
            if name in self._always:
                self._always[name](*args, *files)
            elif not self.failure:
                self._unless_failed[name](*args, *files)
            else:
                _close(files)
        except OSError as error:
            self._fail(error.errno or errno.EIO, error.strerror, error.filename)
        except Exception as error:
            self._fail(errno.EIO, f"{name}: {type(error).__name__}: {error}", None)
        return True

    def _fail(self, *failure: object) -> None:
        self.failure = self.failure or list(failure)

    def _of_file(self, operation: str) -> Callable[..., None]:
        carried_out = getattr(self.disk, operation)
        return lambda name, *args: carried_out(self._files[name], *args)

    def _write(self, name: int, at: int, start: int, size: int) -> None:
        if self._memory is None:
            raise OSError(errno.EIO, "There is no memory to write from")
        self._write_from(name, at, self._memory, start, size)

    def _copy(self, name: int, at: int, size: int, source: int) -> None:
        try:
            with mmap.mmap(source, size, prot=mmap.PROT_READ) as memory:
                self._write_from(name, at, memory, 0, size)
        finally:
            os.close(source)

    def _write_from(self, name: int, at: int, memory: mmap.mmap, start: int, size: int) -> None:
        file, done = self._files[name], 0
        with memoryview(memory) as whole, whole[start : start + size] as view:
            while done < size:
                done += self._write_once(file, view[done : done + _BLOCK], at + done)

    def _write_once(self, file: int, view: memoryview, at: int) -> int:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        with view:
            try:
                written = int(self.disk.write(file, view, at))
            except OSError as error:
                if not flags & _DIRECT or error.errno not in _REFUSED:
                    raise
                written = 0
            else:
                if written <= 0:
                    raise OSError(errno.EIO, "The disk took no bytes")
        if flags & _DIRECT and (written == 0 or written % mmap.PAGESIZE):
            # It takes no more past the page cache.
            self.disk.bypass_cache(file, on=False)
        return written

    def _open(self, name: int, file: int) -> None:
        self._close(name)
        self._files[name] = file

    def _close(self, name: int) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            os.close(file)

    def _share(self, file: int) -> None:
        self._unshare()
        try:
            self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)

    def _unshare(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _begin(self) -> None:
        for name in list(self._files):
            self._close(name)
        while self._held:
            os.close(self._held.pop())
        self.failure = []

    def _end(self) -> None:
        with suppress(OSError):
            self.channel.send(json.dumps(self.failure).encode())


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def main() -> None:
    """Carry out whatever comes, to the end of it. Signals are for the training; this ends when that is gone."""
    for one in FOR_THE_TRAINING:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_TRAINING)
    spec = importlib.util.spec_from_file_location("disk", sys.argv[1])
    assert spec is not None and spec.loader is not None
    disk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(disk)
    carrier = Carrier(socket.socket(fileno=0), disk.Disk())
    while carrier.next():
        pass


if __name__ == "__main__":
    main()
