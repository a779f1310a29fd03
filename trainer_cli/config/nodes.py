"""An experiment that writes out a component by its `_target_` means that one, not a mixture with the default choice.

config.yaml chooses a model, so that it runs by itself. Were an experiment's `model: {_target_: mine.Net}` only
merged over it, the other model's arguments would stay. So, where the experiment did not choose an option of that
group itself (`override /model: cnn`), what the default choice brought is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_cli.config.overrides import KeyPath

COMPONENTS = ("model", "data", "optimizer", "scheduler")


def own_nodes(
    values: dict[str, Any], documents: Sequence[Mapping[str, Any]], given: Iterable[KeyPath], chosen: Iterable[str]
) -> dict[str, Any]:
    """The composed values without the leavings of default choices.

    `documents` are the contents of the experiments, in the order of merging; `given` the keys, and `chosen` the
    groups, that the command line names.
    """
    choices = {*chosen, *(group for document in documents for group in _overridden(document))}
    result = dict(values)
    for section in COMPONENTS:
        nodes = [node for document in documents if isinstance(node := document.get(section), Mapping)]
        whole = next((index for index, node in enumerate(nodes) if _is_whole(section, node)), None)
        if whole is None or section in choices or not isinstance(result.get(section), Mapping):
            continue
        meant = {key for node in nodes[whole:] for key in node}
        meant |= {path[1] for path in given if path[:1] == (section,) and len(path) > 1}
        result[section] = {key: value for key, value in result[section].items() if key in meant}
    return result


def _is_whole(section: str, node: Mapping[str, Any]) -> bool:
    """Whether a node says all of a component: it has a target, or names several schedulers that have."""
    named = [part for part in node.values() if isinstance(part, Mapping) and "_target_" in part]
    several = section == "scheduler" and bool(named) and all(part is None or part in named for part in node.values())
    return "_target_" in node or several


def _overridden(document: Mapping[str, Any]) -> list[str]:
    """The groups of which an experiment's defaults list chooses an option."""
    defaults = document.get("defaults")
    entries = [entry for entry in defaults if isinstance(entry, Mapping)] if isinstance(defaults, list) else []
    names = [str(key).split()[-1].partition("@")[0].lstrip("/") for entry in entries for key in entry]
    return names
