"""Every key of the config with its type, default and meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer_cli.auto_values import AUTO, is_auto_batch_size
from trainer_cli.errors import Code, ConfigError, raise_all
from trainer_cli.keys.resume_rules import why_may_change
from trainer_cli.schema import TrainConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE
from trainer_cli.values import MISSING, ValueKind, check_values, kind_of, unfit_value

KeyPath = tuple[str, ...]

OPEN = ("model", "data", "optimizer", "scheduler", "step", "sparsity", "param_groups", "callbacks", "loggers", "vars")
"""Sections with arbitrary keys."""
DATA_KEYS = (
    "batch_size", "val_batch_size", GLOBAL_BATCH_SIZE, "num_workers", "collate_fn", "persistent_workers",
    "worker_timeout", "overfit_batches", "drop_last",
)  # fmt: skip
"""Keys of `data` for our loaders, which the data object does not get."""
_LEAST_OF_DATA: Mapping[str, int] = {
    "batch_size": 1, "val_batch_size": 1, GLOBAL_BATCH_SIZE: 1, "num_workers": 0, "overfit_batches": 1,
}  # fmt: skip
"""Key of DATA_KEYS that holds a whole number -> the least that it may be."""
OF_ONE_COMMAND = ("resume", "resume_allow", "source", "trust")
"""Keys that apply to a single command and are not recovered from a config on disk."""
SEVERAL = ("callbacks", "loggers")
"""Groups of which several options are chosen at once."""
WITHOUT_EFFECT = (
    "name", "run_dir", "resume", "resume_allow", "source", "trust", "checkpoint", "loggers", "logging", "restarts",
    "notify", "sweep",
)  # fmt: skip
"""Sections on which no number of a training depends."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the config, or a section, whose `kind` is its dataclass. `rules` is the metadata of its field."""

    path: KeyPath
    section: type
    kind: Any
    default: Any
    rules: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        """Whether it is a section with a fixed set of keys."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def meaning(self) -> str:
        """The docstring under the field, or that of the section's class."""
        if self.is_section:
            return _meanings()[self.kind.__name__][""]
        return _meanings()[self.section.__name__][self.path[-1]]

    @property
    def may_change(self) -> str | None:
        """Why it may change on a resume, or None."""
        return None if self.is_section else why_may_change(self.key)


@cache
def list_keys() -> tuple[ConfigKey, ...]:
    """Every key in the order of the YAML, each section before its keys."""
    return tuple(_walk_fields(TrainConfig, ()))


@cache
def sections() -> Mapping[KeyPath, type]:
    """Path -> dataclass of each section, the whole config under `()`."""
    return {
        (): TrainConfig,
        **{config_key.path: config_key.kind for config_key in list_keys() if config_key.is_section},
    }


@cache
def text_keys() -> frozenset[KeyPath]:
    """The keys that take strings and no numbers."""
    kinds = {entry.path: kind_of(entry.kind) for entry in list_keys() if not entry.is_section}
    return frozenset(
        path for path, kind in kinds.items() if kind and "str" in kind.names and {"int", "float"}.isdisjoint(kind.names)
    )


def kind_at(key: str) -> ValueKind | None:
    """What the value of a key may be; None for a key that is not in the schema, and where it may be anything."""
    return next((kind_of(entry.kind) for entry in list_keys() if entry.key == key), None)


def why_refused(key: str, value: Any) -> str | None:
    """Why a plain value is refused for a key of the schema or of `data`; None if it is accepted, or the key unknown."""
    prefix, _, name = key.rpartition(".")
    entry = next((entry for entry in list_keys() if entry.key == key and not entry.is_section), None)
    try:
        if prefix == "data":
            raise_all(list(check_data_counts({name: value})))
        elif entry is not None:
            kind = kind_of(entry.kind)
            # A whole number is read as a string where only a string may be.
            is_text = type(value) is int and kind is not None and "str" in kind.names
            check_values(entry.section, {name: str(value) if is_text else value}, prefix)
    except ConfigError as error:
        return error.message
    return None


def check_data_counts(node: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Refuse numbers of `data` that our loaders read and that are not whole, or too small."""
    for name, least in _LEAST_OF_DATA.items():
        value = node.get(name)
        is_auto = is_auto_batch_size(value) if name == "batch_size" else name == "num_workers" and value == AUTO
        is_valid = is_auto or (type(value) is int and value >= least)
        if value is None or value == MISSING or is_valid:
            continue
        autos = {"batch_size": ", or auto, or auto:LIMIT", "num_workers": ", or auto"}
        auto = autos.get(name, "") if isinstance(value, str) else ""
        expected = f"a whole number of at least {least}{auto}"
        yield unfit_value(f"data.{name}", value, expected, code=Code.wrong_value)


def defaults() -> dict[str, Any]:
    """The schema's defaults as plain values, made anew."""
    values: dict[str, Any] = {}
    for config_key in list_keys():
        section = values
        for name in config_key.path[:-1]:
            section = section[name]
        default = {} if config_key.is_section else config_key.default
        # Copies: callers change their tree in place.
        section[config_key.path[-1]] = default.copy() if isinstance(default, list | dict) else default
    return values


def unknown_key(path: KeyPath) -> tuple[KeyPath, list[str]] | None:
    """The first unknown key on `path`, and the keys of its section; None if all are known."""
    for depth, key in enumerate(path):
        section = sections().get(path[:depth])
        if section is None:
            return None
        names = [field.name for field in dataclasses.fields(section)]
        if key not in names:
            return path[: depth + 1], names
    return None


def whole_values(values: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a tree that is not a mapping, with its path; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in whole_values(value))
        else:
            yield (str(key),), value


def _walk_fields(section: type, path: KeyPath) -> Iterator[ConfigKey]:
    """The keys of the dataclass of the section at `path`, each followed by the keys below it."""
    for field in dataclasses.fields(section):
        key_path, default = (*path, field.name), None
        if not dataclasses.is_dataclass(field.type):
            value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            default = value.value if isinstance(value, Enum) else value
        yield ConfigKey(key_path, section, field.type, default, field.metadata)
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from _walk_fields(field.type, key_path)


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it; the class's own under the empty name."""
    meanings: dict[str, dict[str, str]] = {}
    files = {inspect.getfile(section) for section in sections().values()}
    # From the source: a class keeps no docstring of its fields.
    statements = [statement for file in files for statement in ast.parse(Path(file).read_text("utf-8")).body]
    for cls in statements:
        if not isinstance(cls, ast.ClassDef):
            continue
        meanings[cls.name] = {"": ast.get_docstring(cls) or ""}
        for statement, following in pairwise(cls.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ast.literal_eval(following.value) if isinstance(following, ast.Expr) else ""
                meanings[cls.name][statement.target.id] = " ".join(text.split())
    return meanings
