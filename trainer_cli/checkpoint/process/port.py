"""What checkpointing asks of a place where slow work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Work = Callable[[], object]


class Process(Protocol):
    """Does work in the order in which it was given. Work tells its own failures: it raises nothing."""

    def submit(self, work: Work) -> None:
        """Do it, now or soon."""
        ...

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all is done; False where that took longer than it may."""
        ...
