"""Compare configs: with another config (`diff`), with the environment (digests), and with the defaults (`hparams`).

A resume refuses values that differ from the run's config. Values that come from environment variables are compared by
digests, which show a change and keep a secret.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from trainer_cli.components import list_metric_intervals
from trainer_cli.config.tree import ConfigTree, Node, ValueOrigin, fill_defaults, resolve
from trainer_cli.keys import KeyPath, defaults, matches_any, whole_values, why_may_change
from trainer_cli.metric_names import Mode, find_usual_mode
from trainer_cli.schema import SchedulerInterval, TrainConfig
from trainer_cli.steps import GLOBAL_BATCH_SIZE
from trainer_cli.values import to_yaml_line

_RESOLVER = re.compile(r"\$\{\s*(?!oc\.(?:select|create|decode|deprecated|dict))[\w.]+\s*:")
"""An interpolation with a resolver other than OmegaConf's own: its value can change while its text stays the same."""
_VARS_REFERENCE = re.compile(r"\$\{\s*vars[.\[]([^{}:\s]+?)\s*\}")
"""A reference such as `${vars.width}` to a value of the section `vars`; its group is the name of that value."""
_MAX_NESTING = 20
_DIGESTS_PREFIX = "# digests of values from the environment: "
_BY_GLOBAL_BATCH_SIZE = ("data.batch_size", "loop.grad_accum_steps")
"""Keys that may change if `data.global_batch_size` fixes the samples per step."""
_OPEN_DEFAULTS: Mapping[KeyPath, Any] = {("data", "global_batch_size"): None, ("data", "drop_last"): False}
"""Keys of open sections that a config may lack -> the value that equals that."""
_NULL_IF_EMPTY = (("freeze",),)
"""Keys that are null by default, and were an empty list in older configs."""


class Absent(Enum):
    """The value of a key that one of two configs does not have."""

    ABSENT = "(not set)"

    def __str__(self) -> str:
        return str(self.value)


ABSENT = Absent.ABSENT


class Change(NamedTuple):
    """A key whose value differs between two configs; `ABSENT` where one has none."""

    path: KeyPath
    old: Any
    new: Any

    @property
    def key(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def is_removal(self) -> bool:
        """Whether the new config has no such key."""
        return self.new is ABSENT

    @property
    def values(self) -> str:
        """`old -> new`."""
        return f"{shown(self.old)} -> {shown(self.new)}"

    def __str__(self) -> str:
        return f"{self.key}: {self.values}"

    def why_accepted(self, config: TrainConfig) -> str | None:
        """Why a resume with this config accepts the change; None if it refuses it."""
        key, allowed = self.key, config.resume_allow
        # Such a schedule steps at each evaluation or log record, so their number changes the training.
        by_evaluation, by_log = (
            interval in list_metric_intervals(config.scheduler)
            for interval in (SchedulerInterval.evaluation, SchedulerInterval.log)
        )
        changes_scheduler_steps = (by_evaluation and key.startswith("loop.eval_")) or (
            by_log and key == "loop.log_interval"
        )
        if changes_scheduler_steps and not matches_any(key, allowed):
            return None
        if (config.data or {}).get(GLOBAL_BATCH_SIZE) is not None and key in _BY_GLOBAL_BATCH_SIZE:
            return "data.global_batch_size fixes a step's samples"
        return why_may_change(key, allowed)

    def origin(self, tree: ConfigTree) -> ValueOrigin | None:
        """What set the new value or removed the old one; None if unknown."""
        return tree.gone(self.path) if self.is_removal else tree.exact(self.path)


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The values that differ, in each section removed keys last; unresolved, except for `${vars.NAME}`.

    A key that is absent equals its default.
    """
    # With the defaults: a config of an older version lacks keys that were added since.
    before, after = (_with_vars(fill_defaults(Node.of(config)).plain()) for config in (old, new))
    return list(_changes(before, after, ()))


def _with_vars(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values with those of `vars`, unresolved, in place of the references to them."""
    return _fill_vars(dict(values), Node.of(values), 0) if values.get("vars") else dict(values)


def _fill_vars(value: Any, root: Node, depth: int) -> Any:
    """A value with each `${vars.NAME}` in it replaced, also within `vars`; a reference to nothing stays."""
    if isinstance(value, dict):
        return {key: _fill_vars(item, root, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_vars(item, root, depth) for item in value]
    # Values of `vars` may refer to others; a circle has been refused, except in a run that is only read.
    if not isinstance(value, str) or depth > _MAX_NESTING:
        return value
    # A value that is one reference takes the type of the variable; within a longer text it becomes text.
    if (reference := _VARS_REFERENCE.fullmatch(value)) is not None:
        variable = root.at(_variable_path(reference[1]))
        return value if variable is None else _fill_vars(variable.plain(), root, depth + 1)

    def as_text(match: re.Match[str]) -> str:
        variable = root.at(_variable_path(match[1]))
        return match[0] if variable is None else str(variable.plain())

    filled = _VARS_REFERENCE.sub(as_text, value)
    return filled if filled == value else _fill_vars(filled, root, depth + 1)


def vars_in(root: Node, path: KeyPath) -> list[KeyPath]:
    """The keys of `vars` that the value at a path refers to."""
    node = root.at(path)
    return [] if node is None else [_variable_path(match[1]) for match in _VARS_REFERENCE.finditer(str(node.plain()))]


def _variable_path(name: str) -> KeyPath:
    """The path of a variable: `a.b[0]` is at `("vars", "a", "b", "0")`."""
    return ("vars", *re.split(r"[.\[\]]+", name.rstrip("]")))


def _changes(old: dict[Any, Any], new: dict[Any, Any], path: KeyPath) -> Iterator[Change]:
    """The changes below `path`, at which the configs have the mappings `old` and `new`."""
    # In the order of the new config, which the reader has before them.
    for key in [*new, *(key for key in old if key not in new)]:
        key_path = (*path, str(key))
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if key_path in _OPEN_DEFAULTS:
            before, after = (_OPEN_DEFAULTS[key_path] if value is ABSENT else value for value in (before, after))
        if key_path in _NULL_IF_EMPTY:
            before, after = before or None, after or None
        # Two that follow the metric differ with it alone, which is a change already.
        if key == "mode" and before != after:
            before, after = (_mode(section, value) for section, value in ((old, before), (new, after)))
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(before, after, key_path)
            continue
        # True == 1 in Python, but they are different values in YAML.
        is_other_type = isinstance(before, bool) is not isinstance(after, bool)
        if before != after or is_other_type:
            yield Change(key_path, before, after)


def _mode(section: dict[Any, Any], value: Any) -> Any:
    """The value of `mode` in a section with a metric; without one, the mode that the metric's name suggests."""
    if "metric" not in section or value not in (ABSENT, None, Mode.auto):
        return value
    # Without a metric a mode has no effect, and older configs have min.
    usual_mode = Mode.min if section["metric"] is None else find_usual_mode(str(section["metric"]))
    return value if usual_mode is None else usual_mode.value


def shown(value: Any) -> str:
    """A value in YAML's one-line style."""
    return str(value) if isinstance(value, Absent) else to_yaml_line(value)


def line_of_digests(raw: Mapping[str, Any], salt: str) -> str:
    """The last line of a stored config: a comment with digests of values from resolvers. Empty if it has none."""
    digests = {".".join(path): digest for path, digest, _ in _digests(raw, salt)}
    return f"{_DIGESTS_PREFIX}{json.dumps(digests, ensure_ascii=False)}\n" if digests else ""


def changed_env_values(stored: str, raw: Mapping[str, Any], salt: str) -> list[Change]:
    """The values from resolvers that differ from the digests in a stored config while their text is the same."""
    # A config without digests (an older one, or one without resolvers) shows no change.
    old_digests: Any = {}
    for line in stored.splitlines():
        if line.startswith(_DIGESTS_PREFIX):
            old_digests = json.loads(line.removeprefix(_DIGESTS_PREFIX))
    return [
        Change(path, text, f"{text}, which has another value now")
        for path, digest, text in _digests(raw, salt)
        if old_digests.get(".".join(path), digest) != digest
    ]


def _digests(raw: Mapping[str, Any], salt: str) -> Iterator[tuple[KeyPath, str, Any]]:
    """Path, digest and text of each value with a resolver in it, without keys that may change on a resume."""
    resolving = None
    for path, text in whole_values(_with_vars(raw)):
        if not _RESOLVER.search(str(text)) or why_may_change(".".join(path)) is not None:
            continue
        # Once, where it is needed: it takes longer than all else here.
        resolving = resolving or OmegaConf.create(dict(raw))
        value = resolve(resolving, path)
        # The digest is salted, so that short secrets cannot be looked up in a table of digests.
        plain = json.dumps([salt, path, value], default=str)
        yield path, hashlib.sha256(plain.encode()).hexdigest()[:16], text


SECTIONS = (
    "seed", "ckpt", "model", "model_call", "data", "optimizer", "scheduler", "step", "sparsity", "param_groups",
    "freeze", "eval_modules", "compile", "loop", "precision", "parallel", "callbacks",
)  # fmt: skip
"""Sections that hold hyperparameters. Other keys, such as `checkpoint`, do not affect training."""


def hparams(raw: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Dotted key -> value that differs from its default; a list as one text. Nulls and interpolations are left out."""
    # An interpolation may be a secret from the environment, and a logger would publish it.
    default_values = dict(whole_values(defaults()))
    return {
        ".".join(path): _plain(value)
        for path, value in whole_values(_with_vars(raw))
        if path[0] in SECTIONS and value is not None and value != default_values.get(path) and "${" not in str(value)
    }


def _plain(value: Any) -> bool | int | float | str:
    """The value as loggers take it: numbers and strings as they are, other values as one line of YAML."""
    # JSON, which loggers write, has no infinity and no NaN.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else shown(value)
