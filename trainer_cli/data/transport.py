"""Batches through a pipe between processes: large tensors stay in shared memory, whose file descriptors go along.

The descriptors travel with the message in the same pipe, so that whoever receives it needs nothing more from the
sender, which may have died or be stuck meanwhile. (torch's own way asks the sender for each of them.)
"""

from __future__ import annotations

import io
import os
import socket
import struct
from collections import deque
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
import torch.multiprocessing

_context: Any = context
_SMALL_BYTES = 16384  # a copy costs less than a mapping
_AT_ONCE = 250  # descriptors that one message can take
_HEAD = struct.Struct("<QQ")  # bytes of the message, and descriptors


class _Sending:
    """Collects the descriptors that torch wants to be sent. It plays the part of a process that is being started."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor

    def DupFd(self, descriptor: int) -> _Descriptor:
        return _Descriptor()


class _Descriptor:
    """Stands in a message for the next of the descriptors that come with it."""

    arrived: ClassVar[deque[int]] = deque()

    def detach(self) -> int:
        return self.arrived.popleft()


class _Pickler(ForkingPickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.nbytes <= _SMALL_BYTES:
            try:
                return torch.from_numpy, (thing.numpy(),)
            except (RuntimeError, TypeError):
                pass
        return NotImplemented


def send(pipe: Any, thing: Any) -> None:
    """Send anything that can be pickled. Tensors in it are in shared memory afterwards."""
    sending, message = _Sending(), io.BytesIO()
    before = _context.get_spawning_popen()
    _context.set_spawning_popen(sending)
    try:
        _Pickler(message).dump(thing)
    finally:
        _context.set_spawning_popen(before)
    content, descriptors = message.getbuffer(), sending.descriptors
    head = _HEAD.pack(len(content), len(descriptors))
    with _socket(pipe) as through:
        # All in one: whoever waits for it wakes once.
        sent = socket.send_fds(through, [head, content], descriptors[:_AT_ONCE])
        if sent < len(head) + len(content):
            through.sendall((head + content)[sent:])
        for start in range(_AT_ONCE, len(descriptors), _AT_ONCE):
            socket.send_fds(through, [b"."], descriptors[start : start + _AT_ONCE])


def receive(pipe: Any) -> Any:
    """What was sent.

    Raises:
        EOFError, OSError: the sender ended before it had sent it whole.
    """
    arrived: deque[int] = deque()
    try:
        with _socket(pipe) as through:
            head, descriptors, _, _ = socket.recv_fds(through, _HEAD.size, _AT_ONCE)
            arrived.extend(descriptors)
            head += _exactly(through, _HEAD.size - len(head))
            size, number = _HEAD.unpack(head)
            message = _exactly(through, size)
            while len(arrived) < number:
                mark, descriptors, _, _ = socket.recv_fds(through, 1, _AT_ONCE)
                if not mark or not descriptors:
                    raise EOFError
                arrived.extend(descriptors)
        _Descriptor.arrived = arrived
        return ForkingPickler.loads(message)
    finally:
        _Descriptor.arrived = deque()
        for descriptor in arrived:
            os.close(descriptor)


def _exactly(through: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        read = through.recv_into(rest)
        if read == 0:
            raise EOFError
        rest = rest[read:]
    return content


def _socket(pipe: Any) -> socket.socket:
    return socket.socket(fileno=os.dup(pipe.fileno()))
