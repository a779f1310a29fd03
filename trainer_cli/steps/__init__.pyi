from trainer_cli.steps.intervals import (
    COUNTERS as COUNTERS,
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
