"""The size of a checkpoint, from its state made without values and the file layout of the format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_cli.format import Format
from trainer_cli.loads import omit_states
from trainer_cli.messages import ROOT, SILENT
from trainer_cli.steps import Progress
from trainer_cli.trainer import capture, describe, refuse_absent_loaders

if TYPE_CHECKING:
    from trainer_cli.running.build import Builder, Data
    from trainer_cli.trainer import Trainer


_AFFORDABLE_BYTES = 2**30
"""A state up to this size is built with values if the optimizer needs them."""
_SMALL_BYTES = 2**26
"""A state up to this size is built with values at once: a step without them imports sympy for half a second."""
LOG_MARKS_BYTES = 560
"""Size of the positions of the logs in a checkpoint: about this with the default loggers and two validation metrics."""
IMPLEMENTATIONS = ("fused", "foreach", "capturable")
"""Settings by which torch's optimizers choose how a step is computed. They do not change the state."""


@dataclass(frozen=True, slots=True)
class CheckpointSize:
    """Size of one checkpoint in bytes; None if unknown."""

    before_training: int | None = None
    """Size of a checkpoint that is saved before the first optimizer step."""
    trained: int | None = None
    """Size of a later one."""
    note: str | None = None
    """What the size leaves out, or why it is unknown."""

    def at(self, step: int) -> int:
        """Size in bytes of the checkpoint of a step; 0 if unknown."""
        return (self.trained if step else self.before_training) or 0


def checkpoint_size(
    builder: Builder,
    data: Data,
    end: Progress,
    format: Format,
    *,
    beside: int = 0,
    log_marks: int = 0,
    leave_out: Sequence[str] = (),
    metrics: Mapping[str, str] | None = None,
) -> CheckpointSize:
    """Compute the size of a checkpoint at step 0 and of one at `end`.

    Args:
        beside: size in bytes of the small files in a checkpoint.
        log_marks: size in bytes of the positions of the logs, which a checkpoint after step 0 has.
        leave_out: `checkpoint.leave_out`.
        metrics: setting -> the metric that the saver needs; None: callbacks that are not built here may log any.

    Raises:
        TrainError: `fit` would refuse the model, the optimizer, their state or the name of a metric.
    """
    try:
        trainer = _prepare_trainer(builder, data)
        if metrics is not None:
            refuse_absent_loaders(trainer, data.val, metrics)
        before_bytes = _compute_size(trainer, data, format, leave_out)
        if before_bytes <= _SMALL_BYTES:
            trainer = _prepare_with_values(builder, data)
        why_not_counted = _create_optimizer_state(trainer)
        if why_not_counted is not None and before_bytes <= _AFFORDABLE_BYTES:
            trainer = _prepare_with_values(builder, data)
            why_not_counted = _create_optimizer_state(trainer)
        # With the counts of the last step: longer numbers make the JSON of the state longer.
        trainer.progress.load_state_dict(end.state_dict())
        after_bytes = _compute_size(trainer, data, format, leave_out) + log_marks
        return CheckpointSize(before_bytes + beside, after_bytes + beside, why_not_counted)
    except RuntimeError as error:
        return CheckpointSize(note=f"the size of a checkpoint is unknown: {str(error).splitlines()[0]}")


def _prepare_trainer(builder: Builder, data: Data, *, values: bool = False) -> Trainer:
    """Build a trainer, on the meta device unless it needs `values`, and prepare it for its first step."""
    trainer = builder.shapes(data, values=values)
    trainer.loop.prepare(trainer, data.train)
    trainer.make_schedulers()
    return trainer


def _prepare_with_values(builder: Builder, data: Data) -> Trainer:
    """Build and prepare the trainer again, with values, and without messages: they have been shown once."""
    logger = logging.getLogger(ROOT)
    level = logger.level
    logger.setLevel(SILENT.upper())
    try:
        return _prepare_trainer(builder, data, values=True)
    finally:
        logger.setLevel(level)


def _compute_size(trainer: Trainer, data: Data, format: Format, leave_out: Sequence[str]) -> int:
    """Size in bytes of a checkpoint of the trainer's present state, without the small files."""
    # Callbacks create their state here, such as the copy of an average.
    trainer.hooks.call("on_fit_start", trainer, data.train, data.val, trainer.loop)
    files = sum(map(len, describe(trainer).files.values()))
    state = omit_states(capture(trainer, with_data=True), leave_out)
    return files + format.plan(state, shapes_only=True).total_bytes


def _create_optimizer_state(trainer: Trainer) -> str | None:
    """Make each optimizer create its state by a step. Returns why one cannot, or None."""
    for optimizer in trainer.optimizers.values():
        for group in optimizer.param_groups:
            # The implementation of a step does not change the state, and not every one works without values.
            group.update({key: False for key in IMPLEMENTATIONS if group.get(key)})
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = parameter.detach().clone()
        try:
            optimizer.step()
        except Exception as error:
            # An optimizer of the user may need gradients with values, which a plan does not have.
            return f"the state of {type(optimizer).__name__} is not counted: {type(error).__name__}: {error}"[:300]
    return None
