"""Errors which say that another rank has failed, has ended or hangs, and what this one was at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_BACKENDS = ("gloo/", "NCCL", "nccl")
"""One of these is in every error of torch's that says that another rank has ended, or does not answer."""


class PeerError(Exception):
    """Another rank failed, and says why; this one only ends, with the same exit code if that is known."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostRankError(PeerError):
    """A rank has ended without a word, is stopped, or hangs; the message names it."""


def is_of_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has failed or ended."""
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)
    )


@contextmanager
def noting(doing: str) -> Iterator[None]:
    """Add a note to an error which says that another rank has ended or hangs: `while` and what this one was at."""
    try:
        yield
    except RuntimeError as error:
        if is_of_peer(error):
            error.add_note(doing)
        raise


def waited(error: BaseException, otherwise: str) -> str:
    """What this rank was at when it waited for one that did not come, by the notes of the error."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith("while ")), otherwise)
