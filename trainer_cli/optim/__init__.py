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
    from trainer_cli.optim.freezing import Freezing as Freezing
    from trainer_cli.optim.freezing import Patterns as Patterns
    from trainer_cli.optim.optimizer_modes import OptimizerModes as OptimizerModes
    from trainer_cli.optim.optimizers import ONLY as ONLY
    from trainer_cli.optim.optimizers import OptimizerEntry as OptimizerEntry
    from trainer_cli.optim.optimizers import make_optimizer as make_optimizer
    from trainer_cli.optim.optimizers import make_optimizers as make_optimizers
    from trainer_cli.optim.optimizers import optimizer_factory as optimizer_factory
    from trainer_cli.optim.optimizers import parameters_of as parameters_of
    from trainer_cli.optim.scheduler_intervals import Scheduled as Scheduled
    from trainer_cli.optim.schedulers import Schedulers as Schedulers
    from trainer_cli.optim.schedulers import name_schedulers as name_schedulers
    from trainer_cli.optim.schedulers import schedule_from as schedule_from
    from trainer_cli.optim.schedulers import scheduler_factory as scheduler_factory
    from trainer_cli.optim.trained_parameters import TrainedParameters as TrainedParameters
    from trainer_cli.optim.warmup import WarmupCosine as WarmupCosine
    from trainer_cli.optim.warmup import WarmupInverseSqrt as WarmupInverseSqrt
    from trainer_cli.optim.warmup import WarmupLinear as WarmupLinear
    from trainer_cli.optim.warmup import WarmupPolynomial as WarmupPolynomial
    from trainer_cli.optim.warmup import WarmupStableDecay as WarmupStableDecay

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
