"""No garbage is collected where it would find nothing, and take long: what a config makes lives on, a save is brief."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection inside; afterwards it is as it was. One looks through all objects that there are."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
