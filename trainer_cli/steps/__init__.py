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

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
