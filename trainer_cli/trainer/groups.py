"""Parameters in groups of equal optimizer settings, chosen by globs of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer_cli.config.globs import matches
from trainer_cli.errors import ConfigError


def parameter_groups(model: nn.Module, patterns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameters in groups of equal settings. Every glob that matches a name counts, later ones win.

    Raises:
        ConfigError: a glob matches no parameter, or its settings are no mapping.
    """
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"param_groups: '{pattern}' must hold optimizer settings", where="param_groups")
        if not any(matches(name, pattern) for name, _ in model.named_parameters()):
            names = [name for name, _ in model.named_parameters()]
            raise ConfigError(
                f"param_groups: '{pattern}' matches no parameter of the model",
                where="param_groups",
                cure=f"Its parameters are named like {', '.join(names[:4])}.",
            )
    groups: dict[tuple[tuple[str, Any], ...], list[Any]] = {}
    for name, parameter in model.named_parameters():
        settings = {}
        for pattern, own in patterns.items():
            if matches(name, pattern):
                settings.update(own)
        if parameter.requires_grad:
            groups.setdefault(tuple(settings.items()), []).append(parameter)
    return [{"params": members, **dict(settings)} for settings, members in groups.items()]
