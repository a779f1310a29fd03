"""What there is to choose from, and what can be set: read from files and the schema alone, so that it is quick.

Listing, completing and guessing what was meant all ask here; neither Hydra nor torch is imported.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from trainer_cli.config import search_path
from trainer_cli.config.fields import whole_values

if TYPE_CHECKING:
    from trainer_cli.config.fields import Described

EXPERIMENT = "experiment"


@dataclass(frozen=True, slots=True)
class Choices:
    """The folders of configs in use, in the order in which they are searched."""

    dirs: list[Path]
    shipped: Path | None = None
    """That of `dirs` which is not the user's."""

    @classmethod
    def of(cls, config_dir: Path | None = None, cwd: Path | None = None) -> Choices:
        """What stands in `--config-dir`, `./configs` and the shipped folder.

        Raises:
            ConfigError: `config_dir` is no folder.
        """
        shipped = search_path.shipped_configs(search_path.PACKAGE)
        dirs = search_path.config_dirs(config_dir, cwd or Path.cwd(), search_path.PACKAGE)
        return cls(dirs, None if shipped is None else shipped.resolve())

    @property
    def groups(self) -> list[str]:
        """Names of all groups, `experiment` first."""
        return search_path.groups(self.dirs)

    def options(self, group: str) -> dict[str, Path]:
        """Option -> file of a group: the user's own first, each part sorted."""
        found = search_path.options(self.dirs, group)
        return dict(sorted(found.items(), key=lambda item: (not self.is_own(item[1]), item[0])))

    def is_own(self, file: Path) -> bool:
        """Whether a config file is the user's, and not one of those that ship."""
        return self.shipped is None or self.shipped not in file.parents

    def groups_with(self, option: str) -> list[str]:
        """The groups that have an option of this name."""
        return [group for group in self.groups if option in search_path.options(self.dirs, group)]

    def settings(self, primary: str, words: Iterable[str]) -> dict[str, Any]:
        """Dotted key -> value in every component that the words choose: their own keys, the experiment's on top.

        This is a guess for completion, made without composing: interpolations and nested defaults are left out.
        """
        chosen = {key.lstrip("+"): value for word in words for key, _, value in [word.partition("=")]}
        experiment = self._read(f"{EXPERIMENT}/{chosen[EXPERIMENT]}") if EXPERIMENT in chosen else {}
        options = {**_defaults(self._read(primary)), **_defaults(experiment), **chosen}
        chosen_groups = [group for group in self.groups if group != EXPERIMENT and group in options]
        components = {group: self._read(f"{group}/{options[group]}") for group in chosen_groups}
        trees = (components, experiment)
        return {".".join(path): value for tree in trees for path, value in whole_values(tree)}

    def _read(self, name: str) -> dict[Any, Any]:
        import yaml

        file = search_path.find(self.dirs, name)
        try:
            content = yaml.safe_load(file.read_text("utf-8")) if file is not None else None
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}  # Composing reports the mistake; here the file offers nothing.
        return content if isinstance(content, dict) else {}


def keys() -> dict[str, Described]:
    """Every dotted key of the schema that is no section."""
    from trainer_cli.config.fields import fields

    return {one.key: one for one in fields() if not one.is_section}


def sections() -> list[str]:
    """The closed sections of the schema."""
    from trainer_cli.config.fields import fields

    return [one.key for one in fields() if one.is_section]


def values_of(kind: Any) -> Iterator[str]:
    """The values of a type that are known beforehand, if it has such."""
    if get_origin(kind) in (Union, types.UnionType):
        for part in get_args(kind):
            yield from ("null",) if part is type(None) else values_of(part)
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from (member.name for member in kind)


def _defaults(content: Mapping[Any, Any]) -> dict[str, str]:
    """Group -> option, as a file's defaults list chooses them."""
    entries = content.get("defaults")
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, Sequence) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            found[str(key).split()[-1].partition("@")[0].lstrip("/")] = str(value)
    return found
