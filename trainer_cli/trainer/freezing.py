"""Parameters by patterns of their names: freeze them, and say what a pattern that matches nothing may have meant."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer_cli.config.globs import matches, why_no_pattern
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Set `requires_grad` to False for the parameters whose names match a glob, or a regular expression after `re:`.

    Returns the norms whose `running_mean` matches too. They belong in evaluation mode, where the statistics stay.

    Raises:
        ConfigError: a pattern matches no parameter, or all are frozen.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        check_pattern(pattern, "freeze")
        found = [parameter for name, parameter in named.items() if matches(name, pattern)]
        if not found:
            raise matches_nothing(pattern, list(named), "freeze")
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError("freeze: no parameter is left to train", location="freeze")
    norms = [
        module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        and any(matches(f"{name}.running_mean".lstrip("."), pattern) for pattern in patterns)
    ]
    for norm in norms:
        norm.eval()
    return norms


def check_pattern(pattern: str, where: str) -> None:
    """Refuse what is no regular expression."""
    if (fault := why_no_pattern(pattern)) is not None:
        raise ConfigError(f"{where}: {fault}", location=where)


def matches_nothing(pattern: str, names: Sequence[str], where: str, what: str = "parameter") -> ConfigError:
    """The error for a pattern that matches none of these names, with the nearest name or module."""
    modules = {name.rsplit(".", depth)[0] + ".*" for name in names for depth in range(1, name.count(".") + 1)}
    like = f"Its parameters are named like {', '.join(names[:4])}."
    return ConfigError(
        f"{where}: '{pattern}' matches no {what} of the model",
        location=where,
        hint=" ".join(filter(None, (did_you_mean(pattern, [*sorted(modules), *names]).strip(), like))),
    )
