"""Parameter groups that were added to an optimizer after it was made, as by a callback that unfreezes a part of the
model: a checkpoint says which these are, and a load makes them again, or removes what the checkpoint does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ADDED = "added"
"""The key, in an optimizer's saved state, of the names of the untrained parameters of each added group."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The parameter groups that an optimizer will have after `change`: settings with indices, names and parameters."""

    packed: list[dict[str, Any]]
    names: list[str]
    parameters: list[torch.Tensor]
    change: Callable[[], None]


def names_of(model_names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order in which it counts them."""
    return [
        model_names.get(parameter, f"param_groups.{number}.{place}")
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def describe_added(
    model_names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer, made: int | None
) -> list[list[str]]:
    """Of each group beyond the `made` first ones: the names of its parameters that are not trained."""
    if made is None:
        return []
    return [
        [model_names[one] for one in group["params"] if one in model_names and not one.requires_grad]
        for group in optimizer.param_groups[made:]
    ]


def match_groups(
    model_names: Mapping[nn.Parameter, str],
    optimizer: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, Any]],
    added: Sequence[Sequence[str]],
    made: int | None,
) -> Groups:
    """The groups to load a checkpoint into; nothing is changed before `change` is called.

    Args:
        saved: the checkpoint's groups, with the names of their parameters as they are called here.
        added: as of `describe_added`, of the last of them.
        made: how many groups the optimizer was made with; None: it is not known, and no group is removed.
    """
    packed = optimizer.state_dict()["param_groups"]
    names = names_of(model_names, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if made is not None and made <= len(saved) < len(packed):
        return _without(optimizer, packed, names, parameters, len(saved))
    by_name = {name: parameter for parameter, name in model_names.items()}
    missing = saved[len(packed) :]
    wanted = [name for group in missing for name in group["params"]]
    # Only what was added later: a config that leaves parameters out has fewer groups as well.
    if len(saved) - len(added) > len(packed) or any(name in names or name not in by_name for name in wanted):
        return Groups(packed, names, parameters, lambda: None)
    for group in missing:
        first = len(names)
        names += group["params"]
        parameters += [by_name[name] for name in group["params"]]
        packed.append({**group, "params": list(range(first, len(names)))})

    def add() -> None:
        for group, untrained in zip(missing, added[len(added) - len(missing) :], strict=True):
            for name in group["params"]:
                by_name[name].requires_grad_(name not in untrained)
            optimizer.add_param_group({**group, "params": [by_name[name] for name in group["params"]]})

    return Groups(packed, names, parameters, add)


def _without(
    optimizer: torch.optim.Optimizer,
    packed: list[dict[str, Any]],
    names: list[str],
    parameters: list[torch.Tensor],
    count: int,
) -> Groups:
    """The first `count` groups: the training goes back to before the others were added."""
    kept = sum(len(group["params"]) for group in packed[:count])

    def remove() -> None:
        for parameter in parameters[kept:]:
            optimizer.state.pop(parameter, None)
            # As it was; its gradients would be added up until the group is added again.
            parameter.requires_grad_(False)
            parameter.grad = None
        del optimizer.param_groups[count:]

    return Groups(packed[:count], names[:kept], parameters[:kept], remove)
