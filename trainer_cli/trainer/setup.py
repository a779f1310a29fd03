"""Check and make what a trainer is given: model, optimizers, loaders, names, device and seed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_cli.data import sample_seed
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.layout import STEP_MODULES
from trainer_cli.loggers import Logger, make_display
from trainer_cli.parallel import ProcessGroup
from trainer_cli.patterns import check_name, find_nearest
from trainer_cli.signatures import check_type, make_instance
from trainer_cli.state import clean_name, find_versions, fit_model, inner_optimizers
from trainer_cli.terminal import format_count
from trainer_cli.torch_compat import compile_deterministically, leave_compiler_out, step_lightly
from trainer_cli.user_cache import folder_of_compiled

P = TypeVar("P")

log = logging.getLogger(__name__)

_SMALLEST_RANDOM_SEED = 2**32
"""Torch starts with a random seed of 53 bits; seeds that people give are smaller."""
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
CONSOLE = "console"
"""Name of the logger that shows metrics."""


def compile_model(model: nn.Module, settings: Mapping[str, Any] | None) -> None:
    """Compile the forward of a model at its first call, in place, so that the names in its state stay as they are.

    Args:
        settings: arguments of torch.compile; None: the model is not compiled, and the compiler not imported.

    Raises:
        ConfigError: torch has no such backend, or refuses the settings.
    """
    if settings is None:
        leave_compiler_out()
        return
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"compile: expected a mapping of arguments of torch.compile, got {type(settings).__name__}",
            location="compile",
            hint="Give {} for its defaults.",
        )
    _keep_compiled()
    settings = {key: value for key, value in settings.items() if value is not None}
    backend = settings.get("backend", "inductor")
    if isinstance(backend, str) and backend != "inductor":
        check_name("compiler", backend, torch.compiler.list_backends(exclude_tags=()), "compile.backend")
    try:
        model.compile(**settings)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torch.compile refused its settings: {error}", location="compile") from error


def _keep_compiled() -> None:
    """Keep what is compiled in the user's cache, unless the user has chosen a folder.

    Torch keeps it in the folder for temporary files, which is empty after a restart of the machine or on another one.
    Not in the run directory: it is code that torch loads, and a run may be someone else's.
    """
    # Torch writes its own choice into the environment, which forks of a server then have.
    if os.path.basename(os.environ.get(_COMPILED, "torchinductor_")).startswith("torchinductor_"):
        # Without a folder for it the compiler works as ever.
        with suppress(UserError, OSError):
            folder = folder_of_compiled(torch.__version__)
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[_COMPILED] = str(folder)


def seed_everything(seed: int | None) -> None:
    """Seed python, numpy and torch (all devices); None: leave them alone."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def warn_of_earlier_weights(seed: int | None, model: Any) -> None:
    """Warn of a module that was made before the seed is set."""
    # torch starts with a random seed, unless the caller has set one.
    if seed is not None and isinstance(model, nn.Module) and torch.initial_seed() >= _SMALLEST_RANDOM_SEED:
        log.warning(
            "the model was made before the seed was set: weights that it drew at random differ from process to "
            "process. Give its class, or a function that makes it"
        )


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Seed every rank except the first by its rank, so that ranks do not draw the same dropout."""
    # Rank 0 keeps the seed, so that one process and rank 0 of many draw the same numbers.
    if rank:
        seed_everything(sample_seed(seed, step, rank))


def use_deterministic_kernels() -> None:
    """Use only deterministic kernels in this process, and no timing of kernels in the compiler."""
    # cuBLAS reads this when its first handle is made, so before any kernel runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    compile_deterministically()
    torch.use_deterministic_algorithms(True)
    # Benchmarks choose kernels by their time, which differs between runs.
    torch.backends.cudnn.benchmark = False


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is cuda, else mps, else cpu. Tensors on `meta` have shapes, but no values.

    Raises:
        UserError: this machine has no such device.
    """
    if name == "meta":
        return torch.device(name)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        cure = None
        if isinstance(name, str):
            kind, colon, index = name.strip().partition(":")
            match = find_nearest(kind, ("auto", *available))
            cure = None if match is None else f"Did you mean '{match}{colon}{index}'?"
        raise UserError(f"device: expected auto, cpu, cuda or mps, got {name!r}", where="device", cure=cure) from None
    if not available.get(device.type, False):
        have = ", ".join(kind for kind in available if available[kind])
        raise UserError(f"device is {name}, but this machine has none", where="device", cure=f"It has: {have}.")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        cure = f"There are: {', '.join(f'cuda:{index}' for index in range(count))}."
        raise UserError(f"device is {name}, but this process sees no such GPU", where="device", cure=cure)
    return device


def make_default(slot: str, value: Any, kind: type[P]) -> P:
    """The value, or an instance with its defaults for None.

    Raises:
        UserError: the value is not of this kind.
    """
    instance: P = kind() if value is None else check_type(slot, value, kind)
    return instance


def make_model(source: nn.Module | Callable[[], nn.Module], optimizer: Any) -> nn.Module:
    """The model, made by calling it if it is a class or a function.

    Raises:
        UserError: it is not a module, a parameter has no shape, or an optimizer instance cannot be over its parameters.
    """
    optimizers = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
    if not isinstance(source, nn.Module) and any(isinstance(value, torch.optim.Optimizer) for value in optimizers):
        raise UserError(
            "optimizer is an instance, but model is a function: the optimizer cannot hold its parameters",
            cure="Give the optimizer as a function `model -> optimizer`.",
        )
    model: nn.Module = check_type("model", make_instance(source, nn.Module), nn.Module)
    refuse_lazy(model)
    return model


def warn_of_narrow_weights(model: nn.Module) -> None:
    """Warn if trained parameters have fewer than 32 bits, as files of pretrained weights often have.

    The optimizer rounds each update to them: AdamW with a rate of 1e-5 moves few of bfloat16.
    """
    trained = {name: value.dtype for name, value in model.named_parameters() if value.requires_grad}
    narrow = {name: dtype for name, dtype in trained.items() if dtype.itemsize < 4}
    if narrow:
        name, dtype = next(iter(narrow.items()))
        log.warning(
            "%d of %s are trained in %s (%s): updates smaller than its precision are lost; "
            "dtype: float32 of from_pretrained, or model.float(), keeps 32 bits",
            len(narrow),
            format_count(len(trained), "parameter"),
            str(dtype).removeprefix("torch."),
            clean_name(name),
        )


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers that have no shape before its first forward, as with nn.LazyLinear.

    Raises:
        UserError: naming the first of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape before the model's first forward, so no optimizer and no checkpoint can hold it",
                where="model",
                cure="Call the model once with a batch when it is made, such as at the end of its __init__.",
            )


def check_logged(config: Any, hparams: Any) -> dict[str, Any]:
    """Return a copy of `hparams`; raise UserError unless it is a mapping or None, and `config` a text."""
    check_type("config", config, str)
    return dict(check_type("hparams", hparams or {}, Mapping, "Give a mapping of names to values."))


def check_texts(slot: str, value: Any) -> None:
    """Raise UserError unless the value is a sequence or set of strings.

    A string alone would be read as its letters, and an iterator can be read only once.
    """
    if isinstance(value, str):
        raise UserError(f"{slot}: expected a list of strings, got {value!r}", cure=f"Give [{value!r}].")
    if not isinstance(value, Sequence | Set):
        cure = "Give list(…) of it." if isinstance(value, Iterable) else None
        raise UserError(f"{slot}: expected a list of strings, got {type(value).__name__}", cure=cure)
    for element in value:
        if not isinstance(element, str):
            raise UserError(f"{slot}: expected a list of strings, got {element!r} in it")


def name_values(slot: str, values: Any, kind: type) -> dict[str, Any]:
    """A mapping of names to values of one kind; the values of a sequence are named by their classes.

    Raises:
        UserError: a value is of another kind, or two have the same name.
    """
    if not isinstance(values, Mapping | Iterable):
        raise UserError(f"{slot}: expected a sequence or mapping of {kind.__name__}, got {type(values).__name__}")
    by_name: dict[str, Any] = {}
    if isinstance(values, Mapping):
        for name, value in values.items():
            # None turns an entry of a config off.
            if value is not None and by_name.setdefault(str(name), value) is not value:
                raise UserError(f"{slot}: two are called '{name}'", cure="Name each of them in a mapping.")
    else:
        add_by_class(by_name, values)
    # A copy of the items, because the loop removes some.
    for name, value in [*by_name.items()]:
        first_name = next(other_name for other_name, other in by_name.items() if other is value)
        if first_name != name:
            log.warning("%s: '%s' is the same object as '%s', and is used once", slot, name, first_name)
            del by_name[name]
    return {name: check_type(f"{slot}.{name}", value, kind) for name, value in by_name.items()}


def add_by_class(by_name: dict[str, Any], values: Iterable[Any]) -> None:
    """Add each value under the name of its class, with a number after it if the name is in use."""
    for value in values:
        name, count = type(value).__name__, 1
        while name in by_name:
            count += 1
            name = f"{type(value).__name__}_{count}"
        by_name[name] = value


def name_loggers(loggers: Any, style: str, *, is_main: bool) -> dict[str, Logger]:
    """The loggers by name, and one that shows metrics on a terminal or in a notebook, unless there is one.

    Args:
        loggers: as in `Trainer`; a mapping with "console" decides itself whether metrics are shown.
        style: as in `Logging.console`.
    """
    by_name = name_values("loggers", loggers, Logger)
    is_decided = isinstance(loggers, Mapping) and CONSOLE in loggers
    has_display = any(logger.is_display for logger in by_name.values())
    if is_main and not is_decided and not has_display:
        display = make_display(style)
        if display is not None:
            by_name[CONSOLE] = display
    return by_name


def loader_settings(seed: int | None, device: torch.device, group: ProcessGroup) -> dict[str, Any]:
    """The arguments with which a trainer makes a loader of a dataset."""
    return {
        "seed": seed or 0,
        "pin_memory": device.type == "cuda",
        "rank": group.data_rank,
        "world_size": group.data_size,
    }


def check_data(train_loader: Any, val_loaders: Mapping[str, Any]) -> None:
    """Log what the train loader promises, and refuse a validation loader with the name of the training's metrics."""
    if promise := getattr(train_loader, "promise", None):
        log.info(promise)
    if "train" in val_loaders:
        raise UserError(
            "a validation loader is called 'train', the prefix of the training metrics", cure="Give it another name."
        )


def prepare_optimizers(optimizers: Iterable[torch.optim.Optimizer], *, drops_frozen: bool) -> None:
    """Make new optimizers' steps cheap.

    Args:
        drops_frozen: remove the parameters that need no gradient, and groups that are then empty.
    """
    for optimizer in optimizers:
        if drops_frozen:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
            # In place: a wrapper may hold this list.
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        step_lightly(optimizer)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, copied."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def reset_model(model: nn.Module, source: Any, seed: int | None) -> None:
    """Load the first weights into a model; those of a model given as an instance stay.

    Args:
        source: the class or function that has made the model, or the instance.
        seed: seeds the generators as before the model was made; None: they are left alone.
    """
    seed_everything(seed)
    if isinstance(source, nn.Module):
        return
    first = make_instance(source, nn.Module)
    for name, module in first.named_modules():
        buffers = model.get_submodule(name)._buffers
        # A buffer that the model had created later is None again.
        for buffer_name, buffer in module._buffers.items():
            if buffer is None:
                buffers[buffer_name] = None
    # The modules of a step were given as instances, so they keep their weights.
    of_step = {name: value for name, value in model.state_dict().items() if name.startswith(f"{STEP_MODULES}.")}
    state = {**first.state_dict(), **of_step}
    # Into the same tensors, which the optimizers and the compiled forward hold.
    fitting, _ = fit_model(model, state, versions=find_versions(model), reshape_buffers=True)
    fitting.load()


def reset_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer], settings: Mapping[str, list[dict[str, Any]]]
) -> None:
    """Reset each optimizer to its groups and settings, without state or gradients."""
    # In place: schedules, steps and compiled code hold the optimizer and its list of groups.
    for name, optimizer in optimizers.items():
        optimizer.zero_grad()
        for holder in (optimizer, *inner_optimizers(optimizer)):
            holder.state.clear()
        # Groups that callbacks have added are removed.
        del optimizer.param_groups[len(settings[name]) :]
        for group, first_settings in zip(optimizer.param_groups, settings[name], strict=True):
            params = group["params"]
            group.clear()
            group.update(params=params, **first_settings)
