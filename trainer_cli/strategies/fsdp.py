"""FSDP: every process holds a part of each parameter, gradient and optimizer state (torch's fully_shard, FSDP2).

A model is sharded block by block (`blocks.py`). With tensor parallelism the processes of a tensor group first divide
single layers between them, by a plan that maps globs of module names to styles. The method
`tensor_parallel_plan(tensor_size)` of a model returns the plan, or raises a ValueError that says why this model cannot
be divided so. Models of transformers have a plan as `tp_plan`.
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

from trainer_cli.errors import ConfigError
from trainer_cli.layout import STEP_MODULES
from trainer_cli.parallel import ProcessGroup
from trainer_cli.patterns import did_you_mean, matches
from trainer_cli.ranks import check_shards
from trainer_cli.strategies.blocks import find_blocks, without_tied
from trainer_cli.strategies.strategy import on_local_device
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

PLAN = "tensor_parallel_plan"
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Style by its name, the same as in transformers. After `colwise` each process has its part of the output features,
which `rowwise` takes as input; after every other style each has all features."""
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
"""Keys of the config of a model of transformers, counts that its plan divides."""


def divide(model: nn.Module, mesh: DeviceMesh) -> set[nn.Module]:
    """Divide a model's layers by its plan between the ranks of a mesh of one dimension, which have the same weights.

    Returns the layers that are divided.

    Raises:
        ConfigError: the model has no plan, or one that does not fit.
    """
    size = mesh.size()
    styles = read_styles(model, size)
    tied_names = _find_tied_names(model)
    if not hasattr(model, PLAN):
        # A plan of transformers expects that tied weights are tied again after the division; here they stay whole.
        tied_layers = {name.rpartition(".")[0] for names in tied_names for name in names}
        styles = {name: style for name, style in styles.items() if name not in tied_layers}
    # src_data_rank=None: no broadcast, as every rank has the same weights already.
    parallelize_module(model, mesh, styles, src_data_rank=None)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in tied_names:
        if len({id(parameters[name]) for name in names}) > 1:
            raise _wrong(f"{names[0]} and {names[1]} are one tensor, and the model's {PLAN} divides one alone")
    divided = sum(parameter.numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    share = divided / sum(parameter.numel() for parameter in model.parameters())
    layers = format_count(len(styles), "layer")
    log.info("tensor_size=%d divides %s, with %.0f %% of the parameters", size, layers, 100 * share)
    return {model.get_submodule(name) for name in styles}


def read_styles(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Full name -> style of each layer that a tensor group of this size divides, by the model's plan.

    Raises:
        ConfigError: the model has no plan, or one that does not fit.
    """
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in _read_plan(model, size).items():
        layers = {name: module for name, module in model.named_modules() if name and matches(name, pattern)}
        if not layers:
            names = [name for name, _ in model.named_modules() if name]
            raise _wrong(f"the model's {PLAN} names '{pattern}', and no module is called so", pattern, names)
        if not isinstance(style, str | ParallelStyle):
            raise _wrong(f"the model's {PLAN} gives '{pattern}' a {type(style).__name__}, which is not a style")
        for name, module in layers.items():
            styles[name] = _make_style(name, module, style, size) if isinstance(style, str) else style
    if not styles:
        raise _wrong(f"the model's {PLAN} is empty")
    return styles


def _read_plan(model: nn.Module, size: int) -> Mapping[str, Any]:
    """Glob of layers -> style, by the model's method, else by the plan that transformers gives a model.

    Raises:
        ConfigError: there is no plan, or it is not for groups of this size.
    """
    method, transformers_plan = getattr(model, PLAN, None), getattr(model, "tp_plan", None)
    if method is None and isinstance(transformers_plan, Mapping) and transformers_plan:
        for key in _HEAD_COUNTS:
            if (count := getattr(getattr(model, "config", None), key, None) or 0) % size:
                raise _wrong(f"parallel.tensor_size is {size}, which does not divide the model's {count} {key}")
        return transformers_plan
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


def _make_style(name: str, module: nn.Module, style: str, size: int) -> ParallelStyle:
    """The style with this name. Refuses a layer that it cannot divide in equal parts."""
    if style not in _STYLES:
        raise _wrong(f"the model's {PLAN} gives {name} the style '{style}', which does not exist", style, [*_STYLES])
    if not isinstance(module, nn.Linear | nn.Embedding):
        kind = type(module).__name__
        raise _wrong(f"{name} is a {kind}, and '{style}' divides Linear and Embedding: use a style of torch's")
    # The weight of Linear is (outputs, inputs), that of Embedding (inputs, outputs).
    by_inputs, is_linear = style.endswith("rowwise"), isinstance(module, nn.Linear)
    features = module.weight.shape[1 if by_inputs == is_linear else 0]
    if features % size:
        kind = "inputs" if by_inputs else "outputs"
        raise _wrong(f"{name} has {features} {kind}, which {size} processes cannot divide in equal parts")
    return _STYLES["embedding_rowwise" if by_inputs and not is_linear else style]()


def _find_tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    return [names for names in names_by_parameter.values() if len(names) > 1]


def _wrong(problem: str, name: str = "", choices: list[str] | None = None) -> ConfigError:
    """The error of a plan that does not fit, with the choice that is most like the name, if there is one."""
    return ConfigError(problem, location="parallel.tensor_size", hint=did_you_mean(name, choices or []).strip() or None)


class FSDP:
    """Shards the blocks of a model. Each block is gathered while it is computed.

    The ranks of a tensor group (`ProcessGroup.divide_layers`) first divide layers between them, by the model's plan.
    Then each rank's part is sharded with the ranks of the other tensor groups.

    Args:
        shard_size: processes that share one copy of the parameters; between these groups gradients are averaged, as by
            DDP (hybrid sharding). None: all processes.
        wrap, wrap_min_parameters: which modules are blocks, as in `find_blocks`.
        dtype: the number format that parameters are gathered and computed in; None: that of the parameters. Gradients
            are reduced in 32 bits, and batch norms are computed in the format of their parameters.
        cpu_offload: keep parts in the memory of the host between steps.
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
        # Copies to a GPU overlap with computation only from pinned memory.
        pinned = torch.cuda.is_available()
        self._offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Give all ranks the weights of rank 0, divide layers by the plan, and shard the blocks.

        Raises:
            ConfigError: a parameter cannot be sharded, or the plan does not fit.
        """
        device = on_local_device(device, self.group)
        for name, parameter in model.named_parameters():
            if name.startswith(f"{STEP_MODULES}."):
                raise ConfigError(
                    f"the step holds the parameter {name.partition('.')[2]}, which parallel=fsdp cannot shard",
                    location="parallel.strategy",
                    hint="Hold it in the model, and use it in its forward; or choose parallel=ddp.",
                )
            if not parameter.ndim:
                raise ConfigError(
                    f"the parameter {name} has no dimension, and parallel=fsdp cannot shard it",
                    location="parallel.strategy",
                    hint="Make it a tensor of shape (1,), or choose parallel=ddp.",
                )
        with torch.no_grad():
            # The weights of rank 0, as under DDP: ranks may have drawn different random numbers.
            for tensor in (*model.parameters(), *model.buffers()):
                value = tensor.data.to(device)
                broadcast(value, src=0)
                tensor.data.copy_(value)
        mesh = self._mesh(device.type)
        self.group.set_timeout_of(mesh.get_all_groups())
        blocks = without_tied(model, find_blocks(model, self._wrap, self._min_parameters))
        if self.group.tensor_size > 1:
            divided = divide(model, mesh["tensor"])
            # The output of such a layer is a view, after which torch's hooks of a block need not be called.
            blocks = [block for block in blocks if block not in divided]
            # A mesh of all dimensions, over which the norm of gradients is summed by one collective.
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
        """The ranks as a mesh of at most three dimensions: copies, shards, and tensor groups if there are some."""
        tensor = self.group.tensor_size
        sizes = {"replicate": self.world_size // self._shard_size, "shard": self._shard_size // tensor}
        sizes = {"shard": sizes["shard"]} if sizes["replicate"] == 1 else sizes
        # The innermost dimension: ranks of a tensor group are neighbours, mostly on one machine.
        sizes |= {"tensor": tensor} if tensor > 1 else {}
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def trained(self, model: nn.Module) -> nn.Module:
        """The model itself, whose modules were changed in place."""
        return model

    def on_trained_changed(self, model: nn.Module) -> None:
        """Nothing: a block reads `requires_grad` each time that it is gathered."""

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Set whether the next backward averages gradients."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(on)

    def has_averaged(self) -> bool:
        """True: each block averages the gradients that it has, at once."""
        return True

    def check_averaged(self, model: nn.Module) -> None:
        """Nothing: each block averages the gradients that it has."""

    def before_save(self, model: nn.Module) -> dict[str, int]:
        """No checksums: no process holds a whole parameter."""
        return {}

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        """Evaluate with the outermost parameters gathered, and with the buffers of rank 0 on all ranks."""
        assert isinstance(model, FSDPModule)
        # Gather the parameters outside of the blocks, for calls of methods other than forward.
        model.unshard()
        for buffer in model.buffers():
            broadcast(buffer, src=0)
        try:
            yield
        finally:
            # The last forward leaves the outermost parameters gathered.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip by the norm over all shards and all layers, divided ones or not."""
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor):
                by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
        # Norms of tensors on different meshes cannot be stacked, so each mesh has a norm of its own first.
        norms: list[Tensor] = []
        for on_mesh in by_mesh.values():
            norm = nn.utils.get_total_norm([parameter.grad for parameter in on_mesh if parameter.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for on_mesh in by_mesh.values():
            nn.utils.clip_grads_with_norm_(on_mesh, max_norm, total)
        return total
