"""The command `train` and its library. Public names are resolved when first used: importing this imports no torch."""

from __future__ import annotations

TYPE_CHECKING = False  # As typing's, which would take as long to import as Python to start.
if TYPE_CHECKING:
    from typing import Any

    from trainer_cli.callbacks.check_finite import CheckFinite
    from trainer_cli.callbacks.checkpointer import CheckpointerCallback
    from trainer_cli.callbacks.skip_samples import SkipSamples
    from trainer_cli.checkpoint.async_checkpointer import AsyncCheckpointer, make_async_checkpointer
    from trainer_cli.checkpoint.checkpointer import Checkpointer, SyncCheckpointer, make_sync_checkpointer
    from trainer_cli.checkpoint.find import checkpoint_path, checkpoint_pattern, latest_checkpoint
    from trainer_cli.checkpoint.load_options import LoadOptions
    from trainer_cli.checkpoint.without_trainer import load_checkpoint, save_checkpoint
    from trainer_cli.data.datasets import Datasets
    from trainer_cli.data.loader import Loader
    from trainer_cli.loggers.base import Logger
    from trainer_cli.trainer.duration import Duration
    from trainer_cli.trainer.hooks import Callback
    from trainer_cli.trainer.optimizers import optimizer_factory
    from trainer_cli.trainer.precision import Precision
    from trainer_cli.trainer.scheduler_intervals import Scheduled
    from trainer_cli.trainer.schedulers import WarmupCosine, scheduler_factory
    from trainer_cli.trainer.train_step import TrainStep
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop
    from trainer_cli.trainer.validation_loop import ValidationLoop

_MODULES = {
    "AsyncCheckpointer": "trainer_cli.checkpoint.async_checkpointer",
    "CheckFinite": "trainer_cli.callbacks.check_finite",
    "SkipSamples": "trainer_cli.callbacks.skip_samples",
    "Callback": "trainer_cli.trainer.hooks",
    "Checkpointer": "trainer_cli.checkpoint.checkpointer",
    "CheckpointerCallback": "trainer_cli.callbacks.checkpointer",
    "checkpoint_path": "trainer_cli.checkpoint.find",
    "checkpoint_pattern": "trainer_cli.checkpoint.find",
    "Datasets": "trainer_cli.data.datasets",
    "Duration": "trainer_cli.trainer.duration",
    "latest_checkpoint": "trainer_cli.checkpoint.find",
    "load_checkpoint": "trainer_cli.checkpoint.without_trainer",
    "save_checkpoint": "trainer_cli.checkpoint.without_trainer",
    "Loader": "trainer_cli.data.loader",
    "LoadOptions": "trainer_cli.checkpoint.load_options",
    "Logger": "trainer_cli.loggers.base",
    "make_async_checkpointer": "trainer_cli.checkpoint.async_checkpointer",
    "make_sync_checkpointer": "trainer_cli.checkpoint.checkpointer",
    "optimizer_factory": "trainer_cli.trainer.optimizers",
    "Precision": "trainer_cli.trainer.precision",
    "Scheduled": "trainer_cli.trainer.scheduler_intervals",
    "scheduler_factory": "trainer_cli.trainer.schedulers",
    "SyncCheckpointer": "trainer_cli.checkpoint.checkpointer",
    "Trainer": "trainer_cli.trainer.trainer",
    "TrainingLoop": "trainer_cli.trainer.training_loop",
    "TrainStep": "trainer_cli.trainer.train_step",
    "ValidationLoop": "trainer_cli.trainer.validation_loop",
    "WarmupCosine": "trainer_cli.trainer.schedulers",
}
__all__ = [
    "AsyncCheckpointer",
    "Callback",
    "CheckFinite",
    "Checkpointer",
    "CheckpointerCallback",
    "Datasets",
    "Duration",
    "LoadOptions",
    "Loader",
    "Logger",
    "Precision",
    "Scheduled",
    "SkipSamples",
    "SyncCheckpointer",
    "TrainStep",
    "Trainer",
    "TrainingLoop",
    "ValidationLoop",
    "WarmupCosine",
    "checkpoint_path",
    "checkpoint_pattern",
    "latest_checkpoint",
    "load_checkpoint",
    "make_async_checkpointer",
    "make_sync_checkpointer",
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
