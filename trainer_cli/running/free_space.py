"""Compare the checkpoints of a training with the free space of the disk, before its first step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from trainer_cli.callbacks import CheckpointerCallback
from trainer_cli.checkpoint import FreeSpace, NeededSpace, files_of_checkpoint, find_shortage
from trainer_cli.errors import UserError
from trainer_cli.files import is_url
from trainer_cli.running.checkpoint_size import IMPLEMENTATIONS
from trainer_cli.schema import CheckpointConfig, CheckpointFormat, Compression
from trainer_cli.storage import LocalStorage
from trainer_cli.torch_compat import step_lightly

if TYPE_CHECKING:
    from trainer_cli.policy import Timeline
    from trainer_cli.running.planning import StartPoint
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_SMALL_FILES = 2
"""Files beside the state, at least: config.yaml, and the config of a model of another library."""


def estimate_size(trainer: Trainer, start_point: StartPoint) -> int:
    """A lower bound of the size in bytes of the next checkpoint; 0 if nothing is known.

    It is the size of the newest checkpoint, or else of the weights and the state of torch's own optimizers.
    """
    settings = trainer.checkpoint.settings if isinstance(trainer.checkpoint, CheckpointerCallback) else None
    if settings is None or settings.compression is not Compression.none:
        return 0
    if start_point.saved and start_point.sizes:
        return start_point.sizes[max(start_point.saved, key=lambda saved: saved.step).name]
    if settings.leave_out:
        return 0
    tensors = [value for value in trainer.model.state_dict(keep_vars=True).values() if isinstance(value, torch.Tensor)]
    # Tensors are compared by identity: tied ones are stored once. Those that are not dense are refused later.
    dense = {id(tensor): tensor for tensor in tensors if tensor.layout is torch.strided}
    return sum(tensor.nbytes for tensor in dense.values()) + sum(map(optimizer_bytes, trainer.optimizers.values()))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """A lower bound of the size in bytes of an optimizer's state after its first step; 0 if it is not one of torch.

    A second optimizer with the same settings makes a step with tensors of one element, which shows the state for each
    parameter.
    """
    # A class of a user may have effects beyond its parameters.
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    size_bytes = 0
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        tiny = [torch.zeros([1] * max(tensor.ndim, 1), dtype=tensor.dtype, requires_grad=True) for tensor in parameters]
        if not tiny:
            continue
        for tensor in tiny:
            tensor.grad = torch.zeros_like(tensor)
        settings = {**group, **dict.fromkeys(IMPLEMENTATIONS, False)}
        accepted = {key: value for key, value in settings.items() if key in optimizer.defaults}
        try:
            copy = type(optimizer)([{**accepted, "params": tiny}])  # type: ignore[call-arg]
            # As in the trainer: torch's wrapper of `step` imports the compiler, half of the time to the first step.
            step_lightly(copy)
            copy.step()
        # The optimizer needs more than gradients, such as a closure.
        except Exception as error:
            log.debug("the size of the state of %s is unknown: %r", type(optimizer).__name__, error)
            return 0
        for parameter, tensor in zip(parameters, tiny, strict=True):
            states = [value for value in copy.state[tensor].values() if isinstance(value, torch.Tensor) and value.ndim]
            size_bytes += parameter.numel() * sum(state.element_size() for state in states)
    return size_bytes


def _shared_bytes(trainer: Trainer, settings: CheckpointConfig) -> int:
    """Size of the frozen tensors, which are written once for all checkpoints."""
    if not settings.link_frozen or settings.format is not CheckpointFormat.tensors:
        return 0
    return sum(parameter.nbytes for parameter in trainer.trained.frozen() if parameter.layout is torch.strided)


def check_space(trainer: Trainer, start_point: StartPoint, timeline: Timeline, size_bytes: int) -> None:
    """Warn if the planned checkpoints do not fit.

    Args:
        timeline: the plan, with checkpoints of this size.

    Raises:
        UserError: not even two fit, and a failed save would end the training.
    """
    checkpoint, peak = trainer.checkpoint, timeline.peak
    assert isinstance(checkpoint, CheckpointerCallback)
    # A store has no limit, and its local cache is emptied while the training goes on.
    is_limited = not is_url(checkpoint.folder)
    if not size_bytes or peak is None or not timeline.saves or not is_limited:
        return
    files = files_of_checkpoint(trainer.strategy.world_size, _SMALL_FILES)
    present = start_point.sizes or {}
    # The plan does not list automatic ones, of which the newest stays beside the others.
    automatic = int(checkpoint.settings.is_automatic)
    added_bytes = peak.size_bytes - sum(present.values()) + automatic * size_bytes
    added = peak.count - len(present) + automatic
    storage = checkpoint.storage
    free = FreeSpace(storage.free_bytes(), storage.free_files())
    save, peak_space = NeededSpace(size_bytes, files), NeededSpace(added_bytes, files * added)
    shortage = find_shortage(save, peak_space, free)
    shared_bytes = _shared_bytes(trainer, checkpoint.settings) if shortage else 0
    # A link is tried only where that decides, as it writes to the disk.
    if shared_bytes and isinstance(storage, LocalStorage) and storage.has_links():
        # The first of them may write the frozen tensors.
        peak_space = NeededSpace(added_bytes - shared_bytes * max(added - 1, 0), files * added)
        shortage = find_shortage(save, peak_space, free, shared_bytes)
    if shortage is None:
        return
    if shortage.refuses and not checkpoint.tolerates_errors:
        raise UserError(
            shortage.text,
            where=str(checkpoint.folder),
            cure="Free some space, or set checkpoint.folder to another disk; train plan lists what would be saved.",
        )
    log.warning(
        "%s (%s). Free some space, or keep fewer (checkpoint.max_checkpoints); train plan lists all of them",
        shortage.text,
        checkpoint.folder,
    )
