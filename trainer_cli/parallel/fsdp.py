"""Every process holds a part of each parameter, gradient and optimizer state (torch's fully_shard, FSDP2).

Tensor parallelism: the processes of a tensor group divide layers between them, by a plan that the model gives.

A plan maps globs of module names to styles. The method `tensor_parallel_plan(tensor_size)` of a model returns it, or
raises a ValueError that says why this model cannot be divided so. Models of transformers have it as `tp_plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_cli.core.patterns import did_you_mean, matches
from trainer_cli.core.ranks import check_shards
from trainer_cli.errors import ConfigError
from trainer_cli.parallel.blocks import apart, blocks_of
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.parallel.strategy import on_local_device

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


class FSDP:
    """Blocks of the model are sharded; a block is gathered when it is computed.

    The ranks of a tensor group (`ProcessGroup.divide_layers`) first divide layers between them, by the model's plan;
    what each has then is sharded with the ranks of the other tensor groups.

    Args:
        shard_size: processes that share one copy of the parameters; between these groups gradients are averaged, as by
            DDP (hybrid sharding). None: all processes.
        wrap, wrap_min_parameters: which modules are blocks, as of `blocks_of`.
        dtype: the number format that parameters are gathered and computed in; None: their own. Gradients are reduced
            in 32 bits, and batch norms are computed in their own format.
        cpu_offload: keep parts on the host between steps; on a CPU they are there anyway.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        shard_size: int | None = None,
        wrap: Sequence[str] = (),
        wrap_min_parameters: int | None = None,
        dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
    ) -> None:
        self.group, self.world_size = group, group.world_size
        check_shards(shard_size, group.tensor_size, group.world_size)
        self._shard_size = self.world_size if shard_size is None else shard_size
        self._wrap, self._min_parameters = wrap, wrap_min_parameters
        self._precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
        # Memory is pinned for copies to a GPU.
        pinned = torch.cuda.is_available()
        self._offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        device = on_local_device(device, self.group)
        for name, parameter in model.named_parameters():
            if not parameter.ndim:
                raise ConfigError(
                    f"the parameter {name} has no dimension, and parallel=fsdp cannot shard it",
                    location="parallel.strategy",
                    hint="Make it a tensor of shape (1,), or choose parallel=ddp.",
                )
        with torch.no_grad():
            # As under DDP: one initialization, also if ranks drew different numbers.
            for tensor in (*model.parameters(), *model.buffers()):
                value = tensor.data.to(device)
                broadcast(value, src=0)
                tensor.data.copy_(value)
        mesh = self._mesh(device.type)
        self.group.limit_also(mesh.get_all_groups())
        blocks = apart(model, blocks_of(model, self._wrap, self._min_parameters))
        if self.group.tensor_size > 1:
            divided = divide(model, mesh["tensor"])
            # The output of such a layer is a view, after which torch's hooks of a block need not be called.
            blocks = [one for one in blocks if one not in divided]
            # So that norms are summed at once.
            mesh._flatten()
            mesh = mesh["shard"] if mesh.ndim == 2 else mesh["replicate", "shard"]
        if self._precision.param_dtype is not None:
            for norm in model.modules():
                # Its running statistics have 32 bits, and so must its parameters.
                if isinstance(norm, _BatchNorm) and norm is not model and norm.weight is not None:
                    fully_shard(norm, mesh=mesh, offload_policy=self._offload)
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=self._precision, offload_policy=self._offload)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        return model

    def _mesh(self, device: str) -> DeviceMesh:
        tensor = self.group.tensor_size
        sizes = {"replicate": self.world_size // self._shard_size, "shard": self._shard_size // tensor}
        sizes = {"shard": sizes["shard"]} if sizes["replicate"] == 1 else sizes
        sizes |= {"tensor": tensor} if tensor > 1 else {}
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def trained(self, model: nn.Module) -> nn.Module:
        return model

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(on)

    def check_averaged(self, model: nn.Module) -> None:
        """Each block averages the gradients that it has."""

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        # What stands outside of the blocks, for methods other than forward.
        model.unshard()
        for buffer in model.buffers():
            broadcast(buffer, src=0)
        try:
            yield
        finally:
            # The last forward has left the outermost parameters gathered.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        meshes: dict[DeviceMesh, list[Tensor]] = {}
        for one in parameters:
            if isinstance(one.grad, DTensor):
                meshes.setdefault(one.grad.device_mesh, []).append(one)
        # Norms of tensors on different meshes cannot be stacked.
        found = [nn.utils.get_total_norm([one.grad for one in own if one.grad is not None]) for own in meshes.values()]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in found]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for own in meshes.values():
            nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm
