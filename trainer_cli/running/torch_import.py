"""Import torch as a training needs it: with short spins of its threads, and outside of garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_cli.gc_pause import gc_paused
from trainer_cli.terminal import LOADING_TORCH, clear_status, show_status

_SPINS = "10000"
"""Rounds that an OpenMP thread spins before it sleeps. With the default of some milliseconds, small steps took eight
times as long on a busy machine."""


def import_torch() -> None:
    """Import torch and what a training needs."""
    if "torch" not in sys.modules:
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        # Imported objects live as long as the process: exclude them from garbage collection.
        with gc_paused():
            import trainer_cli.running.build  # noqa: F401

            gc.freeze()
    clear_status()


@contextmanager
def showing_import() -> Iterator[None]:
    """Show `loading torch …` on a terminal while the block imports what needs torch."""
    if "torch" not in sys.modules:
        show_status(LOADING_TORCH)
    try:
        yield
    finally:
        # Also if it was shown before this block.
        clear_status()
