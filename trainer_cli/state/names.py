"""Names of a model's tensors, without what wrappers of the model add to them."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

_COMPILED = "_orig_mod"
_WRAPPED = "module."


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without the wrappers that put a prefix before its names."""
    while True:
        inner = getattr(model, _COMPILED, None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def clean_name(name: str, live: Container[str] = (), state: Container[str] = ()) -> str:
    """A tensor's name without the parts that torch.compile adds.

    Args:
        live: names of the model. A name that is not among them loses the prefix of a parallel wrapper, if it is among
            them without it.
        state: all names in the same state: the prefix stays if another tensor has the name without it.
    """
    if _COMPILED in name:
        name = ".".join(component for component in name.split(".") if component != _COMPILED)
    short = name.removeprefix(_WRAPPED)
    return short if name not in live and short in live and short not in state else name


def name_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter; the first one of a tied parameter."""
    return {value: clean_name(name) for name, value in unwrap(model).named_parameters()}
