"""Which values differ between two configs, and what set the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig

from trainer_cli.config import check
from trainer_cli.config.origins import Origin, Origins
from trainer_cli.config.overrides import KeyPath


class Absent(Enum):
    """Stands for a value that one of two configs does not have."""

    ABSENT = "(not set)"

    def __str__(self) -> str:
        return str(self.value)


ABSENT = Absent.ABSENT


class Change(NamedTuple):
    """A key whose value differs between two configs; `ABSENT` where one has none."""

    path: KeyPath
    old: Any
    new: Any

    @property
    def key(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def values(self) -> str:
        """`old -> new`."""
        return f"{shown(self.old)} -> {shown(self.new)}"

    def __str__(self) -> str:
        return f"{self.key}: {self.values}"

    def origin(self, origins: Origins) -> Origin | None:
        """What set the new value, or took the old one away; None where that cannot be said."""
        return origins.gone(self.path) if self.new is ABSENT else origins.exact(self.path)


def diff(old: DictConfig, new: DictConfig) -> list[Change]:
    """Which unresolved values differ, in each section the vanished ones last. Defaults do not show."""
    before, after = (check.contents(check.completed(config)) for config in (old, new))
    return list(_changes(before, after, ()))


def _changes(old: dict[Any, Any], new: dict[Any, Any], path: KeyPath) -> Iterator[Change]:
    for key in [*new, *(key for key in old if key not in new)]:
        here = (*path, str(key))
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(before, after, here)
        elif before != after or isinstance(before, bool) is not isinstance(after, bool):
            yield Change(here, before, after)


def shown(value: Any) -> str:
    """A value in YAML's one-line style."""
    if isinstance(value, Absent):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
