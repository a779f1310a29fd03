"""Where a composition looks, and from where: folders in order, the current folder, the primary config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import locate
from trainer_cli.config.origins import label
from trainer_cli.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a composition looks, and from where."""

    dirs: list[Path]
    cwd: Path
    root: Path
    primary: str

    @classmethod
    def of(cls, config_dir: Path | None, config_name: str, cwd: Path | None) -> Place:
        here = (cwd or Path.cwd()).resolve()
        package = Path(__file__).resolve().parents[1]
        dirs = locate.config_dirs(config_dir, here, package)
        primary = config_name.removesuffix(".yaml")
        dirs += [folder for folder in _own_search_path(locate.find(dirs, primary), here) if folder not in dirs]
        return cls(dirs, here, locate.project_root(config_dir, here), primary)

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses an option of a group, and sets no value."""
        return locate.is_group(self.dirs, override.key_or_group)

    def listed(self) -> str:
        """The folders, for a message."""
        return " or ".join(str(folder) for folder in self.dirs)


def _own_search_path(primary: Path | None, cwd: Path) -> Iterator[Path]:
    """The folders that a primary config adds by `hydra.searchpath`."""
    if primary is None:
        return
    try:
        config = OmegaConf.load(primary)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise bad_yaml(error, cwd, label(primary, cwd)) from None
    paths = OmegaConf.select(config, "hydra.searchpath") if isinstance(config, DictConfig) else None
    for path in paths or ():
        scheme, separator, rest = str(path).rpartition("://")
        if scheme == "pkg":
            spec = find_spec(rest.replace("/", "."))
            places = spec.submodule_search_locations if spec is not None else None
            yield from map(Path, places or ())
        elif scheme == "file" or not separator:
            yield (cwd / rest).resolve()


def bad_yaml(error: Exception, cwd: Path, name: str) -> ConfigError:
    """The error for a file that YAML or OmegaConf cannot read, with its line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return ConfigError(f"{name} cannot be read: {problem}")
    file = Path(mark.name)
    shown = label(file.resolve(), cwd) if file.is_file() else name
    return ConfigError(f"this is not valid YAML: {problem}", where=f"{shown}:{mark.line + 1}")
