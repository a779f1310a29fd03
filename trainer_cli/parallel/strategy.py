"""What the trainer asks of the way in which one model is trained, by one process or by several.

One process on one device.

Every process holds the whole model; gradients are averaged (torch's DistributedDataParallel).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ALONE, ProcessGroup
from trainer_cli.parallel.torch_compat import ddp_with_fixed_buckets


@runtime_checkable
class Strategy(Protocol):
    """How a model is placed, and what is computed over all processes that train it."""

    world_size: int
    """Processes that train this model."""
    group: ProcessGroup
    """These processes."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model on the device of this process, before its optimizers are made."""

    def trained(self, model: nn.Module) -> nn.Module:
        """What a training forward calls: the placed model, or a wrapper whose backward averages gradients."""

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Whether the next forward and backward averages gradients over the processes, or only adds to its own."""

    def check_averaged(self, model: nn.Module) -> None:
        """Check, after the last backward of several processes, that gradients are averaged.

        Raises:
            UserError: parameters without a gradient have kept others from it.
        """

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around an evaluation: the model is the same on all processes, also where training leaves differences.
        Collective."""

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to this norm over all processes. Returns the norm before, without a wait for it."""


class Single:
    """The model as it is, moved to the device."""

    world_size = 1
    group: ProcessGroup = ALONE

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model.to(device)

    def trained(self, model: nn.Module) -> nn.Module:
        return model

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """There are no other gradients."""

    def check_averaged(self, model: nn.Module) -> None:
        """There are no other gradients."""

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def on_local_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The device of this rank: of several GPUs, that of its number on its machine.

    Raises:
        UserError: this machine has fewer GPUs than processes.
    """
    if device.type != "cuda":
        return device
    if group.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {group.local_rank} has no GPU: this machine has {torch.cuda.device_count()}",
            cure="Start as many processes on each machine as it has GPUs.",
        )
    return torch.device("cuda", group.local_rank)


class DDP:
    """The model on every rank. Gradients are averaged in buckets, each while the backward computes those that follow.

    Buckets hold the parameters in the reverse of the order in which the model registers them: an all-reduce starts when
    the bucket is complete, and after those before it. A model that registers modules in the order of their use overlaps
    most.

    Args:
        find_unused_parameters: also parameters without a gradient in some steps are handled; that costs time.
    """

    def __init__(self, group: ProcessGroup, *, find_unused_parameters: bool = False) -> None:
        self.group, self.world_size = group, group.world_size
        self._find_unused = find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        device = on_local_device(device, self.group)
        model = model.to(device)
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._wrapped = ddp_with_fixed_buckets(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                find_unused_parameters=self._find_unused,
                gradient_as_bucket_view=True,
            )
        return model

    def trained(self, model: nn.Module) -> nn.Module:
        return model if self._wrapped is None else self._wrapped

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        if self._wrapped is not None:
            # As its no_sync() does; the forward reads this too.
            self._wrapped.require_backward_grad_sync = on

    def check_averaged(self, model: nn.Module) -> None:
        if self._wrapped is None:
            return
        reducer: Any = self._wrapped.reducer
        try:
            # Torch does so in _rebuild_buckets, after the optimizer's step.
            reducer._check_reducer_finalized()
        except RuntimeError as error:
            unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
            named = f" ({', '.join(unused[:3])}{', …' if len(unused) > 3 else ''})" if unused else ""
            cure = "Set it to true, or freeze parameters that get none."
            if self._find_unused:
                cure = "Return tensors, or mappings or lists of them, from forward; name no optimizer in self.backward."
            raise UserError(
                f"parameters{named} got no gradient, so the gradients of the processes were not averaged",
                where="parallel.find_unused_parameters",
                cure=cure,
            ) from error

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        # The buffers of rank 0 are those of a checkpoint.
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)
        yield

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
