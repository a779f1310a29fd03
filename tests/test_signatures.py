"""Library users see real signatures: the same names and defaults as the sections of a config."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.core.checkpoint_config import CheckpointConfig, CopyToConfig, KeepBestConfig
from trainer_cli.core.schema import LoopConfig, PrecisionConfig
from trainer_cli.trainer.hooks import CheckpointSaver
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.training_loop import TrainingLoop

# Arguments that no config holds, and defaults that differ as values but not in what they mean.
ONLY_IN_PYTHON = {"self", "identity", "thread"}
SAME_MEANING: dict[str, tuple[Any, Any]] = {
    "folder": ("checkpoints", None),
    "fixed_steps": ((), []),
    "leave_out": ((), []),
    "eval_loaders": (None, {}),
    "copy_to": (None, CopyToConfig()),
    "keep_best": (None, KeepBestConfig()),
}


@pytest.mark.parametrize(
    ("component", "config"),
    [(TrainingLoop, LoopConfig), (CheckpointerCallback, CheckpointConfig), (Precision, PrecisionConfig)],
)
def test_arguments_and_defaults_are_those_of_the_config(component: type, config: type) -> None:
    parameters = inspect.signature(component.__init__).parameters
    assert set(parameters) - ONLY_IN_PYTHON == {field.name for field in dataclasses.fields(config)}
    for name, value in dataclasses.asdict(config()).items():
        expected = SAME_MEANING[name][0] if name in SAME_MEANING else value
        assert parameters[name].default == expected, name
        if name in SAME_MEANING:
            assert getattr(config(), name) == SAME_MEANING[name][1]


def test_the_checkpointer_callback_is_what_the_trainer_needs(tmp_path: Any) -> None:
    assert isinstance(CheckpointerCallback(tmp_path), CheckpointSaver)
