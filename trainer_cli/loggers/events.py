"""TensorBoard's event records, written and read without importing it, which would take longer than a small training.

A file is a row of records: length (8 bytes), its masked crc32c (4), the event, the event's masked crc32c (4). An event
is a message in the wire format of protocol buffers; the numbers of its fields are those of TensorFlow's `event.proto`
and `summary.proto`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import BinaryIO

_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS = 1, 1, 2, 1
_START = 1
_HEADER_BYTES, _FOOTER_BYTES = 12, 4


def first_event(wall_time: float) -> bytes:
    """What every file begins with: the version of its format."""
    return _double(_WALL_TIME, wall_time) + _sized(_FILE_VERSION, b"brain.Event:2")


def start_event(wall_time: float, step: int) -> bytes:
    """Tells a running TensorBoard to forget what it read of this step and later ones."""
    return _double(_WALL_TIME, wall_time) + _integer(_STEP, step) + _sized(_SESSION_LOG, _integer(_STATUS, _START))


def scalars_event(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """One value of each tag at a step."""
    summary = b"".join(_sized(_VALUE, _sized(_TAG, tag.encode()) + _float(value)) for tag, value in values.items())
    return _double(_WALL_TIME, wall_time) + _integer(_STEP, step) + _sized(_SUMMARY, summary)


def framed(event: bytes) -> bytes:
    """An event as it stands in a file."""
    length = struct.pack("<Q", len(event))
    return b"".join((length, _checksum(length), event, _checksum(event)))


def spans_up_to(file: BinaryIO, step: int) -> Iterator[tuple[int, int]]:
    """Where the whole, undamaged records of events not later than `step` lie; reading ends at the first torn one."""
    start = 0
    while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
        length, checksum = header[:8], header[8:]
        if _checksum(length) != checksum:
            return
        (size,) = struct.unpack("<Q", length)
        event, footer = file.read(size), file.read(_FOOTER_BYTES)
        if len(event) < size or len(footer) < _FOOTER_BYTES:
            return
        stop = start + _HEADER_BYTES + size + _FOOTER_BYTES
        if _checksum(event) == footer and _is_kept(event, step):
            yield start, stop
        start = stop


def _is_kept(event: bytes, step: int) -> bool:
    """True for what tells the file's version, and for events not later than `step`."""
    at = 0
    for field, value in _fields(event):
        if field == _FILE_VERSION:
            return True
        if field == _STEP:
            at = value - (1 << 64) if value >= 1 << 63 else value
    return at <= step


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Number and value of each field; the value of what is no integer is its place."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield field, value
            continue
        size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
        if size is None:
            size, place = _varint(message, place)
        yield field, place
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The integer that begins there, and the place after it."""
    value = shift = 0
    while place < len(message):
        byte = message[place]
        place, value, shift = place + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    return value, place


def _key(field: int, kind: int) -> bytes:
    return bytes((field << 3 | kind,))


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _integer(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, _EIGHT_BYTES) + struct.pack("<d", value)


def _float(value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _key(_SIMPLE_VALUE, _FOUR_BYTES) + packed


def _sized(field: int, content: bytes) -> bytes:
    return _key(field, _SIZED) + _number(len(content)) + content


def _checksum(content: bytes) -> bytes:
    """The masked crc32c of TensorFlow's record files."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    """The remainders of all bytes under the Castagnoli polynomial, bits reversed."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)
