"""The standard streams of a command: open, able to print every character, and safe when their reader goes away."""

from __future__ import annotations

import errno
import io
import os
import sys


def prepare_streams() -> None:
    """Make each standard stream open, able to print every character, and safe after its terminal is closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        # A program that was started with a closed stream has none.
        if stream is None:
            setattr(sys, name, _open_null(mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            may_raise = stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream))
            if may_raise:
                # A name that the stream cannot encode must not end a training when it prints its last line.
                stream.reconfigure(errors="replace")
            if stream.isatty():
                setattr(sys, name, _make_tolerant(stream, errno.EIO))


def tolerate_lost_output() -> None:
    """Discard output that cannot be written, so that a training continues and ends with its own exit code.

    The reader of a pipe may be gone, or the disk of a file full. The log is in the run directory too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(_raw_file(stream), _TolerantFile):
            setattr(sys, name, _make_tolerant(stream))


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    """Whether a stream writes UTF-8."""
    return stream.encoding.lower().replace("-", "") == "utf8"


def _open_null(mode: str) -> io.TextIOWrapper:
    """Open /dev/null for a stream that the caller closed (`>&-`).

    Otherwise the next opened file, perhaps a checkpoint, would get its descriptor, and prints would go there.
    """
    # The lowest free descriptor: the one of the closed stream.
    number = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(number, True)
    stream: io.TextIOWrapper = os.fdopen(number, mode, encoding="utf-8", closefd=False)  # type: ignore[assignment]
    return stream


def _raw_file(stream: io.TextIOWrapper) -> object:
    """The unbuffered file behind a stream."""
    return getattr(stream.buffer, "raw", None)


def _make_tolerant(stream: io.TextIOWrapper, error_number: int | None = None) -> io.TextIOWrapper:
    """A stream to the same file that discards what cannot be written because of an error of this number; None: of any.

    A stream without a descriptor is returned as it is.
    """
    # They are flushed first: with two buffers for one file, later output could come before earlier.
    try:
        stream.flush()
    except OSError as error:
        if error_number not in (error.errno, None):
            raise
    try:
        raw = _TolerantFile(stream.fileno(), error_number)
    except io.UnsupportedOperation:
        return stream
    # An unbuffered stream (PYTHONUNBUFFERED=1) has no line buffering; this one needs it to write each line at once.
    is_prompt = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=is_prompt
    )


class _TolerantFile(io.FileIO):
    """A terminal or pipe whose reader may end, or a file whose disk may be full: such writes are discarded.

    After a terminal is closed each write fails with EIO, while SIGHUP lets the run save and exit.
    """

    def __init__(self, descriptor: int, error_number: int | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._error_number = error_number

    def write(self, data: object, /) -> int:
        """Write, or discard, all bytes; returns their number."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if self._error_number not in (error.errno, None):
                raise
            # Reported as written: a short count would make the buffer above try again for ever.
            return memoryview(data).nbytes  # type: ignore[arg-type]
