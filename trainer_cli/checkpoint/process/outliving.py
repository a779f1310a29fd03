"""Work whose operations on files are carried out by a process of its own, which outlives a killed training.

    training         submit ─┐
    thread                   └─ prepare ─ send, send, send … ─ end ─┐               ┌─ what became of it
    writer process                        write, fsync, rename …    └─ answer ──────┘

Whatever was sent is carried out, though the training be killed meanwhile. The process is started by the first piece
of work, and again by the next one where it died; it ends when nobody holds the other end of its socket.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer_cli.checkpoint.process import carrier
from trainer_cli.checkpoint.process.background import Background

_PATIENCE_S = 60.0
_ROOM = 1 << 20
"""What the socket is asked to hold; the system may give less."""


class WriterDied(OSError):
    """The writer process is gone, and what was sent to it may be done or not."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the writer process died")


class WriterProcess:
    """The sender's side. By one thread at a time."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._channel: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._shared: int | None = None
        self._lent: tuple[int, int, int] | None = None
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(self)))

    @property
    def pid(self) -> int | None:
        """The process, where there is one."""
        return None if self._child is None else self._child.pid

    def lend(self, file: int, address: int, size_bytes: int) -> None:
        """The memory in which most of what is written lies: a file without a name, mapped at an address."""
        self._lent = (file, address, size_bytes)

    def place_of(self, address: int, size_bytes: int) -> int | None:
        """Where something lies in the memory that was lent; None where it does not."""
        if self._lent is None:
            return None
        start = address - self._lent[1]
        return start if start >= 0 and start + size_bytes <= self._lent[2] else None

    def begin(self) -> None:
        """A new piece of work: start the process where there is none, and forget what failed before."""
        if self._child is None or self._child.poll() is not None or self._channel is None:
            self.close()
            self._start()
        self.send("begin")
        if self._lent is not None:
            file = self._lent[0]
            # By its inode: the number of a descriptor, and an address, are used again.
            if self._shared != (inode := os.fstat(file).st_ino):
                self.send("share", files=[file])
                self._shared = inode

    def send(self, operation: str, *about: object, files: Sequence[int] = ()) -> None:
        """Have an operation carried out, after all those before it. Whether it failed is told by `end`.

        Raises:
            WriterDied: it will not be.
        """
        packet = json.dumps([operation, *about]).encode()
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            if self._channel is None:
                raise WriterDied
            self._channel.sendmsg([packet], sent)
        except (BrokenPipeError, ConnectionError):
            raise WriterDied from None

    def end(self) -> None:
        """Wait until all is carried out.

        Raises:
            OSError: the first that failed; nothing was tried after it.
            WriterDied: nobody knows.
        """
        self.send("end")
        assert self._channel is not None
        try:
            answer = self._channel.recv(1 << 16)
        except ConnectionError:
            answer = b""
        if not answer:
            raise WriterDied
        failure = json.loads(answer)
        if failure:
            number, text, path = failure
            raise OSError(number, text, *([path] if path else []))

    def close(self) -> None:
        """Let the process end once it has done what was sent."""
        child, self._child = self._child, None
        self.let_go()
        if child is not None:
            try:
                child.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with suppress(OSError):
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            # A session of its own: Ctrl-C in the terminal is not for it.
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", carrier.__file__, str(self._disk)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        self._channel, self._shared = ours, None

    def let_go(self) -> None:
        """Close this end. A forked data worker must not hold it: the process would outlive the training for ever."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _let_go(sender: weakref.ref[WriterProcess]) -> None:
    if (one := sender()) is not None:
        one.let_go()


class Outliving(Background):
    """A thread that prepares, and the process that carries out.

    Args:
        disk: the program text of the operations, which the process reads: `checkpoint/storage/disk.py`.
    """

    def __init__(self, name: str, disk: Path) -> None:
        super().__init__(name)
        self._carrier = WriterProcess(disk)

    @property
    def carrier(self) -> WriterProcess:
        """The process."""
        return self._carrier

    @staticmethod
    def is_offered() -> bool:
        """Whether this system has what it takes: memory to share without a name, sockets that keep packets whole."""
        return hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET") and hasattr(socket, "recv_fds")

    def close(self) -> None:
        """Let the process end."""
        self._carrier.close()
