"""The config's settings of saving and removal, as the rules that the policy goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_cli.checkpoint.policy import BestRule, RetentionRules, SaveRules
from trainer_cli.config.schema import CheckpointConfig
from trainer_cli.trainer.duration import Duration
from trainer_cli.trainer.timetable import Cadence

ToCadence = Callable[[str, Any], Cadence | None]
"""The cadence of a setting, by its key and value; None for null. It knows how long an epoch is, or refuses."""


def save_rules(settings: CheckpointConfig, cadence: ToCadence) -> SaveRules:
    """When to save."""
    cooldown = settings.ephemeral_cooldown
    return SaveRules(
        save_interval=cadence("save_interval", settings.save_interval),
        ephemeral_save_interval=cadence("ephemeral_save_interval", settings.ephemeral_save_interval),
        ephemeral_cooldown=None if cooldown is None else Duration.parse(cooldown),
        fixed_steps=frozenset(settings.fixed_steps),
        pre_train=settings.pre_train_checkpoint,
        save_final=settings.save_final,
        save_on_stop=settings.save_on_stop,
        keep_best=_best(settings),
    )


def retention_rules(settings: CheckpointConfig, cadence: ToCadence) -> RetentionRules:
    """What may go."""
    return RetentionRules(
        remove=settings.remove,
        max_checkpoints=settings.max_checkpoints,
        keep_every=cadence("keep_every", settings.keep_every),
        keep_best=_best(settings),
        fixed_steps=frozenset(settings.fixed_steps),
        save_interval=cadence("save_interval", settings.save_interval),
    )


def _best(settings: CheckpointConfig) -> BestRule | None:
    best = settings.keep_best
    return None if best.metric is None else BestRule(best.metric, best.mode, best.count)
