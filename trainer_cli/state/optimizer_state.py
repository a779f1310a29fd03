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
ParamGroups = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimizer: the settings of each, and its parameters or their indices."""
PackedGroups = list[dict[str, Any]]
"""Parameter groups as a state dict has them: with indices for parameters."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The parameter groups that an optimizer will have after `change`: settings with indices, names and parameters."""

    packed: PackedGroups
    names: list[str]
    parameters: list[torch.Tensor]
    change: Callable[[], None]


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer keeps as attributes, or in lists of these, and steps by."""
    lists = (value if isinstance(value, list | tuple) else [value] for value in vars(optimizer).values())
    return [value for values in lists for value in values if isinstance(value, torch.optim.Optimizer)]


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
    """For each group beyond the first `configured_count`: the names of its parameters that are not trained."""
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
    saved: ParamGroups,
    added: Sequence[Sequence[str]],
    configured_count: int | None,
) -> Groups:
    """The groups to load a checkpoint into; nothing is changed before `change` is called.

    Args:
        saved: the checkpoint's groups, with the names of their parameters as they are called here.
        added: result of `describe_added` for the last ones of `saved`.
        configured_count: number of groups that the optimizer was made with; None: unknown, and no group is removed.
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
    # Only groups that were added later are made again: a config that leaves parameters out has fewer groups as well.
    lacks_configured = len(saved) - len(added) > len(packed)
    if lacks_configured or any(name in present or name not in by_name for name in added_names):
        return Groups(packed, names, parameters, lambda: None)
    for group in missing:
        start = len(names)
        names += group["params"]
        parameters += [by_name[name] for name in group["params"]]
        packed.append({**group, "params": list(range(start, len(names)))})

    def add() -> None:
        """Add the groups that the checkpoint has, and train those of their parameters that were trained."""
        for group, untrained in zip(missing, added[len(added) - len(missing) :], strict=True):
            for name in group["params"]:
                by_name[name].requires_grad_(name not in untrained)
            optimizer.add_param_group({**group, "params": [by_name[name] for name in group["params"]]})

    return Groups(packed, names, parameters, add)


def _without(
    optimizer: torch.optim.Optimizer,
    packed: PackedGroups,
    names: list[str],
    parameters: list[torch.Tensor],
    count: int,
) -> Groups:
    """Keep the first `count` groups: the training resumes a step before the others were added."""
    parameter_count = sum(len(group["params"]) for group in packed[:count])

    def remove() -> None:
        """Remove the groups that the checkpoint does not have, with the state of their parameters."""
        for parameter in parameters[parameter_count:]:
            # Otherwise the next save would hold the state of a parameter that is in no group.
            optimizer.state.pop(parameter, None)
            # As before the group was added. Its gradients would be added up until the group is added again.
            parameter.requires_grad_(False)
            parameter.grad = None
        del optimizer.param_groups[count:]

    return Groups(packed[:count], names[:parameter_count], parameters[:parameter_count], remove)


log = logging.getLogger(__name__)

_PACKED = ("state", "param_groups")
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings of the implementation of a step: the configured values stay."""
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Keys that schedulers write into a group when they are made: the values of the schedulers made here stay."""
_TRAINED = "trained_weights"
"""The key of the weights that are trained, where others are evaluated."""
_NEEDED_ENTRIES = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Setting of torch's optimizers -> the entry of the state that it needs."""


def capture_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    evaluated: Container[nn.Parameter] = (),
    configured_count: int | None = None,
) -> dict[str, Any]:
    """The optimizer's state by parameter name, and its groups with their settings.

    A parameter that was never stepped has no state, but is listed in its group. State that belongs to no parameter is
    under `other`, further entries of the optimizer's `state_dict` under `more`; most optimizers have neither.

    Args:
        evaluated: parameters for which the model's state has the weights to evaluate. The weights that are trained are
            saved with the optimizer's state.
        configured_count: number of groups that the optimizer was made with. A load makes the others again.
    """
    model_names = name_parameters(model)
    names = names_of(model_names, optimizer)
    packed = optimizer.state_dict()
    # Torch counts parameters by indices; other keys are of an optimizer's own making.
    states = packed["state"]
    tree: dict[str, Any] = {
        "class": class_name(optimizer),
        "state": {names[key]: dict(state) for key, state in states.items() if isinstance(key, int)},
        "groups": [
            {**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        # A parameter without state was never stepped: its trained weights are the evaluated ones.
        if parameter in evaluated and name in tree["state"]:
            tree["state"][name][_TRAINED] = parameter.detach()
    if added := describe_added(model_names, optimizer, configured_count):
        tree[ADDED] = added
    if other := {key: state for key, state in states.items() if not isinstance(key, int)}:
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
    configured: ParamGroups | None = None,
) -> Fitting:
    """The parts of a captured state that do not fit an optimizer, and a function that loads the state.

    Settings come from the checkpoint, and `load` logs which of them are configured otherwise. Without the states of
    the schedules all settings stay as configured. Parameters that `options` ignore keep their present state.

    Args:
        keep_settings: settings that stay as configured.
        moved: settings that schedules change: that they differ is not logged.
        configured: the groups' settings that the optimizer was made with; None: the present ones.
    """
    model_names = name_parameters(model)
    renamed = options.renamed([*state["state"], *(name for group in state["groups"] for name in group["params"])])
    every_name = set(model_names.values())
    # First as the parameters are called in the model: by these names the groups are found that are to be added.
    name_in_model = {name: clean_name(new, every_name) for name, new in renamed.items()}
    saved_groups = [{**group, "params": [name_in_model[name] for name in group["params"]]} for group in state["groups"]]
    configured_count = None if configured is None else len(configured)
    live_groups = match_groups(model_names, optimizer, saved_groups, state.get(ADDED, ()), configured_count)
    names, live = live_groups.names, live_groups.packed
    live_set = set(names)
    # Then as they are called in the groups that the optimizer will have.
    new_name = {name: clean_name(new, live_set) for name, new in renamed.items()}
    ignored = options.ignored({*names, *new_name.values()})
    if not options.strict:
        ignored |= live_set ^ set(new_name.values())
    live_names = [[names[index] for index in group["params"] if names[index] not in ignored] for group in live]
    saved = [[new_name[name] for name in group["params"] if new_name[name] not in ignored] for group in state["groups"]]
    state_of = {
        new_name[name]: dict(saved_state)
        for name, saved_state in state["state"].items()
        if new_name[name] not in ignored
    }
    rows = []
    if state["class"] != class_name(optimizer):
        rows.append(f"it is a {class_name(optimizer)}, but the checkpoint has a {state['class']}")
    rows += find_misplaced(live_names, saved)
    saved_set = {name for group in saved for name in group}
    rows += [f"{name}: has state, but is in no group of the checkpoint" for name in state_of if name not in saved_set]
    for name, parameter in zip(names, live_groups.parameters, strict=True):
        weights = state_of.get(name, {}).get(_TRAINED)
        fault = None if weights is None else _tensor_fault(parameter, weights, exact=True)
        if fault is not None:
            rows.append(f"{name}: its {_TRAINED} {fault}")
    # Without the states of the schedules, which have moved them, the settings stay as configured.
    saved_settings = state["groups"] if options.takes("schedulers") else [{} for _ in state["groups"]]
    groups, notes = _merge_settings(type(optimizer), live, saved_settings, configured, keep_settings, moved)
    # Shapes are compared once all names fit: only then each state has its parameter.
    if not rows:
        rows = _state_faults(optimizer, names, live_groups.parameters, state_of, groups)
    index_of = {name: index for index, name in enumerate(names)}

    def load() -> None:
        """Change the groups as the checkpoint has them, and load state and settings, which are known to fit."""
        for line in dict.fromkeys(notes):
            log.warning("optimizer: %s", line)
        # Groups first: the state below has an entry for each of their parameters.
        live_groups.change()
        trained = {name: entries.pop(_TRAINED) for name, entries in state_of.items() if _TRAINED in entries}
        packed: dict[Any, Any] = {index_of[name]: entries for name, entries in state_of.items()}
        packed |= state.get("other", {})
        _load_with_inner(optimizer, {**state.get("more", {}), "state": packed, "param_groups": groups})
        # Torch casts states to the type of the parameter, which would round those of a 16-bit model.
        _undo_casts(optimizer, packed)
        with torch.no_grad():
            for name, parameter in zip(names, _parameters(optimizer), strict=True):
                if name in trained:
                    # Over the evaluated weights, which the model has loaded before.
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
    saved: ParamGroups,
    configured: ParamGroups | None,
    keep: Collection[str],
    moved: Collection[str],
) -> tuple[PackedGroups, list[str]]:
    """The groups with the settings of a checkpoint, and a line for each that is configured otherwise.

    Args:
        kind: class of the optimizer.
        live, saved: the optimizer's groups, and those of the checkpoint.
        configured, keep, moved: as in `fit_optimizer`.
    """
    groups, notes = [], []
    # An entry that is no argument is not a setting, but counted by the optimizer, as in Prodigy.
    arguments = _arguments(kind)
    for number, (group, settings) in enumerate(zip(live, saved, strict=False)):
        fixed = {key: group[key] for key in group if key in keep or key in _IMPLEMENTATION or key in _OF_SCHEDULES}
        configured_settings: Mapping[str, Any] = group
        if configured is not None:
            # A group that was added later is not configured.
            configured_settings = configured[number] if number < len(configured) else {}
        for key, value in configured_settings.items():
            if key not in settings or key in fixed or key in moved or key == "params":
                continue
            is_setting = not arguments or key in arguments
            if is_setting and not _alike(settings[key], value):
                notes.append(f"{key} is {settings[key]}, as in the checkpoint; {value} is configured")
        groups.append({**group, **settings, **fixed, "params": group["params"]})
    return groups, notes


def _state_faults(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    state_of: Mapping[str, Mapping[str, Any]],
    groups: ParamGroups,
) -> list[str]:
    """A line for each tensor that does not fit its parameter, and for each entry that a setting needs and the state
    lacks. Only for torch's own optimizers, whose states are known.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind is torch.optim.LBFGS:
        return []
    rows = []
    for group in groups:
        needed = [entry for setting, entry in _NEEDED_ENTRIES.items() if group.get(setting)]
        if kind is torch.optim.RMSprop and group.get("momentum"):
            needed.append("momentum_buffer")
        for index in group["params"]:
            name, parameter = names[index], parameters[index]
            entries = state_of.get(name)
            for key, value in (entries or {}).items():
                if isinstance(value, torch.Tensor) and value.ndim and (fault := _tensor_fault(parameter, value)):
                    rows.append(f"{name}: its {key} {fault}")
            rows += [
                f"{name}: its {key} is missing in the checkpoint" for key in needed if entries and key not in entries
            ]
    return rows


def _tensor_fault(parameter: torch.Tensor, value: torch.Tensor, *, exact: bool = False) -> str | None:
    """Why a tensor of the state does not fit its parameter; None if it does.

    Args:
        exact: it must have the parameter's shape. Otherwise it may have size 1 in any dimension, or a single element.
    """
    fits = value.shape == parameter.shape
    if not fits and not exact and value.ndim == parameter.ndim:
        fits = all(size in (1, expected) for size, expected in zip(value.shape, parameter.shape, strict=True))
    if not fits and (exact or value.numel() != 1):
        return f"has shape {tuple(value.shape)} in the checkpoint, but the parameter {tuple(parameter.shape)}"
    # States of a 16-bit parameter may be more precise than it.
    wider = (torch.float32, torch.float64) if parameter.dtype in (torch.bfloat16, torch.float16) else ()
    if value.dtype not in (parameter.dtype, *wider):
        return f"is {value.dtype} in the checkpoint, but the parameter is {parameter.dtype}"
    return None


def _alike(first: Any, second: Any) -> bool:
    """Whether two settings are equal; a tensor equals its number, and a list a tuple of equal elements."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return float(first) == float(second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    return bool(first == second)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _arguments(kind: type) -> set[str]:
    """The names of the arguments of an optimizer's class; empty if they are not known."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (ValueError, TypeError):
        return set()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set()
    return {parameter.name for parameter in parameters}


def _load_with_inner(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimizer. Its inner optimizers share state and groups with it as before."""
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


def _with_ranges(optimizer: torch.optim.Optimizer, groups: PackedGroups) -> PackedGroups:
    """The groups with ranges in place of lists of consecutive indices, if only torch's own code reads them."""
    # Torch searches the groups for the index of each tensor of the state, which in lists takes quadratic time.
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
    """Replace states that `Optimizer.load_state_dict` has cast to the parameter's type by the saved ones.

    States shaped like their parameter also get its memory layout, as they had when they were made.
    """
    parameters, holders = _parameters(optimizer), [optimizer, *inner_optimizers(optimizer)]
    for index, entries in packed.items():
        if not isinstance(index, int):
            continue
        parameter = parameters[index]
        for holder in holders:
            state = holder.state.get(parameter, {})
            for key in state.keys() & entries.keys():
                state[key] = _as_saved(state[key], entries[key], parameter)


def _as_saved(present: Any, saved: Any, parameter: torch.Tensor) -> Any:
    """A loaded value with the saved dtype, and with the layout of the parameter if it has its shape."""
    if isinstance(saved, Mapping) and isinstance(present, dict):
        return {key: _as_saved(present[key], value, parameter) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(present, list | tuple):
        return type(saved)(_as_saved(*pair, parameter) for pair in zip(present, saved, strict=True))
    if not isinstance(saved, torch.Tensor):
        return present
    if present.dtype != saved.dtype:
        present = saved.to(present.device)
    has_other_layout = present.shape == parameter.shape and present.stride() != parameter.stride()
    if has_other_layout and present.numel():
        present = torch.empty_like(parameter, dtype=present.dtype, device=present.device).copy_(present)
    return present.detach()
