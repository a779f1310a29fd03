"""The command `train` and its library. Public names are imported when first used, so this module loads no torch."""

from __future__ import annotations

# Not from typing, whose import takes as long as the start of Python. Type checkers take the name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainer_cli.callbacks.check_finite import AnomalyDetection, CheckFinite
    from trainer_cli.callbacks.checkpointer import CheckpointerCallback
    from trainer_cli.callbacks.early_stopping import EarlyExit, EarlyStopping, ThresholdStopper
    from trainer_cli.callbacks.ema import EMA, SWA
    from trainer_cli.callbacks.learning_rate_monitor import BatchSummary, LearningRateMonitor, ParameterTable
    from trainer_cli.callbacks.metrics import ConfusionMatrix, Metrics
    from trainer_cli.callbacks.momentum_teacher import MomentumTeacher
    from trainer_cli.callbacks.profiling import DurationProfiler, MemoryMonitor, Throughput, TorchProfiler
    from trainer_cli.callbacks.samples import EvalHarness, TextSamples
    from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
    from trainer_cli.callbacks.skip_samples import ScopedFlags, SelectiveGrad, SkipSamples
    from trainer_cli.callbacks.sparse_training import GMP, SET, RigL, Static
    from trainer_cli.callbacks.system import SystemMonitor
    from trainer_cli.callbacks.tensors import ActivationStatistics, DumpActivations, Norms, TensorListener
    from trainer_cli.callbacks.validation_callback import ValidationCallback
    from trainer_cli.checkpoint.checkpointer import (
        AsyncCheckpointer,
        Checkpointer,
        SyncCheckpointer,
        make_async_checkpointer,
        make_sync_checkpointer,
    )
    from trainer_cli.checkpoint.find import checkpoint_path, checkpoint_pattern, latest_checkpoint
    from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
    from trainer_cli.core.checkpoint_config import CheckpointConfig
    from trainer_cli.core.intervals import Duration
    from trainer_cli.core.load_options import LoadOptions
    from trainer_cli.core.schema import LoopConfig, PrecisionConfig
    from trainer_cli.data.datasets import Datasets, Digits
    from trainer_cli.data.loader import Loader
    from trainer_cli.data.mixture import Mixture
    from trainer_cli.data.text import Documents, Packing, Text
    from trainer_cli.data.tokens import TokenFiles
    from trainer_cli.errors import (
        CheckpointError,
        ConfigError,
        NotFiniteError,
        RunDirectoryError,
        SaveError,
        TrainError,
        UserError,
    )
    from trainer_cli.loggers.base import Logger, Record, RunFacts
    from trainer_cli.loggers.console import ConsoleLogger
    from trainer_cli.loggers.media import MediaLogger
    from trainer_cli.loggers.mlflow import MlflowLogger
    from trainer_cli.loggers.tensorboard import TensorBoardLogger
    from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger
    from trainer_cli.loggers.trackio import TrackioLogger
    from trainer_cli.loggers.wandb import WandbLogger
    from trainer_cli.models.cnn import CNN
    from trainer_cli.models.gpt import GPT
    from trainer_cli.models.lora import lora
    from trainer_cli.models.mlp import MLP
    from trainer_cli.parallel.process_group import ALONE
    from trainer_cli.runs.load_model import load_model
    from trainer_cli.runs.prediction_writers import ParquetWriter, PredictionWriter
    from trainer_cli.testing.resume import assert_resume_is_exact
    from trainer_cli.trainer.evaluate import Evaluation
    from trainer_cli.trainer.find import find_batch_size, find_learning_rate
    from trainer_cli.trainer.hooks import Callback, add_global_callback
    from trainer_cli.trainer.messages import Logging
    from trainer_cli.trainer.model_call import observe
    from trainer_cli.trainer.optimizers import optimizer_factory
    from trainer_cli.trainer.precision import Precision
    from trainer_cli.trainer.scheduler_intervals import Scheduled
    from trainer_cli.trainer.schedulers import scheduler_factory
    from trainer_cli.trainer.train_step import TrainStep
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import FitResult, TrainingLoop
    from trainer_cli.trainer.validation_loop import ValidationLoop
    from trainer_cli.trainer.warmup import (
        WarmupCosine,
        WarmupInverseSqrt,
        WarmupLinear,
        WarmupPolynomial,
        WarmupStableDecay,
    )

_NAMES = {
    "callbacks.check_finite": "AnomalyDetection CheckFinite",
    "callbacks.checkpointer": "CheckpointerCallback",
    "callbacks.early_stopping": "EarlyExit EarlyStopping ThresholdStopper",
    "callbacks.ema": "EMA SWA",
    "callbacks.learning_rate_monitor": "BatchSummary LearningRateMonitor ParameterTable",
    "callbacks.metrics": "ConfusionMatrix Metrics",
    "callbacks.momentum_teacher": "MomentumTeacher",
    "callbacks.profiling": "DurationProfiler MemoryMonitor Throughput TorchProfiler",
    "callbacks.samples": "EvalHarness TextSamples",
    "callbacks.save_checkpoint_state": "SaveCheckpointState",
    "callbacks.skip_samples": "ScopedFlags SelectiveGrad SkipSamples",
    "callbacks.sparse_training": "GMP RigL SET Static",
    "callbacks.system": "SystemMonitor",
    "callbacks.tensors": "ActivationStatistics DumpActivations Norms TensorListener",
    "callbacks.validation_callback": "ValidationCallback",
    "checkpoint.checkpointer": (
        "AsyncCheckpointer Checkpointer make_async_checkpointer make_sync_checkpointer SyncCheckpointer"
    ),
    "checkpoint.find": "checkpoint_path checkpoint_pattern latest_checkpoint",
    "checkpoint.without_trainer": "load_checkpoint save_checkpoint",
    "core.checkpoint_config": "CheckpointConfig",
    "core.intervals": "Duration",
    "core.load_options": "LoadOptions",
    "core.schema": "LoopConfig PrecisionConfig",
    "data.datasets": "Datasets Digits",
    "data.loader": "Loader",
    "data.mixture": "Mixture",
    "data.text": "Documents Packing Text",
    "data.tokens": "TokenFiles",
    "errors": "CheckpointError ConfigError NotFiniteError RunDirectoryError SaveError TrainError UserError",
    "loggers.base": "Logger Record RunFacts",
    "loggers.console": "ConsoleLogger",
    "loggers.media": "MediaLogger",
    "loggers.mlflow": "MlflowLogger",
    "loggers.tensorboard": "TensorBoardLogger",
    "loggers.text_files": "CsvLogger JsonlLogger",
    "loggers.trackio": "TrackioLogger",
    "loggers.wandb": "WandbLogger",
    "models.cnn": "CNN",
    "models.gpt": "GPT",
    "models.lora": "lora",
    "models.mlp": "MLP",
    "parallel.process_group": "ALONE",
    "runs.load_model": "load_model",
    "runs.prediction_writers": "ParquetWriter PredictionWriter",
    "testing.resume": "assert_resume_is_exact",
    "trainer.evaluate": "Evaluation",
    "trainer.find": "find_batch_size find_learning_rate",
    "trainer.hooks": "add_global_callback Callback",
    "trainer.messages": "Logging",
    "trainer.model_call": "observe",
    "trainer.optimizers": "optimizer_factory",
    "trainer.precision": "Precision",
    "trainer.scheduler_intervals": "Scheduled",
    "trainer.schedulers": "scheduler_factory",
    "trainer.train_step": "TrainStep",
    "trainer.trainer": "Trainer",
    "trainer.training_loop": "FitResult TrainingLoop",
    "trainer.validation_loop": "ValidationLoop",
    "trainer.warmup": "WarmupCosine WarmupInverseSqrt WarmupLinear WarmupPolynomial WarmupStableDecay",
}
"""Module -> its public names. The same as the imports above, which type checkers read."""
_MODULES = {name: f"trainer_cli.{module}" for module, names in _NAMES.items() for name in names.split()}
# A literal, and not sorted(_MODULES): type checkers read it too.
__all__ = [
    "ALONE",
    "CNN",
    "EMA",
    "GMP",
    "GPT",
    "MLP",
    "SET",
    "SWA",
    "ActivationStatistics",
    "AnomalyDetection",
    "AsyncCheckpointer",
    "BatchSummary",
    "Callback",
    "CheckFinite",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "CheckpointerCallback",
    "ConfigError",
    "ConfusionMatrix",
    "ConsoleLogger",
    "CsvLogger",
    "Datasets",
    "Digits",
    "Documents",
    "DumpActivations",
    "Duration",
    "DurationProfiler",
    "EarlyExit",
    "EarlyStopping",
    "EvalHarness",
    "Evaluation",
    "FitResult",
    "JsonlLogger",
    "LearningRateMonitor",
    "LoadOptions",
    "Loader",
    "Logger",
    "Logging",
    "LoopConfig",
    "MediaLogger",
    "MemoryMonitor",
    "Metrics",
    "Mixture",
    "MlflowLogger",
    "MomentumTeacher",
    "Norms",
    "NotFiniteError",
    "Packing",
    "ParameterTable",
    "ParquetWriter",
    "Precision",
    "PrecisionConfig",
    "PredictionWriter",
    "Record",
    "RigL",
    "RunDirectoryError",
    "RunFacts",
    "SaveCheckpointState",
    "SaveError",
    "Scheduled",
    "ScopedFlags",
    "SelectiveGrad",
    "SkipSamples",
    "Static",
    "SyncCheckpointer",
    "SystemMonitor",
    "TensorBoardLogger",
    "TensorListener",
    "Text",
    "TextSamples",
    "ThresholdStopper",
    "Throughput",
    "TokenFiles",
    "TorchProfiler",
    "TrackioLogger",
    "TrainError",
    "TrainStep",
    "Trainer",
    "TrainingLoop",
    "UserError",
    "ValidationCallback",
    "ValidationLoop",
    "WandbLogger",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupPolynomial",
    "WarmupStableDecay",
    "add_global_callback",
    "assert_resume_is_exact",
    "checkpoint_path",
    "checkpoint_pattern",
    "find_batch_size",
    "find_learning_rate",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "lora",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "observe",
    "optimizer_factory",
    "save_checkpoint",
    "scheduler_factory",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trainer-cli")
    # Here, not above: `train --help` and completion import this module and need neither.
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    # Completion and `dir` show the public names, although none of them is imported yet.
    return sorted({*globals(), *_MODULES})
