"""The YAML files of one composition, each read once, and the mistakes that can be seen in one file alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer_cli.config import defaults_list
from trainer_cli.config.fields import OPEN, KeyPath, sections
from trainer_cli.config.hydra_compat import SCHEMA, Loaded
from trainer_cli.config.provenance import label
from trainer_cli.config.search_path import SearchPath, every_group, find, options, search_folders
from trainer_cli.config.yaml_reader import Reading, read_file
from trainer_cli.errors import ConfigError


class ConfigFiles:
    """Configs by name, for Hydra's defaults list (hydra_compat.Configs). One with mistakes counts as empty."""

    def __init__(self, search: SearchPath) -> None:
        self._search = search
        self._groups = every_group(search.dirs)
        self.read: dict[Path, Reading] = {}

    def load(self, name: str) -> Loaded | None:
        """The values of a config, and its package."""
        file = find(self._search.dirs, name)
        if file is None:
            return Loaded({}, None) if name == SCHEMA else None
        reading = self[file]
        return Loaded(reading.values or {}, reading.package)

    def is_group(self, name: str) -> bool:
        """Whether there is such a group."""
        return self._search.is_group(name)

    def options(self, group: str) -> list[str]:
        """The names of a group's configs."""
        return [*options(self._search.dirs, group)]

    @property
    def mistakes(self) -> list[ConfigError]:
        """The mistakes in the files read so far."""
        return [mistake for reading in self.read.values() for mistake in reading.mistakes]

    @property
    def broken(self) -> bool:
        """Whether one of them has no usable values."""
        return any(reading.broken for reading in self.read.values())

    def __getitem__(self, path: Path) -> Reading:
        if path not in self.read:
            self.read[path] = self._read(path)
        return self.read[path]

    def _read(self, path: Path) -> Reading:
        name = label(path, self._search.cwd)
        reading = read_file(path, name)
        group = self._search.name_of(path).rpartition("/")[0]
        if not reading.broken:
            for mistake in defaults_list.defaults_list_mistakes(reading.node, name, group, self._groups):
                reading.mistakes.append(mistake)
                reading.broken, reading.values = True, None
        if self._search.primary == self._search.name_of(path) and reading.package not in (None, "_global_"):
            what = f"the primary config cannot go to '{reading.package}': all else is merged into it"
            reading.add(what, f"{name}:1", "Remove the line '# @package'.", breaks=True)
        if group.partition("/")[0] == "experiment" and reading.package is None:
            if not reading.broken and not reading.mistakes and set(reading.values) - {"defaults"}:
                section = group.replace("/", ".")
                hint = f"Make that its first line: without it all goes to '{section}', and nothing reads that."
                reading.add("the file does not say '# @package _global_'", f"{name}:1", hint)
            reading.package = "_global_"
        if not reading.broken and (reading.package == "_global_" or not group):
            _refuse_shapes(reading, name)
            _refuse_hydra(reading, name, self._search.cwd, primary=not group)
        return reading


def _refuse_shapes(reading: Reading, name: str) -> None:
    """Refuse a list in the place of a mapping, and the reverse: the other's values would vanish in the merge."""
    for path, node, what in _misshapen(reading.node, ()):
        values = reading.values
        for part in path[:-1]:
            values = values[part]
        values.pop(path[-1], None)
        several = len(path) == 1 and path[0] in ("optimizer", "scheduler") and what.startswith("a list")
        cure = f"For several write a mapping of names: {path[0]}: {{first: {{_target_: …}}}}." if several else ""
        reading.add(f"{'.'.join(path)} is {what}", f"{name}:{node.start_mark.line + 1}", cure)


def _misshapen(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node, str]]:
    """Lists where the schema has a section or components, and mappings where it has a list, with their paths."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here = (*path, str(key.value))
        if isinstance(value, yaml.SequenceNode) and (here in sections() or here[0] in OPEN):
            yield here, key, "a list, but it must be a mapping of keys to values"
        elif isinstance(value, yaml.MappingNode) and here in sections():
            yield from _misshapen(value, here)
        elif isinstance(value, yaml.MappingNode) and path in sections():
            types = {one.name: one.type for one in dataclasses.fields(sections()[path])}
            if str(types.get(here[-1])).startswith("list"):
                yield here, key, "a mapping, but it must be a list"


def _refuse_hydra(reading: Reading, name: str, cwd: Path, *, primary: bool) -> None:
    """Refuse settings of Hydra's own: only the primary config's search path has an effect here."""
    for key, value in reading.node.value if isinstance(reading.node, yaml.MappingNode) else ():
        if key.value != "hydra" or not isinstance(value, yaml.MappingNode):
            continue
        for below, listed in value.value:
            where = f"{name}:{below.start_mark.line + 1}"
            if not (primary and below.value == "searchpath"):
                reading.add(f"hydra.{below.value} has no effect", where, "Hydra only composes the config here.")
            elif not isinstance(listed, yaml.SequenceNode):
                reading.add("hydra.searchpath must be a list", where, "Write hydra.searchpath: [FOLDER].")
            else:
                _refuse_folders(reading, name, cwd, listed)


def _refuse_folders(reading: Reading, name: str, cwd: Path, listed: yaml.SequenceNode) -> None:
    for entry in listed.value:
        if not any(folder.is_dir() for folder in search_folders(entry.value, cwd)):
            what = f"hydra.searchpath names {entry.value}, which is no folder"
            hint = "A path counts from the current folder; pkg://NAME is an installed package."
            reading.add(what, f"{name}:{entry.start_mark.line + 1}", hint)
