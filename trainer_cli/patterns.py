"""Match names against globs and regular expressions, and suggest the nearest valid name to a misspelt one.

A glob may have alternatives: `a{b,c}d` matches `abd` and `acd`. `re:a(b|c)d` does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from trainer_cli.errors import ConfigError


def find_nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that other trainers call by this word, or the most similar one; None if there is neither.

    Case is ignored, and `-` equals `_`.
    """
    names = _normalise_all(choices)
    if (match := _find_translation(word, names)) is not None:
        return match
    similar = get_close_matches(_normalise(word), names, n=1, cutoff=0.6)
    return names[similar[0]] if similar else None


def find_name(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is called so here or in another trainer, but no similar one; None without such a choice."""
    names = _normalise_all(choices)
    return names.get(_normalise(word)) or _find_translation(word, names)


def _normalise_all(choices: Iterable[str]) -> dict[str, str]:
    """Normalised name -> choice; of two choices that differ in case alone, the first."""
    names: dict[str, str] = {}
    for choice in choices:
        names.setdefault(_normalise(choice), choice)
    return names


def _normalise(word: str) -> str:
    """See `elsewhere.normalise`."""
    # Imported here: only a mistake needs the names of other trainers.
    from trainer_cli.elsewhere import normalise

    return normalise(word)


def _find_translation(word: str, names: Mapping[str, str]) -> str | None:
    """The choice, among normalised `names`, that other trainers call by this word; None if there is none."""
    from trainer_cli.elsewhere import NAMES_HERE

    section, dot, name = _normalise(word).rpartition(".")
    translations = (f"{section}{dot}{translation}" for translation in NAMES_HERE.get(name, ()))
    return next((names[translation] for translation in translations if translation in names), None)


def check_name(noun: str, name: str, names: Iterable[str], where: str | None = None) -> None:
    """Refuse a name that no `noun` has, with the nearest one, or all. `where` is the key that names it."""
    names = list(names)
    if name not in names:
        hint = did_you_mean(name, names).strip() or f"Available: {', '.join(names) or 'none'}."
        raise ConfigError(f"there is no {noun} '{name}'", location=where, hint=hint)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, or an empty text if no choice is near."""
    return _question(word, find_nearest(word, choices))


def find_key(word: str, keys: Iterable[str]) -> str | None:
    """The key that ends in the word, or in its translation: `optimizer.lr` for `lr`; None if no key does."""
    keys = list(keys)
    names = {key.rpartition(".")[2]: key for key in keys} | {key.replace(".", "_"): key for key in keys}
    match = find_name(word, names)
    return None if match is None else names[match]


def _question(word: str, match: str | None) -> str:
    """The question whether `match` is meant by a word; empty for None."""
    if match is None:
        return ""
    epochs = " Epochs are written as 5ep." if "epoch" in word and match.endswith("max_duration") else ""
    return f" Did you mean '{match}'?{epochs}"


def expand_braces(pattern: str) -> Iterator[str]:
    """The patterns without braces that a pattern expands to, in the order written."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    # The innermost braces are expanded first; the recursion expands those around them.
    for alternative in match[1].split(","):
        yield from expand_braces(pattern[: match.start()] + alternative + pattern[match.end() :])


REGEX = "re:"
"""Prefix of a regular expression, where a glob is allowed too."""


def check_pattern(pattern: str, where: str) -> None:
    """Raise ConfigError for a regular expression that does not compile; every glob is a pattern."""
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            message = f"{where}: {pattern!r} is not a regular expression: {error}"
            raise ConfigError(message, location=where) from None


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a glob, or a regular expression after `re:`; case matters."""
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return any(fnmatchcase(name, alternative) for alternative in expand_braces(pattern))


def no_match_error(pattern: str, names: Sequence[str], where: str, target: str = "parameter") -> ConfigError:
    """The error for a pattern that matches none of these names, with the nearest name or module."""
    modules = {name.rsplit(".", depth)[0] + ".*" for name in names for depth in range(1, name.count(".") + 1)}
    examples = f"Its parameters are named like {', '.join(names[:4])}."
    return ConfigError(
        f"{where}: '{pattern}' matches no {target} of the model",
        location=where,
        hint=" ".join(filter(None, (did_you_mean(pattern, [*sorted(modules), *names]).strip(), examples))),
    )
