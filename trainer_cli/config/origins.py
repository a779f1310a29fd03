"""Where each value of a composed config was said: file and line, the command line, or nowhere (a default)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trainer_cli.config.overrides import COMMAND_LINE, KeyPath

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Source:
    """A YAML text, the section it was put into, and which keys of it count (all below `only`)."""

    label: str
    text: str
    package: KeyPath = ()
    only: KeyPath = ()


@dataclass(slots=True)
class Origins:
    """The sources of a config, in the order in which later ones win. Read only when somebody asks."""

    sources: list[Source]
    given: list[KeyPath] = field(default_factory=list)
    _lines: dict[KeyPath, str] | None = None

    def of(self, key: KeyPath) -> str:
        """`file:line`, `command line` or `default`: of the key, of one below it, or of the nearest above."""
        if any(_below(key, given) or _below(given, key) for given in self.given):
            return COMMAND_LINE
        if self._lines is None:
            self._lines = {
                path: line for source in self.sources for path, line in _lines(source) if _below(path, source.only)
            }
        for length in range(len(key), 0, -1):
            if key[:length] in self._lines:
                return self._lines[key[:length]]
        return DEFAULT


def label(path: Path, cwd: Path) -> str:
    """The path as a person in `cwd` would write it."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _below(path: KeyPath, root: KeyPath) -> bool:
    return path[: len(root)] == root


def _lines(source: Source) -> Iterator[tuple[KeyPath, str]]:
    node = yaml.compose(source.text, Loader=yaml.SafeLoader)
    if node is not None:
        yield from _walk(node, source.package, source.label)


def _walk(node: yaml.Node, path: KeyPath, label: str) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            below = (*path, key.value)
            yield below, f"{label}:{key.start_mark.line + 1}"
            yield from _walk(value, below, label)
