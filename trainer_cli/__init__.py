"""The command `train` and its library. Public names are resolved when first used: importing this imports no torch."""

from __future__ import annotations

TYPE_CHECKING = False  # As typing's, which would take as long to import as Python to start.
if TYPE_CHECKING:
    from typing import Any

    from trainer_cli.callbacks.check_finite import AnomalyDetection, CheckFinite
    from trainer_cli.callbacks.checkpointer import CheckpointerCallback
    from trainer_cli.callbacks.early_stopping import EarlyExit, EarlyStopping, ThresholdStopper
    from trainer_cli.callbacks.ema import EMA, SWA
    from trainer_cli.callbacks.learning_rate_monitor import BatchSummary, LearningRateMonitor, ParameterTable
    from trainer_cli.callbacks.metrics import ConfusionMatrix, Metrics
    from trainer_cli.callbacks.profiling import DurationProfiler, MemoryMonitor, Throughput, TorchProfiler
    from trainer_cli.callbacks.samples import EvalHarness, TextSamples
    from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
    from trainer_cli.callbacks.skip_samples import ScopedFlags, SelectiveGrad, SkipSamples
    from trainer_cli.callbacks.sparse_training import GMP, SET, RigL, Static
    from trainer_cli.callbacks.tensors import ActivationStatistics, DumpActivations, Norms, TensorListener
    from trainer_cli.callbacks.validation_callback import ValidationCallback
    from trainer_cli.checkpoint.async_checkpointer import AsyncCheckpointer, make_async_checkpointer
    from trainer_cli.checkpoint.checkpointer import Checkpointer, SyncCheckpointer, make_sync_checkpointer
    from trainer_cli.checkpoint.find import checkpoint_path, checkpoint_pattern, latest_checkpoint
    from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
    from trainer_cli.core.intervals import Duration
    from trainer_cli.core.load_options import LoadOptions
    from trainer_cli.data.datasets import Datasets, Digits
    from trainer_cli.data.loader import Loader
    from trainer_cli.data.mixture import Mixture
    from trainer_cli.data.text import Documents, Packing, Text
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

_MODULES = {
    "ALONE": "trainer_cli.parallel.process_group",
    "ActivationStatistics": "trainer_cli.callbacks.tensors",
    "add_global_callback": "trainer_cli.trainer.hooks",
    "AnomalyDetection": "trainer_cli.callbacks.check_finite",
    "assert_resume_is_exact": "trainer_cli.testing.resume",
    "AsyncCheckpointer": "trainer_cli.checkpoint.async_checkpointer",
    "BatchSummary": "trainer_cli.callbacks.learning_rate_monitor",
    "Callback": "trainer_cli.trainer.hooks",
    "CheckFinite": "trainer_cli.callbacks.check_finite",
    "checkpoint_path": "trainer_cli.checkpoint.find",
    "checkpoint_pattern": "trainer_cli.checkpoint.find",
    "Checkpointer": "trainer_cli.checkpoint.checkpointer",
    "CheckpointerCallback": "trainer_cli.callbacks.checkpointer",
    "CheckpointError": "trainer_cli.errors",
    "CNN": "trainer_cli.models.cnn",
    "ConfigError": "trainer_cli.errors",
    "ConfusionMatrix": "trainer_cli.callbacks.metrics",
    "ConsoleLogger": "trainer_cli.loggers.console",
    "CsvLogger": "trainer_cli.loggers.text_files",
    "Datasets": "trainer_cli.data.datasets",
    "Digits": "trainer_cli.data.datasets",
    "Documents": "trainer_cli.data.text",
    "DumpActivations": "trainer_cli.callbacks.tensors",
    "Duration": "trainer_cli.core.intervals",
    "DurationProfiler": "trainer_cli.callbacks.profiling",
    "EarlyExit": "trainer_cli.callbacks.early_stopping",
    "EarlyStopping": "trainer_cli.callbacks.early_stopping",
    "EMA": "trainer_cli.callbacks.ema",
    "EvalHarness": "trainer_cli.callbacks.samples",
    "Evaluation": "trainer_cli.trainer.evaluate",
    "find_batch_size": "trainer_cli.trainer.find",
    "find_learning_rate": "trainer_cli.trainer.find",
    "FitResult": "trainer_cli.trainer.training_loop",
    "GMP": "trainer_cli.callbacks.sparse_training",
    "GPT": "trainer_cli.models.gpt",
    "JsonlLogger": "trainer_cli.loggers.text_files",
    "latest_checkpoint": "trainer_cli.checkpoint.find",
    "LearningRateMonitor": "trainer_cli.callbacks.learning_rate_monitor",
    "load_checkpoint": "trainer_cli.checkpoint.without_trainer",
    "load_model": "trainer_cli.runs.load_model",
    "Loader": "trainer_cli.data.loader",
    "LoadOptions": "trainer_cli.core.load_options",
    "Logger": "trainer_cli.loggers.base",
    "Logging": "trainer_cli.trainer.messages",
    "lora": "trainer_cli.models.lora",
    "make_async_checkpointer": "trainer_cli.checkpoint.async_checkpointer",
    "make_sync_checkpointer": "trainer_cli.checkpoint.checkpointer",
    "MemoryMonitor": "trainer_cli.callbacks.profiling",
    "Metrics": "trainer_cli.callbacks.metrics",
    "Mixture": "trainer_cli.data.mixture",
    "MlflowLogger": "trainer_cli.loggers.mlflow",
    "MLP": "trainer_cli.models.mlp",
    "Norms": "trainer_cli.callbacks.tensors",
    "NotFiniteError": "trainer_cli.errors",
    "observe": "trainer_cli.trainer.model_call",
    "optimizer_factory": "trainer_cli.trainer.optimizers",
    "Packing": "trainer_cli.data.text",
    "ParameterTable": "trainer_cli.callbacks.learning_rate_monitor",
    "Precision": "trainer_cli.trainer.precision",
    "Record": "trainer_cli.loggers.base",
    "RigL": "trainer_cli.callbacks.sparse_training",
    "RunDirectoryError": "trainer_cli.errors",
    "RunFacts": "trainer_cli.loggers.base",
    "save_checkpoint": "trainer_cli.checkpoint.without_trainer",
    "SaveCheckpointState": "trainer_cli.callbacks.save_checkpoint_state",
    "SaveError": "trainer_cli.errors",
    "Scheduled": "trainer_cli.trainer.scheduler_intervals",
    "scheduler_factory": "trainer_cli.trainer.schedulers",
    "ScopedFlags": "trainer_cli.callbacks.skip_samples",
    "SelectiveGrad": "trainer_cli.callbacks.skip_samples",
    "SET": "trainer_cli.callbacks.sparse_training",
    "SkipSamples": "trainer_cli.callbacks.skip_samples",
    "Static": "trainer_cli.callbacks.sparse_training",
    "SWA": "trainer_cli.callbacks.ema",
    "SyncCheckpointer": "trainer_cli.checkpoint.checkpointer",
    "TensorBoardLogger": "trainer_cli.loggers.tensorboard",
    "TensorListener": "trainer_cli.callbacks.tensors",
    "Text": "trainer_cli.data.text",
    "TextSamples": "trainer_cli.callbacks.samples",
    "ThresholdStopper": "trainer_cli.callbacks.early_stopping",
    "Throughput": "trainer_cli.callbacks.profiling",
    "TorchProfiler": "trainer_cli.callbacks.profiling",
    "TrackioLogger": "trainer_cli.loggers.trackio",
    "Trainer": "trainer_cli.trainer.trainer",
    "TrainError": "trainer_cli.errors",
    "TrainingLoop": "trainer_cli.trainer.training_loop",
    "TrainStep": "trainer_cli.trainer.train_step",
    "UserError": "trainer_cli.errors",
    "ValidationCallback": "trainer_cli.callbacks.validation_callback",
    "ValidationLoop": "trainer_cli.trainer.validation_loop",
    "WandbLogger": "trainer_cli.loggers.wandb",
    "WarmupCosine": "trainer_cli.trainer.warmup",
    "WarmupInverseSqrt": "trainer_cli.trainer.warmup",
    "WarmupLinear": "trainer_cli.trainer.warmup",
    "WarmupPolynomial": "trainer_cli.trainer.warmup",
    "WarmupStableDecay": "trainer_cli.trainer.warmup",
}
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
    "MemoryMonitor",
    "Metrics",
    "Mixture",
    "MlflowLogger",
    "Norms",
    "NotFiniteError",
    "Packing",
    "ParameterTable",
    "Precision",
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
    "TensorBoardLogger",
    "TensorListener",
    "Text",
    "TextSamples",
    "ThresholdStopper",
    "Throughput",
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
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
