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
