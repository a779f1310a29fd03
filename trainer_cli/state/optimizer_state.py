"""Capture and load optimizers: their state of each parameter by its name, and their groups' settings.

Parameter groups that were added to an optimizer after it was made, as by a callback that unfreezes a part of the
model: a checkpoint says which these are, and a load makes them again, or removes what the checkpoint does not have.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_cli.layout import class_name
from trainer_cli.loads import WHOLE, LoadOptions
from trainer_cli.state.model_state import Fitting
from trainer_cli.state.names import clean_name, name_parameters

ADDED = "added"
"""The key, in an optimizer's saved state, of the names of the untrained parameters of each added group."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The parameter groups that an optimizer will have after `change`: settings with indices, names and parameters."""

    packed: list[dict[str, Any]]
    names: list[str]
    parameters: list[torch.Tensor]
    change: Callable[[], None]


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer keeps as attributes, or in lists of these, and steps by."""
    values = (value if isinstance(value, list | tuple) else [value] for value in vars(optimizer).values())
    return [value for kept in values for value in kept if isinstance(value, torch.optim.Optimizer)]


def names_of(model_names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order in which it counts them."""
    return [
        model_names.get(parameter, f"param_groups.{number}.{position}")
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


def describe_added(
    model_names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer, configured_count: int | None
) -> list[list[str]]:
    """Of each group beyond the first `configured_count`: the names of its parameters that are not trained."""
    if configured_count is None:
        return []
    return [
        [
            model_names[parameter]
            for parameter in group["params"]
            if parameter in model_names and not parameter.requires_grad
        ]
        for group in optimizer.param_groups[configured_count:]
    ]


def match_groups(
    model_names: Mapping[nn.Parameter, str],
    optimizer: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, Any]],
    added: Sequence[Sequence[str]],
    configured_count: int | None,
) -> Groups:
    """The groups to load a checkpoint into; nothing is changed before `change` is called.

    Args:
        saved: the checkpoint's groups, with the names of their parameters as they are called here.
        added: as in `describe_added`, of the last of them.
        configured_count: how many groups the optimizer was made with; None: it is not known, and no group is removed.
    """
    packed = optimizer.state_dict()["param_groups"]
    names = names_of(model_names, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if configured_count is not None and configured_count <= len(saved) < len(packed):
        return _without(optimizer, packed, names, parameters, len(saved))
    by_name = {name: parameter for parameter, name in model_names.items()}
    missing = saved[len(packed) :]
    added_names = [name for group in missing for name in group["params"]]
    present = set(names)
    # Only what was added later: a config that leaves parameters out has fewer groups as well.
    if len(saved) - len(added) > len(packed) or any(name in present or name not in by_name for name in added_names):
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
    """Keep the first `count` groups: the training resumes a step before the others were added."""
    kept = sum(len(group["params"]) for group in packed[:count])

    def remove() -> None:
        for parameter in parameters[kept:]:
            # Otherwise the next save would hold the state of a parameter that is in no group.
            optimizer.state.pop(parameter, None)
            # As it was; its gradients would be added up until the group is added again.
            parameter.requires_grad_(False)
            parameter.grad = None
        del optimizer.param_groups[count:]

    return Groups(packed[:count], names[:kept], parameters[:kept], remove)


log = logging.getLogger(__name__)

_PACKED = ("state", "param_groups")
_HOW = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings of the implementation of a step: the configured values stay."""
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Keys that schedulers write into a group when they are made: the values of the schedulers made here stay."""
_TRAINED = "trained_weights"
"""The key of the weights that are trained, where others are evaluated."""
_NEEDS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Settings with which torch's optimizers need this entry in the state."""


def capture_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    evaluated: Container[nn.Parameter] = (),
    configured_count: int | None = None,
) -> dict[str, Any]:
    """The optimizer's state by parameter name, and its groups with their settings.

    A parameter that was never stepped has no state, but is listed in its group. State that belongs to no parameter is
    under `other`, further entries of the optimizer's `state_dict` under `more`; most have neither.

    Args:
        evaluated: parameters of which the model's state holds the weights to evaluate; those that are trained are kept
            with the optimizer's state.
        configured_count: how many groups the optimizer was made with: a load makes the others again.
    """
    model_names = name_parameters(model)
    names = names_of(model_names, optimizer)
    packed = optimizer.state_dict()
    kept_of = packed["state"]
    tree: dict[str, Any] = {
        "class": class_name(optimizer),
        "state": {names[key]: dict(kept) for key, kept in kept_of.items() if isinstance(key, int)},
        "groups": [
            {**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        # A parameter without state was never stepped: its trained and its evaluated weights are one.
        if parameter in evaluated and name in tree["state"]:
            tree["state"][name][_TRAINED] = parameter.detach()
    if added := describe_added(model_names, optimizer, configured_count):
        tree[ADDED] = added
    if other := {key: kept for key, kept in kept_of.items() if not isinstance(key, int)}:
        tree["other"] = other
    if more := {key: value for key, value in packed.items() if key not in _PACKED}:
        tree["more"] = more
    return tree


def fit_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    options: LoadOptions = WHOLE,
    *,
    keep_settings: Collection[str] = (),
    moved: Collection[str] = (),
    configured: Sequence[Mapping[str, Any]] | None = None,
) -> Fitting:
    """The parts of a captured state that do not fit an optimizer, and what `load` will give it.

    Settings come from the checkpoint, and `load` logs which of them are configured otherwise; `moved` names those
    that schedules move, which differ as a matter of course. Without the states of the schedules all settings stay as
    configured. Parameters that `options` ignore keep the state that they have.

    Args:
        configured: the groups' settings as the optimizer was made with them; not given: as they are.
    """
    model_names = name_parameters(model)
    renamed = options.renamed([*state["state"], *(name for group in state["groups"] for name in group["params"])])
    every_name = set(model_names.values())
    in_model = {name: clean_name(new, every_name) for name, new in renamed.items()}
    saved_groups = [{**group, "params": [in_model[name] for name in group["params"]]} for group in state["groups"]]
    configured_count = None if configured is None else len(configured)
    live_groups = match_groups(model_names, optimizer, saved_groups, state.get(ADDED, ()), configured_count)
    names, live = live_groups.names, live_groups.packed
    live_set = set(names)
    new_name = {name: clean_name(new, live_set) for name, new in renamed.items()}
    ignored = options.ignored({*names, *new_name.values()})
    if not options.strict:
        ignored |= live_set ^ set(new_name.values())
    live_names = [[names[index] for index in group["params"] if names[index] not in ignored] for group in live]
    saved = [[new_name[name] for name in group["params"] if new_name[name] not in ignored] for group in state["groups"]]
    kept_of = {new_name[name]: dict(kept) for name, kept in state["state"].items() if new_name[name] not in ignored}
    rows = []
    if state["class"] != class_name(optimizer):
        rows.append(f"it is a {class_name(optimizer)}, but the checkpoint has a {state['class']}")
    rows += find_misplaced(live_names, saved)
    saved_set = {name for group in saved for name in group}
    rows += [f"{name}: has state, but is in no group of the checkpoint" for name in kept_of if name not in saved_set]
    rows += [
        f"{name}: its {_TRAINED} {fault}"
        for name, parameter in zip(names, live_groups.parameters, strict=True)
        if (weights := kept_of.get(name, {}).get(_TRAINED)) is not None
        and (fault := _tensor_fault(parameter, weights, exact=True))
    ]
    # Without the states of the schedules, which have moved them, the settings stay as configured.
    saved_settings = state["groups"] if options.takes("schedulers") else [{} for _ in state["groups"]]
    groups, notes = _merge_settings(type(optimizer), live, saved_settings, configured, keep_settings, moved)
    # Shapes are compared once all names fit: only then each state has its parameter.
    if not rows:
        rows = _state_faults(optimizer, names, live_groups.parameters, kept_of, groups)
    index_of = {name: index for index, name in enumerate(names)}

    def load() -> None:
        for line in dict.fromkeys(notes):
            log.warning("optimizer: %s", line)
        # Groups first: the state below has an entry for each of their parameters.
        live_groups.change()
        trained = {name: kept.pop(_TRAINED) for name, kept in kept_of.items() if _TRAINED in kept}
        packed: dict[Any, Any] = {index_of[name]: kept for name, kept in kept_of.items()}
        packed |= state.get("other", {})
        _load_with_inner(optimizer, {**state.get("more", {}), "state": packed, "param_groups": groups})
        # Torch casts states to the type of the parameter, which would round those of a 16-bit model.
        _undo_casts(optimizer, packed)
        with torch.no_grad():
            for name, parameter in zip(names, _parameters(optimizer), strict=True):
                if name in trained:
                    # After the model was loaded, whose weights are the evaluated ones here.
                    parameter.copy_(trained[name])

    return Fitting(rows, load)


def find_misplaced(live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[str]:
    """A line for each name that is in a group of the optimizer or of the checkpoint, but not of both."""
    rows = []
    if len(live) != len(saved):
        rows.append(f"it has {len(live)} parameter groups, but the checkpoint has {len(saved)}")
    for number, (live_names, saved_names) in enumerate(zip(live, saved, strict=False)):
        live_set, saved_set = set(live_names), set(saved_names)
        rows += [f"{name}: missing in group {number} of the checkpoint" for name in live_names if name not in saved_set]
        rows += [f"{name}: not in group {number} of this optimizer" for name in saved_names if name not in live_set]
    return rows


def _merge_settings(
    kind: type[torch.optim.Optimizer],
    live: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    configured: Sequence[Mapping[str, Any]] | None,
    keep: Collection[str],
    moved: Collection[str],
) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups with the settings of a checkpoint, and a line for each that is configured otherwise; arguments as of
    `fit_optimizer`."""
    groups, notes = [], []
    # What an optimizer counts in its groups, as Prodigy does, is no setting.
    takes = _arguments(kind)
    for number, (group, settings) in enumerate(zip(live, saved, strict=False)):
        own_keys = {key for key in group if key in keep or key in _HOW or key in _OF_SCHEDULES}
        first = group if configured is None else configured[number] if number < len(configured) else {}
        notes += [
            f"{key} is {settings[key]}, as in the checkpoint; {first[key]} is configured"
            for key in first
            if key in settings and key not in own_keys and key not in moved and key != "params"
            if (not takes or key in takes) and not _alike(settings[key], first[key])
        ]
        groups.append({**group, **settings, **{key: group[key] for key in own_keys}, "params": group["params"]})
    return groups, notes


def _state_faults(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    kept_of: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Tensors that do not fit their parameter, and what a setting needs and the state lacks.

    What torch's own optimizers keep is known: in each dimension as much as the parameter, or one.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind is torch.optim.LBFGS:
        return []
    rows = []
    for group in groups:
        needed = [entry for setting, entry in _NEEDS.items() if group.get(setting)]
        if kind is torch.optim.RMSprop and group.get("momentum"):
            needed.append("momentum_buffer")
        for index in group["params"]:
            name, parameter = names[index], parameters[index]
            kept = kept_of.get(name)
            for key, value in (kept or {}).items():
                if isinstance(value, torch.Tensor) and value.ndim and (fault := _tensor_fault(parameter, value)):
                    rows.append(f"{name}: its {key} {fault}")
            rows += [f"{name}: its {key} is missing in the checkpoint" for key in needed if kept and key not in kept]
    return rows


def _tensor_fault(parameter: torch.Tensor, value: torch.Tensor, *, exact: bool = False) -> str | None:
    fits = value.ndim == parameter.ndim and all(
        size == expected or (size == 1 and not exact)
        for size, expected in zip(value.shape, parameter.shape, strict=True)
    )
    if not fits and (exact or value.numel() != 1):
        return f"has shape {tuple(value.shape)} in the checkpoint, but the parameter {tuple(parameter.shape)}"
    # States of a 16-bit parameter may be more precise than it.
    wider = (torch.float32, torch.float64) if parameter.dtype in (torch.bfloat16, torch.float16) else ()
    if value.dtype not in (parameter.dtype, *wider):
        return f"is {value.dtype} in the checkpoint, but the parameter is {parameter.dtype}"
    return None


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return float(first) == float(second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    return bool(first == second)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _arguments(kind: type) -> set[str]:
    """The names that an optimizer's class takes; none where they are not known."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (ValueError, TypeError):
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set()
    return {parameter.name for parameter in parameters}


def _load_with_inner(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer, and have those by which it steps share with it what they shared before."""
    shared = [
        (inner, attribute)
        for inner in inner_optimizers(optimizer)
        for attribute in ("state", "param_groups")
        if getattr(inner, attribute) is getattr(optimizer, attribute)
    ]
    optimizer.load_state_dict({**state, "param_groups": _with_ranges(optimizer, state["param_groups"])})
    # Torch replaces both in the optimizer alone.
    for inner, attribute in shared:
        setattr(inner, attribute, getattr(optimizer, attribute))


def _with_ranges(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with ranges in place of the lists of consecutive indices, if only torch's own code reads them."""
    # Torch searches the groups for the index of each tensor of the state: in lists, in quadratic time.
    load = getattr(optimizer.load_state_dict, "__func__", None)
    if load is not torch.optim.Optimizer.load_state_dict or optimizer._optimizer_load_state_dict_pre_hooks:
        return groups
    changed = []
    for group in groups:
        indices = group["params"]
        consecutive = range(indices[0], indices[0] + len(indices)) if indices else range(0)
        changed.append({**group, "params": consecutive if [*consecutive] == indices else indices})
    return changed


def _undo_casts(optimizer: torch.optim.Optimizer, packed: Mapping[Any, Any]) -> None:
    """`Optimizer.load_state_dict` casts states to the parameter's type; take them as they were saved.

    States shaped like their parameter also take its layout, as they had when they were made.
    """
    parameters, holders = _parameters(optimizer), [optimizer, *inner_optimizers(optimizer)]
    for index, kept in packed.items():
        if not isinstance(index, int):
            continue
        parameter = parameters[index]
        for holder in holders:
            state = holder.state.get(parameter, {})
            for key in state.keys() & kept.keys():
                state[key] = _as_saved(state[key], kept[key], parameter)


def _as_saved(present: Any, saved: Any, parameter: torch.Tensor) -> Any:
    if isinstance(saved, Mapping) and isinstance(present, dict):
        return {key: _as_saved(present[key], value, parameter) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        return type(saved)(_as_saved(*pair, parameter) for pair in zip(present, saved, strict=True))
    if not isinstance(saved, torch.Tensor):
        return present
    if present.dtype != saved.dtype:
        present = saved.to(present.device)
    if present.shape == parameter.shape and present.stride() != parameter.stride() and present.numel():
        present = torch.empty_like(parameter, dtype=present.dtype, device=present.device).copy_(present)
    return present.detach()
