"""Hydra, run quietly: no `@hydra.main`, no chdir, no logging, no global of its own; and it reads files as we do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from trainer_cli.config import check, defaults_list, locate
from trainer_cli.config.origins import Source, label
from trainer_cli.config.overrides import KeyPath, line_of
from trainer_cli.config.place import Place, search_folders
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
            for mistake in defaults_list.mistakes(reading.node, name, group, self._groups):
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
            _no_hydra(reading, name, self._place.cwd, primary=not group)
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


def _no_hydra(reading: Reading, name: str, cwd: Path, *, primary: bool) -> None:
    """Refuse settings of Hydra's own, which nobody here reads but for the primary config's search path."""
    for key, value in reading.node.value if isinstance(reading.node, yaml.MappingNode) else ():
        if key.value == "hydra" and isinstance(value, yaml.MappingNode):
            for below, listed in value.value:
                where = f"{name}:{below.start_mark.line + 1}"
                if not (primary and below.value == "searchpath"):
                    reading.add(f"hydra.{below.value} has no effect", where, "Hydra only composes the config here.")
                elif not isinstance(listed, yaml.SequenceNode):
                    reading.add("hydra.searchpath must be a list", where, "Write hydra.searchpath: [FOLDER].")
                else:
                    _no_such_folder(reading, name, cwd, listed)


def _no_such_folder(reading: Reading, name: str, cwd: Path, listed: yaml.SequenceNode) -> None:
    for entry in listed.value:
        if not any(folder.is_dir() for folder in search_folders(entry.value, cwd)):
            what = f"hydra.searchpath names {entry.value}, which is no folder"
            cure = "A path counts from the current folder; pkg://NAME is an installed package."
            reading.add(what, f"{name}:{entry.start_mark.line + 1}", cure)


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
        config = OmegaConf.create(reading.values or {})
        return ConfigResult(
            config=config,
            path=f"{SCHEME}://{self.path}",
            provider=self.provider,
            header={"package": reading.package},
        )


def _no_experiment(entry: InputDefault) -> bool:
    if not isinstance(entry, GroupDefault) or entry.override:
        return False
    return entry.group is not None and entry.group.lstrip("/") == "experiment" and entry.value is None


class _Repository(ConfigRepository):
    """Hydra's repository of configs, which loads each once. Hydra's own that does so begins by copying all it knows."""

    def __init__(self, search: ConfigSearchPathImpl) -> None:
        super().__init__(search)
        self._loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            found = self._loaded[config_path] = super().load_config(config_path)
            entries = found.defaults_list or [] if found is not None else []
            # `experiment: null` chooses nothing, and is no choice that the command line's would be the second of.
            entries[:] = [entry for entry in entries if "/" in config_path or not _no_experiment(entry)]
            if not all(entry.is_override() for entry in entries) and not any(entry.is_self() for entry in entries):
                # What a file says itself comes last, as Hydra has it too, but not without a warning.
                entries.append(ConfigDefault(path="_self_"))
        return self._loaded[config_path]


class Composition(NamedTuple):
    """What Hydra made: the config, the defaults list that it was merged from, and what is wrong with overrides."""

    config: DictConfig
    listed: DefaultsList
    mistakes: list[ConfigError]


def run(place: Place, primary: str, overrides: Sequence[Override], files: Files) -> Composition:
    """Compose the primary config, its groups and the overrides.

    The steps are those of Hydra's `load_configuration`, less what costs half of its time and nobody here reads: its own
    settings, and a search for plugins. It computes no defaults list that it would keep, and stops at the first override
    that does not fit.
    """
    parsed = [_for_hydra(place, override) for override in overrides]
    ConfigStore.instance().store(SCHEMA, check.plain())
    search = ConfigSearchPathImpl()
    for folder in place.dirs:
        search.append("main", f"{SCHEME}://{folder}")
    search.append("schema", "structured://")
    for source in (TrainConfigSource, StructuredConfigSource):
        SourcesRegistry.instance().register(source)
    with _reading(files):
        version.setbase("1.3")
        setup_globals()
        loader = ConfigLoaderImpl(search)
        repo = _Repository(search)
        listed = create_defaults_list(repo, primary, parsed, prepend_hydra=False, skip_missing=False)
        config = loader._compose_config_from_defaults_list(listed.defaults, repo)
    with open_dict(config):
        config.pop("hydra", None)
    OmegaConf.set_struct(config, True)
    mistakes = []
    for override in listed.config_overrides:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        problem = no_value(override, config, place) if plain else None
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


def _for_hydra(place: Place, override: Override) -> Override:
    """The override in Hydra's words: `group=null` is `~group`, and a mapping in an open section needs `++`."""
    if override.is_delete():
        return override
    value, text = override.value(), line_of(override).lstrip("+")
    if place.is_group(override):
        text = f"~{text.partition('=')[0]}" if value is None else ""
    else:
        text = f"++{text}" if isinstance(value, dict) and override.key_or_group in check.typed() else ""
    return OverridesParser.create().parse_override(text) if text else override


def sources(place: Place, defaults: Sequence[ResultDefault], files: Files) -> Iterator[Source]:
    """The files of a composition as sources of values."""
    for default in defaults:
        file = locate.find(place.dirs, default.config_path or "")
        if file is not None:
            package = default.package or ""
            path = tuple(package.split(".")) if package not in ("", "_global_") else ()
            yield Source(label(file, place.cwd), files[file].node, path)
