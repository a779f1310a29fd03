"""The config of a resume check: the user's, with short epochs and another run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer_cli.config.compose import Composed
from trainer_cli.config.schema import CheckpointConfig
from trainer_cli.trainer.duration import Duration, Unit

RECORDER = "resume_check"
_SAVER = "checkpoint"


def freeze(
    composed: Composed, folder: Path, *, steps: int, plan: Path, fixed_steps: Sequence[int] = (), **changes: Any
) -> Path:
    """Write the config into a folder, and return its path. `changes` are values by dotted key (dots as `__`)."""
    tree: Any = OmegaConf.to_container(composed.raw, resolve=False)
    config = composed.config
    loop, checkpoint = dict(tree["loop"]), dict(tree["checkpoint"])
    accum = config.loop.grad_accum_steps
    epoch = math.ceil(0.4 * steps)
    # With accumulation, the last step of an epoch has one batch less, as in most trainings.
    batches = epoch if accum == 1 else (epoch - 1) * accum + 1
    loop |= {
        "limit_train_batches": batches,
        "max_duration": _long_enough(config.loop.max_duration),
        "hard_stop": steps,
        "max_time": None,
        "eval_interval": max(1, steps // 4),
        "eval_steps": min(2, config.loop.eval_steps or 2),
        "log_interval": max(1, steps // 3),
    }
    checkpoint |= {
        "enabled": True,
        "save_interval": None,
        "ephemeral_save_interval": None,
        "ephemeral_cooldown": None,
        "fixed_steps": list(fixed_steps),
        "pre_train_checkpoint": False,
        "save_final": False,
        "save_on_stop": True,
    }
    callbacks = {
        # First, so that it records state before other callbacks change it.
        RECORDER: {"_target_": "trainer_cli.testing.recorder.Recorder", "plan": str(plan)},
        **(tree["callbacks"] or {}),
    }
    if isinstance(saver := callbacks.get(_SAVER), Mapping):
        own = {one.name for one in fields(CheckpointConfig)}
        callbacks[_SAVER] = {key: value for key, value in saver.items() if key not in own}
    tree |= {
        "run_dir": str(folder / "run"),
        "resume": "auto",
        "loop": loop,
        "checkpoint": checkpoint,
        "callbacks": callbacks,
        "loggers": {},
        "logging": {"level": "warning", "console": "off"},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(tree)), "utf-8")
    return path


def _long_enough(duration: Any) -> Any:
    """At least three epochs, since epochs are short here; other units unchanged."""
    parsed = Duration.parse(duration)
    return "3ep" if parsed.unit is Unit.EPOCH and parsed.value < 3 else duration
