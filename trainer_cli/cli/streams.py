"""Prepare the standard streams: none is closed, none fails at a letter, and a terminal may be closed meanwhile."""

from __future__ import annotations

import errno
import io
import os
import sys


def prepare_streams() -> None:
    """Prepare stdin, stdout and stderr for a verb."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            if stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream)):
                # A name beyond what the stream can encode must not end a training at its last line.
                stream.reconfigure(errors="replace")
            if stream.isatty():
                setattr(sys, name, _until_closed(stream))


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    return stream.encoding.lower().replace("-", "") == "utf8"


def _opened(mode: str) -> io.TextIOWrapper:
    """The stream for one that the caller closed (`>&-`), on /dev/null.

    Otherwise the next opened file, perhaps a checkpoint, would get its number, and prints would go there.
    """
    number = os.open(os.devnull, os.O_RDWR)  # The lowest that is free: the stream's own.
    os.set_inheritable(number, True)
    stream: io.TextIOWrapper = os.fdopen(number, mode, encoding="utf-8", closefd=False)  # type: ignore[assignment]
    return stream


def _until_closed(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream to the same terminal that discards what is written after it was closed."""
    stream.flush()
    try:
        raw = _Terminal(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream  # no file of the system
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )


class _Terminal(io.FileIO):
    """A terminal. Once it is closed each write fails with EIO; the run then saves and ends by SIGHUP."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]
