"""What of a chosen option stands in the config, and choices and keys without effect, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import list_keys

Write = Callable[[str, str], Path]
NET = {"_target_": "mine.Net", "width": 3}
MLP = {"_target_": "mine.MLP", "hidden": [64]}
MINE, OTHER = {"_target_": "mine.Net", "width": 1}, {"_target_": "mine.CNN", "width": 2}
SLOTS = """defaults:
  - small
  - /callbacks@callbacks.first: mine
  - /parts@param_groups.head: slow
  - _self_
"""
EXPERIMENTS = {
    "own": "model: {_target_: mine.Net, width: 3}\n",
    "more": "defaults: [own]\nmodel: {depth: 2}\n",
    "later": "model: {depth: 5}\n",
    "wide": "model: {hidden: [8]}\n",
    "chosen": "defaults:\n  - override /model: cnn\nmodel: {_target_: mine.Net, width: 3}\n",
    "slots": SLOTS,
    "full": """model:
  _target_: mine.Net
  width: 3
optimizer:
  _target_: torch.optim.AdamW
  lr: 0.05
precision:
  dtype: bf16
loop:
  max_duration: 4
""",
}
OPTIONS = {
    "size/big": "# @package _global_\nmodel: {width: 64, depth: 4}\n",
    "model/of_parts": "defaults:\n  - part: small\n  - _self_\n_target_: mine.MLP\n",
    "model/part/small": "size: 1\n",
    "callbacks/mine": "_target_: mine.Net\nwidth: 1\n",
    "callbacks/other": "_target_: mine.CNN\nwidth: 2\n",
    "parts/slow": "lr: 0.1\nweight_decay: 0.0\n",
    "parts/fast": "lr: 9.0\n",
}


@pytest.fixture(autouse=True)
def _configs(project: Path, write: Write) -> None:
    for name, text in OPTIONS.items():
        write(f"{name}.yaml", text)
    for name, text in EXPERIMENTS.items():
        write(f"experiment/{name}.yaml", f"# @package _global_\n{text}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["+experiment=own"], NET, id="the default choice is dropped"),
        pytest.param(["+experiment=wide"], {**MLP, "hidden": [8]}, id="a value alone is merged"),
        pytest.param(["+experiment=chosen"], {"channels": 8, **NET}, id="its own choice is kept"),
        pytest.param(["+experiment=own", "model=cnn", "model._target_=mine.CNN"],
                     {**NET, "_target_": "mine.CNN", "channels": 8}, id="so is that of the command line"),
        pytest.param(["+experiment=more"], {**NET, "depth": 2}, id="another experiment adds"),
        pytest.param(["+experiment=[later,own]"], {**NET, "depth": 5}, id="another experiment before it adds"),
        pytest.param(["+experiment=own", "+size=big"], {**NET, "width": 64, "depth": 4}, id="a global option adds"),
        pytest.param(["+experiment=own", "+model.depth=3"], {**NET, "depth": 3}, id="+key"),
        pytest.param(["+experiment=own", "model={width: 4}"], {**NET, "width": 4}, id="a mapping"),
        pytest.param(["+experiment=own", "+model={_target_: mine.Net, depth: 3}"], {**NET, "depth": 3}, id="+mapping"),
        pytest.param(["+experiment=own", "++model={depth: {a: 3}}"], {**NET, "depth": {"a": 3}}, id="++mapping"),
        pytest.param(["+experiment=own", "model=null", "model={depth: 3}"], {"depth": 3}, id="null, then a mapping"),
        pytest.param(["+experiment=own", "~model", "+model.depth=3"], {"depth": 3}, id="~, then a key"),
        pytest.param(["model=of_parts", "+size=big"],
                     {"_target_": "mine.MLP", "part": {"size": 1}, "width": 64, "depth": 4}, id="nested groups"),
    ],
)  # fmt: skip
def test_what_is_given_stands_in_the_component(overrides: list[str], expected: dict[str, Any]) -> None:
    composed = compose(overrides, sections=())
    assert composed.raw["model"] == expected


@pytest.mark.parametrize("off", ["~scheduler", "scheduler=null"])
@pytest.mark.parametrize(
    "node", ["scheduler={_target_: mine.Net, size: 2}", "+scheduler={_target_: mine.Net, size: 2}"]
)
def test_a_component_that_is_switched_off_may_be_written_anew(off: str, node: str) -> None:
    for line in ([off, node], [node, off]):
        assert compose(["+experiment=small", *line], sections=()).config.scheduler == {
            "_target_": "mine.Net",
            "size": 2,
        }
    assert compose(["+experiment=small", off]).config.scheduler is None


def test_several_schedulers_written_out_take_nothing_from_the_default_choice(write: Write) -> None:
    write(
        "config.yaml", "defaults:\n  - train_schema\n  - model: mlp\n  - data: digits\n  - scheduler: warmup_cosine\n"
    )
    several = {"first": {"_target_": "mine.Net"}, "second": None}
    write("experiment/several.yaml", f"# @package _global_\nscheduler: {several}\n".replace("None", "null"))
    assert compose(["+experiment=several"], sections=()).config.scheduler == several


CASES: list[tuple[list[str], str, Any]] = [
    (["+experiment=small", "+callbacks@callbacks.two=mine"], "callbacks.two", MINE),
    (["+experiment=small", "+callbacks@callbacks.two=mine", "callbacks.two.width=7"], "callbacks.two.width", 7),
    (["+experiment=slots"], "callbacks.first", MINE),
    (["+experiment=slots", "callbacks@callbacks.first=other"], "callbacks.first", OTHER),
    (["+experiment=slots", "parts@param_groups.head=fast"], "param_groups.head", {"lr": 9.0}),
    (["+experiment=slots", "parts@param_groups.head=fast", "+callbacks@callbacks.two=other"], "callbacks.two", OTHER),
    (["+scheduler@scheduler.a=warmup_cosine", "+experiment=own"],
     "scheduler.a._target_", "trainer_cli.WarmupCosine"),
    (["+parts@param_groups.x=slow", "+experiment=small"], "param_groups.x.weight_decay", 0.0),
]  # fmt: skip


def value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize(("overrides", "key", "expected"), CASES, ids=str)
def test_an_option_stands_at_its_package(overrides: list[str], key: str, expected: Any) -> None:
    composed = compose(overrides, sections=())
    assert value_at(composed.raw, key) == expected


@pytest.mark.parametrize("key", ["callbacks.two", "callbacks.first"])
def test_an_option_replaces_the_node_of_a_recovered_config(key: str) -> None:
    text = compose(["+experiment=slots", "callbacks.first.width=5"], sections=()).to_yaml()
    again = from_yaml(text, [f"+callbacks@{key}=other", "param_groups.head.lr=3"], trusted=True, sections=())
    assert value_at(again.raw, key) == OTHER
    assert value_at(again.raw, "param_groups.head") == {"lr": 3, "weight_decay": 0.0}
    assert again.where(f"{key}.width") == "configs/callbacks/other.yaml:2"
    assert again.where("callbacks.first.width" if key.endswith("two") else "seed").startswith("the recovered config:")


@pytest.mark.parametrize("off", ["~scheduler", "scheduler=null"])
def test_an_option_within_a_component_that_is_switched_off_is_refused(off: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=small", off, "+scheduler@scheduler.a=warmup_cosine"])
    assert str(caught.value) == (
        f"+scheduler@scheduler.a=warmup_cosine has no effect: {off} switches off what it is merged into (command "
        "line). Write its node out: 'scheduler={a: {_target_: …}}'."
    )


def test_an_option_that_an_experiment_writes_over_is_refused_with_its_package(write: Write) -> None:
    write("experiment/over.yaml", f"# @package _global_\n{SLOTS}" + "callbacks:\n  first: {_target_: mine.Text}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=over", "callbacks@callbacks.first=other"], sections=())
    assert str(caught.value).startswith(
        "callbacks@callbacks.first=other has no effect: configs/experiment/over.yaml:8 sets callbacks.first._target_"
    )


@pytest.mark.parametrize(
    ("choice", "key", "line"),
    [
        ("optimizer=adam", "optimizer._target_ to torch.optim.AdamW", 6),
        ("model=cnn", "model._target_ to mine.Net", 3),
        ("precision=fp16", "precision.dtype to bf16", 9),
    ],
)
@pytest.mark.parametrize("experiment", ["experiment=full", "+experiment=full"])
def test_a_choice_that_the_experiment_writes_over_is_a_mistake(
    experiment: str, choice: str, key: str, line: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([experiment, choice])
    said = str(caught.value)
    assert said.startswith(f"{choice} has no effect: configs/experiment/full.yaml:{line} sets {key} (command line). ")
    assert said.count("\n") == 0, "what is wrong with the mixture is reported too"


def test_several_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"2 mistakes:\n  - optimizer=adam .*\n  - model=mlp "):
        compose(["+experiment=full", "optimizer=adam", "model=mlp"])


@pytest.mark.parametrize(
    "choices",
    [
        ["optimizer=adamw"],
        ["precision=bf16"],
        ["scheduler=warmup_cosine"],
        ["optimizer=adam", "optimizer._target_=torch.optim.Adam"],
        ["~scheduler"],
        ["scheduler=null"],
    ],
    ids=" ".join,
)
def test_a_choice_that_shows_passes_though_the_experiment_changes_it(choices: list[str]) -> None:
    assert compose(["+experiment=full", *choices]).config.loop.max_duration == 4


def test_values_of_a_chosen_option_may_be_changed_by_the_experiment() -> None:
    config = compose(["+experiment=small", "optimizer=sgd"]).config
    assert (config.optimizer["_target_"], config.optimizer["lr"]) == ("torch.optim.SGD", 0.5)


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
    "checkpoint.budget=0.1": (
        "checkpoint.ephemeral_save_interval is null", "checkpoint.ephemeral_save_interval=auto"
    ),
    "checkpoint.keep_by_age={1h: 2}": ("checkpoint.max_checkpoints is null", "checkpoint.max_checkpoints=3"),
    "checkpoint.compression=gz": ("checkpoint.format is tensors", "checkpoint.format=archive"),
    "checkpoint.max_save_errors=9": ("checkpoint.on_save_error is raise", "checkpoint.on_save_error=warn"),
    "parallel.find_unused_parameters=true": ("parallel.strategy is single", "parallel.strategy=ddp"),
    "parallel.shard_size=2": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "parallel.wrap=[Block]": ("parallel.strategy is single", "parallel.activation_checkpointing=true"),
    "parallel.wrap_min_parameters=9": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "parallel.cpu_offload=true": ("parallel.strategy is single", "parallel.strategy=fsdp"),
    "restarts.backoff=3s": ("restarts.max is 0", "restarts.max=2"),
    "sweep.trials=3": ("sweep.search is grid", "sweep.search=random"),
    "sweep.seed=3": ("sweep.search is grid", "sweep.search=random"),
    "sweep.eta=4": ("sweep.prune is none", "sweep.prune=asha"),
    "sweep.rungs=[1ep]": ("sweep.prune is none", "sweep.prune=asha"),
    "notify.events=[end]": ("notify.command is null", "notify.command=mail"),
}  # fmt: skip
BY_SECTION_RULES = {"precision", "parallel.mixed_precision", "parallel.tensor_size"}
"""Keys with rules of their own, which name more than one other key; tests/config/test_mistakes.py has them."""


def test_each_key_that_needs_another_is_in_the_table() -> None:
    declared = {one.key for one in list_keys() if "needs" in one.rules}
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
