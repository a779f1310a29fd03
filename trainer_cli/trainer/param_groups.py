"""Parameters in groups of equal optimizer settings, chosen by globs of their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from trainer_cli.config.globs import matches
from trainer_cli.config.suggest import did_you_mean
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
    groups: list[tuple[list[tuple[str, Any]], list[Any]]] = []
    for name, parameter in model.named_parameters():
        settings = {}
        for pattern, own in patterns.items():
            if matches(name, pattern):
                settings.update(own)
        if parameter.requires_grad:
            said = list(settings.items())
            members = next((members for others, members in groups if others == said), None)
            if members is None:
                groups.append((said, members := []))
            members.append(parameter)
    return [{"params": members, **dict(said)} for said, members in groups]


def refuse_unknown_settings(optimizer: Any, name: str, takes: Collection[str], patterns: Mapping[str, Any]) -> None:
    """Refuse settings that an optimizer called `name`, whose constructor `takes` these, does not have: it ignores them.

    Raises:
        ConfigError: naming the setting and the nearest that there is.
    """
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, Mapping):
        return
    known = [key for key in dict.fromkeys((*takes, *map(str, defaults))) if key != "params"]
    for pattern, settings in patterns.items():
        for key in settings:
            if key not in known:
                where = f"param_groups.{pattern}.{key}"
                cure = did_you_mean(key, known).strip() or f"It has: {', '.join(known)}."
                raise ConfigError(f"{name} has no setting '{key}'", where=where, cure=cure)
