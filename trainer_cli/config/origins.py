"""Where each value of a composed config was said: file and line, the command line, or nowhere (a default)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.types import Override

from trainer_cli.config.overrides import COMMAND_LINE, KeyPath, line_of, path_of
from trainer_cli.config.walk import whole_values

DEFAULT = "default"
MERGE = "tag:yaml.org,2002:merge"


class Source(NamedTuple):
    """A YAML document, the section it was put into, and which keys of it count: all below `only`, none below `but`."""

    label: str
    node: yaml.Node | None
    package: KeyPath = ()
    only: KeyPath = ()
    but: tuple[str, ...] = ()


class Given(NamedTuple):
    """What an override sets. A mapping is merged; `added` says that the value went to the end of a list."""

    path: KeyPath
    line: str
    value: Any = None
    added: bool = False

    @classmethod
    def of(cls, override: Override) -> Given:
        return cls(path_of(override), line_of(override), None if override.is_delete() else override.value())


class Origin(NamedTuple):
    """A place, and in more words what was said there."""

    place: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.words}" if self.words else self.place


class Choice(NamedTuple):
    """An option of a group: who chose it, and the label of its file (empty for none)."""

    origin: Origin
    label: str = ""


class _Setting(NamedTuple):
    origin: Origin
    is_mapping: bool
    text: str = ""
    """A single value without quotes as it stands in its file, or all that an override sets."""


@dataclass(slots=True)
class Origins:
    """What a config was made of, in the order in which later ones win. Read only when somebody asks."""

    sources: list[Source]
    given: list[Given] = field(default_factory=list)
    choices: Mapping[KeyPath, Choice] = field(default_factory=dict)
    """Section -> the option of its group that was chosen; what goes to the root of the tree under its group."""
    _settings: dict[KeyPath, _Setting] | None = None

    def of(self, key: KeyPath) -> str:
        """`file:line`, `command line` or `default`: of the key, of one below it, or of the nearest above.

        A component that only its group's file speaks of stands where its target does, else where its option was chosen.
        """
        if any(_below(given.path, key) for given in self.given):
            return COMMAND_LINE
        settings = self._read()
        for length in range(len(key), 0, -1):
            if found := settings.get(key[:length]):
                return found.origin.place
        if found := settings.get((*key, "_target_")):
            return found.origin.place
        above = (self.choices.get(key[:length]) for length in range(len(key), 0, -1))
        return next((choice.origin.place for choice in above if choice is not None), DEFAULT)

    def exact(self, key: KeyPath) -> Origin:
        """What set this very value: itself, or a value above it that is no mapping; else who chose its group."""
        settings = self._read()
        for length in range(len(key), 0, -1):
            found = settings.get(key[:length])
            if found and (length == len(key) or not found.is_mapping):
                return found.origin
        choice = self.choices.get(key)
        return choice.origin if choice is not None else Origin(DEFAULT)

    def written(self, key: KeyPath, number: float) -> str:
        """A number as it stands where it was said: `1_0` for 10. Written plainly where that cannot be told."""
        settings, plain = self._read(), str(number).lower()
        said = next((settings[key[:length]] for length in range(len(key), 0, -1) if key[:length] in settings), None)
        if said is None or not said.text:
            return plain
        if said.origin.place != COMMAND_LINE:
            return said.text
        found = [word for word in re.findall(r"[-+.\w]+", said.text) if _reads_as(word, number)]
        return plain if plain in found else next(iter(found), plain)

    def gone(self, key: KeyPath) -> Origin | None:
        """What took a value away: `~key`, or the choice of another option above it."""
        if any(given.path == key for given in self.given):
            return self.exact(key)
        above = (self.choices.get(key[:length]) for length in range(len(key), 0, -1))
        return next((choice.origin for choice in above if choice is not None), None)

    def chosen(self, section: KeyPath, values: Mapping[Any, Any]) -> Origin | None:
        """Who chose the option that a section's values come from; None where none of them does."""
        choice = self.choices.get(section)
        if choice is None or not choice.label:
            return None
        places = (self.exact((*section, *path)).place for path, _ in whole_values(values))
        return choice.origin if any(place.startswith(f"{choice.label}:") for place in places) else None

    def _read(self) -> dict[KeyPath, _Setting]:
        if self._settings is None:
            self._settings = {}
            for source in self.sources:
                for path, value, line in _walk_source(source):
                    text = value.value if isinstance(value, yaml.ScalarNode) and value.style in (None, "") else ""
                    origin = Origin(f"{source.label}:{line}")
                    self._set(path, _Setting(origin, isinstance(value, yaml.MappingNode), text))
            for given in self.given:
                self._give(given.path, given.value, given)
        return self._settings

    def _give(self, path: KeyPath, value: Any, given: Given) -> None:
        is_mapping = isinstance(value, Mapping)
        origin = Origin(COMMAND_LINE, given.line)
        assert self._settings is not None
        before = self._settings.get(path)
        if given.added and before is not None:
            origin = Origin(COMMAND_LINE, f"{given.line}, after {before.origin}")
        self._set(path, _Setting(origin, is_mapping, given.line.partition("=")[2]))
        if is_mapping:
            for key, item in value.items():
                self._give((*path, str(key)), item, given)

    def _set(self, path: KeyPath, setting: _Setting) -> None:
        """A mapping is merged with what is there; anything else takes its place."""
        assert self._settings is not None
        if not setting.is_mapping:
            for below in [other for other in self._settings if len(other) > len(path) and _below(other, path)]:
                del self._settings[below]
        self._settings[path] = setting


def label(path: Path, cwd: Path) -> str:
    """The path as a person in `cwd` would write it."""
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _reads_as(word: str, number: float) -> bool:
    """Whether Hydra's grammar reads a word as this number, or as this of true and false."""
    if isinstance(number, bool):
        return word.lower() == str(number).lower()
    try:
        return float(word) == number
    except ValueError:
        return False


def _below(path: KeyPath, root: KeyPath) -> bool:
    return path[: len(root)] == root


def _walk_source(source: Source) -> Iterator[tuple[KeyPath, yaml.Node, int]]:
    """Path, value and line of each key that counts."""
    for path, value, line in _walk(source.node, source.package):
        if _below(path, source.only) and path[0] not in source.but and path != ("defaults",):
            yield path, value, line


def _walk(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node, int]]:
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        pairs = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        for key, value in pairs:
            if key.tag == MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _walk(merged, path)
        children = [(key.value, key, value) for key, value in pairs if key.tag != MERGE]
    else:
        return
    for name, at, value in children:
        below = (*path, name)
        yield below, value, at.start_mark.line + 1
        yield from _walk(value, below)
