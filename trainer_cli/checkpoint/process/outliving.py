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
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from trainer_cli.checkpoint.process import carrier
from trainer_cli.checkpoint.process.background import Background

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""So long the end of the process is waited for, and its first answer."""
_ROOM = 1 << 20
"""What the socket is asked to hold; the system may give less."""


class WriterDied(OSError):
    """The writer process is gone, and what was sent to it may be done or not."""

    def __init__(self, how: str = "") -> None:
        super().__init__(errno.EIO, f"the writer process died{how}")


class WriterProcess:
    """The sender's side. By one thread at a time; whoever lends is no other while nothing is being written."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._channel: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._lent: tuple[int, int, int] | None = None
        self._is_shared = False
        self._refused = False
        self._how = ""
        _senders.add(self)
        _watch_forks()

    @property
    def pid(self) -> int | None:
        """The process, where there is one."""
        return None if self._child is None else self._child.pid

    def lend(self, file: int, address: int, size_bytes: int) -> None:
        """The memory in which most of what is written lies: a file without a name, mapped at an address."""
        self._lent, self._is_shared = (file, address, size_bytes), False

    def take_back(self) -> None:
        """That memory is given back."""
        self._lent, self._is_shared = None, False
        self._tell("unshare")

    def place_of(self, address: int, size_bytes: int) -> int | None:
        """Where something lies in the memory that was lent; None where it does not."""
        if self._lent is None:
            return None
        start = address - self._lent[1]
        return start if start >= 0 and start + size_bytes <= self._lent[2] else None

    def is_ready(self) -> bool:
        """Whether there is memory to write from and a process that does, which is started if need be. One that cannot
        be started is told of once, and not tried again."""
        if self._lent is None or self._refused:
            return False
        try:
            self._ensure()
        except (OSError, ValueError) as error:
            self._refused = True
            log.warning("the training itself writes its checkpoints, since no process for that can be had: %s", error)
            self.close()
        return not self._refused

    def begin(self) -> None:
        """A new piece of work: start the process where there is none, and forget what failed before.

        Raises:
            WriterDied: none can be had.
        """
        try:
            self._ensure()
        except OSError as error:
            raise WriterDied(f"; another cannot be started: {error.strerror}") from error
        self.send("begin")
        if self._lent is not None and not self._is_shared:
            self.send("share", files=[self._lent[0]])
            self._is_shared = True

    def send(self, operation: str, *about: object, files: Sequence[int] = ()) -> None:
        """Have an operation carried out, after all those before it. Whether it failed is told by `end`.

        Raises:
            WriterDied: it will not be.
        """
        packet = json.dumps([operation, *about]).encode()
        sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        if self._channel is None:
            raise WriterDied(self._how)
        try:
            self._channel.sendmsg([packet], sent)
        except ConnectionError:
            raise self._dead() from None

    def end(self) -> None:
        """Wait until all is carried out.

        Raises:
            OSError: the first that failed; nothing was tried after it.
            WriterDied: nobody knows.
        """
        self.send("end")
        assert self._channel is not None
        try:
            answer = self._channel.recv(carrier.PACKET)
        except ConnectionError:
            answer = b""
        except BaseException:
            # Its answer must not be taken for one to a later question, nor may it go on with memory that changes.
            if self._child is not None:
                self._child.kill()
            self.let_go()
            raise
        if not answer:
            raise self._dead()
        failure = json.loads(answer)
        if failure:
            number, text, path = failure
            raise OSError(number, text, *([path] if path else []))

    def forget(self) -> None:
        """The piece of work is over, however it went."""
        self._tell("begin")

    def close(self) -> None:
        """Let the process end once it has done what was sent."""
        child, self._child = self._child, None
        self.let_go()
        if child is not None:
            _awaited(child)

    def let_go(self) -> None:
        """Close this end. A forked data worker must not hold it: the process would outlive the training for ever."""
        channel, self._channel = self._channel, None
        self._is_shared = False
        if channel is not None:
            channel.close()

    def _tell(self, operation: str) -> None:
        """Say something to the process, if there is one that listens."""
        if self._channel is not None:
            with suppress(OSError):
                self.send(operation)

    def _dead(self) -> WriterDied:
        """What to raise where nobody listens any more; the next piece of work starts another process."""
        self.let_go()
        child, self._child = self._child, None
        if child is not None:
            code = _awaited(child)
            self._how = f" (killed by signal {-code})" if code < 0 else f" (it ended with {code})"
        return WriterDied(self._how)

    def _ensure(self) -> None:
        if self._channel is None or self._child is None or self._child.poll() is not None:
            self.close()
            with _starting:
                self._start()
            assert self._channel is not None
            self._channel.settimeout(_PATIENCE_S)
            self.end()
            self._channel.settimeout(None)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The signals that stop the training are not for it, from its first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, carrier.FOR_THE_TRAINING)
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-S", carrier.__file__, str(self._disk)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._channel = ours
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)


_senders: weakref.WeakSet[WriterProcess] = weakref.WeakSet()
_starting = threading.Lock()
"""Held while a process is started: whoever forks meanwhile would hand both ends of its socket to its child."""


@cache
def _watch_forks() -> None:
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_let_go_of_all)


def _let_go_of_all() -> None:
    _starting.release()
    for sender in list(_senders):
        sender.let_go()


def _awaited(child: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that should end now; it is made to if it does not."""
    try:
        return child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


class Outliving(Background):
    """A thread that prepares, and the process that carries out.

    Args:
        disk: the program text of the operations, which the process reads: `checkpoint/storage/disk.py`.
        lingers_s: so long the thread waits for more work before it ends.
    """

    def __init__(self, name: str, disk: Path, *, lingers_s: float = 0.0) -> None:
        super().__init__(name, lingers_s=lingers_s)
        self._carrier = WriterProcess(disk)

    @property
    def carrier(self) -> WriterProcess:
        """The process."""
        return self._carrier

    @staticmethod
    def is_offered() -> bool:
        """Whether this system has what it takes: memory to share without a name, sockets that keep packets whole, and
        an interpreter to start."""
        has_parts = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET") and hasattr(socket, "recv_fds")
        return has_parts and bool(sys.executable) and not getattr(sys, "frozen", False)

    def close(self) -> None:
        """Let the process end."""
        self._carrier.close()
