"""The size of a checkpoint, from its state made without values and the file layout of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.format.interfaces import Format
from trainer_cli.checkpoint.left_out import without
from trainer_cli.checkpoint.model_state import model_files
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.schedulers import Schedulers
from trainer_cli.trainer.state import capture

if TYPE_CHECKING:
    from trainer_cli.run.build import Builder, Data
    from trainer_cli.trainer.trainer import Trainer

_AFFORDABLE_BYTES = 2**30
"""A state up to this size is made with values if the optimizer needs them."""
_SMALL_BYTES = 2**26
"""A state up to this size is made with values at once: a step without values imports torch's compiler, some seconds."""
_HOW = ("fused", "foreach", "capturable")


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """Bytes of the files of one checkpoint; None if unknown."""

    before_training: int | None = None
    """Of one saved before the first optimizer step."""
    trained: int | None = None
    doubt: str | None = None
    """What is not counted, or why the size is unknown."""

    def at(self, step: int) -> int:
        """Bytes of the checkpoint of a step; 0 if unknown."""
        return (self.trained if step else self.before_training) or 0


def checkpoint_size(
    builder: Builder, data: Data, end: Progress, form: Format, *, beside: int = 0, leave_out: Sequence[str] = ()
) -> CheckpointSize:
    """Bytes of a checkpoint of a format at step 0, and of one at `end`.

    Args:
        beside: bytes of the small files in it.
        leave_out: `checkpoint.leave_out`.

    Raises:
        TrainError: `fit` would refuse the model, the optimizer or their state.
    """
    try:
        trainer = _made(builder, data)
        before = _size(trainer, data, form, leave_out)
        if before <= _SMALL_BYTES:
            trainer = _made(builder, data, values=True)
        doubt = _step(trainer)
        if doubt is not None and before <= _AFFORDABLE_BYTES:
            trainer = _made(builder, data, values=True)
            doubt = _step(trainer)
        trainer.progress.load_state_dict(end.state_dict())
        return CheckpointSize(before + beside, _size(trainer, data, form, leave_out) + beside, doubt)
    except RuntimeError as error:
        return CheckpointSize(doubt=f"the size of a checkpoint is unknown: {str(error).splitlines()[0]}")


def _made(builder: Builder, data: Data, *, values: bool = False) -> Trainer:
    """A trainer as before its first step."""
    trainer = builder.shapes(data, values=values)
    trainer.loop.prepare(trainer, data.train)
    trainer.schedulers = Schedulers(builder.schedulers(trainer.loop), trainer.optimizers)
    return trainer


def _size(trainer: Trainer, data: Data, form: Format, leave_out: Sequence[str]) -> int:
    trainer.hooks.call("on_fit_start", trainer, data.train, data.val, trainer.loop)
    files = sum(map(len, model_files(trainer.model).values()))
    state = without(capture(trainer, data.train), leave_out)
    return files + form.plan(state, shapes_only=True).total_bytes


def _step(trainer: Trainer) -> str | None:
    """Make each optimizer create its state; why it cannot, or None."""
    for optimizer in trainer.optimizers.values():
        for group in optimizer.param_groups:
            # The implementation of a step does not change the state, and not every one works without values.
            group.update({key: False for key in _HOW if group.get(key)})
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = parameter.detach().clone()
        try:
            optimizer.step()
        except Exception as error:  # A user's optimizer may need what a plan does not have.
            return f"the state of {type(optimizer).__name__} is not counted: {type(error).__name__}: {error}"[:300]
    return None
