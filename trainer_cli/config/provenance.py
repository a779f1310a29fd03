"""Find where each value of a composed config was set: file and line, the command line, or nowhere (a default)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.types import Override

from trainer_cli.config.fields import OPEN, KeyPath, whole_values
from trainer_cli.config.overrides import COMMAND_LINE, line_of, path_of
from trainer_cli.core.types import MISSING

DEFAULT = "default"
MERGE = "tag:yaml.org,2002:merge"


class Source(NamedTuple):
    """A YAML document and the section it was merged into. Only keys below `only`, and not below `but`, count."""

    label: str
    node: yaml.Node | None
    package: KeyPath = ()
    only: KeyPath = ()
    but: tuple[KeyPath, ...] = ()


class Assignment(NamedTuple):
    """A value that an override sets. A mapping is merged; with `added` the value was appended to a list."""

    path: KeyPath
    line: str
    value: Any = None
    added: bool = False

    @classmethod
    def of(cls, override: Override) -> Assignment:
        return cls(path_of(override), line_of(override), None if override.is_delete() else override.value())


class Origin(NamedTuple):
    """Where a value was set, and the words there."""

    source: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.words}" if self.words else self.source


class Choice(NamedTuple):
    """An option of a group: where it was chosen, and the label of its file (empty for none)."""

    origin: Origin
    label: str = ""


class _Setting(NamedTuple):
    origin: Origin
    is_mapping: bool
    text: str = ""
    """The value as it is written: a scalar without quotes in its file, or the text after `=` of an override."""


@dataclass(slots=True)
class Provenance:
    """The sources of a config in the order of merging. The YAML is walked on first use."""

    sources: list[Source]
    assignments: list[Assignment] = field(default_factory=list)
    choices: Mapping[KeyPath, Choice] = field(default_factory=dict)
    """Section -> the option of its group that was chosen; what is merged into the tree's root under its group."""
    _settings: dict[KeyPath, _Setting] | None = None
    _parents: set[KeyPath] = field(default_factory=set)
    """The paths of `_settings`, and others, that have settings below them."""

    def source(self, key: KeyPath) -> str:
        """`file:line`, `command line` or `default`: of the key, of one below it, or of the nearest above.

        A component that only its group's file sets has the line of its target, else that of the choice.
        """
        if any(_below(assignment.path, key) for assignment in self.assignments):
            return COMMAND_LINE
        settings = self._read()
        for length in range(len(key), 0, -1):
            if setting := settings.get(key[:length]):
                return setting.origin.source
        if setting := settings.get((*key, "_target_")):
            return setting.origin.source
        choice = self._chosen_above(key)
        return choice.origin.source if choice is not None else DEFAULT

    def within(self, key: KeyPath) -> str:
        """Like `source`, but for a key that no file names, such as a package, that of the first value below it."""
        settings = self._read()
        below = next((path for path in settings if _below(path, key)), key)
        return self.source(key if key in settings else below)

    def exact(self, key: KeyPath) -> Origin:
        """What set this very value: itself, or a value above it that is not a mapping; else the choice of its group."""
        settings = self._read()
        for length in range(len(key), 0, -1):
            setting = settings.get(key[:length])
            if setting and (length == len(key) or not setting.is_mapping):
                return setting.origin
        choice = self.choices.get(key)
        return choice.origin if choice is not None else Origin(DEFAULT)

    def collect_sources(self, values: Mapping[Any, Any]) -> dict[str, str]:
        """Dotted key -> source, for each value that is not a default."""
        sources = {".".join(path): self.exact(path).source for path, _ in whole_values(values)}
        return {key: source for key, source in sources.items() if source != DEFAULT}

    def written(self, key: KeyPath, number: float) -> str:
        """A number as it was written: `1_0` for 10. Its plain form if the text is unknown."""
        # YAML and Hydra keep the number and forget its text: it is looked up where the value was set.
        settings, plain = self._read(), str(number).lower()
        setting = next((settings[key[:length]] for length in range(len(key), 0, -1) if key[:length] in settings), None)
        if setting is None or not setting.text:
            return plain
        if setting.origin.source != COMMAND_LINE:
            return setting.text
        words = [word for word in re.findall(r"[-+.\w]+", setting.text) if _reads_as(word, number)]
        return plain if plain in words else next(iter(words), plain)

    def find_asked(self) -> list[KeyPath]:
        """The keys for which the last file that names them writes `???`: the value must be given."""
        return [path for path, setting in self._read().items() if setting.text == MISSING]

    def gone(self, key: KeyPath) -> Origin | None:
        """What removed a value: `~key`, or the choice of another option above it."""
        if any(assignment.path == key for assignment in self.assignments):
            return self.exact(key)
        choice = self._chosen_above(key)
        return choice.origin if choice is not None else None

    def chosen(self, section: KeyPath, values: Mapping[Any, Any]) -> Origin | None:
        """Where the option was chosen that a section's values come from; None if none of them does."""
        choice = self.choices.get(section)
        if choice is None or not choice.label:
            return None
        sources = (self.exact((*section, *path)).source for path, _ in whole_values(values))
        return choice.origin if any(source.startswith(f"{choice.label}:") for source in sources) else None

    def _chosen_above(self, key: KeyPath) -> Choice | None:
        above = (self.choices.get(key[:length]) for length in range(len(key), 0, -1))
        return next((choice for choice in above if choice is not None), None)

    def _read(self) -> dict[KeyPath, _Setting]:
        if self._settings is None:
            self._settings = {}
            for source in self.sources:
                for path, value, line in _walk_source(source):
                    is_text = isinstance(value, yaml.ScalarNode) and (not value.style or value.value == MISSING)
                    text = value.value if is_text else ""
                    origin = Origin(f"{source.label}:{line}")
                    self._set(path, _Setting(origin, isinstance(value, yaml.MappingNode), text))
            # After the files, since overrides replace their values.
            for assignment in self.assignments:
                self._give(assignment.path, assignment.value, assignment)
        return self._settings

    def _give(self, path: KeyPath, value: Any, assignment: Assignment) -> None:
        is_mapping = isinstance(value, Mapping)
        origin = Origin(COMMAND_LINE, assignment.line)
        before = self._read().get(path)
        if assignment.added and before is not None:
            origin = Origin(COMMAND_LINE, f"{assignment.line}, after {before.origin}")
        self._set(path, _Setting(origin, is_mapping, assignment.line.partition("=")[2]))
        if is_mapping:
            for key, item in value.items():
                self._give((*path, str(key)), item, assignment)

    def _set(self, path: KeyPath, setting: _Setting) -> None:
        """Record a setting. A mapping is merged with the existing one; any other value replaces all below it."""
        settings = self._read()
        # Not for each item of a list: of thousands, each would be compared with all others.
        if not setting.is_mapping and path in self._parents:
            # A list first: the mapping changes while its keys are removed.
            for below in [other for other in settings if len(other) > len(path) and _below(other, path)]:
                del settings[below]
                self._parents.discard(below)
        settings[path] = setting
        self._parents.update(path[:length] for length in range(1, len(path)))
        # A key below a former single value turns that value into a mapping.
        for length in range(1, len(path) if path[0] not in OPEN else 0):
            above = settings.get(path[:length])
            if above is not None and not above.is_mapping and not path[length].isdecimal():
                settings[path[:length]] = setting._replace(is_mapping=True)


def _reads_as(word: str, number: float) -> bool:
    """Whether Hydra's grammar reads a word as this number, or as this of true and false."""
    if isinstance(number, bool):
        return word.lower() == str(number).lower()
    try:
        value = float(word)
    except ValueError:
        return False
    return value == number or (math.isnan(value) and math.isnan(number))


def _below(path: KeyPath, root: KeyPath) -> bool:
    return path[: len(root)] == root


def _walk_source(source: Source) -> Iterator[tuple[KeyPath, yaml.Node, int]]:
    """Path, value and line of each key that `only` and `but` select."""
    for path, value, line in _walk(source.node, source.package):
        replaced = any(_below(path, section) for section in source.but)
        # The defaults list chooses files and sets no value.
        if _below(path, source.only) and not replaced and path != ("defaults",):
            yield path, value, line


def _walk(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node, int]]:
    if isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        pairs = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        for key, value in pairs:
            if key.tag == MERGE:
                # YAML's `<<` merges keys of another node into this one.
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _walk(merged, path)
        children = [(key.value, key, value) for key, value in pairs if key.tag != MERGE]
    else:
        return
    for name, at, value in children:
        below = (*path, name)
        yield below, value, at.start_mark.line + 1
        yield from _walk(value, below)
