from trainer_cli.addons import *
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
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState as SaveCheckpointState
from trainer_cli.callbacks.skip_samples import ScopedFlags as ScopedFlags, SkipSamples as SkipSamples
from trainer_cli.callbacks.system import SystemMonitor as SystemMonitor
from trainer_cli.callbacks.validation_callback import ValidationCallback as ValidationCallback
from trainer_cli.catalog.find import (
    checkpoint_path as checkpoint_path,
    checkpoint_pattern as checkpoint_pattern,
    latest_checkpoint as latest_checkpoint,
)
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer as AsyncCheckpointer,
    Checkpointer as Checkpointer,
    SyncCheckpointer as SyncCheckpointer,
    make_async_checkpointer as make_async_checkpointer,
    make_sync_checkpointer as make_sync_checkpointer,
)
from trainer_cli.checkpoint.without_trainer import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from trainer_cli.data.datasets import Datasets as Datasets, Digits as Digits
from trainer_cli.data.loader import Loader as Loader
from trainer_cli.errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    NotFiniteError as NotFiniteError,
    RunDirectoryError as RunDirectoryError,
    SaveError as SaveError,
    TrainError as TrainError,
    UserError as UserError,
)
from trainer_cli.loads.options import LoadOptions as LoadOptions
from trainer_cli.loggers.base import Logger as Logger, Record as Record, RunFacts as RunFacts
from trainer_cli.loggers.console import ConsoleLogger as ConsoleLogger
from trainer_cli.loggers.media import MediaLogger as MediaLogger
from trainer_cli.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger as CsvLogger, JsonlLogger as JsonlLogger
from trainer_cli.messages import Logging as Logging
from trainer_cli.models.cnn import CNN as CNN
from trainer_cli.models.mlp import MLP as MLP
from trainer_cli.optim.optimizers import optimizer_factory as optimizer_factory
from trainer_cli.optim.scheduler_intervals import Scheduled as Scheduled
from trainer_cli.optim.schedulers import scheduler_factory as scheduler_factory
from trainer_cli.optim.warmup import (
    WarmupCosine as WarmupCosine,
    WarmupInverseSqrt as WarmupInverseSqrt,
    WarmupLinear as WarmupLinear,
    WarmupPolynomial as WarmupPolynomial,
    WarmupStableDecay as WarmupStableDecay,
)
from trainer_cli.outputs.model_call import observe as observe
from trainer_cli.parallel.process_group import ALONE as ALONE
from trainer_cli.running.load_model import load_model as load_model
from trainer_cli.schema.checkpoint_config import CheckpointConfig as CheckpointConfig
from trainer_cli.schema.sections import LoopConfig as LoopConfig, PrecisionConfig as PrecisionConfig
from trainer_cli.steps.intervals import Duration as Duration
from trainer_cli.trainer.evaluate import Evaluation as Evaluation
from trainer_cli.trainer.hooks import Callback as Callback, add_global_callback as add_global_callback
from trainer_cli.trainer.precision import Precision as Precision
from trainer_cli.trainer.train_step import TrainStep as TrainStep
from trainer_cli.trainer.trainer import Trainer as Trainer
from trainer_cli.trainer.training_loop import FitResult as FitResult, TrainingLoop as TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop as ValidationLoop
from trainer_cli.version import __version__ as __version__

__all__: list[str]
