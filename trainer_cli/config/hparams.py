"""The hyperparameters of a run: values of its config that differ from the schema's defaults, flat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from trainer_cli.config.diff import shown
from trainer_cli.config.fields import KeyPath, defaults
from trainer_cli.config.validation import contents

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
