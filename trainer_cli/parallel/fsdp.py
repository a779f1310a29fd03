"""Every process holds a part of each parameter, gradient and optimizer state (torch's fully_shard, FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_cli.errors import ConfigError
from trainer_cli.parallel.blocks import apart, blocks_of
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.parallel.ranks import check_shards
from trainer_cli.parallel.single import on_local_device
from trainer_cli.parallel.tensor import divide


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
