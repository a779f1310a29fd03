"""Whether a run is started again after a failure: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_cli.errors import describe_exit
from trainer_cli.terminal import format_count

_LONGEST_S = 600.0
_OUTCOMES = {
    0: "the run is finished",
    2: "the config or the command is wrong",
    3: "no checkpoint is valid",
    4: "the run directory is in use, or another run's",
    75: "a stop was requested, or the disk is full",
    130: "a stop was requested",
}
"""Exit code -> why a restart cannot help."""
_REPEATABLE = ("AssertionError",)
"""Exceptions that a restart would raise again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `exit_code` is negative for a signal; `reason` comes from summary.json."""

    exit_code: int
    reason: str
    progressed: bool
    """Whether the newest checkpoint is of a later step than before the attempt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to restart: after `pause_s` seconds, or not at all if None. `failures` counts those in a row without
    progress."""

    pause_s: float | None
    why: str
    failures: int


def decide_restart(ended: Ended, *, failures: int, most: int, backoff_s: float) -> Verdict:
    """Restart after a failure that may be temporary, while there are at most `most` in a row without progress.

    The pause is `backoff_s` after the first failure, and doubles with each without progress, up to ten minutes.
    """
    # Before the count: such an end is no failure.
    if (why := _OUTCOMES.get(ended.exit_code)) is not None:
        return Verdict(None, why, failures)
    if exception := next((name for name in _REPEATABLE if ended.reason.startswith(name)), None):
        return Verdict(None, f"a restart does not fix an {exception}", failures)
    # Progress resets the count: a run that fails once a day may be restarted for ever.
    failures = 1 if ended.progressed else failures + 1
    if failures > most:
        return Verdict(None, f"{format_count(failures, 'failure')} in a row without progress", failures)
    pause_s = min(_LONGEST_S, backoff_s * 2 ** (failures - 1))
    return Verdict(
        pause_s, f"{describe_exit(ended.exit_code)}; failure {failures} of at most {most} without progress", failures
    )
