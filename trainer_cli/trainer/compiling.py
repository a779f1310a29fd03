"""Compile a model's forward in place, so that the names in its state stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError


def compile_model(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compile the forward of a model at its first call; `settings` are those of torch.compile.

    Raises:
        ConfigError: torch has no such backend, or refuses the settings.
    """
    if not isinstance(settings, Mapping):
        what = f"compile: expected a mapping of arguments of torch.compile, got {type(settings).__name__}"
        raise ConfigError(what, location="compile", hint="Give {} for its defaults.")
    settings = {key: value for key, value in settings.items() if value is not None}
    backend = settings.get("backend", "inductor")
    if isinstance(backend, str) and backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            cure = did_you_mean(backend, known).strip() or f"There are {', '.join(known)}."
            raise ConfigError(f"there is no compiler '{backend}'", location="compile.backend", hint=cure)
    try:
        model.compile(**settings)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torch.compile refused its settings: {error}", location="compile") from error
