"""Pause the garbage collector while it would find nothing: while a config is composed, and objects are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector inside the context. A collection scans every object of the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Nested pauses, and programs that have turned it off, keep it off.
        if was_enabled:
            gc.enable()
