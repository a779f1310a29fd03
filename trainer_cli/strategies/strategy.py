"""How a model is placed and its gradients are averaged: the interface `Strategy`, one process, and DDP.

`Single` trains on one device. Under `DDP` every process holds the whole model (torch's DistributedDataParallel). The
third strategy, which shards the model, is in `fsdp.py`: it imports parts of torch that take long to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer_cli.errors import UserError
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.torch_compat import ddp_with_fixed_buckets, release_ddp


@runtime_checkable
class Strategy(Protocol):
    """How a model is placed, and the operations that involve all processes that train it."""

    world_size: int
    """Processes that train this model."""
    group: ProcessGroup
    """These processes."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to the device of this process. Called before its optimizers are made."""

    def trained(self, model: nn.Module) -> nn.Module:
        """The module that a training forward calls: the model, or a wrapper whose backward averages gradients."""

    def on_trained_changed(self, model: nn.Module) -> None:
        """Called between two steps, on all processes, after `requires_grad` of parameters has changed."""

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Set whether the next forward and backward averages gradients over the processes. Off, gradients only
        accumulate on each."""

    def has_averaged(self) -> bool:
        """Whether no average of gradients is pending: all of the last forward are averaged, or none were to be."""

    def check_averaged(self, model: nn.Module) -> None:
        """Check, after the last backward of a step, that gradients were averaged over the processes.

        Raises:
            UserError: parameters without a gradient prevented it.
        """

    def before_save(self, model: nn.Module) -> dict[str, int]:
        """Prepare the model for a save, after a step. Collective.

        Returns:
            A checksum of each parameter that every process holds whole, and that must be equal on all of them.
        """

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context for an evaluation, in which the model is the same on all processes, buffers too. Collective."""

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to this norm over all processes. Returns the norm before, as a tensor: to read its value
        would wait for the device."""


class Single:
    """The model as it is, moved to the device."""

    world_size = 1
    group: ProcessGroup = ALONE

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to the device."""
        if device.type == "cuda" and device.index is not None:
            # Streams, pinned memory and random numbers are those of the current device.
            torch.cuda.set_device(device)
        return model.to(device)

    def trained(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def on_trained_changed(self, model: nn.Module) -> None:
        """Nothing depends on it."""

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Nothing to average."""

    def has_averaged(self) -> bool:
        """True: nothing is averaged."""
        return True

    def check_averaged(self, model: nn.Module) -> None:
        """Nothing to average."""

    def before_save(self, model: nn.Module) -> dict[str, int]:
        """No checksums: there is no other process to compare with."""
        return {}

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip as torch does."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def on_local_device(device: torch.device, group: ProcessGroup) -> torch.device:
    """The device of this rank: for `cuda`, the GPU with its local rank.

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
    """The whole model on every rank. Gradients are averaged in buckets, while the backward computes the next ones.

    Buckets hold the parameters in the reverse of the order in which the model registers them. An all-reduce starts when
    its bucket is complete and those before it have started, so a model that registers modules in the order of their
    use overlaps most.

    Args:
        find_unused_parameters: allow parameters without a gradient in some steps; that costs time.
    """

    def __init__(self, group: ProcessGroup, *, find_unused_parameters: bool = False) -> None:
        self.group, self.world_size = group, group.world_size
        self._find_unused = find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to this rank's device, and wrap it if it has a parameter to train."""
        self._device = on_local_device(device, self.group)
        model = model.to(self._device)
        # DistributedDataParallel refuses a model without a parameter to train.
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._wrapped = self._wrap(model)
        return model

    def _wrap(self, model: nn.Module, *, init_sync: bool = True) -> DistributedDataParallel:
        """Wrap the model; `init_sync`: give all ranks the weights and buffers of rank 0."""
        return ddp_with_fixed_buckets(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            find_unused_parameters=self._find_unused,
            gradient_as_bucket_view=True,
            init_sync=init_sync,
        )

    def on_trained_changed(self, model: nn.Module) -> None:
        """Wrap the model anew."""
        assert self._wrapped is not None
        # Its buckets hold the parameters that were trained when it was made. A wrapper made after a resume has the same
        # buckets, so gradients are added in the same order.
        release_ddp(self._wrapped)
        # Buffers are not sent again: without a change each rank would still have its own statistics of norms.
        self._wrapped = self._wrap(model, init_sync=False)

    def trained(self, model: nn.Module) -> nn.Module:
        """The wrapper; the model itself if it has no parameter to train."""
        return model if self._wrapped is None else self._wrapped

    def sync_gradients(self, model: nn.Module, on: bool) -> None:
        """Set whether the next backward averages gradients."""
        if self._wrapped is not None:
            # The attribute that its no_sync() sets. The forward reads it too, so it is set before the forward.
            self._wrapped.require_backward_grad_sync = on

    def has_averaged(self) -> bool:
        """Whether torch waits for no gradient of the last forward."""
        return self._pending_average() is None

    def _pending_average(self) -> RuntimeError | None:
        """The error with which torch would refuse another forward, because some parameters lack a gradient."""
        reducer: Any = None if self._wrapped is None else self._wrapped.reducer
        try:
            if reducer is not None:
                reducer._check_reducer_finalized()
        except RuntimeError as error:
            return error
        return None

    def check_averaged(self, model: nn.Module) -> None:
        """Raise UserError with the parameters that got no gradient, if torch still waits for some."""
        # Torch checks this in `_rebuild_buckets` of the next forward: too late, after the optimizer's step.
        if (error := self._pending_average()) is None:
            return
        parameters = model.named_parameters()
        unused = [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]
        names = f" ({', '.join(unused[:3])}{', …' if len(unused) > 3 else ''})" if unused else ""
        cure = "Set it to true, or freeze parameters that get none."
        if not unused:
            cure = "The loss of each self.backward must depend on all of them: add the losses, and call it once."
        elif self._find_unused:
            cure = "Return tensors, or mappings or lists of them, from forward; name no optimizer in self.backward."
        raise UserError(
            f"parameters{names} got no gradient, so the gradients of the processes were not averaged",
            where="parallel.find_unused_parameters",
            cure=cure,
        ) from error

    def before_save(self, model: nn.Module) -> dict[str, int]:
        """Give all ranks the buffers of rank 0. Returns a checksum of each parameter, to compare between ranks."""
        if self._wrapped is None:
            return {}
        # Before the next forward torch gives all ranks the buffers of rank 0. Each rank writes some of the large ones.
        self._send_buffers(model)
        ignored = _ignored(model)
        checksums = {name: _checksum(value) for name, value in model.named_parameters() if name not in ignored}
        # One copy from a GPU, not one for each parameter.
        return dict(zip(checksums, torch.stack(list(checksums.values())).tolist(), strict=True))

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        """Evaluate with the buffers of rank 0 on all ranks."""
        # Each rank has its own running statistics; a checkpoint has those of rank 0, so these are evaluated.
        self._send_buffers(model)
        yield

    def _send_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0, but those that the user has kept from torch."""
        ignored = _ignored(model)
        for name, buffer in model.named_buffers():
            if name not in ignored:
                torch.distributed.broadcast(buffer, src=0)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip as torch does: averaged gradients are the same on all ranks."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)


_CHUNK = 1 << 20
"""Elements of a parameter that are summed at once."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ignored(model: nn.Module) -> set[str]:
    """The parameters and buffers that the user has kept from DistributedDataParallel: each rank has its own."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum of the bits of a tensor, 64 bits. On a GPU it is computed there, where a copy would take longer."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        # Not above: only ranks that compare their weights need it.
        from trainer_cli.manifest import new_digest

        digest = new_digest(DigestAlgorithm.xxh3_128)
        digest.update(flat.view(torch.uint8).numpy().data)
        return torch.tensor(int(digest.hexdigest()[:15], 16))
    return _sum_bits(flat)


def _sum_bits(flat: Tensor) -> Tensor:
    """A checksum of a flat tensor by sums of integers of 64 bits, which wrap around."""
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
    # Each element has a factor of its own, so that a sum differs where two elements are exchanged.
    factors = torch.arange(1, 2 * min(_CHUNK, len(bits)) + 1, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        total = total * 1_000_003 + (chunk * factors[: len(chunk)]).sum()
    return total
