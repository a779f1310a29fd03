"""Which values differ between two configs, and what set the new ones.

Values of environment variables are stored as digests, which show a change without the content.

The hyperparameters of a run: values of its config that differ from the schema's defaults, flat.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from trainer_cli.config.check import completed, contents
from trainer_cli.config.fields import ABSENT_IF_NULL, KeyPath, defaults, whole_values, why_may_change
from trainer_cli.config.provenance import Origin, Provenance
from trainer_cli.core.types import in_yaml

_RESOLVER = re.compile(r"\$\{\s*(?!oc\.(?:select|create|decode|deprecated|dict))[\w.]+\s*:")
"""The environment, or a resolver of the project: what it gives is not in the text."""
_LINE = "# digests of values from the environment: "


class Absent(Enum):
    """Stands for a value that one of two configs does not have."""

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
    def values(self) -> str:
        """`old -> new`."""
        return f"{shown(self.old)} -> {shown(self.new)}"

    def __str__(self) -> str:
        return f"{self.key}: {self.values}"

    def origin(self, provenance: Provenance) -> Origin | None:
        """What set the new value, or took the old one away; None if it is not known."""
        return provenance.gone(self.path) if self.new is ABSENT else provenance.exact(self.path)


def diff(old: DictConfig, new: DictConfig) -> list[Change]:
    """Which unresolved values differ, in each section the vanished ones last. Defaults do not show."""
    before, after = (completed(contents(config)) for config in (old, new))
    return list(_changes(before, after, ()))


def _changes(old: dict[Any, Any], new: dict[Any, Any], path: KeyPath) -> Iterator[Change]:
    for key in [*new, *(key for key in old if key not in new)]:
        key_path = (*path, str(key))
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changes(before, after, key_path)
        elif key_path in ABSENT_IF_NULL and {before, after} <= {None, ABSENT}:
            continue
        elif before != after or isinstance(before, bool) is not isinstance(after, bool):
            yield Change(key_path, before, after)


def shown(value: Any) -> str:
    """A value in YAML's one-line style."""
    return str(value) if isinstance(value, Absent) else in_yaml(value)


def line_of_digests(raw: DictConfig, salt: str) -> str:
    """A comment that ends a frozen config: digests of the values that resolvers gave, or nothing."""
    digests = {".".join(path): digest for path, digest, _ in _digests(raw, salt)}
    return f"{_LINE}{json.dumps(digests, ensure_ascii=False)}\n" if digests else ""


def changed_env_values(frozen: str, raw: DictConfig, salt: str) -> list[Change]:
    """Which values of resolvers differ from the digests in a frozen config, though their text is the same."""
    before: Any = {}
    for line in frozen.splitlines():
        if line.startswith(_LINE):
            before = json.loads(line.removeprefix(_LINE))
    return [
        Change(path, text, f"{text}, which has another value now")
        for path, digest, text in _digests(raw, salt)
        if before.get(".".join(path), digest) != digest
    ]


def _digests(raw: DictConfig, salt: str) -> Iterator[tuple[KeyPath, str, Any]]:
    """Path, digest and text of each value that a resolver has a part in, where a change of it matters."""
    for path, text in whole_values(contents(raw)):
        if not _RESOLVER.search(str(text)) or why_may_change(".".join(path)) is not None:
            continue
        node: Any = raw
        for name in path:
            node = node[next(key for key in node if str(key) == name)]
        value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        plain = json.dumps([salt, path, value], default=str)
        yield path, hashlib.sha256(plain.encode()).hexdigest()[:16], text


SECTIONS = (
    "seed", "ckpt", "model", "model_call", "data", "optimizer", "scheduler", "step", "sparsity", "param_groups",
    "freeze", "compile", "loop", "precision", "parallel", "callbacks",
)  # fmt: skip
"""Where they are. Other keys, such as `checkpoint`, do not change what is trained."""


def hparams(raw: DictConfig) -> dict[str, bool | int | float | str]:
    """Dotted key -> value; a list as one text. Left out are nulls and what refers to another key or to the
    environment, which may be a secret."""
    usual = dict(_leaves(defaults(), ()))
    return {
        ".".join(path): _plain(value)
        for path, value in _leaves(contents(raw), ())
        if path[0] in SECTIONS and value is not None and value != usual.get(path) and "${" not in str(value)
    }


def _leaves(values: Mapping[Any, Any], above: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else shown(value)
