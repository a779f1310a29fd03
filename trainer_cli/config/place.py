"""Where a composition looks, and from where: folders in order, the current folder, the primary config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import locate
from trainer_cli.config.reading import read_file
from trainer_cli.errors import ConfigError


class Place(NamedTuple):
    """Where a composition looks, and from where."""

    dirs: list[Path]
    cwd: Path
    root: Path
    primary: str

    @classmethod
    def of(cls, config_dir: Path | None, config_name: str, cwd: Path | None) -> Place:
        here = (cwd or Path.cwd()).resolve()
        dirs = locate.config_dirs(config_dir, here, locate.PACKAGE)
        if config_dir is not None and next(locate.configs(dirs[0]), None) is None:
            raise ConfigError(f"{config_dir} holds no configs: no .yaml in it or below it", where="--config-dir")
        primary = config_name.removesuffix(".yaml")
        dirs += [folder for folder in _own_search_path(locate.find(dirs, primary), here) if folder not in dirs]
        return cls(dirs, here, locate.project_root(config_dir, here), primary)

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses an option of a group, and sets no value."""
        return self.is_group_name(override.key_or_group)

    def is_group_name(self, name: str) -> bool:
        """Whether a group is called so."""
        return locate.is_group(self.dirs, name)

    def listed(self) -> str:
        """The folders, for a message."""
        return " or ".join(str(folder) for folder in self.dirs)


def _own_search_path(primary: Path | None, cwd: Path) -> Iterator[Path]:
    """The folders that a primary config adds by `hydra.searchpath`. What is wrong with the file is told later."""
    config = read_file(primary, "").values if primary is not None else None
    hydra = config.get("hydra") if isinstance(config, dict) else None
    paths = hydra.get("searchpath") if isinstance(hydra, dict) else None
    for path in paths if isinstance(paths, list) else ():
        yield from search_folders(path, cwd)


def search_folders(path: Any, cwd: Path) -> Iterator[Path]:
    """The folders that an entry of `hydra.searchpath` stands for, be they there or not."""
    with suppress(OmegaConfBaseException):
        path = OmegaConf.create([path])[0]  # ${oc.env:NAME}
    scheme, separator, rest = str(path).rpartition("://")
    if scheme == "pkg":
        yield from _folders_of(rest.replace("/", "."))
    elif scheme == "file" or not separator:
        yield (cwd / rest).resolve()


def _folders_of(package: str) -> Iterator[Path]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return
    places = spec.submodule_search_locations if spec is not None else None
    yield from map(Path, places or ())
