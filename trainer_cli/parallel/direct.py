"""Sums of a few numbers over few ranks of one machine, by a message from each rank to every other.

A sum of six numbers by gloo wakes several threads on each rank: on a virtual machine with two processors it took 0.39
ms of processor time and 8 context switches a rank for two ranks, and 1.1 ms and 23 for four. By messages over Unix
sockets it took 0.03 ms and 0.09 ms, and less than one switch: the main thread sends and receives them, and they have
usually arrived before they are waited for.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections import deque
from contextlib import ExitStack
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.parallel.peer_errors import DIRECT
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.parallel.process_group import ProcessGroup

_MOST_BYTES = 4096
"""Size of the largest tensor. Several must fit into the buffer of a socket, as ranks send before they receive."""
_MOST_RANKS = 8
"""The main thread sends to and receives from each other rank, while other threads do the work of gloo's sums."""
_DTYPES = (torch.float64, torch.float32, torch.int64)
_HEADER = struct.Struct("=II")
"""Begins each message: the index of its type, and its size in bytes."""
_LONGEST_S = 2e6
"""Largest time limit of a socket: Python passes it to `poll` as milliseconds in 32 bits, and does not check that."""


class DirectSum:
    """A sum that has been started."""

    is_complete = False

    def __init__(self, sums: DirectSums, tensor: Tensor) -> None:
        self._sums = sums
        # Detached: a loss may be summed, without a gradient.
        self.values = tensor.detach().numpy()
        # The numbers of this rank at the start: the sum is written into the tensor.
        self.message = _HEADER.pack(_DTYPES.index(tensor.dtype), tensor.nbytes) + self.values.tobytes()

    def wait(self) -> None:
        """Write the sum into the tensor.

        Raises:
            RuntimeError: another rank has ended, has sent nothing within the time limit, or adds another tensor.
        """
        self._sums.complete(self)


class DirectSums:
    """Connections of this rank to all others.

    Args:
        connections: by rank; None for this rank.
    """

    def __init__(self, connections: list[socket.socket | None], timeout_s: float) -> None:
        self._connections = connections
        self._others = [connection for connection in connections if connection is not None]
        self._started: deque[DirectSum] = deque()
        self._is_cut_short = False
        """Whether a sum failed or was interrupted: what arrives next may belong to it instead of to a later sum."""
        self.set_timeout(timeout_s)

    def set_timeout(self, seconds: float) -> None:
        """Set the time after which a sum fails that another rank has not started."""
        for connection in self._others:
            connection.settimeout(min(seconds, _LONGEST_S))

    def start(self, tensor: Tensor) -> DirectSum | None:
        """Send the numbers of this rank to the others. None: such a tensor is not sent."""
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        if tensor.dtype not in _DTYPES or tensor.nbytes > _MOST_BYTES:
            return None
        started = DirectSum(self, tensor)
        self._begin_exchange()
        try:
            for connection in self._others:
                connection.sendall(started.message)
        except OSError as error:
            raise _lost(error) from error
        self._started.append(started)
        self._is_cut_short = False
        return started

    def complete(self, awaited: DirectSum) -> None:
        """Receive what belongs to the started sums up to this one, as messages arrive in the order of their sums."""
        while not awaited.is_complete:
            self._begin_exchange()
            started = self._started.popleft()
            message, values = started.message, started.values
            try:
                terms = [
                    np.frombuffer(
                        message if connection is None else _receive(connection, message),
                        values.dtype,
                        offset=_HEADER.size,
                    )
                    for connection in self._connections
                ]
            except OSError as error:
                raise _lost(error) from error
            # In the order of ranks, so that all ranks have the same rounding.
            values[...] = reduce(add, terms).reshape(values.shape)
            started.is_complete = True
            self._is_cut_short = False

    def _begin_exchange(self) -> None:
        """Before messages are sent or received; `_is_cut_short` is reset after the last of them."""
        if self._is_cut_short:
            raise _lost(ConnectionError("An earlier sum was cut short"))
        self._is_cut_short = True

    def close(self) -> None:
        """Close the connections."""
        for connection in self._others:
            connection.close()


def _receive(connection: socket.socket, sent: bytes) -> bytes:
    """Receive another rank's message, which has the header of this rank's."""
    message = b""
    while len(message) < len(sent):
        received = connection.recv(len(sent) - len(message))
        if not received:
            raise ConnectionError("Connection closed by peer")
        message += received
        # At once: the rest of a shorter message would be the beginning of the next one.
        if len(message) >= _HEADER.size and message[: _HEADER.size] != sent[: _HEADER.size]:
            local, remote = _shown(sent), _shown(message)
            raise RuntimeError(f"the ranks add different tensors: {local} on this rank, {remote} on another")
    return message


def _shown(message: bytes) -> str:
    """What a message holds, for an error: its size and type."""
    index, size_bytes = _HEADER.unpack_from(message)
    return f"{format_count(size_bytes, 'byte')} of {_DTYPES[index]}"


def _lost(error: OSError) -> RuntimeError:
    """The error of a sum that failed because of another rank, of the type of torch's."""
    return RuntimeError(f"{DIRECT}a sum of the ranks: {'Timed out' if isinstance(error, TimeoutError) else error}")


def connect(group: ProcessGroup, timeout_s: float) -> DirectSums | None:
    """Connect the ranks of a group; None if they are many, or cannot reach one another by Unix sockets. Collective."""
    if not 1 < group.world_size <= _MOST_RANKS:
        return None
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="train-", ignore_cleanup_errors=True))
            path = f"{folder}/rank"
            listener.bind(path)
            listener.listen(group.world_size)
        except OSError:
            # No folder can be written, or its name is longer than an address may be: no other rank connects.
            path = ""
        paths = group.gather(path)
        connections: list[Any] = [None] * group.world_size
        try:
            for rank in range(group.rank):
                # Succeeds without an `accept`, so no rank waits for another here.
                connections[rank] = socket.socket(socket.AF_UNIX)
                connections[rank].connect(paths[rank])
                connections[rank].sendall(bytes([group.rank]))
            connects = True
        except OSError:
            connects = False
        if not all(group.gather(connects)):
            for connection in filter(None, connections):
                connection.close()
            return None
        for _ in range(group.rank + 1, group.world_size):
            connection, _ = listener.accept()
            connections[connection.recv(1)[0]] = connection
        return DirectSums(connections, timeout_s)
