"""Errors of which another rank is the cause: it has failed, has ended, or does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DIRECT = "trainer_cli/direct: "
"""Begins the errors of `direct.py` about a rank that has ended, or does not answer."""
_BACKENDS = ("gloo/", "caused pair closure", "NCCL", "nccl", DIRECT)
"""Every error of torch about a rank that has ended, or does not answer, contains one of these."""


class PeerError(Exception):
    """Another rank failed; this one ends, with the same exit code if that is known."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostRankError(PeerError):
    """A rank has ended without an error, is stopped, or hangs; the message names it."""


def is_of_peer(error: BaseException) -> bool:
    """Whether the cause of an error is another rank, which has failed or ended."""
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)
    )


@contextmanager
def noting(activity: str) -> Iterator[None]:
    """Add a note (`while …`, what this rank was doing) to an error of a lost rank."""
    try:
        yield
    except RuntimeError as error:
        if is_of_peer(error):
            error.add_note(activity)
        raise


def noted_activity(error: BaseException, default: str) -> str:
    """What this rank was doing when it waited for a lost rank: the first note of `noting`, which is the innermost."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith("while ")), default)
