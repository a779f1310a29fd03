"""States that `checkpoint.leave_out` keeps out of checkpoints, and what can be loaded from such a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_cli.errors import CheckpointError, ConfigError
from trainer_cli.loads.options import ONE_CALLBACK, STATES, LoadOptions
from trainer_cli.patterns import check_pattern, did_you_mean, expand_braces, matches

LEAVE_OUT = "checkpoint.leave_out"
_NEEDED = ("model", "progress")
OPTIONAL_STATES = tuple(state for state in STATES if state not in _NEEDED)
"""States that a checkpoint may lack; beside these `callbacks.NAME`."""


def check_leave_out(key: str, patterns: Sequence[str], callbacks: Iterable[str] | None = None) -> None:
    """Refuse patterns of states that every checkpoint needs, or that match no state.

    Args:
        callbacks: the names of the callbacks; None: not known yet.

    Raises:
        ConfigError: names the pattern, and the most similar state.
    """
    states = [*OPTIONAL_STATES, *(ONE_CALLBACK + name for name in callbacks or ())]
    for pattern in patterns:
        check_pattern(pattern, key)
        for name in expand_braces(pattern):
            if name in _NEEDED:
                raise ConfigError(
                    f"{key}: every checkpoint has {' and '.join(_NEEDED)}",
                    location=key,
                    hint="Set checkpoint.enabled=false to save nothing.",
                )
            # Before the callbacks are known, a pattern may match one of them.
            may_match = callbacks is None and name.startswith((ONE_CALLBACK, "re:"))
            if not may_match and not any(matches(state, name) for state in states):
                hint = did_you_mean(name, states).strip() or f"There are {', '.join(states)}."
                raise ConfigError(f"{key} names {name!r}, and there is no such state", location=key, hint=hint)


def find_left_out(patterns: Sequence[str], callbacks: Iterable[str]) -> tuple[str, ...]:
    """The states that these patterns match: those of `STATES`, and `callbacks.NAME`."""

    def matches_any(name: str) -> bool:
        return any(matches(name, pattern) for pattern in patterns)

    states = [state for state in OPTIONAL_STATES if matches_any(state)]
    # `callbacks` is all of them, so their names are not listed too.
    if "callbacks" in states:
        return tuple(states)
    names = [ONE_CALLBACK + name for name in callbacks]
    return (*states, *filter(matches_any, names))


def omit_states(state: Mapping[str, Any], patterns: Sequence[str]) -> Mapping[str, Any]:
    """A training's state without what these patterns leave out."""
    if not patterns:
        return state
    names = find_left_out(patterns, state.get("callbacks", ()))
    keys = {key for name in names for key in STATES.get(name, ())}
    # A new mapping, as the state still belongs to the caller.
    kept = {key: value for key, value in state.items() if key not in keys}
    if "callbacks" in kept:
        callbacks = kept["callbacks"].items()
        kept["callbacks"] = {name: value for name, value in callbacks if ONE_CALLBACK + name not in names}
    return kept


def describe_left_out(names: Sequence[str]) -> str:
    """One line about checkpoints that lack these states."""
    return (
        f"checkpoints lack {', '.join(names)} ({LEAVE_OUT}): the run cannot be resumed from them exactly, "
        f"and only with 'load.states=[{_list_remaining(names)}]'"
    )


def can_resume(lacking: Sequence[str], states: Sequence[str]) -> bool:
    """Whether `load.states` asks for a resume without what a checkpoint lacks."""
    return "progress" in states and not any(_is_left_out(state, lacking) for state in states)


def _is_left_out(state: str, lacking: Sequence[str]) -> bool:
    """Whether a checkpoint lacks a state of `load.states`: without `callbacks` it also lacks each `callbacks.NAME`."""
    return state in lacking or (state.startswith(ONE_CALLBACK) and "callbacks" in lacking)


def check_load(where: str, lacking: Sequence[str], options: LoadOptions) -> None:
    """Refuse to load states that a checkpoint lacks.

    Args:
        lacking: the names in its manifest.

    Raises:
        CheckpointError: `options` load one of them.
    """
    lost = [name for name in lacking if options.whole or any(_is_left_out(state, [name]) for state in options.states)]
    if lost:
        raise CheckpointError(
            f"the checkpoint was saved without {', '.join(lost)}, so it cannot be loaded whole",
            where=where,
            cure=f"To load the rest, and start these afresh, add 'load.states=[{_list_remaining(lacking)}]'.",
        )


def _list_remaining(lacking: Sequence[str]) -> str:
    """The states that a checkpoint has, as the value of `load.states`."""
    return ",".join(state for state in STATES if state not in lacking)
