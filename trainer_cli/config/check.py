"""A composed config against the schema: every mistake at once, each with its key, its place and a cure."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config.kinds import (
    IN_QUOTES,
    MISSING,
    fits,
    hint,
    kind_of,
    leaves,
    names_one_of,
    numbers_for_texts,
    odd_keys,
    places,
    why_unresolved,
)
from trainer_cli.config.origins import DEFAULT, Origins
from trainer_cli.config.overrides import COMMAND_LINE, KeyPath, raise_all
from trainer_cli.config.schema import TrainConfig
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.words import as_text
from trainer_cli.errors import ConfigError

OPEN = ("model", "data", "optimizer", "scheduler", "step", "param_groups", "callbacks", "loggers")
_LONGEST = 80


@cache
def typed() -> DictConfig:
    """The schema, with its types and defaults. Shared, so not to be changed."""
    schema = OmegaConf.structured(TrainConfig)
    assert isinstance(schema, DictConfig)
    return schema


def plain() -> dict[str, Any]:
    """The schema's defaults as plain values."""
    return copy.deepcopy(_defaults())


@cache
def _defaults() -> dict[str, Any]:
    values = OmegaConf.to_container(typed(), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def completed(config: DictConfig | dict[str, Any]) -> DictConfig:
    """A config over the schema's defaults."""
    values = contents(config) if isinstance(config, DictConfig) else config
    full = OmegaConf.create(_over(_defaults(), values))
    assert isinstance(full, DictConfig)
    return full


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values merged as OmegaConf does, in a fraction of its time: what is missing (???) replaces nothing."""
    full = dict(below)
    for key, value in above.items():
        known = below.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            full[key] = _over(known, value)
        elif key not in below or value != MISSING:
            full[key] = value
    return full


def contents(config: DictConfig) -> dict[str, Any]:
    """A config as plain values, unresolved."""
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def is_closed(node: Any) -> bool:
    """Whether a node of the schema is a section whose keys are fixed."""
    return isinstance(node, DictConfig) and OmegaConf.get_type(node) is not dict


def unknown_key(path: KeyPath, schema: DictConfig) -> tuple[KeyPath, list[str]] | None:
    """The part of `path` that no closed section knows, and what it knows instead; None where all is well."""
    node: Any = schema
    for depth, key in enumerate(path):
        if not is_closed(node):
            return None
        if key not in node:
            return path[: depth + 1], [str(name) for name in node]
        node = node[key]
    return None


def no_such_key(path: KeyPath, known: list[str], where: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest that does."""
    above = ".".join(path[:-1])
    names = [f"{above}.{name}" if above else name for name in known]
    if not above and where != COMMAND_LINE:
        names.append("defaults")  # Hydra's own, which no schema knows.
    cure = did_you_mean(".".join(path), names).strip() or f"Known here: {', '.join(known)}."
    return ConfigError(f"there is no key '{'.'.join(path)}'", where=where, cure=cure)


def to_config(raw: DictConfig, origins: Origins, *, missing_ok: bool = False) -> TrainConfig:
    """The validated config, interpolations resolved.

    Raises:
        ConfigError: naming all mistakes.
    """
    config, mistakes, _ = examined(raw, origins, missing_ok=missing_ok)
    raise_all(mistakes)
    assert config is not None
    return config


def examined(
    raw: DictConfig, origins: Origins, *, missing_ok: bool = False
) -> tuple[TrainConfig | None, list[ConfigError], set[str]]:
    """The config, interpolations resolved, and all mistakes in it; None where it cannot be made at all.

    A value that is wrong is put back to its default, so that the rest of its section can be judged; the keys of those
    come third.
    """
    examination = _Examination(copy.deepcopy(typed()), origins)
    values = contents(raw)
    examination.fill(values)
    if not missing_ok:
        examination.complete(values)
    examination.leaves()
    config = examination.settled()
    return config, examination.mistakes, examination.told


class _Examination:
    """One pass over a config: what is wrong is told and put back."""

    def __init__(self, schema: DictConfig, origins: Origins) -> None:
        self.schema = schema
        self.mistakes: list[ConfigError] = []
        self._defaults = plain()
        self._origins = origins
        self.told: set[str] = set()

    def fill(self, values: Mapping[Any, Any]) -> None:
        """Put plain values into the schema."""
        self._fill(self.schema, values, ())
        for key in OPEN:
            if key in values:
                self._shape(key, values[key])
        if (ckpt := values.get("ckpt")) is not None:
            texts = ckpt if isinstance(ckpt, list) else [ckpt]
            if not all(isinstance(text, str) for text in texts):
                self._wrong(("ckpt",), ckpt, "a path, a glob or a list of them")

    def complete(self, values: Mapping[Any, Any]) -> None:
        """Refuse what must still be given."""
        for path, value in leaves(values, ()):
            if value == MISSING:
                key = ".".join(path)
                self._tell(path, f"{key} must be given", f"Add {key}=VALUE to the command line.")
        for key in ("model", "data"):
            if not values.get(key):
                where = self._origins.exact((key,)).place
                shown = "null" if values.get(key) is None else "empty"
                cure = f"Choose one with {key}=NAME; `train list {key}` shows them."
                self._tell((key,), f"{key} is {shown}, but nothing runs without", cure, where=where)

    def leaves(self) -> None:
        """Refuse single values that are wrong wherever they stand."""
        every = list(places(self.schema, ()))
        known = [".".join(path) for path, _, _ in every]
        for path, owner, key in every:
            node = owner._get_node(key)
            if node is None or OmegaConf.is_missing(owner, key):
                continue
            try:
                value = owner[key] if node._is_interpolation() else node._value()
            except (OmegaConfBaseException, RecursionError) as error:
                words = why_unresolved(error, owner._get_node(key)._value(), known)
                self._tell(path, f"{'.'.join(path)}: {words[0]}", words[1])
                continue
            for below, number in leaves(value if isinstance(value, list | dict) else None, path):
                self._number(below, number)
            self._number(path, value)

    def settled(self) -> TrainConfig | None:
        """The config as its dataclass, held against the checks of its sections."""
        settled = {key: self._settled(key) for key in map(str, self.schema)}
        while True:
            try:
                return TrainConfig(**settled)
            except ConfigError as error:
                key = error.where or ""
                if not self._complaint(error, "") or key not in self._defaults:
                    return None
                settled[key] = self._defaults[key]

    def _fill(self, schema: DictConfig, values: Mapping[Any, Any], path: KeyPath) -> None:
        for name, value in values.items():
            key = str(name)
            here = (*path, key)
            if key not in schema:
                self.mistakes.append(no_such_key(here, [str(known) for known in schema], self._origins.of(here)))
            elif is_closed(schema._get_node(key)):
                if isinstance(value, Mapping):
                    self._fill(schema[key], value, here)
                else:
                    cure = f"Set its keys, such as {'.'.join(here)}.{next(iter(schema[key]))}."
                    self._wrong(here, value, "a section: a mapping of keys to values, never null", cure)
            else:
                node = schema._get_node(key)
                try:
                    if not fits(node, value):
                        self._wrong(here, value, kind_of(node))
                    else:
                        schema[key] = value
                        for below, number in numbers_for_texts(node, value, here):
                            self._as_written(here, below, number)
                except (OmegaConfBaseException, OverflowError, RecursionError):
                    self._wrong(here, value, kind_of(node))

    def _as_written(self, whole: KeyPath, path: KeyPath, number: int) -> None:
        """Refuse a text, the value of `whole` or in it, that was read as a number which is written otherwise: `1_0`."""
        text = self._origins.written(path, number)
        if text == str(number):
            return
        key, place = ".".join(path), self._origins.of(path)
        if place == COMMAND_LINE:
            assign = f"{key}=" if path == whole else ""
            what = f"{key}: {text} is read as the number {number}"
            cure = f"Write {assign}{number}, or {assign}{as_text(text)} for the text."
        else:
            what = f"{key}: {text} is read by YAML as the number {number}"
            cure = f"Write {number}, or '{text}' in quotes."
        self._tell(whole, what, cure, where=place)

    def _shape(self, key: str, value: Any) -> None:
        """Refuse what can be no component, or no mapping of them."""
        if isinstance(value, str) and ("${" in value or value == MISSING):
            return
        by_name = key in ("param_groups", "callbacks", "loggers")
        if not by_name and value is not None and not isinstance(value, Mapping):
            cure = f"Choose one with {key}=NAME, in a file by '- override /{key}: NAME' in its defaults list."
            self._wrong((key,), value, "a node with `_target_`, or null", cure)
        for path, name in odd_keys(value, (key,)):
            shown = "null" if name is None else str(name).lower()
            what = f"{'.'.join(path)} has the key {shown}, but keys are texts"
            self._tell(path, what, f"Put it in quotes: '{shown}'.")
        if not isinstance(value, Mapping) or "_target_" in value or key in ("model", "data", "optimizer", "step"):
            return
        for name, node in value.items():
            ok = isinstance(node, Mapping) or (node is None and key != "param_groups")
            if not ok and not (isinstance(node, str) and "${" in node):
                kind = "a mapping of settings" if key == "param_groups" else "a node with `_target_`, or null"
                self._wrong((key, str(name)), node, kind)

    def _number(self, path: KeyPath, value: Any) -> None:
        key = ".".join(path)
        if isinstance(value, float) and not math.isfinite(value):
            self._tell(path, f"{key} is {value}, but it must be finite")
        elif isinstance(value, int) and abs(value) >= 2**63:
            shown = str(value) if abs(value) < 10**24 else "a number of too many digits"
            self._tell(path, f"{key} is {shown}, but it must fit into 64 bits")

    def _settled(self, key: str) -> Any:
        """The value of a key: a dataclass, plain containers, or a single value."""
        while is_closed(self.schema._get_node(key)):
            try:
                return OmegaConf.to_object(self.schema[key])
            except ConfigError as error:
                where = tuple((error.where or key).split("."))
                if not self._complaint(error, key) or where[0] != key or not self._put_back(where):
                    return None
            except OmegaConfBaseException as error:
                full_key = str(getattr(error, "full_key", None) or key)
                self._tell(tuple(full_key.split(".")), f"{full_key}: {why_unresolved(error, '')[0]}")
                return None
        if OmegaConf.is_missing(self.schema, key):
            return None
        value = self.schema[key]
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value

    def _complaint(self, error: ConfigError, section: str) -> bool:
        """Tell the complaint of a section's own check, but if it may come from a value that was put back."""
        if names_one_of([key for key in self.told if key.startswith(f"{section}.")], error.what):
            return False
        where = error.where or section
        self.mistakes.append(ConfigError(error.what, where=place(where, error.what, self._origins), cure=error.cure))
        self.told.add(where)
        return True

    def _wrong(self, path: KeyPath, value: Any, kind: str, cure: str = "") -> None:
        shown = repr(value) if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6)
        shown = shown.removesuffix("\n").removesuffix("\n...")
        shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
        key, cure = ".".join(path), cure or hint(value, kind)
        if cure == IN_QUOTES and self._origins.of(path) == COMMAND_LINE:
            cure = f"Write {key}={as_text(self._origins.written(path, value))} if a text is meant."
        self._tell(path, f"{key} is {shown}, but it must be {kind}", cure)

    def _tell(self, path: KeyPath, what: str, cure: str = "", where: str = "") -> None:
        """Note a mistake, once for each key, and put the value back."""
        key = ".".join(path)
        if key in self.told:
            return
        self.told.add(key)
        self.mistakes.append(ConfigError(what, where=where or self._origins.of(path), cure=cure or None))
        self._put_back(path)

    def _put_back(self, path: KeyPath) -> bool:
        """Whether there was a default, or nothing, to put into the place of a wrong value."""
        known: Any = self._defaults
        for part in path:
            known = known.get(part) if isinstance(known, dict) else None
        owner: Any = self.schema
        for part in path[:-1]:
            inside = owner._get_node(int(part) if isinstance(owner, ListConfig) and part.isdecimal() else part)
            owner = inside if isinstance(inside, DictConfig | ListConfig) else None
            if owner is None or owner._is_none() or owner._is_interpolation():
                return False
        name: Any = int(path[-1]) if isinstance(owner, ListConfig) and path[-1].isdecimal() else path[-1]
        if isinstance(owner, DictConfig) and name in owner and not is_closed(owner._get_node(name)):
            owner[name] = known
            return True
        if isinstance(owner, ListConfig):
            owner[name] = {int: 0, str: ""}.get(owner._metadata.element_type)
            return True
        return False


def place(key: str, what: str, origins: Origins) -> str:
    """Where a key's value was said; with the key itself where the message does not name it."""
    said = origins.of(tuple(key.split(".")))
    said = "its default" if said == DEFAULT else said
    return said if key in what else f"{key}, {said}"
