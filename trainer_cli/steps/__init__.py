"""How a training counts: lengths and intervals in every unit, and the counts of each step.

A `Duration` is a length of training, such as `3ep`, `1e9tok` or `1h30m`; an `Interval` repeats it from the start of the
run; `Progress` is what has been counted at a step; `StepCounts` predicts the counts of later steps; `RunStatus` is
the state of an attempt. All is arithmetic: no clock, no disk, no torch.

Invariants:

- Amounts are exact fractions, never floats: a quotient of floats may fall on the other side of a multiple.
- Whether an interval is due is decided from one `Progress` alone, which holds the counts of the step before, too.
  A resume is therefore due at the same steps as a run that was never interrupted.
- Counts are those of the whole run, over all attempts, not of this process.
- `data.global_batch_size` is divided into whole batches of each rank (`divide_step`), or refused.

Begin with `intervals.py`: `Duration.parse`, then `Interval.due`, then `StepCounts.at`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.steps.intervals import (
        Duration as Duration,
        Interval as Interval,
        StepCounts as StepCounts,
        Unit as Unit,
        count_epoch_steps as count_epoch_steps,
        count_steps as count_steps,
        find_first_step as find_first_step,
        limit_batches as limit_batches,
    )
    from trainer_cli.steps.progress import Progress as Progress
    from trainer_cli.steps.run_status import RunStatus as RunStatus
    from trainer_cli.steps.step_batches import GLOBAL_BATCH_SIZE as GLOBAL_BATCH_SIZE, divide_step as divide_step

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "intervals": (
                "count_epoch_steps count_steps Duration find_first_step Interval limit_batches StepCounts Unit"
            ),
            "progress": "Progress",
            "run_status": "RunStatus",
            "step_batches": "divide_step GLOBAL_BATCH_SIZE",
        },
    )
