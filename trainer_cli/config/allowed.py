"""What `resume_allow` names that no config can have: a misspelt key would allow nothing, and say nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from trainer_cli.config import check
from trainer_cli.config.describe import fields
from trainer_cli.config.globs import alternatives
from trainer_cli.config.origins import Origins
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError


def mistakes(allowed: Iterable[str], origins: Origins) -> Iterator[ConfigError]:
    """The keys and globs that fit no key of the schema. What is below an open section cannot be told."""
    for pattern in allowed:
        if not any(map(_may_fit, alternatives(pattern))):
            known = [one.key for one in fields()]
            cure = did_you_mean(pattern, known).strip() or "It takes keys, sections and globs of them."
            what = f"resume_allow names {pattern!r}, and there is no such key"
            yield ConfigError(what, where=origins.of(("resume_allow",)), cure=cure)


def _may_fit(pattern: str) -> bool:
    glob = re.search(r"[*?\[]", pattern)
    if glob is None:
        parts = tuple(pattern.split("."))
        return all(parts) and check.unknown_key(parts, check.typed()) is None
    # A star stands for dots too, so that one above an open section's dot may mean anything below it.
    return any(
        fnmatchcase(one.key, pattern) or (one.key in check.OPEN and _meet(f"{one.key}.", pattern[: glob.start()]))
        for one in fields()
    )


def _meet(above: str, start: str) -> bool:
    return above.startswith(start) or start.startswith(above)
