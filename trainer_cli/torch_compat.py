"""Code of training and parallelism that uses torch's private names, each with a fallback if a name is missing.

leave_compiler_out   `torch._dynamo` is half of the time to the first step. Torch wraps methods of its optimizers, and
                     functions of the meta device, so that a compiled function does not trace into them, and imports
                     the compiler at their first call. The wrappers are recognised layer by layer; where they differ,
                     nothing is changed.
step_lightly         the same wrappers cost time at each step; where they differ, `optimizer.step` is not changed.
foreach_…_           one kernel for many tensors; where it is missing, one call for each tensor.
ddp_with_fixed_…     the same buckets of gradients at every step. Where a torch before 2.13 does not assign
                     them by the expected function, there is one, whose all-reduce starts after the backward.
release_ddp          frees the reducer, which has hooks on parameters; where the names differ, Python frees it later.
next_batch           `__next__` of a DataLoader adds a range for profilers, which takes longer than many batches;
                     where the names are missing, it is called.
is_without_devices   whether a fork can use CUDA; where the name is missing, it is assumed to.
dump_cuda_memory     what the allocator holds; where the name is missing, nothing is written.
overflow_flags       which steps GradScaler skips, without waiting for the device; where missing, none is counted.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_BARE = "__dynamo_disable"
"""The attribute of torch's wrapper for the untraced function; set at the first call."""
_UNTRACED = "_disable_dynamo.<locals>.inner"
_SHAPE_MODULES = ("torch._refs", "torch._refs.nn.functional", "torch._decomp.decompositions")
"""Functions of them that convert types, as a division does, are wrapped so that no compiled function traces them."""
_PROFILED = "Optimizer.profile_hook_step.<locals>.wrapper"
_BUCKETS_MIB = (1, 25)
"""Torch's own limits: of the bucket with the parameters that are registered first, whose all-reduce comes last and
overlaps nothing, and of the others."""
_SMALLEST_BUCKET = 2**18
"""Bytes of gradients whose overlap with the backward saves as much time as an all-reduce of their own takes: by gloo
0.35 ms on a virtual machine with two processors, which added 1.3 MB in a millisecond."""
_UNLIMITED_MIB = 2**20
_ASSIGN_BUCKETS = "_compute_bucket_assignment_by_size"
_WITHOUT_GRADIENTS = "_use_grad_for_differentiable.<locals>._use_grad"


def leave_compiler_out() -> None:
    """Call the optimizers' untraced methods without the compiler until it is imported. For the whole process."""
    _leave_out_of(vars(Optimizer).values())


def leave_compiler_out_of_shapes() -> None:
    """`leave_compiler_out` for the functions by which torch computes shapes on the meta device."""
    for name in _SHAPE_MODULES:
        _leave_out_of(vars(sys.modules[name]).values() if name in sys.modules else ())


def _leave_out_of(functions: Iterable[Any]) -> None:
    """Make torch call the functions below these without the layer that keeps its compiler from tracing them."""
    if _COMPILER in sys.modules:
        return
    layers, seen = list(functions), set[Any]()
    while layers:
        layer = layers.pop()
        if not isinstance(layer, FunctionType) or layer in seen:
            continue
        seen.add(layer)
        # `__wrapped__` is not used: decorators of torch may set it to what is inside the next layer, or not at all.
        try:
            variables = inspect.getclosurevars(layer).nonlocals
        except ValueError:  # A variable without a value.
            continue
        layers += variables.values()
        function = variables.get("fn")
        if _is_layer(layer, _UNTRACED) and function is not None and not hasattr(function, _BARE):
            setattr(function, _BARE, _bare(layer, function))


def _bare(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a method: the function inside it, until the compiler is imported."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)
        # The compiler was imported: without the attribute, torch makes its wrapper again at the next call.
        if getattr(function, _BARE, None) is call:
            delattr(function, _BARE)
        return method(*args, **kwargs)

    return call


def has_compiler() -> bool:
    """Whether the compiler was imported."""
    return _COMPILER in sys.modules


def import_compiler() -> None:
    """Import the compiler, as torch does by itself when a model is wrapped for several ranks."""
    importlib.import_module(_COMPILER)


def is_without_devices() -> bool:
    """Whether this is a fork of a process that has asked CUDA for its devices, and so can't use any."""
    is_in_bad_fork = getattr(torch.cuda, "_is_in_bad_fork", None)
    return is_in_bad_fork is not None and bool(is_in_bad_fork())


def step_lightly(optimizer: Optimizer) -> None:
    """Call an optimizer's update without torch's wrapper of `step` while that does nothing. The wrapper is called as
    usual if the step is compiled or profiled or has hooks. An optimizer with another wrapper, or a replaced step, is
    not changed.
    """
    whole = type(optimizer).step
    guarded = getattr(whole, "__wrapped__", None)
    update = getattr(guarded, "__wrapped__", None)
    profiling = getattr(torch.autograd, "_profiler_enabled", None)
    module = vars(sys.modules[Optimizer.__module__])
    hooks = [module.get(f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    hooks += [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    is_expected = _is_layer(whole, _PROFILED) and _is_layer(guarded, _WITHOUT_GRADIENTS)
    # A step in the instance was replaced, as torch's schedulers do.
    is_replaced = "step" in vars(optimizer)
    if not is_expected or is_replaced or update is None or profiling is None or None in hooks:
        return
    compiling = torch.compiler.is_compiling
    # The dicts themselves, not copies: hooks that are registered later are seen.
    global_before, global_after, before, after = hooks

    @functools.wraps(whole)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if compiling() or profiling() or before or after or global_before or global_after:
            return whole(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return update(self, *args, **kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def foreach_div_(tensors: list[Tensor], divisor: float | Tensor) -> None:
    """Divide each tensor by the divisor, in place."""
    if (kernel := getattr(torch, "_foreach_div_", None)) is not None:
        kernel(tensors, divisor)
        return
    for tensor in tensors:
        tensor.div_(divisor)


def foreach_mul_(tensors: Sequence[Any], factors: list[Tensor]) -> None:
    """Multiply each tensor in place by its factors."""
    if (kernel := getattr(torch, "_foreach_mul_", None)) is not None:
        if tensors:
            kernel(tensors, factors)
        return
    for tensor, factor in zip(tensors, factors, strict=True):
        tensor.mul_(factor)


def foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Interpolate each tensor in place."""
    if (kernel := getattr(torch, "_foreach_lerp_", None)) is not None:
        kernel(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


def foreach_copy_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its tensor."""
    if (kernel := getattr(torch, "_foreach_copy_", None)) is not None:
        kernel(tensors, sources)
        return
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def dense_stand_in(parameter: Tensor) -> Tensor:
    """The parameter; for one with a sparse or complex gradient a dense, real tensor whose gradient is the same memory.

    Torch's kernels that look at gradients, or clip them, take no others.
    """
    gradient = parameter.grad
    if gradient is None or not (gradient.is_sparse or gradient.is_complex()):
        return parameter
    if gradient.is_sparse:
        # Values of equal indices must be summed before a norm is taken.
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values().detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    stand_in = torch.empty_like(gradient)
    stand_in.grad = gradient
    return stand_in


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, on its device."""
    tensors = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    if (kernel := getattr(torch, "_foreach_norm", None)) is not None:
        return list(kernel(tensors)) if tensors else []
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


class _FixedBuckets:
    """Torch's reducer, but without new buckets after the first step.

    The order in which the gradients of more than two ranks are added depends on their place in a bucket. With new
    buckets the first step after a resume would differ in the last bits from the same step of an uninterrupted run.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def ddp_with_fixed_buckets(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """Wrap a model in DistributedDataParallel whose buckets of gradients are the same at every step.

    By default torch has one bucket in the first step, and makes others after it.
    """
    limits = _bucket_limits(model)
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        wrapped = DistributedDataParallel(model, bucket_cap_mb_list=limits, **settings)
    else:
        with _limited_buckets(limits):
            wrapped = DistributedDataParallel(model, **settings)
    fixed: Any = _FixedBuckets(wrapped.reducer)
    wrapped.reducer = fixed
    return wrapped


def release_ddp(wrapped: DistributedDataParallel) -> None:
    """Free the reducer of a wrapper that is no longer used, which removes its hooks from the parameters."""
    # The logger holds it too.
    for name in ("logger", "reducer"):
        if hasattr(wrapped, name):
            setattr(wrapped, name, None)


def _bucket_limits(model: nn.Module) -> list[int]:
    """The limits of the buckets in MiB, the last also of all later ones. A small last bucket joins the one before."""
    sizes = [0]
    for parameter in model.parameters():
        sizes[-1] += parameter.nbytes if parameter.requires_grad else 0
        # As torch assigns parameters: a bucket ends with the one that reaches its limit.
        if sizes[-1] >= _BUCKETS_MIB[min(len(sizes), len(_BUCKETS_MIB)) - 1] * 2**20:
            sizes.append(0)
    if len(sizes) == 1 or sizes[-1] >= _SMALLEST_BUCKET:
        return list(_BUCKETS_MIB)
    first_mib, later = _BUCKETS_MIB
    return [*[first_mib, *[later] * len(sizes)][: len(sizes) - 2], _UNLIMITED_MIB]


@contextmanager
def _limited_buckets(limits_mib: list[int]) -> Iterator[None]:
    """Use these limits in the first step too, where torch has no argument for them."""
    module: Any = torch.distributed
    assign = getattr(module, _ASSIGN_BUCKETS, None)
    if assign is None:
        yield
        return

    def assign_limited(tensors: Any, limits: Any, *args: Any) -> Any:
        return assign(tensors, [limit * 2**20 for limit in limits_mib], *args)

    setattr(module, _ASSIGN_BUCKETS, assign_limited)
    try:
        yield
    finally:
        setattr(module, _ASSIGN_BUCKETS, assign)


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """A tensor for each device, above zero if gradients on it overflowed in this step."""
    flags_per_device = getattr(scaler, "_found_inf_per_device", None)
    return [] if flags_per_device is None else list(flags_per_device(optimizer).values())


def next_batch(iterator: Any) -> Any:
    """The next batch of a DataLoader without workers."""
    is_profiling = getattr(torch._C._autograd, "_profiler_enabled", None)
    fetch = getattr(iterator, "_next_data", None)
    return next(iterator) if fetch is None or is_profiling is None or is_profiling() else fetch()


def compile_deterministically() -> None:
    """Keep the compiler from choosing kernels by measured time."""
    # Read when the compiler is imported, at the first compilation.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.__setattr__("deterministic", True)


def _is_layer(function: Any, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_qualname == name


def dump_cuda_memory(path: Path) -> bool:
    """Write what CUDA's allocator holds, with its history if that is recorded. Whether that is possible."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is not None:
        dump(str(path))
    return dump is not None
