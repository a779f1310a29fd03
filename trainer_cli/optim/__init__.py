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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.optim.freezing import Freezing as Freezing, Patterns as Patterns
    from trainer_cli.optim.optimizer_modes import OptimizerModes as OptimizerModes
    from trainer_cli.optim.optimizers import (
        ONLY as ONLY,
        OptimizerEntry as OptimizerEntry,
        make_optimizer as make_optimizer,
        make_optimizers as make_optimizers,
        optimizer_factory as optimizer_factory,
        parameters_of as parameters_of,
    )
    from trainer_cli.optim.scheduler_intervals import Scheduled as Scheduled
    from trainer_cli.optim.schedulers import (
        Schedulers as Schedulers,
        name_schedulers as name_schedulers,
        schedule_from as schedule_from,
        scheduler_factory as scheduler_factory,
    )
    from trainer_cli.optim.trained_parameters import TrainedParameters as TrainedParameters
    from trainer_cli.optim.warmup import (
        WarmupCosine as WarmupCosine,
        WarmupInverseSqrt as WarmupInverseSqrt,
        WarmupLinear as WarmupLinear,
        WarmupPolynomial as WarmupPolynomial,
        WarmupStableDecay as WarmupStableDecay,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "freezing": "Freezing Patterns",
            "optimizer_modes": "OptimizerModes",
            "optimizers": "make_optimizer make_optimizers ONLY optimizer_factory OptimizerEntry parameters_of",
            "scheduler_intervals": "Scheduled",
            "schedulers": "name_schedulers schedule_from scheduler_factory Schedulers",
            "trained_parameters": "TrainedParameters",
            "warmup": "WarmupCosine WarmupInverseSqrt WarmupLinear WarmupPolynomial WarmupStableDecay",
        },
    )
