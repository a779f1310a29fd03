"""What may change between two starts of one run, and why. All else would make it another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from trainer_cli.config.globs import matches

MAY_CHANGE: Mapping[str, str] = {
    "name": "a name, no part of the training",
    "run_dir": "where the run lies",
    "device": "where it trains",
    "resume": "says how to start",
    "resume_allow": "says how to start",
    "ckpt": "counts only while the run has no checkpoint",
    "load.*": "counts only while the run has no checkpoint",
    "trust": "whose code may be built",
    "validate.*": "is of `train validate`",
    "loop.max_duration": "where the run ends",
    "loop.hard_stop": "where the run ends",
    "loop.max_time": "when this process stops",
    "loop.eval_*": "evaluation does not touch the training",
    "loop.log_interval": "what is recorded",
    "logging.*": "what is said",
    "loggers": "what is recorded",
    "loggers.*": "what is recorded",
    "checkpoint.*": "what is saved and kept, when and where",
    "data.num_workers": "samples do not depend on who loads them",
    "data.persistent_workers": "samples do not depend on who loads them",
    "data.worker_timeout": "samples do not depend on who loads them",
}
"""Glob of config keys -> why they may change."""


def why_may_change(key: str, allowed: Iterable[str] = ()) -> str | None:
    """Why a key may change on a resume, or None. `allowed` are further globs; a section stands for all below it."""
    for pattern, reason in MAY_CHANGE.items():
        if fnmatchcase(key, pattern):
            return reason
    for pattern in allowed:
        if key == pattern or key.startswith(f"{pattern}.") or matches(key, pattern):
            return "resume_allow"
    return None
