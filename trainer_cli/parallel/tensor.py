"""Tensor parallelism: the processes of a tensor group divide layers between them, by a plan that the model gives.

A plan maps globs of module names to styles. The method `tensor_parallel_plan(tensor_size)` of a model returns it, or
raises a ValueError that says why this model cannot be divided so. Models of transformers have it as `tp_plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer_cli.config.globs import matches
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

log = logging.getLogger(__name__)

PLAN = "tensor_parallel_plan"
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Styles by the names that transformers gives them, too. After `colwise` each process has its part of the output
features, which `rowwise` takes as input; all others have the whole."""
_COUNTS = ("num_attention_heads", "num_key_value_heads")
"""What the config of a model of transformers may have, and a plan divides."""


def divide(model: nn.Module, mesh: DeviceMesh) -> set[nn.Module]:
    """Divide a model's layers by its plan, between the ranks of a mesh of one dimension. All have the same weights.

    Returns the layers that are divided.

    Raises:
        ConfigError: the model has no plan, or one that does not fit.
    """
    size = mesh.size()
    styles = styles_of(model, size)
    sharing = _names_by_parameter(model)
    if not hasattr(model, PLAN):
        # In a plan of transformers, which expects that tied weights are tied again, these stay whole.
        tied = {name.rpartition(".")[0] for names in sharing for name in names}
        styles = {name: style for name, style in styles.items() if name not in tied}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in sharing:
        if len({id(now[name]) for name in names}) > 1:
            raise _wrong(f"{names[0]} and {names[1]} are one tensor, and the model's {PLAN} divides one alone")
    divided = [one for one in model.parameters() if isinstance(one, DTensor)]
    share = sum(one.numel() for one in divided) / sum(one.numel() for one in model.parameters())
    log.info("tensor_size=%d divides %d layers, with %.0f %% of the parameters", size, len(styles), 100 * share)
    return {model.get_submodule(name) for name in styles}


def styles_of(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """How a tensor group of this size divides a model: the style of each layer that is divided, by its whole name.

    Raises:
        ConfigError: the model has no plan, or one that does not fit.
    """
    found: dict[str, ParallelStyle] = {}
    for pattern, style in _plan_of(model, size).items():
        named = {name: module for name, module in model.named_modules() if name and matches(name, pattern)}
        if not named:
            names = [name for name, _ in model.named_modules() if name]
            raise _wrong(f"the model's {PLAN} names '{pattern}', and no module is called so", pattern, names)
        if not isinstance(style, str | ParallelStyle):
            raise _wrong(f"the model's {PLAN} gives '{pattern}' a {type(style).__name__}, which is no style")
        for name, module in named.items():
            found[name] = _named_style(name, module, style, size) if isinstance(style, str) else style
    if not found:
        raise _wrong(f"the model's {PLAN} is empty")
    return found


def _plan_of(model: nn.Module, size: int) -> Mapping[str, Any]:
    method, theirs = getattr(model, PLAN, None), getattr(model, "tp_plan", None)
    if method is None and isinstance(theirs, Mapping) and theirs:
        for key in _COUNTS:
            if (count := getattr(getattr(model, "config", None), key, None) or 0) % size:
                raise _wrong(f"parallel.tensor_size is {size}, which does not divide the model's {count} {key}")
        return theirs
    if method is None:
        raise ConfigError(
            f"parallel.tensor_size is {size}, but {type(model).__name__} has no method {PLAN}",
            location="parallel.tensor_size",
            hint=f"Give it one, such as `def {PLAN}(self, tensor_size): return "
            '{"blocks.*.mlp.hidden": "colwise", "blocks.*.mlp.out": "rowwise"}`, or set parallel.tensor_size=1.',
        )
    try:
        plan: Mapping[str, Any] = method(size)
    except ValueError as error:
        raise _wrong(f"parallel.tensor_size is {size}: {error}") from error
    return plan


def _named_style(name: str, module: nn.Module, style: str, size: int) -> ParallelStyle:
    """The style of a layer that it divides in equal parts."""
    if style not in _STYLES:
        raise _wrong(f"the model's {PLAN} gives {name} the style '{style}', which does not exist", style, [*_STYLES])
    if not isinstance(module, nn.Linear | nn.Embedding):
        kind = type(module).__name__
        raise _wrong(f"{name} is a {kind}, and '{style}' divides Linear and Embedding: use a style of torch's")
    by_inputs, is_linear = style.endswith("rowwise"), isinstance(module, nn.Linear)
    features = module.weight.shape[1 if by_inputs == is_linear else 0]
    if features % size:
        what = "inputs" if by_inputs else "outputs"
        raise _wrong(f"{name} has {features} {what}, which {size} processes cannot divide in equal parts")
    return _STYLES["embedding_rowwise" if by_inputs and not is_linear else style]()


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _wrong(problem: str, given: str = "", known: list[str] | None = None) -> ConfigError:
    return ConfigError(problem, location="parallel.tensor_size", hint=did_you_mean(given, known or []).strip() or None)
