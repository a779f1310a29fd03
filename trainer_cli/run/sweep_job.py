"""What a job of a sweep leaves for the sweep's table where it ends before its run directory could tell: its error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ERROR = "error"
"""Suffix of the file that holds it, beside the job's frozen config."""
_LONGEST = 160


@contextlib.contextmanager
def telling(frozen: Path) -> Iterator[None]:
    """Write the error that ends a job, in one line, beside its frozen config."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of a list of mistakes the first one says more than their number.
        text = next((line.removeprefix("- ") for line in lines if not line.endswith(":")), type(error).__name__)
        with contextlib.suppress(OSError):
            frozen.with_suffix(f".{ERROR}").write_text(text, "utf-8")
        raise


def told_in(frozen: Path) -> str:
    """The error that a job printed, shortened; empty where it printed none."""
    try:
        text = frozen.with_suffix(f".{ERROR}").read_text("utf-8")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
