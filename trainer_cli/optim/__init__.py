"""Optimizers, schedules of the learning rate, and which parameters are trained.

A trainer asks `make_optimizers` for its optimizers by name, and `Schedulers` for the schedules over them. `Scheduled`
says at which interval a schedule steps; what torch documents for a class is the default. `Freezing` sets
`requires_grad` by patterns and durations; `TrainedParameters` keeps what hooks and steps have changed of it.

- Whether a fused kernel is used follows from the config, the model and the type of the device alone, so that a resume
  makes the same choice: its results differ in the last bits.
- A resumed schedule has the settings of the config and the position of the checkpoint.
- What is frozen at a step follows from the counts of the run: no checkpoint holds it.
- Optimizers that evaluate other weights than they train get back exactly the weights they trained (`OptimizerModes`).
- A parameter has one optimizer, and is the model's: no checkpoint would hold another one.

Nothing here decides when an optimizer steps; that is `TrainStep` of `trainer_cli.trainer`. `optimizer_factory` and
`scheduler_factory` are what a config's `optimizer` and `scheduler` are in Python.

Begin with `optimizers.py`, then `scheduler_intervals.py` and `schedulers.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
