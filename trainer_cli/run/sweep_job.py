"""The error of a sweep's job that ended before its run directory existed, for the sweep's table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ERROR = "error"
"""Suffix of the file with the error, next to the job's frozen config."""
_LONGEST = 160


@contextlib.contextmanager
def recording_error(frozen: Path) -> Iterator[None]:
    """Write the error that ends a job, as one line, next to its frozen config."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of a list of mistakes take the first, not their number.
        text = next((line.removeprefix("- ") for line in lines if not line.endswith(":")), type(error).__name__)
        with contextlib.suppress(OSError):
            frozen.with_suffix(f".{ERROR}").write_text(text, "utf-8")
        raise


def recorded_error(frozen: Path) -> str:
    """The error that `recording_error` wrote, shortened; empty if there is none."""
    try:
        text = frozen.with_suffix(f".{ERROR}").read_text("utf-8")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
