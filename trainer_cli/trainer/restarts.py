"""Whether a run that ended is started again, and after which pause; pure."""

from __future__ import annotations

from dataclasses import dataclass

_LONGEST_S = 600.0
_OUTCOMES = {
    0: "the run is finished",
    2: "the config or the command is wrong",
    3: "no checkpoint is valid",
    4: "the run directory is in use, or another run's",
    75: "a stop was requested",
    130: "a stop was requested",
}
"""Exit code -> why a restart cannot help."""
_HOPELESS = ("AssertionError",)
"""Exceptions that come again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `exit_code` is negative for a signal; `reason` is that of summary.json."""

    exit_code: int
    reason: str
    progressed: bool
    """Whether the newest checkpoint is of a later step than before the attempt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do: `pause_s` null means to end, `why` says why. `failures` are those in a row without progress."""

    pause_s: float | None
    why: str
    failures: int


def verdict(ended: Ended, *, failures: int, most: int, backoff_s: float) -> Verdict:
    """Restart after a failure that a restart may mend, while there are at most `most` in a row without progress.

    The pause is `backoff_s` after the first failure, and doubles with each without progress, up to ten minutes.
    """
    if (why := _OUTCOMES.get(ended.exit_code)) is not None:
        return Verdict(None, why, failures)
    if hopeless := next((name for name in _HOPELESS if ended.reason.startswith(name)), None):
        return Verdict(None, f"a restart does not mend an {hopeless}", failures)
    failures = 1 if ended.progressed else failures + 1
    if failures > most:
        return Verdict(None, f"{failures} failures in a row without progress", failures)
    what = f"signal {-ended.exit_code}" if ended.exit_code < 0 else f"exit code {ended.exit_code}"
    pause_s = min(_LONGEST_S, backoff_s * 2 ** (failures - 1))
    return Verdict(pause_s, f"{what}; failure {failures} of at most {most} without progress", failures)
