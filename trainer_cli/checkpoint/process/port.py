"""What checkpointing asks of a place where slow work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Work = Callable[[], object]


class Carrier(Protocol):
    """Carries out operations on files in another process, in the order in which they are sent."""

    def lend(self, file: int, address: int, size_bytes: int) -> None:
        """The memory in which most of what is written lies: a file without a name, mapped at an address."""
        ...

    def take_back(self) -> None:
        """That memory is given back."""
        ...

    def is_ready(self) -> bool:
        """Whether there is memory to write from, and somebody who does."""
        ...

    def place_of(self, address: int, size_bytes: int) -> int | None:
        """Where something lies in the memory that was lent; None where it does not."""
        ...

    def begin(self) -> None:
        """A new piece of work."""
        ...

    def send(self, operation: str, *about: object, files: Sequence[int] = ()) -> None:
        """Have an operation carried out, after all those before it. OSError where it will not be."""
        ...

    def end(self) -> None:
        """Wait until all is carried out. OSError: the first that failed; nothing was tried after it."""
        ...

    def forget(self) -> None:
        """The piece of work is over, however it went."""
        ...


class Process(Protocol):
    """Does work in the order in which it was given. Work tells its own failures: it raises nothing."""

    @property
    def carrier(self) -> Carrier | None:
        """Who carries out what the work writes, where it is not the work itself."""
        ...

    def submit(self, work: Work) -> None:
        """Do it, now or soon."""
        ...

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all is done; False where that took longer than it may."""
        ...

    def close(self) -> None:
        """Let go of whatever it holds. Work that is given later is done all the same."""
        ...
