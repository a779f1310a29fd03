"""What changed between two configs: their difference, values of the environment, what may change on a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer_cli.config.changes import changed_env_values, diff, hparams, line_of_digests
from trainer_cli.config.composing import Composed, compose
from trainer_cli.keys.config_keys import list_keys
from trainer_cli.keys.resume_rules import MAY_CHANGE, why_may_change

CONFIG = {
    "model": {
        "dropout": "${oc.decode:${oc.env:DROPOUT}}",
        "widths": [1, "${oc.env:WIDTH,2}"],
        "by_depth": {3: "${oc.env:WIDTH,2}"},
        "twice": "${model.dropout}",
    },
    "data": {"path": "${oc.env:DATA_PATH}/texts"},
    "loggers": {"key": "${oc.env:DROPOUT}"},
    "seed": 3,
}  # fmt: skip


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("DROPOUT", "0.25")
    monkeypatch.setenv("DATA_PATH", "/secret")
    return CONFIG


def test_only_values_that_matter_are_remembered_and_none_is_reported(raw: dict[str, Any]) -> None:
    line = line_of_digests(raw, "run")
    assert [key in line for key in ("model.dropout", "model.widths", "data.path")] == [True] * 3
    assert not [message for message in ("0.25", "secret", "loggers", "seed", "twice") if message in line]
    assert line.startswith("# ")
    assert OmegaConf.create(OmegaConf.to_yaml(raw) + line) == OmegaConf.create(raw)
    assert line != line_of_digests(raw, "another run")


@pytest.mark.parametrize(
    ("variable", "value", "changed"),
    [
        ("DROPOUT", "0.25", []),
        ("DROPOUT", "0.5", ["model.dropout"]),
        ("WIDTH", "2", []),
        ("WIDTH", "3", ["model.widths", "model.by_depth.3"]),
        ("DATA_PATH", "/other", ["data.path"]),
    ],
)
def test_another_value_is_a_change(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, changed: list[str]
) -> None:
    frozen = OmegaConf.to_yaml(raw) + line_of_digests(raw, "run")
    monkeypatch.setenv(variable, value)
    assert [one.key for one in changed_env_values(frozen, raw, "run")] == changed


def test_what_was_not_remembered_is_no_change(raw: dict[str, Any]) -> None:
    assert changed_env_values(OmegaConf.to_yaml(raw), raw, "run") == []
    assert line_of_digests({"seed": "${oc.decode:7}"}, "run") == ""


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [([], None, False), (None, {}, False), ([], {"a": 3}, True), ({"a": 3}, {"a": 4}, True), (["a"], None, True)],
)
def test_the_empty_list_of_older_configs_freezes_as_much_as_null(before: object, after: object, changed: bool) -> None:
    assert bool(diff({"freeze": before}, {"freeze": after})) is changed


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [("drop_last", False, False), ("drop_last", True, True), ("global_batch_size", None, False), ("seed", None, True)],
)
def test_a_key_of_the_loader_that_is_not_set_has_its_default(key: str, value: object, changed: bool) -> None:
    without, given = ({"data": {"_target_": "a.B", **data}} for data in ({}, {key: value}))
    assert bool(diff(without, given)) is bool(diff(given, without)) is changed


def test_values_that_differ_from_the_defaults_are_named_by_their_keys(project: Path) -> None:
    found = hparams(compose(["experiment=small", "seed=3", "name=other", "checkpoint.save_interval=7"]).raw)
    assert {key: found.get(key) for key in ("model._target_", "model.channels", "optimizer.lr", "seed")} == {
        "model._target_": "mine.CNN", "model.channels": 8, "optimizer.lr": 0.5, "seed": 3,
    }  # fmt: skip
    assert found["loop.max_duration"] == "3ep"
    assert not [
        key for key in found if key.partition(".")[0] in ("name", "run_dir", "checkpoint", "loggers", "logging")
    ]
    assert "seed" not in hparams(compose(["experiment=small", "seed=0"]).raw), "a default"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5), (True, True), ("text", "text"), ([1, 2], "[1, 2]"), (float("inf"), "inf"), ([], "[]"),
        (None, None), ("${seed}", None), ("a ${oc.env:SECRET}", None), (["${oc.env:SECRET}"], None),
    ],
)  # fmt: skip
def test_lists_are_texts_and_nulls_and_references_are_left_out(value: object, expected: object) -> None:
    assert hparams({"model": {"a": {"b": value}}}).get("model.a.b") == expected


def test_a_frozen_config_comes_back_without_the_yaml_that_it_came_from(empty_folder: Path) -> None:
    options = Path("configs/experiment")
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("# @package _global_\noptimizer:\n  lr: 1.0e-05\nresume_allow: [seed]\n")
    composed = compose(["experiment=mine", "resume=must", "name=x", "trust=[there]"])
    file = empty_folder / "KEY.yaml"
    file.write_text(composed.freeze("sweep/KEY"))
    (options / "mine.yaml").write_text("][")
    Path("configs/config.yaml").write_text("][")
    thawed = Composed.thaw(file, ["experiment=mine"])
    assert [change.key for change in diff(composed.raw, thawed.raw)] == ["run_dir"]
    assert thawed.config.run_dir == "runs/x/sweep/KEY"
    assert (thawed.config.resume, thawed.config.resume_allow) == ("must", ["seed"])
    assert thawed.overrides == ["experiment=mine"]
    assert thawed.project_root == empty_folder
    assert thawed.where("optimizer.lr").startswith("KEY.yaml:")


def test_the_project_is_the_one_that_holds_the_given_configs(empty_folder: Path) -> None:
    Path("project/configs").mkdir(parents=True)
    file = empty_folder / "KEY.yaml"
    file.write_text(compose([]).freeze("there"))
    assert Composed.thaw(file, [], config_dir=Path("project/configs")).project_root == empty_folder / "project"


def test_secrets_stay_out_of_it(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hush")
    text = compose(["trust=['${oc.env:TOKEN}']"]).freeze("there")
    assert "${oc.env:TOKEN}" in text
    assert "hush" not in text


_FREE = """
    name run_dir device model_call resume resume_allow source ckpt trust loggers loggers.jsonl loggers.console.style
    vars vars.width vars.nested.a
    load.states load.strict load.ignore_keys load.key_mapping load.key_mapping.model load.average
    load.chunk_size load.progress
    notes tags report validate.folder validate.watch predict.folder predict.loader predict.outputs predict.writer
    logging.level logging.console
    loop.max_duration loop.min_duration loop.hard_stop loop.max_time loop.eval_interval loop.eval_steps
    loop.eval_at_start
    loop.log_interval loop.eval_sanity_steps loop.eval_loaders restarts.max restarts.backoff
    sweep.search sweep.trials sweep.seed sweep.metric sweep.prune sweep.eta sweep.rungs
    notify.command notify.url notify.events notify.stall
    checkpoint.enabled checkpoint.save_interval checkpoint.ephemeral_save_interval checkpoint.ephemeral_cooldown
    checkpoint.fixed_steps checkpoint.pre_train_checkpoint checkpoint.save_final checkpoint.save_on_stop
    checkpoint.save_async
    checkpoint.budget checkpoint.remove checkpoint.max_checkpoints checkpoint.keep_every checkpoint.keep_by_age
    checkpoint.keep_best.metric
    checkpoint.keep_best.mode checkpoint.keep_best.count checkpoint.newer checkpoint.folder checkpoint.name
    checkpoint.copy_to.folder checkpoint.copy_to.every
    checkpoint.latest_link checkpoint.link_frozen checkpoint.leave_out checkpoint.suffix checkpoint.format
    checkpoint.compression checkpoint.digest checkpoint.on_save_error checkpoint.max_save_errors
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
    freeze eval_modules compile.enabled compile.mode compile.dynamic compile.fullgraph compile.backend loop.microbatch
    callbacks callbacks.ema callbacks.ema.decay names run_dirs loggerss loop checkpoint
"""
FREE, BOUND = _FREE.split(), _BOUND.split()


@pytest.mark.parametrize("key", FREE)
def test_this_may_change(key: str) -> None:
    assert why_may_change(key)


@pytest.mark.parametrize("key", BOUND)
def test_this_may_not_change(key: str) -> None:
    assert why_may_change(key) is None


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ({"metric": "val/loss", "mode": "min"}, {"metric": "val/loss", "mode": "auto"}, False),
        ({"metric": "val/loss", "mode": "min"}, {"metric": "val/loss"}, False),
        ({"metric": "val/accuracy"}, {"metric": "val/accuracy", "mode": "max"}, False),
        ({"metric": None, "mode": "min"}, {"metric": None, "mode": "auto"}, False),
        ({"metric": "val/accuracy", "mode": "min"}, {"metric": "val/accuracy"}, True),
        ({"metric": "val/score", "mode": "min"}, {"metric": "val/score"}, True),
        ({"mode": "min"}, {}, True),
    ],
)
def test_a_mode_that_is_left_out_equals_the_usual_one_of_the_metric(
    before: dict[str, object], after: dict[str, object], changed: bool
) -> None:
    old, new = ({"callbacks": {"early": node}} for node in (before, after))
    assert bool(diff(old, new)) == changed


def test_a_mode_that_follows_another_metric_is_no_change_of_its_own() -> None:
    old, new = ({"callbacks": {"early": {"metric": name, "mode": "auto"}}} for name in ("val/accuracy", "val/loss"))
    assert [change.key for change in diff(old, new)] == ["callbacks.early.metric"]


def test_the_lists_hold_every_key_of_the_schema() -> None:
    assert {one.key for one in list_keys() if not one.is_section} <= {*FREE, *BOUND}


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


USERS = {"width": 16, "list": [1, {"deep": 2}], "nested": {"a": "${vars.width}"}, "key": "${oc.env:TOKEN}", "node": {}}


@pytest.mark.parametrize(
    ("reference", "changed", "values"),
    [
        ("${vars.width}", {"width": 17}, "16 -> 17"),
        ("${ vars.width }", {"width": 17}, "16 -> 17"),
        ("${vars[width]}", {"width": 17}, "16 -> 17"),
        ("w${vars.width}-${vars.list.0}", {"width": 17}, "w16-1 -> w17-1"),
        ("${vars.nested.a}", {"width": 17}, "16 -> 17"),
        ("${vars.list[1].deep}", {"list": [1, {"deep": 3}]}, "2 -> 3"),
        ("${vars.list}", {"list": [1]}, "[1, {deep: 2}] -> [1]"),
        ("${vars.key}", {"key": "${oc.env:OTHER}"}, "${oc.env:TOKEN} -> ${oc.env:OTHER}"),
        ("${mul:${vars.width},2}", {"width": 17}, "${mul:16,2} -> ${mul:17,2}"),
        ("${vars.width}", {"list": [], "nested": {}, "key": None}, None),
        (16, {"width": 17}, None),
    ],
)
def test_a_change_of_users_values_is_one_of_the_values_that_refer_to_them(
    reference: object, changed: dict[str, object], values: str | None
) -> None:
    config = {"optimizer": {"lr": reference}, "vars": USERS}
    changes = diff(config, {**config, "vars": {**USERS, **changed}})
    bound = [change for change in changes if why_may_change(change.key) is None]
    assert [(change.key, change.values) for change in bound] == ([("optimizer.lr", values)] if values else [])


def test_users_values_in_a_circle_or_absent_stay_as_written() -> None:
    config = {"optimizer": {"lr": "${vars.a}", "eps": "${vars.b}"}, "vars": {"a": "${vars.a}"}}
    assert diff(config, config) == []


def test_hyperparameters_have_the_values_of_users_but_no_secret() -> None:
    config = {"model": {"a": "${vars.width}", "b": "x${vars.key}"}, "vars": USERS}
    assert hparams(config) == {"model.a": 16}


def test_a_secret_in_users_values_is_compared_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model": {"a": "${vars.key}"}, "vars": USERS}
    monkeypatch.setenv("TOKEN", "hush")
    frozen = OmegaConf.to_yaml(config) + line_of_digests(config, "run")
    assert "hush" not in frozen
    assert changed_env_values(frozen, config, "run") == []
    monkeypatch.setenv("TOKEN", "secret")
    (change,) = changed_env_values(frozen, config, "run")
    assert (change.key, "secret" in change.values) == ("model.a", False)
