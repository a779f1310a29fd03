"""The start of a fit: what is trained and planned is logged, and the plan compared with the free space of the disk."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.callbacks import CheckpointerCallback
from trainer_cli.config import Composed
from trainer_cli.running.free_space import check_space, estimate_size
from trainer_cli.running.overview import overview_rows, why_on_cpu
from trainer_cli.running.plan_view import schedule_texts
from trainer_cli.running.planning import simulation_of, start_point_of
from trainer_cli.running.start import Start

if TYPE_CHECKING:
    from trainer_cli.running.build import Data
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_LABEL_WIDTH = 11
_MAX_SIMULATED = 500
"""Saves that are simulated before the first step, at 0.1 ms each."""


def log_schedule(start: Start, trainer: Trainer, data: Data, composed: Composed, fork: Path | None) -> None:
    """Log what is trained, the future steps, evaluations and checkpoints; record the last step, and look for space.

    Raises:
        UserError: as in `check_space`.
    """
    checkpoint, loop = trainer.checkpoint, trainer.loop
    assert isinstance(checkpoint, CheckpointerCallback)
    retention = checkpoint.retention
    # Only pins are looked up: to examine thousands of checkpoints as a whole, as `train plan` does, takes seconds.
    is_pinned = retention.catalog.is_pinned
    saved = [replace(entry, pinned=True) if is_pinned(entry.name) else entry for entry in retention.own()]
    start_point = start_point_of(start, fork, checkpoint.folder, composed, saved)
    # As the trainer will do: the simulation needs the lengths before `fit` has computed them.
    loop.learn_lengths(data.train, start_point.progress)
    loop.start_at(data.train, start_point.progress)
    callbacks = bool(trainer.hooks["run_validation"])
    counts, size_bytes = loop.step_counts(data.train, start_point.progress), estimate_size(trainer, start_point)
    setting = simulation_of(loop, checkpoint.settings, start, start_point, evaluated=data.val, callbacks=callbacks)
    timeline = setting.run(counts, size=lambda step: size_bytes, sizes=start_point.sizes, most_saves=_MAX_SIMULATED)
    # Only for train.log: on a terminal the command shows them.
    log.debug("overrides: %s", " ".join(composed.overrides))
    metric = composed.config.checkpoint.keep_best.metric
    plan = schedule_texts(timeline, start_point.progress.step, loop.steps_per_epoch, metric)
    for label, text in overview_rows(start, trainer, data, composed, fork, plan):
        log.info(f"%-{_LABEL_WIDTH}s%s", label, text, extra={"indent": _LABEL_WIDTH})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (why := why_on_cpu(composed.config.device, trainer.device, visible)) is not None:
        log.warning("training on the CPU: %s", why)
    start.run.record_total_steps(loop.total_steps if timeline.end is None else timeline.end.step)
    check_space(trainer, start_point, timeline, size_bytes)
