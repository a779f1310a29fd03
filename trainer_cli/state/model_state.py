"""Models to state tree, and back. Optimizers are in optimizer_state.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainer_cli.dtensor import local_of
from trainer_cli.layout import STEP_MODULES
from trainer_cli.loads import WHOLE, LoadOptions, LoadReport
from trainer_cli.state.load_hooks import Translation, make_metadata, make_state_dict, translate
from trainer_cli.state.names import clean_name, unwrap

logger = logging.getLogger(__name__)

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Fitting:
    """A saved state compared with its owner: a line for each fault, and a function that loads the state."""

    faults: list[str]
    load: Callable[[], None]


def capture_model(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by clean name. Tied ones appear under each name, as one memory."""
    return {clean_name(name): value for name, value in unwrap(model).state_dict().items()}


def find_versions(model: nn.Module) -> dict[str, int]:
    """Path of a module -> its version, for versions other than 1.

    By them `_load_from_state_dict` of a module converts what an earlier version of the module has saved.
    """
    modules = unwrap(model).named_modules(remove_duplicate=False)
    versions = {clean_name(path): getattr(module, "_version", 1) for path, module in modules}
    return {path: version for path, version in versions.items() if version != 1}


def fit_model(
    model: nn.Module,
    state: Mapping[str, Any],
    options: LoadOptions = WHOLE,
    *,
    versions: Mapping[str, int] | None = None,
    cast: bool = False,
    reshape_buffers: bool = False,
    first_none: Container[str] = (),
) -> tuple[Fitting, LoadReport]:
    """Compare a captured state with a model. Returns its faults with a function that loads it, and a report.

    Args:
        options: `strict`, `ignore_keys` and `key_mapping` apply. A different shape of a parameter is always a fault.
        versions: what `find_versions` finds in the saved model, for modules that migrate a state; None: unknown, as in
            a state dict without metadata.
        cast: floating-point tensors of another precision are cast; else they are faults, as in a resume.
        reshape_buffers: the state is of the same model later in its training: a buffer that has changed its shape
            since, or was None, becomes as it was saved.
        first_none: with `reshape_buffers`, the buffers that were None when the model was made: one that the state
            lacks becomes None again. That the state lacks any other buffer is a fault.
    """
    inner = unwrap(model)
    live = {clean_name(name): (name, value) for name, value in inner.state_dict().items()}
    rows: list[str] = []
    state, absent = _with_step_modules(state, live)
    saved = renamed(state, live, rows, options)
    ignored = options.ignored({*live, *saved})
    stored = {key: saved[name] for name, key in _keys(inner, live, saved).items() if name not in ignored}
    metadata = _metadata(inner, renamed({name: name for name in state}, live, [], options), versions, absent)
    # A state with the model's names and versions needs no translation by its modules.
    is_current = saved.keys() == live.keys() and _has_versions(inner, metadata)
    translation = Translation(stored) if is_current else translate(inner, stored, metadata)
    rows += translation.errors
    translated = {clean_name(key): value for key, value in translation.values.items()}
    options.warn_unmatched(map(clean_name, state), {*live, *saved, *translated})
    saved = {name: value for name, value in translated.items() if name not in ignored}
    excused = set(map(clean_name, translation.excused))
    buffers = _reshaped_buffers(inner, live, saved) if reshape_buffers else {}
    live |= {name: (live.get(name, (key,))[0], saved[name]) for name, (key, _, _) in buffers.items()}
    created = _created_since(inner, saved, first_none) if reshape_buffers else {}
    targets = {name: value for name, (_, value) in live.items() if name not in ignored and name not in created}
    report = LoadReport(
        loaded=[name for name in targets if name in saved],
        missing=[name for name in _without_tied(targets, saved) if name not in excused],
        unexpected=[name for name in saved if name not in targets and name not in excused],
        ignored=sorted(ignored & live.keys()),
    )
    for name in report.loaded:
        if cast and _may_cast(targets[name], saved[name]):
            report.cast[name] = f"{saved[name].dtype} to {targets[name].dtype}"
        elif fault := _fault(targets[name], saved[name]):
            rows.append(f"{name}: {fault}")
            # The report names them, because load.ignore_keys can leave them out.
            if isinstance(saved[name], torch.Tensor) and targets[name].shape != saved[name].shape:
                report.reshaped.append(name)
    rows += _untied(targets, saved)
    if options.strict:
        rows += report.one_sided

    def load() -> None:
        """Load the values, which are known to fit."""
        if absent:
            logger.warning("the checkpoint has no %s: as they were made", ", ".join(absent[:_MOST_NAMED]))
        for module, buffer in created.values():
            module._buffers[buffer] = None
        for name, (_, module, buffer) in buffers.items():
            module._buffers[buffer] = torch.empty_like(saved[name], device=_device_of(module, buffer, inner))
        # A hook may translate a name into one that is ignored.
        ignored_values = [(live[name][1], live[name][1].clone()) for name in ignored & live.keys() & translated.keys()]
        # Not strict: what the options leave out was compared above, and would be an error here.
        inner.load_state_dict(make_state_dict(stored, metadata), strict=False)
        with torch.no_grad():
            for value, value_before in ignored_values:
                value.copy_(value_before)

    return Fitting(rows, load), report


def _metadata(
    model: nn.Module, origins: Mapping[str, str], versions: Mapping[str, int] | None, absent: Container[str]
) -> dict[str, dict[str, int]]:
    """The versions of the saved modules, by the paths of the model's.

    Args:
        origins: names in the model -> names in the checkpoint.
        absent: names that the checkpoint lacks: the values are those of the model.
    """
    saved_metadata = make_metadata({name: origin for name, origin in origins.items() if name not in absent}, versions)
    live_metadata = make_metadata({name: name for name in origins if name in absent}, find_versions(model))
    by_path = {**live_metadata, **saved_metadata}
    paths = (path for path, _ in model.named_modules(remove_duplicate=False))
    return {path: by_path[clean_name(path)] for path in paths if clean_name(path) in by_path}


def _has_versions(model: nn.Module, metadata: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether the saved modules have the same versions as those of the model."""
    modules = model.named_modules(remove_duplicate=False)
    return all(getattr(module, "_version", 1) == metadata.get(path, {}).get("version", 1) for path, module in modules)


def _with_step_modules(
    state: Mapping[str, Any], live: Mapping[str, tuple[str, Any]]
) -> tuple[Mapping[str, Any], list[str]]:
    """A state with exactly the tensors of the training step that the model has, and the names of those that it lacked,
    which have the model's values.

    An export, a checkpoint of another step, and an old checkpoint lack them.
    """
    prefix = f"{STEP_MODULES}."
    names = set(map(clean_name, state))
    absent = [name for name in live if name.startswith(prefix) and name not in names]
    kept = {name: value for name, value in state.items() if not clean_name(name).startswith(prefix) or name in live}
    return kept | {name: live[name][1] for name in absent}, absent


def renamed(
    state: Mapping[str, Any], live: Container[str], rows: list[str], options: LoadOptions = WHOLE
) -> dict[str, Any]:
    """The state under the names of the model: mapped by `key_mapping`, and without the prefix of a parallel wrapper
    that the model does not have.

    A line is added to `rows` for each name that two tensors get.
    """
    mapped = options.renamed(map(clean_name, state))
    by_name: dict[str, Any] = {}
    for name, value in state.items():
        name = clean_name(mapped[clean_name(name)], live, state)
        if name in by_name:
            rows.append(f"{name}: two tensors of the checkpoint get this name")
        by_name[name] = value
    return by_name


def _fault(live: Any, saved: Any) -> str | None:
    """Why a saved value cannot be copied into that of the model; None if it can."""
    if isinstance(live, torch.Tensor) != isinstance(saved, torch.Tensor):
        return f"is a {type(live).__name__} in this model, but a {type(saved).__name__} in the checkpoint"
    if not isinstance(live, torch.Tensor) or nn.parameter.is_lazy(live):
        return None
    if live.shape != saved.shape:
        return f"has shape {tuple(live.shape)} in this model, but {tuple(saved.shape)} in the checkpoint"
    if live.dtype != saved.dtype:
        return f"is {live.dtype} in this model, but {saved.dtype} in the checkpoint"
    return None


def _keys(model: nn.Module, live: Mapping[str, tuple[str, Any]], names: Iterable[str]) -> dict[str, str]:
    """Clean name -> key in the model's state; of a name that the model does not have, the key in its module."""
    prefixes = {clean_name(prefix): prefix for prefix, _ in model.named_modules()}

    def key_of(name: str) -> str:
        """The name that a value has in the other model: the path of its module is replaced by that one's."""
        parts = name.split(".")
        # The longest path of a module that the name begins with.
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            if path in prefixes:
                return ".".join([prefixes[path], *parts[end:]])
        return name

    return {name: live[name][0] if name in live else key_of(name) for name in names}


def _reshaped_buffers(
    model: nn.Module, live: Mapping[str, tuple[str, Any]], saved: Mapping[str, Any]
) -> dict[str, tuple[str, nn.Module, str]]:
    """Name -> (key in the model's state, module, name in it) of the persistent buffers that are None or have another
    shape than in a state."""
    reshaped = {}
    for key, module, buffer_name in _persistent_buffers(model):
        name, buffer = clean_name(key), module._buffers[buffer_name]
        value = saved.get(name)
        if type(value) is not torch.Tensor:
            continue
        if buffer is None:
            differs = name not in live
        else:
            is_replaceable = type(buffer) is torch.Tensor and name in live and buffer.dtype == value.dtype
            differs = is_replaceable and buffer.shape != value.shape
        if differs:
            reshaped[name] = key, module, buffer_name
    return reshaped


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Key in the model's state, module and name in it of each persistent buffer, those that are None included."""
    # A module that the model has twice has two names in its state, too.
    for prefix, module in model.named_modules(remove_duplicate=False):
        # By keys(): those of a ScriptModule are no dict, and cannot be iterated over.
        for name in module._buffers.keys():  # noqa: SIM118
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, module, name


def find_none_buffers(model: nn.Module) -> frozenset[str]:
    """Clean names of the persistent buffers that are None."""
    buffers = _persistent_buffers(unwrap(model))
    return frozenset(clean_name(key) for key, module, name in buffers if module._buffers[name] is None)


def _created_since(
    model: nn.Module, saved: Container[str], first_none: Container[str]
) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, name in it) of the buffers that the model has created since a state was saved."""
    created = {}
    for key, module, buffer_name in _persistent_buffers(model):
        name = clean_name(key)
        if name in first_none and name not in saved and module._buffers[buffer_name] is not None:
            created[name] = module, buffer_name
    return created


def _device_of(module: nn.Module, name: str, model: nn.Module) -> torch.device | None:
    """The device of a buffer; if it is None, that of the model's first tensor; None for a model without tensors."""
    if (tensor := module._buffers[name]) is None:
        tensor = next(chain(model.parameters(), model.buffers()), None)
    return None if tensor is None else tensor.device


def _may_cast(live: Any, saved: Any) -> bool:
    """Whether two tensors differ in nothing but the precision of their floating-point numbers."""
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor) or nn.parameter.is_lazy(live):
        return False
    differ_in_dtype = live.shape == saved.shape and live.dtype != saved.dtype
    return differ_in_dtype and live.is_floating_point() and saved.is_floating_point()


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Identify the memory of a tensor on this rank, which tied tensors share; None for a value without memory."""
    value = local_of(value)
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value) or not value.numel() or value.is_meta:
        return None
    return (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def _without_tied(targets: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The names that the checkpoint lacks, except those that share memory with one that it has."""
    filled = {_memory(value) for name, value in targets.items() if name in saved} - {None}
    return [name for name, value in targets.items() if name not in saved and _memory(value) not in filled]


def _untied(targets: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Names that share memory in the model, but have different values in the checkpoint."""
    first_names: dict[tuple[Any, ...], str] = {}
    rows = []
    for name, value in targets.items():
        if name not in saved or (memory := _memory(value)) is None:
            continue
        first_name = first_names.setdefault(memory, name)
        if saved[first_name] is saved[name]:
            continue
        # What does not fit the model is reported by `_fault`, and cannot be compared.
        if _fault(value, saved[name]) or _fault(value, saved[first_name]):
            continue
        if not torch.equal(local_of(saved[first_name]), local_of(saved[name])):
            rows.append(f"{name}: is tied to {first_name} in this model, but differs from it in the checkpoint")
    return rows
