"""Find configs: in the folder that the user names, the project's own, the one that ships, then those of add-ons.

A file in an earlier folder takes the place of one of the same name in a later folder. A config is a `.yaml` file that
is not hidden; links are followed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.addon import each_addon
from trainer_cli.errors import ConfigError
from trainer_cli.source_view import in_view, out_of_view

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

PACKAGE = Path(__file__).resolve().parents[1]
PROJECT = "trainer-cli"
FOLDER = "configs"


class SearchPath(NamedTuple):
    """Where one composition searches: folders in order, the current folder, the project's root, the primary config."""

    dirs: list[Path]
    cwd: Path
    root: Path
    primary: str

    @classmethod
    def of(cls, config_dir: Path | None, config_name: str, cwd: Path | None) -> SearchPath:
        """The search path of a command.

        Raises:
            ConfigError: no such folder, or no config in it.
        """
        # It is resolved: messages shorten paths by it, and links would keep them long.
        search = cls.without_own(config_dir, (cwd or Path.cwd()).resolve())
        search = search._replace(primary=config_name.removesuffix(".yaml"))
        if config_dir is not None and next(configs(search.dirs[0]), None) is None:
            raise ConfigError(f"{config_dir} holds no configs: no .yaml in it or below it", source="--config-dir")
        added = _own_search_path(search.find(search.primary), search.cwd)
        search.dirs.extend(folder for folder in added if folder not in search.dirs)
        return search

    @classmethod
    def without_own(cls, config_dir: Path | None = None, cwd: Path | None = None) -> SearchPath:
        """The search path without folders that a primary config adds: no file is read.

        Raises:
            ConfigError: there is no such folder.
        """
        current_folder = cwd or Path.cwd()
        dirs = [*config_dirs(config_dir, current_folder, PACKAGE), *addon_folders()]
        return cls(dirs, current_folder, project_root(config_dir, current_folder), "config")

    def find(self, name: str) -> Path | None:
        """The file that `name`, with or without `.yaml`, means, or None."""
        paths = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in self.dirs)
        return next((path for path in paths if path.is_file()), None)

    def hint_on_experiment(self) -> str | None:
        """The hint if the primary config is an experiment; None for any other."""
        name = self.primary.rpartition("/")[2]
        hint = f"It is an experiment: write its name alone, as in `train fit {name}`."
        return hint if name in self.options("experiment") else None

    def primaries(self) -> list[str]:
        """Names of the configs outside groups, sorted."""
        return sorted({name for folder in self.dirs for name in _entries(str(folder))[0]})

    def groups(self) -> list[str]:
        """Names of all groups, sorted, `experiment` first."""
        names = {
            name
            for folder in self.dirs
            for name in _entries(str(folder))[1]
            if not name.startswith("_") and next(configs(folder / name), None) is not None
        }
        return sorted(names, key=lambda name: (name != "experiment", name))

    def every_group(self) -> list[str]:
        """Names of all groups, nested ones as `folder/group`, sorted."""
        parents = {name.rpartition("/")[0] for folder in self.dirs for name in configs(folder)}
        groups: set[str] = set()
        for parent in parents:
            words = parent.split("/")
            groups.update("/".join(words[:depth]) for depth in range(1, 9))
        return sorted(groups - {""})

    def is_group(self, name: str) -> bool:
        """Whether any of the folders has a subfolder of this name (with `/` for a nested one)."""
        return bool(name) and ".." not in name.split("/") and any((folder / name).is_dir() for folder in self.dirs)

    def options(self, group: str) -> dict[str, Path]:
        """Option -> file of a group, sorted; options in sub-folders are called `folder/option`."""
        files: dict[str, Path] = {}
        for folder in self.dirs:
            for name in configs(folder / group):
                # The first folder wins, in the order in which Hydra searches.
                files.setdefault(name, folder / group / f"{name}.yaml")
        return dict(sorted(files.items()))

    def is_own(self, file: Path) -> bool:
        """Whether a config file belongs to the user, not to this package."""
        return {_shipped(), *addon_folders()}.isdisjoint(file.parents)

    def label(self, file: Path) -> str:
        """The path as messages show it."""
        return label(file, self.cwd)

    @staticmethod
    def describe_file(path: Path) -> str:
        """The first comment of a file that does not instruct Hydra (`@package`) or an editor, or an empty text."""
        # Composing reports a file that cannot be read.
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                text = line.strip()
                if text and not text.startswith("#"):
                    return ""
                words = text.lstrip("# ")
                if words and not words.startswith(("@", "yaml-language-server:")):
                    return words
        return ""

    def advise_project_above(self) -> str:
        """How to get to the nearest project above the current folder, with its experiments; empty without one."""
        for parent in self.cwd.parents:
            folder = (parent / FOLDER).resolve()
            if folder == _shipped():
                continue
            if experiments := list(self._replace(dirs=[folder]).options("experiment")):
                path = os.path.relpath(parent, self.cwd)
                return f"The project above (cd {shlex.quote(path)}) has {list_names(experiments)}. "
        return ""

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses an option of a group; `group={…}` sets values."""
        return self.is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def name_of(self, path: Path) -> str:
        """The name of the config in a file, with its group: `experiment/x`."""
        folder = next((folder for folder in self.dirs if path.is_relative_to(folder)), path.parent)
        return path.relative_to(folder).with_suffix("").as_posix()

    @property
    def named_dirs(self) -> list[Path]:
        """The folders without those of add-ons, which belong to the shipped one."""
        return [folder for folder in self.dirs if folder not in addon_folders()]

    def listed(self) -> str:
        """The folders, for a message."""
        return " or ".join(map(str, self.named_dirs))


def config_dirs(explicit: Path | None, cwd: Path, package: Path) -> list[Path]:
    """The folders to search, in order, each once: `--config-dir`, `./configs`, the shipped one.

    Raises:
        ConfigError: the explicit folder does not exist, or there is no folder at all.
    """
    if explicit is not None and not (cwd / explicit).is_dir():
        raise ConfigError(f"{explicit} is not a folder", source="--config-dir")
    shipped = shipped_folder(FOLDER, package)
    # The user's first, so that a file of the same name takes the place of the shipped one.
    candidates = [*own_config_dirs(explicit, cwd), *([shipped.resolve()] if shipped is not None else [])]
    folders = [folder for folder in dict.fromkeys(candidates) if folder.is_dir()]
    if not folders:
        raise ConfigError("there is no folder of configs", hint="Name one with --config-dir.")
    return folders


def own_config_dirs(explicit: Path | None, cwd: Path) -> list[Path]:
    """The folders, existing or not, of the user's own configs: `--config-dir`, `./configs`."""
    return [in_view((cwd / folder).resolve()) for folder in (explicit, FOLDER) if folder is not None]


def shipped_folder(name: str, package: Path = PACKAGE) -> Path | None:
    """A folder that ships with the package: inside it in a wheel, beside it in a checkout of this very project."""
    # In a wheel first: beside an installed package, `configs` may be of any other project.
    inside = package / name
    if inside.is_dir():
        return inside
    beside = package.parent / name
    return beside if beside.is_dir() and _is_checkout(package.parent) else None


def project_root(explicit: Path | None, cwd: Path) -> Path:
    """The folder that holds the configs in use, else the current one; or its view. Own classes are imported from it."""
    return in_view((cwd / explicit).resolve().parent if explicit is not None else cwd.resolve())


def list_names(names: Sequence[str]) -> str:
    """The names of experiments, for a message."""
    return ", ".join(names[:8]) + (", … (see train list experiment)" if len(names) > 8 else "")


def configs(folder: Path) -> Iterator[str]:
    """Names, with `/` and without `.yaml`, of all configs in a folder and below it, in no order."""
    # Real paths, so that a link back to a folder above ends the walk.
    real_path = os.path.realpath(folder)
    return (f"{prefix}{name}" for prefix, name in _walk_configs(str(folder), "", real_path, frozenset({real_path})))


def search_folders(path: Any, cwd: Path) -> Iterator[Path]:
    """The folders, existing or not, that an entry of `hydra.searchpath` stands for."""
    from omegaconf import OmegaConf  # Completion lists configs without it.
    from omegaconf.errors import OmegaConfBaseException

    with suppress(OmegaConfBaseException):
        path = OmegaConf.create([path])[0]  # ${oc.env:NAME}
    scheme, separator, location = str(path).rpartition("://")
    if scheme == "pkg":
        yield from _find_package_folders(location.replace("/", "."))
    elif scheme == "file" or not separator:
        yield in_view((cwd / location).resolve())


def _own_search_path(primary: Path | None, cwd: Path) -> Iterator[Path]:
    """The folders that a primary config adds by `hydra.searchpath`. Mistakes in the file are reported later."""
    from trainer_cli.config.yaml import read_file  # It imports OmegaConf.

    config = read_file(primary, "").values if primary is not None else None
    hydra = config.get("hydra") if isinstance(config, dict) else None
    paths = hydra.get("searchpath") if isinstance(hydra, dict) else None
    for path in paths if isinstance(paths, list) else ():
        yield from search_folders(path, cwd)


def _find_package_folders(package: str) -> Iterator[Path]:
    """The folders of an installed package; none if it cannot be found."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return
    locations = spec.submodule_search_locations if spec is not None else None
    yield from map(Path, locations or ())


def _walk_configs(folder: str, prefix: str, real_folder: str, trail: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The group, with a `/` at its end, and the name of each config in a folder and below it.

    `prefix` is the group of the folder itself. `trail` has the real paths of the folders above: a link back to one of
    them is not followed.
    """
    files, folders = _entries(folder)
    yield from ((prefix, name) for name in files)
    for name, is_link in folders.items():
        path = f"{folder}/{name}"
        real_path = os.path.realpath(path) if is_link else f"{real_folder}/{name}"
        if real_path not in trail:
            yield from _walk_configs(path, f"{prefix}{name}/", real_path, trail | {real_path})


def _entries(folder: str) -> tuple[list[str], dict[str, bool]]:
    """The configs of a folder, without `.yaml`, and its folders, each with whether it is a link.

    Hidden and unreadable entries are left out, such as broken links and folders without permission.
    """
    files: list[str] = []
    folders: dict[str, bool] = {}
    try:
        # It tells files from folders without a system call for each entry: completion walks every folder.
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with suppress(OSError):  # A link to itself.
                    if entry.is_dir():
                        folders[entry.name] = entry.is_symlink()
                    elif entry.name.endswith(".yaml") and entry.is_file():
                        files.append(entry.name.removesuffix(".yaml"))
    except OSError:
        pass
    return files, folders


def _is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of this project, by the name in its pyproject.toml."""
    try:
        return _is_named_as_this_project((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


@cache
def _is_named_as_this_project(pyproject: str) -> bool:
    import tomllib  # Slow to import, and rarely needed.

    project = tomllib.loads(pyproject).get("project", {})
    return isinstance(project, dict) and project.get("name") == PROJECT


def label(path: Path, cwd: Path) -> str:
    """The path as messages show it: relative to `cwd`, or `trainer_cli/…` for a shipped config outside it."""
    if path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    if (original := out_of_view(path)) != path:
        return label(original, cwd)
    shipped = _shipped()
    if shipped is not None and path.is_relative_to(shipped):
        return str(Path(PACKAGE.name, FOLDER, path.relative_to(shipped)))
    return str(path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path)


@cache
def addon_folders() -> tuple[Path, ...]:
    """The folders of the configs of add-ons, which are searched after the shipped one."""
    return tuple(Path(addon.configs).resolve() for _, addon in each_addon() if addon.configs is not None)


@cache
def _shipped() -> Path | None:
    """The folder of configs that ships with the package, with links resolved; None if it is missing."""
    folder = shipped_folder(FOLDER)
    return None if folder is None else folder.resolve()
