"""The nearest valid name to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None where nothing is like it. Case and `-` for `_` do not count."""
    plain: dict[str, str] = {}
    for choice in choices:
        plain.setdefault(_plain(choice), choice)
    matches = get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, or nothing."""
    match = nearest(word, choices)
    return f" Did you mean '{match}'?" if match is not None else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
