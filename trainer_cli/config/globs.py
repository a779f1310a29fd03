"""Globs with alternatives: `a{b,c}d` matches `abd` and `acd`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase


def alternatives(pattern: str) -> Iterator[str]:
    """The patterns without braces that a pattern means, in the order written."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    for part in match[1].split(","):
        yield from alternatives(pattern[: match.start()] + part + pattern[match.end() :])


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a glob; case counts."""
    return any(fnmatchcase(name, alternative) for alternative in alternatives(pattern))
