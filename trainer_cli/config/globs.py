"""Globs with alternatives, and regular expressions: `a{b,c}d` matches `abd` and `acd`, as `re:a(b|c)d` does."""

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


REGEX = "re:"
"""What a regular expression begins with, where a glob could stand."""


def why_no_pattern(pattern: str) -> str | None:
    """What is wrong with a regular expression; None for one that compiles, and for a glob."""
    if not pattern.startswith(REGEX):
        return None
    try:
        re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        return f"{pattern!r} is no regular expression: {error}"
    return None


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a glob, or a regular expression after `re:`; case counts."""
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return any(fnmatchcase(name, alternative) for alternative in alternatives(pattern))
