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
