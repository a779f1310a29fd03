"""The state of an attempt: while it trains, and how it ended."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    """State of an attempt."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    """Ended early with a checkpoint: a signal, `loop.max_time`, or a full disk."""
    failed = "failed"
    interrupted = "interrupted"
    killed = "killed"
    """Still `running` when the next attempt began: its process ended without a summary."""

    @classmethod
    def after(cls, error: BaseException) -> RunStatus:
        """How an error ends a run. Python raises KeyboardInterrupt at the second Ctrl-C."""
        return cls.interrupted if isinstance(error, KeyboardInterrupt) else cls.failed
