"""Live objects to state tree, and back: models and optimizers by parameter name, random generators.

Capturing copies nothing: the tensors of the tree are the live ones. Restoring checks everything first and
tells all that does not fit in one table; then values are copied in place, and nothing is cast or dropped.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer_cli.errors import UserError

logger = logging.getLogger(__name__)

_EXTRA_STATE = "_extra_state"
_COMPILED = "_orig_mod"
_WRAPPED = "module."


@dataclass(slots=True)
class LoadReport:
    """What was taken from a checkpoint, and what was not."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """In the model, but not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, but not in the model."""
    ignored: list[str] = field(default_factory=list)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without the wrappers that put a prefix before its names."""
    while True:
        inner = getattr(model, _COMPILED, None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str) -> str:
    """A parameter's name without the marks of compilation, wherever they stand."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def capture_model(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by clean name. Tied ones appear under each name, as one memory."""
    return {clean_name(name): value for name, value in unwrapped(model).state_dict().items()}


def restore_model(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, ignore_keys: Iterable[str] = ()
) -> LoadReport:
    """Copy a captured state into a model, in place.

    `ignore_keys` are globs of names to leave as they are. Without `strict`, names that only one side has
    are reported, not refused. A different shape or element type is always refused.

    Raises:
        UserError: with a table of all that does not fit; the model is then untouched.
    """
    inner = unwrapped(model)
    live = {clean_name(name): (name, value) for name, value in inner.state_dict().items()}
    given = _renamed(state, live)
    globs = list(ignore_keys)
    report = LoadReport(ignored=sorted(name for name in {*live, *given} if _matches(name, globs)))
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in report.ignored):
            logger.warning("load.ignore_keys: %r matches nothing", glob)
    given = {name: value for name, value in given.items() if name not in report.ignored}
    wanted = {name: value for name, (_, value) in live.items() if name not in report.ignored}
    report.loaded = [name for name in wanted if name in given]
    report.missing = _without_tied(wanted, given)
    report.unexpected = [name for name in given if name not in wanted]
    rows = [f"{name}: {fault}" for name in report.loaded if (fault := _fault(wanted[name], given[name]))]
    rows += _untied(wanted, given)
    if strict:
        rows += [f"{name}: missing in the checkpoint" for name in report.missing]
        rows += [f"{name}: not in this model" for name in report.unexpected]
    _refuse(rows, "the model does not fit the checkpoint")
    if report.missing or report.unexpected:
        logger.warning("%s", _table("not everything was loaded", _differences(report)))
    inner.load_state_dict({live[name][0]: given[name] for name in report.loaded}, strict=False)
    return report


def capture_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name: what it keeps of each, and its groups with their settings.

    A parameter that was never stepped has no state, but stands in its group.
    """
    names = _parameter_names(model, optimizer)
    packed = optimizer.state_dict()
    return {
        "class": _class_name(optimizer),
        "state": {names[index]: dict(kept) for index, kept in packed["state"].items()},
        "groups": [
            {**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    keep_settings: Collection[str] = (),
) -> None:
    """Give an optimizer a captured state, whatever the order of its parameters.

    `keep_settings` names group settings, such as `lr`, whose present values stay.

    Raises:
        UserError: with a table of all that does not fit; the optimizer is then untouched.
    """
    names = _parameter_names(model, optimizer)
    live = optimizer.state_dict()["param_groups"]
    mine = [[names[index] for index in group["params"]] for group in live]
    saved = [list(group["params"]) for group in state["groups"]]
    rows = []
    if state["class"] != _class_name(optimizer):
        rows.append(f"it is a {_class_name(optimizer)}, but the checkpoint has a {state['class']}")
    if len(mine) != len(saved):
        rows.append(f"it has {len(mine)} parameter groups, but the checkpoint has {len(saved)}")
    for number, (here, there) in enumerate(zip(mine, saved, strict=False)):
        rows += [f"{name}: missing in group {number} of the checkpoint" for name in here if name not in set(there)]
        rows += [f"{name}: not in group {number} of this optimizer" for name in there if name not in set(here)]
    known = {name for group in saved for name in group}
    rows += [f"{name}: has state, but is in no group of the checkpoint" for name in state["state"] if name not in known]
    _refuse(rows, "the optimizer does not fit the checkpoint")
    index_of = {name: index for index, name in enumerate(names)}
    groups = []
    for group, settings in zip(live, state["groups"], strict=True):
        kept = {key: group[key] for key in keep_settings if key in group}
        groups.append({**group, **settings, **kept, "params": group["params"]})
    packed = {index_of[name]: dict(kept) for name, kept in state["state"].items()}
    optimizer.load_state_dict({"state": packed, "param_groups": groups})
    _undo_casts(optimizer, packed)


def capture_rng() -> dict[str, Any]:
    """The states of python's, numpy's and torch's global generators, those of the devices in use included."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": {
            "kind": kind,
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": [],
        "mps": None,
    }
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every generator back. Do this last: whatever is built or drawn after it changes what follows."""
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    np.random.set_state((legacy["kind"], legacy["keys"], legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != devices and (state["cuda"] or _cuda_in_use()):
        logger.warning(
            "the checkpoint has random states of %d GPUs, but there are %d here: "
            "what is drawn on a GPU will differ from an uninterrupted run",
            len(state["cuda"]),
            devices,
        )
    for index, one in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(one, index)
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _renamed(state: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """The state under clean names; the prefix of a parallel wrapper goes where the model has no such name."""
    renamed = {}
    for name, value in state.items():
        name = clean_name(name)
        short = name.removeprefix(_WRAPPED)
        renamed[short if name not in live and short in live and short not in state else name] = value
    return renamed


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _fault(live: Any, given: Any) -> str | None:
    if isinstance(live, torch.Tensor) != isinstance(given, torch.Tensor):
        return f"is a {type(live).__name__} in this model, but a {type(given).__name__} in the checkpoint"
    if not isinstance(live, torch.Tensor) or nn.parameter.is_lazy(live):
        return None
    if live.shape != given.shape:
        return f"has shape {tuple(live.shape)} in this model, but {tuple(given.shape)} in the checkpoint"
    if live.dtype != given.dtype:
        return f"is {live.dtype} in this model, but {given.dtype} in the checkpoint"
    return None


def _memory(value: Any) -> tuple[Any, ...] | None:
    """What tied tensors have in common."""
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value) or not value.numel() or value.is_meta:
        return None
    return (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def _without_tied(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The names that the checkpoint lacks, but for those whose memory another name fills."""
    filled = {_memory(value) for name, value in wanted.items() if name in given} - {None}
    return [name for name, value in wanted.items() if name not in given and _memory(value) not in filled]


def _untied(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Names that share memory in the model, but have different values in the checkpoint."""
    first: dict[tuple[Any, ...], str] = {}
    rows = []
    for name, value in wanted.items():
        if name not in given or (memory := _memory(value)) is None:
            continue
        other = first.setdefault(memory, name)
        if other == name or given[other] is given[name] or _fault(value, given[name]):
            continue
        if _fault(value, given[other]) is None and not torch.equal(given[other], given[name]):
            rows.append(f"{name}: is tied to {other} in this model, but differs from it in the checkpoint")
    return rows


def _differences(report: LoadReport) -> list[str]:
    rows = [f"{name}: missing in the checkpoint" for name in report.missing]
    return rows + [f"{name}: not in this model" for name in report.unexpected]


def _table(title: str, rows: Sequence[str]) -> str:
    shown = [f"  {row}" for row in rows[:40]]
    if len(rows) > len(shown):
        shown.append(f"  … and {len(rows) - len(shown)} more")
    return "\n".join([f"{title}:", *shown])


def _refuse(rows: Sequence[str], title: str) -> None:
    if rows:
        raise UserError(_table(title, rows) + "\n", cure="Nothing was loaded.")


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in the order in which it counts them."""
    named = {id(value): clean_name(name) for name, value in unwrapped(model).named_parameters()}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            names.append(named.get(id(parameter), f"param_groups.{number}.{place}"))
    return names


def _undo_casts(optimizer: torch.optim.Optimizer, packed: Mapping[int, Mapping[str, Any]]) -> None:
    """`Optimizer.load_state_dict` casts states to the parameter's type; take them as they were saved.

    States shaped like their parameter also take its layout, as they had when they were made.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, kept in packed.items():
        parameter = parameters[index]
        for key, value in kept.items():
            if not isinstance(value, torch.Tensor):
                continue
            present = optimizer.state[parameter][key]
            if present.dtype != value.dtype:
                present = value.to(present.device)
            if present.shape == parameter.shape and present.stride() != parameter.stride() and present.numel():
                present = torch.empty_like(parameter, dtype=present.dtype, device=present.device).copy_(present)
            optimizer.state[parameter][key] = present.detach()


def is_finite(model: nn.Module) -> bool:
    """True where no parameter that is trained holds NaN or infinity; one wait for the device.

    What is not trained may hold them for good: a mask of minus infinity, the start of a running minimum.
    """
    # The largest magnitude is NaN where any element is, and takes no memory of the tensor's size.
    trained = [value for value in model.parameters() if value.requires_grad and value.numel()]
    peaks = [torch.linalg.vector_norm(value.detach(), ord=torch.inf).float() for value in trained]
    return not peaks or bool(torch.isfinite(torch.stack(peaks)).all())
