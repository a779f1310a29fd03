"""What may change on a resume: every key of the schema stands in one of the two lists below."""

from __future__ import annotations

import pytest

from trainer_cli.config.fields import MAY_CHANGE, fields, why_may_change

_FREE = """
    name run_dir device model_call resume resume_allow ckpt trust loggers loggers.jsonl loggers.console.style
    load.states load.strict load.ignore_keys load.key_mapping load.key_mapping.model load.average
    validate.folder validate.watch
    logging.level logging.console
    loop.max_duration loop.min_duration loop.hard_stop loop.max_time loop.eval_interval loop.eval_steps
    loop.eval_at_start
    loop.log_interval loop.eval_sanity_steps loop.eval_loaders restarts.max restarts.backoff
    checkpoint.enabled checkpoint.save_interval checkpoint.ephemeral_save_interval checkpoint.ephemeral_cooldown
    checkpoint.fixed_steps checkpoint.pre_train_checkpoint checkpoint.save_final checkpoint.save_on_stop
    checkpoint.save_async
    checkpoint.remove checkpoint.max_checkpoints checkpoint.keep_every checkpoint.keep_best.metric
    checkpoint.keep_best.mode checkpoint.keep_best.count checkpoint.newer checkpoint.folder checkpoint.name
    checkpoint.copy_to.folder checkpoint.copy_to.every
    checkpoint.latest_link checkpoint.leave_out checkpoint.suffix checkpoint.format checkpoint.compression
    checkpoint.digest checkpoint.on_save_error checkpoint.max_save_errors
    data.num_workers data.persistent_workers data.worker_timeout
    parallel.processes_per_node parallel.timeout logging.rank_files
    parallel.strategy parallel.find_unused_parameters parallel.shard_size parallel.wrap parallel.wrap_min_parameters
    parallel.tensor_size parallel.cpu_offload parallel.activation_checkpointing
"""
_BOUND = """
    seed deterministic model model._target_ model.hidden data data._target_ data.batch_size data.seed data.path
    data.num_workers.deep optimizer optimizer._target_ optimizer.lr optimizer.betas scheduler scheduler.warmup
    step param_groups param_groups.*bias*.weight_decay loop.steps_per_epoch loop.grad_accum_steps
    sparsity loop.limit_train_batches precision.dtype precision.loss_scale precision.clip_norm precision.clip_value
    precision.min_loss_scale precision.max_loss_scale precision.init_scale precision.growth_interval
    parallel.mixed_precision
    freeze compile.enabled compile.mode compile.dynamic compile.fullgraph compile.backend loop.microbatch
    callbacks callbacks.ema callbacks.ema.decay names run_dirs loggerss loop checkpoint
"""
FREE, BOUND = _FREE.split(), _BOUND.split()


@pytest.mark.parametrize("key", FREE)
def test_this_may_change(key: str) -> None:
    assert why_may_change(key)


@pytest.mark.parametrize("key", BOUND)
def test_this_may_not_change(key: str) -> None:
    assert why_may_change(key) is None


def test_the_lists_hold_every_key_of_the_schema() -> None:
    assert {one.key for one in fields() if not one.is_section} <= {*FREE, *BOUND}


def test_each_row_of_the_table_lets_something_change() -> None:
    for pattern in MAY_CHANGE:
        others = {one: why for one, why in MAY_CHANGE.items() if one != pattern}
        assert any(why_may_change(key) == MAY_CHANGE[pattern] for key in FREE), pattern
        assert pattern not in others


ALLOWED = {
    "optimizer.lr": (["optimizer.lr"], True),
    "optimizer.betas": (["optimizer.*"], True),
    "model.layers.0.width": (["model"], True),
    "models": (["model"], False),
    "optimizer.lr_scale": (["optimizer.lr"], False),
    "param_groups.*{norm,bias}*.weight_decay": (["param_groups.*{norm,bias}*.weight_decay"], True),
    "param_groups.[ab].lr": (["param_groups.[ab].lr"], True),
    "precision.clip_norm": (["precision.clip_{norm,value}"], True),
    "seed": (["*.seed"], False),
}


@pytest.mark.parametrize("key", ALLOWED)
def test_resume_allow_takes_keys_sections_and_globs(key: str) -> None:
    allowed, expected = ALLOWED[key]
    assert (why_may_change(key, allowed) is not None) == expected
