"""What an experiment overrides: the default choice of a component, and a choice on the command line.

config.yaml chooses a model, so that it runs by itself. If an experiment's `model: {_target_: mine.Net}` were only
merged over it, the other model's arguments would stay. So, where the experiment did not choose an option of that
group itself (`override /model: cnn`), what the default choice set is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from trainer_cli.config.fields import KeyPath, whole_values
from trainer_cli.config.overrides import line_of, refused
from trainer_cli.config.provenance import Provenance
from trainer_cli.config.search_path import find
from trainer_cli.config.yaml_reader import Reading
from trainer_cli.errors import Code, ConfigError

COMPONENTS = ("model", "data", "optimizer", "scheduler", "step", "sparsity")
_MAKES_IT = (("_target_",), ("dtype",))
"""Keys that identify an option: with another value of these it is another option."""


def own_nodes(
    values: dict[str, Any], documents: Sequence[Mapping[str, Any]], given: Iterable[KeyPath], chosen: Iterable[str]
) -> dict[str, Any]:
    """The composed values without what is left of default choices.

    `documents` are the contents of the experiments, in the order of merging; `given` the keys, and `chosen` the
    groups, that the command line names.
    """
    choices = {*chosen, *(group for document in documents for group in _overridden(document))}
    result = dict(values)
    for section in COMPONENTS:
        nodes = [node for document in documents if isinstance(node := document.get(section), Mapping)]
        whole = next((index for index, node in enumerate(nodes) if is_whole(section, node)), None)
        if whole is None or section in choices or not isinstance(result.get(section), Mapping):
            continue
        kept = {key for node in nodes[whole:] for key in node}
        kept |= {path[1] for path in given if path[:1] == (section,) and len(path) > 1}
        result[section] = {key: value for key, value in result[section].items() if key in kept}
    return result


def is_whole(section: str, node: Mapping[str, Any]) -> bool:
    """Whether a node is a whole component: it has a target, or names several schedulers that have one."""
    named = [part for part in node.values() if isinstance(part, Mapping) and "_target_" in part]
    several = section == "scheduler" and bool(named) and all(part is None or part in named for part in node.values())
    return "_target_" in node or several


def _overridden(document: Mapping[str, Any]) -> list[str]:
    """The groups of which an experiment's defaults list chooses an option."""
    defaults = document.get("defaults")
    entries = [entry for entry in defaults if isinstance(entry, Mapping)] if isinstance(defaults, list) else []
    names = [str(key).split()[-1].partition("@")[0].lstrip("/") for entry in entries for key in entry]
    return names


def overruled(
    choices: Sequence[Override],
    dirs: Sequence[Path],
    read: Callable[[Path], Reading],
    values: Mapping[str, Any],
    given: Collection[KeyPath],
    provenance: Provenance,
) -> Iterator[ConfigError]:
    """A mistake for each of the command line's `choices` that the composed `values` do not show.

    `given` are the keys that the command line sets. Options merged into the tree's root are left out.
    """
    for override in choices:
        group, option = override.key_or_group, None if override.is_delete() else override.value()
        file = find(dirs, f"{group}/{option}") if isinstance(option, str) else None
        section = tuple(group.split("/"))
        if file is None or read(file).package is not None:
            continue
        own = {key: value for key, value in (read(file).values or {}).items() if key != "defaults"}
        means = {(*section, *path): value for path, value in whole_values(own)}
        lost = [path for path, value in means.items() if path not in given and _at(values, path) != value]
        made = [path for path in lost if path[len(section) :] in _MAKES_IT]
        if made or (lost and len(lost) == len(means)):
            key = (made or lost)[0]
            place = provenance.exact(key).place
            line = line_of(override).removeprefix("+")
            yield refused(
                f"{line} has no effect: {place} sets {'.'.join(key)} to {_at(values, key)}",
                f"Set its values ({'.'.join(key)}=…), or choose the option in the experiment "
                f"('- override /{group}: {option}') instead of its values.",
                Code.no_effect,
            )


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
