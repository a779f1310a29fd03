"""Proof that a training is exact: steps of a run made again, their samples, and comparisons of two trainings.

A resume is bit-exact, so every step of a run is a checkpoint: the state after a step that was never saved is computed
from the checkpoint before it. On this rest

    train replay        makes steps again, shows what happened in them, and compares them with what the run recorded
    RUN@stepN           a checkpoint that is replayed when a command names it (`replay_step`)
    train data          the samples of a step, from the position of the step and the order of the epoch
    train bisect        the first step at which a condition holds
    train diverge       the first step at which two runs differ, and what differs first in it
    train check run     stretches of a run, made again and compared
    train rerun         a whole run, made again from the source that it keeps, and compared while it trains
    train pack          what a rerun needs, in one file
    train check resume  a training that is stopped and resumed at every kind of place, against one without a stop

It promises that what it calls equal is equal bit for bit, but for what depends on the clock, and that it writes
nothing into a run but `RUN/replayed`. It never trains a run further, never changes a checkpoint that a run has saved,
and keeps no replayed state of which a record or a kept checkpoint differs.

Begin with `replay_plan` (which checkpoint, which steps), `replay` (the fit that makes them) and `step_trace` (the
callback that looks at steps); `step_samples` for the samples of a step, `diverge` for two runs, `resume` for the check
of a resume. No other package takes a name from this one: what the core asks for is a part in `addon.py`.
"""
