"""Merge files and overrides into a config, by the rules of OmegaConf.

Most merges are simple: new values replace old ones, and mappings are merged key by key. These are made on plain values,
since OmegaConf makes a node of each value and takes twenty times as long. It makes all merges from the first that is
not simple: one into an interpolation, of a list and a mapping, or with keys that are not strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from trainer_cli.config import hydra_compat
from trainer_cli.config.check import to_plain
from trainer_cli.core.types import MISSING

_SCALARS = (str, int, float, bool, type(None))


class MergedConfig:
    """A config to which files and overrides are added. Values that are merged into it are copied.

    Args:
        values: the first ones; shared, and never changed. Who changes what `values` returns changes them too.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})
        self._config: DictConfig | None = None
        """The values from the first merge that is not simple."""

    @property
    def values(self) -> dict[str, Any]:
        """The plain values, unresolved. They are replaced, not changed, by what is added later."""
        return self._values if self._config is None else to_plain(self._config)

    def merge(self, values: Mapping[Any, Any], package: str) -> str | None:
        """Merge the values of a file into its package, as Hydra does; OmegaConf's reason if it refuses, or None."""
        if self._config is None:
            nested: Any = values
            for name in reversed(package.split(".")) if package else ():
                nested = {name: nested}
            try:
                self._values = _merge(self._values, nested)
                return None
            except _NotSimpleError:
                self._config = hydra_compat.create(self._values)
        return hydra_compat.merge_into(self._config, values, package)

    def apply(self, override: Override) -> str | None:
        """Apply an override, as Hydra does where only `+` may add keys; the reason if it refuses, or None."""
        if self._config is None:
            try:
                self._values = _assign(self._values, override)
                return None
            except _NotSimpleError:
                self._config = hydra_compat.create(self._values)
        OmegaConf.set_struct(self._config, True)
        return hydra_compat.apply_override(self._config, override)


class _NotSimpleError(Exception):
    """OmegaConf must make this merge."""


def _merge(old: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """The old values with the new ones merged over them; the old ones are not changed."""
    merged = dict(old)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, str) and "${" in before:
            raise _NotSimpleError  # OmegaConf merges into the mapping that it refers to.
        if key not in old:
            merged[_check_key(key)] = _copy(value)
        elif isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _merge(before, value)
        elif isinstance(value, dict | list) and isinstance(before, dict | list) and type(value) is not type(before):
            raise _NotSimpleError  # OmegaConf refuses that, with its reason.
        elif not (isinstance(value, str) and value == MISSING):
            # `???` asks for a value, and there is one.
            merged[key] = _copy(value)
    return merged


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return {_check_key(key): _copy(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy(item) for item in value]
    if type(value) not in _SCALARS:
        raise _NotSimpleError
    return value


def _check_key(key: Any) -> str:
    if type(key) is not str:
        raise _NotSimpleError
    return key


def _assign(values: dict[str, Any], override: Override) -> dict[str, Any]:
    """The values with an override `key=value` of one value that exists; the given ones are not changed."""
    value = override.value()
    if override.type is not OverrideType.CHANGE or override.package is not None or type(value) not in _SCALARS:
        raise _NotSimpleError
    if isinstance(value, str) and "${" in value:
        raise _NotSimpleError
    *sections, name = override.key_or_group.split(".")
    assigned = parent = dict(values)
    for section in sections:
        child = parent.get(section)
        if type(child) is not dict:
            raise _NotSimpleError
        parent[section] = parent = dict(child)
    if name not in parent:
        raise _NotSimpleError
    parent[name] = value
    return assigned
