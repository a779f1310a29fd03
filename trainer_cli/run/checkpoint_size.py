"""How large a checkpoint of a config will be: its state is made without values, and laid out as it would be saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.format.tensors import TensorsFormat
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.schedulers import Schedulers
from trainer_cli.trainer.state import capture

if TYPE_CHECKING:
    from trainer_cli.run.build import Builder, Data
    from trainer_cli.trainer.trainer import Trainer

_AFFORDABLE_BYTES = 2**30
"""A state up to this size is made with values where that is the only way to know it."""
_HOW = ("fused", "foreach", "capturable")


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes of the files of one checkpoint; None where unknown."""

    before_training: int | None = None
    """Of one that is saved before the optimizer has made a step."""
    trained: int | None = None
    doubt: str | None = None
    """What is not in them, or why there are none."""

    def at(self, step: int) -> int:
        """Bytes of the checkpoint of a step; 0 where unknown."""
        return (self.trained if step else self.before_training) or 0


def weigh(builder: Builder, data: Data, end: Progress, *, beside: int = 0) -> Weight:
    """Bytes of a checkpoint at the beginning, and of one about `end`; `beside` are those of small files with it.

    Raises:
        TrainError: `fit` would refuse the model, the optimizer or their state.
    """
    try:
        trainer, before = _made(builder, data)
        doubt = _step(trainer)
        if doubt is not None and before <= _AFFORDABLE_BYTES:
            trainer, _ = _made(builder, data, values=True)
            doubt = _step(trainer)
        trainer.progress.load_state_dict(end.state_dict())
        return Weight(before + beside, _size(trainer, data) + beside, doubt)
    except RuntimeError as error:
        return Weight(doubt=f"the size of a checkpoint is unknown: {str(error).splitlines()[0]}")


def _made(builder: Builder, data: Data, *, values: bool = False) -> tuple[Trainer, int]:
    """A trainer as before its first step, and the bytes of its state."""
    trainer = builder.shapes(data, values=values)
    trainer.loop.prepare(trainer, data.train)
    trainer.schedulers = Schedulers(builder.schedulers(trainer.loop), trainer.optimizers)
    return trainer, _size(trainer, data)


def _size(trainer: Trainer, data: Data) -> int:
    trainer.hooks.call("on_fit_start", trainer, data.train, data.val, trainer.loop)
    return TensorsFormat().size_bytes(capture(trainer, data.train))


def _step(trainer: Trainer) -> str | None:
    """Have each optimizer make what it keeps; else say that it is not counted."""
    for optimizer in trainer.optimizers.values():
        for group in optimizer.param_groups:
            # How a step is computed changes nothing of what is kept, and not every way works without values.
            group.update({key: False for key in _HOW if group.get(key)})
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = parameter.detach().clone()
        try:
            optimizer.step()
        except Exception as error:  # Any optimizer may be here, and may want what a plan does not have.
            return f"what {type(optimizer).__name__} keeps is not counted: {type(error).__name__}: {error}"[:300]
    return None
