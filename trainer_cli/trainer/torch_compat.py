"""Training that compiles nothing, without `torch._dynamo`: half of torch's time to the first step, and wrappers that
each step would pay for.

Torch wraps methods of its optimizers so that a compiled function does not trace into them, and imports the compiler to
do so at their first call, compiled or not. Here they are called bare as long as it has not been imported. What torch
wraps is recognised layer by layer; a version that does it otherwise is left as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_BARE = "__dynamo_disable"
"""Where torch keeps what it calls in place of a function that is not to be traced; made at the first call."""
_UNTRACED = "_disable_dynamo.<locals>.inner"
_PROFILED = "Optimizer.profile_hook_step.<locals>.wrapper"
_WITHOUT_GRADIENTS = "_use_grad_for_differentiable.<locals>._use_grad"


def leave_compiler_out() -> None:
    """Until the compiler is imported, call the optimizers' untraced methods without it. For the whole process."""
    if _COMPILER in sys.modules:
        return
    for method in vars(Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if _is_layer(method, _UNTRACED) and function is not None and not hasattr(function, _BARE):
            setattr(function, _BARE, _bare(method, function))


def _bare(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)
        # Somebody compiles after all: torch makes its own again, for good.
        if getattr(function, _BARE, None) is call:
            delattr(function, _BARE)
        return method(*args, **kwargs)

    return call


def step_lightly(optimizer: Optimizer) -> None:
    """Have `optimizer.step` do the update without what torch wraps around it, wherever that would do nothing.

    It does something, and is called as ever, where the step is compiled, profiled, or has hooks. An optimizer whose
    step is not wrapped as torch's own are, or was replaced, stays as it is.
    """
    whole = type(optimizer).step
    guarded = getattr(whole, "__wrapped__", None)
    update = getattr(guarded, "__wrapped__", None)
    profiling = getattr(torch.autograd, "_profiler_enabled", None)
    everybodys = vars(sys.modules[Optimizer.__module__])
    hooks = [everybodys.get(f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    hooks += [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    known = _is_layer(whole, _PROFILED) and _is_layer(guarded, _WITHOUT_GRADIENTS) and "step" not in vars(optimizer)
    if not known or update is None or profiling is None or None in hooks:
        return
    compiling = torch.compiler.is_compiling
    every_before, every_after, own_before, own_after = hooks

    @functools.wraps(whole)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if compiling() or profiling() or own_before or own_after or every_before or every_after:
            return whole(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return update(self, *args, **kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def zero_grad(optimizer: Optimizer) -> None:
    """Let go of all gradients; by the optimizer's own `zero_grad`, where it is not torch's."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _is_layer(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_qualname == name
