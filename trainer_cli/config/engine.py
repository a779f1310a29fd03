"""Hydra, run quietly: no `@hydra.main`, no chdir, no logging, no global of its own; and it reads files as we do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from trainer_cli.config import check, listing, locate
from trainer_cli.config.origins import Source, label
from trainer_cli.config.overrides import KeyPath, line_of
from trainer_cli.config.place import Place
from trainer_cli.config.reading import Reading, read_file
from trainer_cli.config.refusals import SCHEMA, no_value, why_refused
from trainer_cli.errors import ConfigError

SCHEME = "train"


class Files:
    """The YAML files of one composition, each read once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._groups = locate.every_group(place.dirs)
        self.read: dict[Path, Reading] = {}

    def __getitem__(self, path: Path) -> Reading:
        if path not in self.read:
            self.read[path] = self._read(path)
        return self.read[path]

    def _read(self, path: Path) -> Reading:
        name = label(path, self._place.cwd)
        reading = read_file(path, name)
        folder = next((folder for folder in self._place.dirs if path.is_relative_to(folder)), path.parent)
        group = path.parent.relative_to(folder).as_posix().removeprefix(".")
        if not reading.broken:
            for mistake in listing.mistakes(reading.node, name, group, self._groups):
                reading.mistakes.append(mistake)
                reading.broken, reading.values = True, None
        if group.partition("/")[0] == "experiment" and reading.package is None:
            if not reading.broken and not reading.mistakes and set(reading.values) - {"defaults"}:
                section = group.replace("/", ".")
                cure = f"Make that its first line: without it all goes to '{section}', and nothing reads that."
                reading.add("the file does not say '# @package _global_'", f"{name}:1", cure)
            reading.package = "_global_"
        if not reading.broken and (reading.package == "_global_" or not group):
            self._no_lists(reading, name)
            _no_hydra(reading, name, primary=not group)
        return reading

    def _no_lists(self, reading: Reading, name: str) -> None:
        """Refuse a list in the place of a mapping, and the reverse: Hydra would merge nothing more."""
        for path, node, what in _misshapen(reading.node, check.typed(), ()):
            values = reading.values
            for part in path[:-1]:
                values = values[part]
            values.pop(path[-1], None)
            reading.add(f"{'.'.join(path)} is {what}", f"{name}:{node.start_mark.line + 1}", "")

    @property
    def mistakes(self) -> list[ConfigError]:
        """The mistakes in them."""
        return [mistake for reading in self.read.values() for mistake in reading.mistakes]

    @property
    def broken(self) -> bool:
        """Whether one of them could not be read."""
        return any(reading.broken for reading in self.read.values())


def _no_hydra(reading: Reading, name: str, *, primary: bool) -> None:
    """Refuse settings of Hydra's own, which nobody here reads but for the primary config's search path."""
    for key, value in reading.node.value if isinstance(reading.node, yaml.MappingNode) else ():
        if key.value == "hydra" and isinstance(value, yaml.MappingNode):
            for below, _ in value.value:
                if not (primary and below.value == "searchpath"):
                    where = f"{name}:{below.start_mark.line + 1}"
                    reading.add(f"hydra.{below.value} has no effect", where, "Hydra only composes the config here.")


def _misshapen(node: Any, schema: DictConfig, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.Node, str]]:
    """Lists where the schema has a section or components, and mappings where it has a list, with their paths."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        known = schema._get_node(key.value) if key.value in schema else None
        here = (*path, str(key.value))
        if isinstance(value, yaml.SequenceNode) and (check.is_closed(known) or here[0] in check.OPEN):
            yield here, key, "a list, but it must be a mapping of keys to values"
        elif isinstance(value, yaml.MappingNode) and isinstance(known, ListConfig):
            yield here, key, "a mapping, but it must be a list"
        elif check.is_closed(known):
            assert isinstance(known, DictConfig)
            yield from _misshapen(value, known, here)


_files: ContextVar[Files] = ContextVar("files")


class TrainConfigSource(FileConfigSource):
    """A folder of configs whose files are read by `Files`. One with mistakes counts as empty: they are told later."""

    @staticmethod
    def scheme() -> str:
        """What stands before `://` in a search path."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """The file's content, anew for each caller, for Hydra takes the defaults list out of it."""
        reading = _files.get()[Path(self.path) / self._normalize_file_name(config_path)]
        config = OmegaConf.create(copy.deepcopy(reading.values or {}))
        return ConfigResult(
            config=config,
            path=f"{SCHEME}://{self.path}",
            provider=self.provider,
            header={"package": reading.package},
        )


@dataclass(frozen=True, slots=True)
class Composition:
    """What Hydra made: the config, the defaults list that it was merged from, and what is wrong with overrides."""

    config: DictConfig
    listed: DefaultsList
    mistakes: list[ConfigError]


def run(place: Place, primary: str, overrides: Sequence[Override], files: Files) -> Composition:
    """Compose the primary config, its groups and the overrides.

    The steps are those of Hydra's `load_configuration`. It computes no defaults list that it would keep, stops at the
    first override that does not fit, and merges its own settings, which nobody here reads.
    """
    lines = [_for_hydra(place, override) for override in overrides]
    ConfigStore.instance().store(SCHEMA, check.plain())
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().register(TrainConfigSource)
    search = create_config_search_path(f"{SCHEME}://{place.dirs[0]}")
    for folder in reversed(place.dirs[1:]):
        search.append("train", f"{SCHEME}://{folder}", SearchPathQuery("main", None))
    with _reading(files):
        version.setbase("1.3")
        setup_globals()
        loader = ConfigLoaderImpl(search)
        parsed, repo = loader._parse_overrides_and_create_caching_repo(primary, lines)
        listed = create_defaults_list(repo, primary, parsed, prepend_hydra=True, skip_missing=False)
        listed.defaults[:] = [one for one in listed.defaults if not (one.config_path or "").startswith("hydra/")]
        config = loader._compose_config_from_defaults_list(listed.defaults, repo)
    with open_dict(config):
        config.pop("hydra", None)
    OmegaConf.set_struct(config, True)
    mistakes = []
    for override in listed.config_overrides:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        problem = no_value(override, line_of(override), config, primary) if plain else None
        if problem is None:
            try:
                loader._apply_overrides_to_config([override], config)
            except HydraException as error:
                problem = why_refused(override, error)
        mistakes += [problem] if problem is not None else []
    return Composition(config, listed, mistakes)


@contextmanager
def _reading(files: Files) -> Iterator[None]:
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


def _for_hydra(place: Place, override: Override) -> str:
    """The override in Hydra's words: `group=null` is `~group`, and a mapping in an open section needs `++`."""
    text = line_of(override)
    if override.is_delete():
        return text
    value = override.value()
    if place.is_group(override):
        return "~" + text.lstrip("+").partition("=")[0] if value is None else text
    known_mapping = isinstance(value, dict) and override.key_or_group in check.typed()
    return "++" + text.lstrip("+") if known_mapping else text


def sources(place: Place, defaults: Sequence[ResultDefault], files: Files) -> Iterator[Source]:
    """The files of a composition as sources of values."""
    for default in defaults:
        file = locate.find(place.dirs, default.config_path or "")
        if file is not None:
            package = default.package or ""
            path = tuple(package.split(".")) if package not in ("", "_global_") else ()
            yield Source(label(file, place.cwd), files[file].node, path)
