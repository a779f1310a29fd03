"""The callbacks that ship, about one a module: what is done at the hooks of a training besides the training itself.

Each is a `Callback` of `trainer_cli.trainer` and uses the trainer as a callback of a user would: by its public
attributes and by hooks. State that must survive a resume is in its `state_dict`. None of them imports another program's
library, and none knows of run directories: `trainer_cli.running` builds them from a config, where each is named by its
public name, such as `trainer_cli.EMA`.

The one with the most behind it is `CheckpointerCallback`. It decides by the rules of `trainer_cli.policy` when to save;
`state_saver.py` saves on every rank, at once or in the background; `Retention` removes what the rules do not keep, and
only after the newer checkpoint is committed. With several ranks rank 0 decides and the others follow. A failed save
is reported in the main thread, never swallowed.

Begin with `early_stopping.py`, then `checkpointer.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.callbacks.check_finite import AnomalyDetection as AnomalyDetection, CheckFinite as CheckFinite
    from trainer_cli.callbacks.checkpointer import CheckpointerCallback as CheckpointerCallback
    from trainer_cli.callbacks.early_stopping import (
        EarlyExit as EarlyExit,
        EarlyStopping as EarlyStopping,
        ThresholdStopper as ThresholdStopper,
    )
    from trainer_cli.callbacks.ema import EMA as EMA, SWA as SWA
    from trainer_cli.callbacks.learning_rate_monitor import (
        BatchSummary as BatchSummary,
        LearningRateMonitor as LearningRateMonitor,
        ParameterTable as ParameterTable,
    )
    from trainer_cli.callbacks.momentum_teacher import MomentumTeacher as MomentumTeacher
    from trainer_cli.callbacks.retention import Retention as Retention
    from trainer_cli.callbacks.run_copies import open_copies as open_copies
    from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState as SaveCheckpointState
    from trainer_cli.callbacks.skip_samples import ScopedFlags as ScopedFlags, SkipSamples as SkipSamples
    from trainer_cli.callbacks.state_saver import RunIdentity as RunIdentity, saves_in_background as saves_in_background
    from trainer_cli.callbacks.validation_callback import ValidationCallback as ValidationCallback

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "check_finite": "AnomalyDetection CheckFinite",
            "checkpointer": "CheckpointerCallback",
            "early_stopping": "EarlyExit EarlyStopping ThresholdStopper",
            "ema": "EMA SWA",
            "learning_rate_monitor": "BatchSummary LearningRateMonitor ParameterTable",
            "momentum_teacher": "MomentumTeacher",
            "retention": "Retention",
            "run_copies": "open_copies",
            "save_checkpoint_state": "SaveCheckpointState",
            "skip_samples": "ScopedFlags SkipSamples",
            "state_saver": "RunIdentity saves_in_background",
            "validation_callback": "ValidationCallback",
        },
    )
