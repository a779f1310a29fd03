"""A choice on the command line that comes to nothing, since an experiment writes over what it stands for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from trainer_cli.config import locate
from trainer_cli.config.origins import Origins
from trainer_cli.config.overrides import KeyPath, line_of
from trainer_cli.config.reading import Reading
from trainer_cli.config.walk import whole_values
from trainer_cli.errors import ConfigError

_MAKES_IT = (("_target_",), ("dtype",))
"""Keys that make an option what it is: with another of these it is another option's, whatever else stays."""


def overruled(
    choices: Sequence[Override],
    dirs: Sequence[Path],
    read: Callable[[Path], Reading],
    values: Mapping[str, Any],
    given: Collection[KeyPath],
    origins: Origins,
) -> Iterator[ConfigError]:
    """A mistake for each of the command line's `choices` that the composed `values` do not show.

    `given` are the keys that the command line sets. What goes to the tree's root, as experiments do, is not looked at.
    """
    for override in choices:
        group, option = override.key_or_group, None if override.is_delete() else override.value()
        file = locate.find(dirs, f"{group}/{option}") if isinstance(option, str) else None
        section = tuple(group.split("/"))
        if file is None or read(file).package is not None:
            continue
        own = {key: value for key, value in (read(file).values or {}).items() if key != "defaults"}
        means = {(*section, *path): value for path, value in whole_values(own)}
        lost = [path for path, value in means.items() if path not in given and _at(values, path) != value]
        made = [path for path in lost if path[len(section) :] in _MAKES_IT]
        if made or (lost and len(lost) == len(means)):
            key = (made or lost)[0]
            place = origins.exact(key).place
            yield ConfigError(
                f"{line_of(override).removeprefix('+')} has no effect: {place} sets {'.'.join(key)} to "
                f"{_at(values, key)}",
                where="command line",
                cure=f"Say it by its values ({'.'.join(key)}=…), or choose the option in the experiment "
                f"('- override /{group}: {option}') in place of writing it out.",
            )


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
