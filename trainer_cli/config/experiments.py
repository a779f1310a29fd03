"""What an experiment overrides: a component that it writes out, and a choice on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from trainer_cli.config.fields import KeyPath, whole_values
from trainer_cli.config.hydra_compat import Merged
from trainer_cli.config.overrides import line_of, refused
from trainer_cli.config.provenance import Provenance
from trainer_cli.config.search_path import find
from trainer_cli.config.yaml_reader import Reading
from trainer_cli.errors import Code, ConfigError

_MAKES_IT = (("_target_",), ("dtype",))
"""Keys that identify an option: with another value of these it is another option."""


def is_whole(section: str, node: Mapping[str, Any]) -> bool:
    """Whether a node is a whole component: it has a target, or names several schedulers that have one."""
    named = [part for part in node.values() if isinstance(part, Mapping) and "_target_" in part]
    several = section == "scheduler" and bool(named) and all(part is None or part in named for part in node.values())
    return "_target_" in node or several


def chosen_groups(document: Mapping[str, Any]) -> list[str]:
    """The groups of which an experiment's defaults list chooses an option for their own section."""
    defaults = document.get("defaults")
    entries = [entry for entry in defaults if isinstance(entry, Mapping)] if isinstance(defaults, list) else []
    names = [str(key).split()[-1].lstrip("/") for entry in entries for key in entry]
    return [name for name in names if "@" not in name]


def overruled(
    choices: Sequence[Override],
    listed: Sequence[Merged],
    dirs: Sequence[Path],
    read: Callable[[Path], Reading],
    values: Mapping[str, Any],
    provenance: Provenance,
) -> Iterator[ConfigError]:
    """A mistake for each of the command line's `choices` that the composed `values` do not show.

    `listed` has the package of each option. Options merged into the tree's root are left out.
    """
    given = {one.path for one in provenance.given}
    for override in choices:
        group, option = override.key_or_group, None if override.is_delete() else override.value()
        file = find(dirs, f"{group}/{option}") if isinstance(option, str) else None
        if file is None:
            continue
        section = _section(override, listed)
        own = {key: value for key, value in (read(file).values or {}).items() if key != "defaults"}
        means = {(*section, *path): value for path, value in whole_values(own)}
        lost = [path for path, value in means.items() if path not in given and _at(values, path) != value]
        made = [path for path in lost if path[len(section) :] in _MAKES_IT]
        if section and (made or (lost and len(lost) == len(means))):
            key = (made or lost)[0]
            place = provenance.exact(key).place
            line = line_of(override).removeprefix("+")
            yield refused(
                f"{line} has no effect: {place} sets {'.'.join(key)} to {_at(values, key)}",
                f"Set its values ({'.'.join(key)}=…), or choose the option in the experiment "
                f"('- override /{line.replace('=', ': ')}') instead of its values.",
                Code.no_effect,
            )


def _section(choice: Override, listed: Sequence[Merged]) -> KeyPath:
    """The keys below which the option of a choice was merged; none for the tree's root."""
    name = f"{choice.key_or_group}/{str(choice.value()).removesuffix('.yaml')}"
    packages = [entry.package for entry in listed if entry.name == name]
    package = choice.package if choice.package in packages else next(iter(packages), "")
    return tuple(package.split(".")) if package else ()


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
