"""A key that has no effect without another one is refused, in every section."""

from __future__ import annotations

import pytest

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.config.compose import compose
from trainer_cli.config.fields import fields
from trainer_cli.errors import ConfigError

NO_EFFECT = {
    "compile.mode=max-autotune": ("compile.enabled is false", "compile.enabled=true"),
    "compile.dynamic=true": ("compile.enabled is false", "compile.enabled=true"),
    "compile.fullgraph=true": ("compile.enabled is false", "compile.enabled=true"),
    "compile.backend=eager": ("compile.enabled is false", "compile.enabled=true"),
    "checkpoint.keep_best.mode=max": ("checkpoint.keep_best.metric is null", "checkpoint.keep_best.metric=val/loss"),
    "checkpoint.keep_best.count=3": ("checkpoint.keep_best.metric is null", "checkpoint.keep_best.metric=val/loss"),
    "checkpoint.copy_to.every=3": ("checkpoint.copy_to.folder is null", "checkpoint.copy_to.folder=copies"),
    "checkpoint.ephemeral_cooldown=2": (
        "checkpoint.ephemeral_save_interval is null", "checkpoint.ephemeral_save_interval=5"
    ),
    "checkpoint.compression=gz": ("checkpoint.format is tensors", "checkpoint.format=archive"),
    "checkpoint.max_save_errors=9": ("checkpoint.on_save_error is raise", "checkpoint.on_save_error=warn"),
    "parallel.find_unused_parameters=true": ("parallel.strategy is single", "parallel.strategy=ddp"),
    "parallel.shard_size=2": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "parallel.wrap=[Block]": ("parallel.strategy is single", "parallel.activation_checkpointing=true"),
    "parallel.wrap_min_parameters=9": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "parallel.cpu_offload=true": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "restarts.backoff=3s": ("restarts.max is 0", "restarts.max=2"),
}  # fmt: skip
BY_SECTION_RULES = {"precision", "parallel.mixed_precision", "parallel.tensor_size"}
"""Keys with rules of their own, which name more than one other key; tests/config/test_mistakes.py has them."""


def test_each_key_that_needs_another_is_in_the_table() -> None:
    declared = {one.key for one in fields() if "needs" in one.rules}
    assert declared == {line.partition("=")[0] for line in NO_EFFECT}
    assert not any(key.startswith(tuple(BY_SECTION_RULES)) for key in declared)


@pytest.mark.parametrize("line", NO_EFFECT)
def test_a_key_without_effect_is_refused_and_what_it_needs_is_named(line: str) -> None:
    because, cure = NO_EFFECT[line]
    key, _, value = line.partition("=")
    with pytest.raises(ConfigError) as caught:
        compose([line], sections=())
    assert str(caught.value).startswith(f"{key} is {value}, but {because} (command line). Set ")
    assert cure.partition("=")[0] in (caught.value.hint or "")
    assert compose([line, cure], sections=()).config is not None
    assert compose([line, cure, f"{key}={value}"], sections=()).config is not None


def test_python_refuses_them_too() -> None:
    with pytest.raises(ConfigError, match=r"keep_best.count is 3, but checkpoint.keep_best.metric is null"):
        CheckpointerCallback(keep_best={"count": 3})
