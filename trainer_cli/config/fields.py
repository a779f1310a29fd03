"""Every key of the config with its type, default and meaning, and the keys that a resume may change.

A resume refuses a change of any key that is not in MAY_CHANGE, since the run would no longer be the same training.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from trainer_cli.errors import Code, ConfigError, raise_all
from trainer_cli.loads import LEAVE_OUT, can_resume, check_leave_out, describe_left_out, find_left_out
from trainer_cli.patterns import alternatives, did_you_mean, matches
from trainer_cli.policy import SaveRules
from trainer_cli.schema import sections as schema
from trainer_cli.schema.auto import is_auto_batch_size
from trainer_cli.steps import GLOBAL_BATCH_SIZE, Duration, Interval, StepCounts
from trainer_cli.values import MISSING, ValueKind, check_rules, kind_of

KeyPath = tuple[str, ...]

OPEN = ("model", "data", "optimizer", "scheduler", "step", "sparsity", "param_groups", "callbacks", "loggers", "vars")
"""Sections with arbitrary keys."""
_SHARING = (
    "strategy", "find_unused_parameters", "shard_size", "tensor_size", "wrap", "wrap_min_parameters", "cpu_offload",
    "activation_checkpointing",
)  # fmt: skip
"""Keys of `parallel` that divide the work among processes and do not affect precision."""
MAY_CHANGE: Mapping[str, str] = {
    "name": "a label: it does not affect training",
    "run_dir": "where the run is kept",
    "notes": "a description: it does not affect training",
    "tags": "a description: it does not affect training",
    "report": "what is written after the end",
    "device": "where it trains",
    "parallel.processes_per_node": "where it trains",
    "parallel.timeout": "when the processes give up",
    **{f"parallel.{key}": "how processes share the work" for key in _SHARING},
    "model_call": "a model that takes a batch one way refuses the others",
    "resume": "how to start",
    "resume_allow": "how to start",
    "ckpt": "is used only while the run has no checkpoint",
    "load.chunk_size": "how checkpoints are downloaded",
    "load.progress": "how checkpoints are downloaded",
    "load.*": "is used only while the run has no checkpoint",
    "trust": "whose code may be built",
    "vars": "only the keys that refer to it matter",
    "vars.*": "only the keys that refer to it matter",
    "validate.*": "is used by `train validate` only",
    "predict.*": "is used by `train predict` only",
    "loop.max_duration": "where the run ends",
    "loop.hard_stop": "where the run ends",
    "loop.min_duration": "where the run ends",
    "loop.max_time": "when this process stops",
    "loop.eval_*": "evaluations do not affect training",
    "loop.log_interval": "what is recorded",
    "restarts.*": "what happens after a failure",
    "logging.*": "what is printed",
    "loggers": "what is recorded",
    "loggers.*": "what is recorded",
    f"callbacks.{schema.SYSTEM}": "what is recorded",
    f"callbacks.{schema.SYSTEM}.*": "what is recorded",
    "checkpoint.*": "what is saved and kept, when and where",
    "data.num_workers": "samples do not depend on who loads them",
    "data.persistent_workers": "samples do not depend on who loads them",
    "data.worker_timeout": "samples do not depend on who loads them",
}
"""Glob of config keys -> why they may change."""
DATA_KEYS = (
    "batch_size", "val_batch_size", GLOBAL_BATCH_SIZE, "num_workers", "collate_fn", "persistent_workers",
    "worker_timeout", "overfit_batches", "drop_last",
)  # fmt: skip
"""Keys of `data` for our loaders, which the data object does not get."""
LEAST_OF_DATA: Mapping[str, int] = {
    "batch_size": 1, "val_batch_size": 1, GLOBAL_BATCH_SIZE: 1, "num_workers": 0, "overfit_batches": 1,
}  # fmt: skip
"""Key of DATA_KEYS that holds a whole number -> the least that it may be."""
BY_GLOBAL_BATCH_SIZE = ("data.batch_size", "loop.grad_accum_steps")
"""Keys that may change if `data.global_batch_size` fixes the samples per step."""
SEVERAL = ("callbacks", "loggers")
"""Groups of which several options are chosen at once."""
DEFAULTS_OF_OPEN: Mapping[KeyPath, Any] = {("data", "global_batch_size"): None, ("data", "drop_last"): False}
"""Keys of open sections that a config may lack -> the value that equals that."""
NULL_IF_EMPTY = (("freeze",),)
"""Keys that are null by default, and were an empty list in older configs."""
SOURCE = "source"
"""Entry of `resume_allow` for the project's source code; not a key of the config."""


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
        return (
            _meanings()[self.kind.__name__][""]
            if self.is_section
            else _meanings()[self.section.__name__][self.path[-1]]
        )

    @property
    def may_change(self) -> str | None:
        """Why it may change on a resume, or None."""
        return None if self.is_section else why_may_change(self.key)


@cache
def fields() -> tuple[ConfigKey, ...]:
    """Every key in the order of the YAML, each section before its keys."""
    return tuple(_fields(schema.TrainConfig, ()))


@cache
def sections() -> Mapping[KeyPath, type]:
    """Path -> dataclass of each section, the whole config under `()`."""
    return {
        (): schema.TrainConfig,
        **{config_key.path: config_key.kind for config_key in fields() if config_key.is_section},
    }


@cache
def text_keys() -> frozenset[KeyPath]:
    """The keys that take strings and no numbers."""
    kinds = {entry.path: kind_of(entry.kind) for entry in fields() if not entry.is_section}
    return frozenset(
        path for path, kind in kinds.items() if kind and "str" in kind.names and {"int", "float"}.isdisjoint(kind.names)
    )


def kind_at(key: str) -> ValueKind | None:
    """What the value of a key may be; None for a key that is not in the schema, and where it may be anything."""
    return next((kind_of(entry.kind) for entry in fields() if entry.key == key), None)


def why_refused(key: str, value: Any) -> str | None:
    """Why a plain value is refused for a key of the schema, or for one of `data`; None if it is not, or the key may
    have any value."""
    section, _, name = key.partition(".")
    entry = next((entry for entry in fields() if entry.key == key and not entry.is_section), None)
    try:
        if section == "data" and name in LEAST_OF_DATA:
            check_data_count(name, value)
        elif entry is not None and (kind := kind_of(entry.kind)) is not None:
            # A whole number is read as a string where only a string may be.
            text = str(value) if type(value) is int and "str" in kind.names else value
            raise_all(list(kind.mistakes(text, key)))
        if entry is not None:
            check_rules(entry.rules, key, value)
    except ConfigError as error:
        return error.message
    return None


def check_data_count(name: str, value: Any) -> None:
    """Check a number of `data` that our loaders read.

    Raises:
        ConfigError: it is no whole number, or below the least.
    """
    if name == "batch_size" and is_auto_batch_size(value):
        return
    least = LEAST_OF_DATA[name]
    if value is not None and value != MISSING and (type(value) is not int or value < least):
        auto = ", or auto, or auto:LIMIT" if name == "batch_size" and isinstance(value, str) else ""
        message = f"data.{name} is {value!r}, but it must be a whole number of at least {least}{auto}"
        raise ConfigError(message, location=f"data.{name}")


def defaults() -> dict[str, Any]:
    """The schema's defaults as plain values, made anew."""
    values: dict[str, Any] = {}
    for config_key in fields():
        section = values
        for name in config_key.path[:-1]:
            section = section[name]
        default = config_key.default
        # Copies: callers change their tree in place.
        section[config_key.path[-1]] = (
            {} if config_key.is_section else default.copy() if isinstance(default, list | dict) else default
        )
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


def why_may_change(key: str, allowed: Iterable[str] = ()) -> str | None:
    """Why a key may change on a resume, or None. `allowed` are further globs; a section includes all keys below it."""
    for pattern, reason in MAY_CHANGE.items():
        if fnmatchcase(key, pattern):
            return reason
    return "resume_allow" if matches_any(key, allowed) else None


def matches_any(key: str, allowed: Iterable[str]) -> bool:
    """Whether one of these globs matches a key or a section above it."""
    return any(key == pattern or key.startswith(f"{pattern}.") or matches(key, pattern) for pattern in allowed)


def check_resume_allow(allowed: Iterable[str]) -> Iterator[ConfigError]:
    """Refuse keys and globs of `resume_allow` that match no key: a misspelt one would silently allow nothing."""
    for pattern in allowed:
        if pattern != SOURCE and not any(map(_may_match, alternatives(pattern))):
            hint = did_you_mean(pattern, [config_key.key for config_key in fields()]).strip()
            message = f"resume_allow names {pattern!r}, and there is no such key"
            hint = hint or "It takes keys, sections and globs of them."
            yield ConfigError(message, location="resume_allow", code=Code.unknown_key, hint=hint)


def check_left_out(config: schema.TrainConfig) -> Iterator[ConfigError]:
    """Refuse names in `checkpoint.leave_out` that are not state of the run, and restarts that would lack state."""
    callbacks = [name for name, node in config.callbacks.items() if node is not None]
    if config.sparsity is not None:
        callbacks.append("sparsity")
    try:
        check_leave_out(LEAVE_OUT, config.checkpoint.leave_out, callbacks)
    except ConfigError as error:
        yield error
    lacking = find_left_out(config.checkpoint.leave_out, callbacks)
    if lacking and config.restarts.max and not can_resume(lacking, config.load.states):
        yield ConfigError(
            f"restarts.max is {config.restarts.max}, but {describe_left_out(lacking)}", location=LEAVE_OUT
        )


def check_ephemeral_interval(config: schema.TrainConfig) -> Iterator[ConfigError]:
    """Refuse ephemeral saves that are not more frequent than regular ones, as far as the config alone shows it.

    An epoch has a known number of steps here if `loop.steps_per_epoch` is set; policy/rules.py compares the others.
    """
    settings, loop = config.checkpoint, config.loop
    if settings.ephemeral_save_interval is None or settings.is_automatic:
        return
    run = Duration.parse(loop.max_duration)

    def interval(text: Any) -> Interval | None:
        return None if text is None else Interval(Duration.parse(text).within(run), loop.steps_per_epoch)

    try:
        rules = SaveRules(interval(settings.save_interval), interval(settings.ephemeral_save_interval))
        rules.check_ephemeral(Interval(run, loop.steps_per_epoch), StepCounts(steps_per_epoch=loop.steps_per_epoch))
    except ConfigError as error:
        yield error
    except ValueError:
        return  # A part of an epoch whose length is not known yet.


def whole_values(values: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a tree that is not a mapping, with its path; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (((str(key), *path), leaf) for path, leaf in whole_values(value))
        else:
            yield (str(key),), value


def leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every scalar with its path, including the items of lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    else:
        yield path, value


def _may_match(pattern: str) -> bool:
    glob = re.search(r"[*?\[]", pattern)
    if glob is None:
        parts = tuple(pattern.split("."))
        return all(parts) and unknown_key(parts) is None
    # A star also matches dots, so a glob that reaches into an open section may match an unknown key there.
    start = pattern[: glob.start()]
    return any(
        fnmatchcase(config_key.key, pattern)
        or (
            config_key.key in OPEN
            and (f"{config_key.key}.".startswith(start) or start.startswith(f"{config_key.key}."))
        )
        for config_key in fields()
    )


def _fields(section: type, path: KeyPath) -> Iterator[ConfigKey]:
    for field in dataclasses.fields(section):
        key_path, default = (*path, field.name), None
        if not dataclasses.is_dataclass(field.type):
            value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            default = value.value if isinstance(value, Enum) else value
        yield ConfigKey(key_path, section, field.type, default, field.metadata)
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from _fields(field.type, key_path)


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it; the class's own under the empty name."""
    meanings: dict[str, dict[str, str]] = {}
    files = {inspect.getfile(section) for section in sections().values()}
    # From the source: a class keeps no docstring of its fields.
    for node in (node for file in files for node in ast.parse(Path(file).read_text("utf-8")).body):
        if isinstance(node, ast.ClassDef):
            meanings[node.name] = {"": ast.get_docstring(node) or ""}
            for statement, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
                    meanings[node.name][statement.target.id] = " ".join(text.split())
    return meanings
