"""The `checkpoint` section of a config as the rules of the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from trainer_cli.checkpoint.policy import BestRule, RetentionRules, SaveRules
from trainer_cli.config.schema import CheckpointConfig, ephemeral_too_rare
from trainer_cli.trainer.duration import Duration
from trainer_cli.trainer.intervals import Interval

ToInterval = Callable[[str, Any], Interval | None]
"""The interval of a setting, by its key and value; None for null. Raises where it needs an unknown epoch length."""


def settings_of(checkpoint: CheckpointConfig, node: Mapping[str, Any] | None) -> CheckpointConfig:
    """The `checkpoint` section, overridden by the config node of a subclass of CheckpointerCallback."""
    known = {field.name for field in fields(CheckpointConfig)}
    return replace(checkpoint, **{key: value for key, value in (node or {}).items() if key in known})


def save_rules(settings: CheckpointConfig, interval: ToInterval) -> SaveRules:
    """The rules of saving.

    Raises:
        ConfigError: ephemeral saves are not more frequent than permanent ones. Where the units differ, this is known
            only with the length of an epoch.
    """
    cooldown = settings.ephemeral_cooldown
    permanent = interval("save_interval", settings.save_interval)
    ephemeral = interval("ephemeral_save_interval", settings.ephemeral_save_interval)
    if permanent is not None and ephemeral is not None:
        seldom, often = permanent.steps, ephemeral.steps
        if seldom is not None and often is not None and often >= seldom:
            raise ephemeral_too_rare(ephemeral.duration, permanent.duration)
    return SaveRules(
        save_interval=permanent,
        ephemeral_save_interval=ephemeral,
        ephemeral_cooldown=None if cooldown is None else Duration.parse(cooldown),
        fixed_steps=frozenset(settings.fixed_steps),
        pre_train=settings.pre_train_checkpoint,
        save_final=settings.save_final,
        save_on_stop=settings.save_on_stop,
        keep_best=_best(settings),
    )


def retention_rules(settings: CheckpointConfig, interval: ToInterval) -> RetentionRules:
    """The rules of removal."""
    return RetentionRules(
        remove=settings.remove,
        max_checkpoints=settings.max_checkpoints,
        keep_every=interval("keep_every", settings.keep_every),
        keep_best=_best(settings),
        fixed_steps=frozenset(settings.fixed_steps),
        save_interval=interval("save_interval", settings.save_interval),
    )


def _best(settings: CheckpointConfig) -> BestRule | None:
    best = settings.keep_best
    return None if best.metric is None else BestRule(best.metric, best.mode, best.count)
