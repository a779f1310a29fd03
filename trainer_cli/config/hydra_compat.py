"""All uses of private names of Hydra 1.3 and OmegaConf 2.3 for composing, each with its reason.

- `create_defaults_list` and `ConfigRepository` compute the defaults list. Hydra's public `compose` does that too, but
  does not return the list, from which the source of every value is known; and it takes twice the time, for settings
  of Hydra's own and a search for plugins.
- `Override._value` says whether a string was in quotes.
- `BaseContainer._resolvers` has the names of the resolvers; the public API answers for one name at a time.
- `get_yaml_loader` reads plain values as OmegaConf does: `1e3` is a number, a date is a string.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader as get_yaml_loader
from omegaconf.basecontainer import BaseContainer
from omegaconf.resolvers.oc import env

from trainer_cli.errors import replace_in_messages

if TYPE_CHECKING:
    from trainer_cli.config.files import ConfigFiles

SCHEMA = "train_schema"
"""Name under which the schema is listed first in a primary config's defaults."""


class Merged(NamedTuple):
    """An entry of the final defaults list: a config, and the dotted package it is merged into (empty: the root)."""

    name: str
    package: str


class DefaultsList(NamedTuple):
    """The configs to merge, in order, and group -> chosen option; a group at a package is `group@package`."""

    merged: list[Merged]
    chosen: dict[str, str | None]


def repository(configs: ConfigFiles) -> ConfigRepository:
    """The configs in the form that `defaults_list` takes; each is loaded once."""
    return _Repository(_Source(configs))


def defaults_list(repository: ConfigRepository, primary: str, overrides: list[Override]) -> DefaultsList:
    """The configs that the primary config and the overrides (of groups) choose.

    Raises:
        HydraException: a choice that cannot be made; its message names it.
        RecursionError: a defaults list that leads back to its own file.
    """
    # Hydra reads its compatibility level from global state, which another user of Hydra may have set.
    version.setbase("1.3")
    # Without Hydra's own config: its settings of logging and job folders have no effect here.
    hydra_list = create_defaults_list(repository, primary, overrides, prepend_hydra=False, skip_missing=False)
    merged = [
        Merged(entry.config_path or "", "" if entry.package == "_global_" else entry.package or "")
        for entry in hydra_list.defaults
    ]
    return DefaultsList(merged, hydra_list.overrides.known_choices)


def register_hydras_resolvers() -> None:
    """Make `${python_version:}`, `${now:…}` and `${hydra:…}` known; the last two are refused with a reason.

    Values that `${oc.env:…}` reads are kept out of messages.
    """
    setup_globals()
    OmegaConf.register_new_resolver("oc.env", _read_environment, replace=True)


def _read_environment(name: str, *default: str | None) -> str | None:
    """The resolver `oc.env`, which also notes the value as a secret that messages do not show."""
    value = env(name, *default)
    if name in os.environ:
        replace_in_messages(os.environ[name], f"${{oc.env:{name}}}")
    return value


def resolver_names() -> set[str]:
    """The names of all resolvers that are registered."""
    return set(BaseContainer._resolvers)


def value_in_quotes(override: Override) -> Any:
    """The value with the quotes that it was given in."""
    return override._value


class _Source(ConfigSource):
    """The one source of configs that Hydra asks: files by name, as `ConfigFiles` reads them."""

    def __init__(self, configs: ConfigFiles) -> None:
        super().__init__("main", f"{self.scheme()}://")
        self._configs = configs

    @staticmethod
    def scheme() -> str:
        return "train"

    def load_config(self, config_path: str) -> ConfigResult:
        """The keys of a config with its whole defaults list, but without other values."""
        reading = self._configs.load(config_path)
        values = {} if reading is None else reading.values
        # Copying the values takes time, and Hydra asks only whether there are any.
        keys = {
            key: type(value)() if key != "defaults" and isinstance(value, dict | list) else value
            for key, value in values.items()
        }
        header = {"package": None if reading is None else reading.package}
        return ConfigResult(provider=self.provider, path=self.path, config=OmegaConf.create(keys), header=header)

    def is_group(self, config_path: str) -> bool:
        return self._configs.search.is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return self._configs.load(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return [*self._configs.search.options(config_path)]


class _Repository(ConfigRepository):
    """Hydra's repository of configs, with one source, each config of which is loaded once."""

    def __init__(self, source: ConfigSource) -> None:
        self.sources = [source]
        self._loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            loaded = self._loaded[config_path] = super().load_config(config_path)
            entries = loaded.defaults_list or [] if loaded is not None else []
            # Without `experiment: null`, `+experiment=x` on the command line is the first choice, not a second one.
            entries[:] = [entry for entry in entries if "/" in config_path or not _is_null_experiment(entry)]
            for entry in entries:
                # Optional for installations that lack the add-on of the group. Where the group exists, Hydra would pass
                # over an unknown option of it without a word, since an override of the entry is optional too.
                if isinstance(entry, GroupDefault) and entry.optional and entry.value is None:
                    entry.optional = not self.group_exists(entry.group or "")
            has_choices = not all(entry.is_override() for entry in entries)
            if has_choices and not any(entry.is_self() for entry in entries):
                # A file's own values are merged last. Hydra does the same, but warns.
                entries.append(ConfigDefault(path="_self_"))
        return self._loaded[config_path]


def _is_null_experiment(entry: InputDefault) -> bool:
    """Whether an entry of a defaults list is `experiment: null`."""
    if not isinstance(entry, GroupDefault) or entry.override:
        return False
    return entry.group is not None and entry.group.lstrip("/") == "experiment" and entry.value is None
