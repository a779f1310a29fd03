"""From config to live objects: what is made, what is refused, and with which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError
from trainer_cli.optim.optimizers import parameter_groups
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.parallel.process_group import ProcessGroup
from trainer_cli.running.build import Builder, target_packages
from trainer_cli.schema.sections import Device, LoopConfig, TrainConfig
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.training_loop import TrainingLoop

MODEL = {"_target_": "trainer_cli.MLP", "hidden": [4]}
DATA = {"_target_": "trainer_cli.Digits", "batch_size": 50}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


class Saver(CheckpointerCallback):
    """A user's own subclass."""


class Split:
    """Data that is split at random when it is made."""

    def __init__(self) -> None:
        points = torch.utils.data.TensorDataset(torch.arange(20.0))
        self.train, self.val = torch.utils.data.random_split(points, [15, 5])


class Scaled(torch.optim.SGD):
    """An optimizer with a setting that its constructor does not take."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.defaults["scale"] = 1.0
        for group in self.param_groups:
            group.setdefault("scale", 1.0)


class Rateless(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Quiet(Callback):
    """No saver at all."""


def builder(**sections: Any) -> Builder:
    return Builder(
        TrainConfig(**{"model": MODEL, "data": DATA, "optimizer": SGD, "device": "cpu", **sections}), Trust()
    )


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_parts", sys.modules[__name__])


def one_optimizer(made: Builder, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = made.optimizer(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


class Ranks(ProcessGroup):
    """A group of this many ranks; this is the first."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


NOT_DIVIDED = "data.global_batch_size is 66, which cannot be divided between 4 ranks"


@pytest.mark.parametrize(
    ("ranks", "sizes", "accumulated", "expected"),
    [
        (1, {"global_batch_size": 64}, 1, (64, 1)),
        (2, {"global_batch_size": 64, "batch_size": None}, 1, (32, 1)),
        (4, {"global_batch_size": 64}, 2, (8, 2)),
        (4, {"global_batch_size": 64, "batch_size": 8}, 1, (8, 2)),
        (2, {"global_batch_size": None, "batch_size": 8}, 3, (8, 3)),
        (1, {}, 1, (32, 1)),
        (4, {"global_batch_size": 66}, 1, f"{NOT_DIVIDED} (data.global_batch_size"),
        (4, {"global_batch_size": 66}, 2, f"{NOT_DIVIDED} of 2 batches each"),
        (4, {"global_batch_size": 2}, 1, "Use a multiple of 4. To accumulate gradients, set data.batch_size, too."),
        (4, {"global_batch_size": 66, "batch_size": 8}, 1, "not a multiple of batches of 8 on each of 4 ranks"),
    ],
)
def test_a_global_batch_size_decides_the_batch_of_a_rank_or_the_accumulation(
    ranks: int, sizes: dict[str, Any], accumulated: int, expected: tuple[int, int] | str
) -> None:
    data = {"_target_": "trainer_cli.Digits", **sizes}
    config = TrainConfig(
        model=MODEL, data=data, optimizer=SGD, device=Device["cpu"], loop=LoopConfig(grad_accum_steps=accumulated)
    )
    made = Builder(config, Trust(), Ranks(ranks))
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as caught:
            made.trainer(made.data(), identity=RunIdentity(), run_dir=Path("run"))
        assert expected in str(caught.value)
    else:
        assert (made.data().train.batch_size, made.loop().settings.grad_accum_steps) == expected


def test_the_train_loader_is_shuffled_and_the_validation_loader_is_not() -> None:
    data = builder(data={**DATA, "val_batch_size": 7}).data()
    assert (data.train.shuffle, data.train.batch_size) == (True, 50)
    assert (data.val["val"].shuffle, data.val["val"].batch_size) == (False, 7)


@pytest.mark.parametrize(
    ("settings", "drops"), [({"drop_last": True}, True), ({"drop_last": None}, False), ({}, False)]
)
def test_only_the_train_loader_leaves_out_what_fills_no_batch(settings: dict[str, Any], drops: bool) -> None:
    data = builder(data={**DATA, "batch_size": 7, **settings}).data()
    assert (data.train.drop_last, data.val["val"].drop_last) == (drops, False)
    assert len(data.train) == (data.train.length // 7 if drops else -(-data.train.length // 7))
    assert data.train.length % 7


def test_a_random_split_is_the_same_at_each_start_and_another_with_another_seed() -> None:
    node = {"_target_": "users_parts.Split", "batch_size": 5}
    splits = [builder(data=node, seed=seed).data().source.val.indices for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (None, "model is None, but it must be a node with `_target_`"),
        ({"_target_": "trainer_cli.MLP", "hiden": [4]}, "MLP takes no argument 'hiden'.*Did you mean 'hidden'"),
        ({"_target_": "trainer_cli.models.mlp.NoSuch"}, "has no 'NoSuch'"),
        ({"_target_": "trainer_cli.MLP", "inputs": "from_data"}, "Digits has no 'inputs'"),
        (
            {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "trainer_cli.MLP", "inputs": "from_data"}]},
            r"model\._args_\.0\.inputs is to come from the data, but Digits has no 'inputs'",
        ),
        ({"_target_": "trainer_cli.MLP", "_recursive_": False}, "_recursive_ is not known"),
        ({"_target_": "torch.nn.Linear"}, "missing required arguments: 'in_features', 'out_features'"),
        ({"_target_": "torch.nn.Linear", "in_features": "x", "out_features": 1}, "must be a whole number"),
        ({"_target_": "torch.nn.Dropout", "p": 2.0}, "refused its arguments"),
    ],
)
def test_a_wrong_model_node_is_one_readable_mistake(node: Any, message: str) -> None:
    made = builder(model=node)
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        made.model(made.data().source)


@pytest.mark.addon("text")
@pytest.mark.parametrize("nested", [False, True])
def test_an_argument_is_taken_from_the_data_at_any_depth(tmp_path: Path, nested: bool) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 100)
    node = {"_target_": "trainer_cli.GPT", "vocab_size": "from_data", "width": 8, "heads": 2, "layers": 1}
    made = builder(
        data={"_target_": "trainer_cli.Text", "path": str(text), "unit": "characters", "context": 8},
        model={"_target_": "torch.nn.Sequential", "_args_": [node]} if nested else node,
    )
    model: Any = made.model(made.data().source)
    model = model[0] if nested else model
    assert model.tokens.num_embeddings == 4


def test_nodes_inside_nodes_and_partial_ones_are_made() -> None:
    node = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Linear", "_args_": [2, 3]}]}
    assert isinstance(builder().make(node, "model")[0], nn.Linear)
    late = builder().make({"_target_": "torch.nn.Linear", "_partial_": True, "in_features": 2}, "model")
    assert late(out_features=5).out_features == 5


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (
            {"*bias": {"weight_decay": 0.0}, "1.*": {"weight_decay": 0.0, "lr": 0.5}},
            [({}, 2), ({"weight_decay": 0.0}, 1), ({"weight_decay": 0.0, "lr": 0.5}, 2)],
        ),
        (
            {"*": {"betas": [0.5, 0.9]}, "0.*": {"lr": 0.1}},
            [({"betas": [0.5, 0.9], "lr": 0.1}, 2), ({"betas": [0.5, 0.9]}, 3)],
        ),
        ({"norm*": {"lr": 1}}, "matches no parameter"),
        ({"*": 3}, "must hold optimizer settings"),
    ],
)
def test_parameter_groups_merge_every_glob_that_matches_and_leave_frozen_ones_out(
    patterns: dict[str, Any], expected: Any
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    model[2].bias.requires_grad = False
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            parameter_groups(model, patterns)
        return
    groups = parameter_groups(model, patterns)
    assert [({k: v for k, v in group.items() if k != "params"}, len(group["params"])) for group in groups] == expected


REFUSED = r"torch.optim.SGD refused its arguments: .* \(param_groups\.bias\)"
MISSPELT = r"no setting 'momentun' .param_groups.bias.momentun.\. Did you"


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("torch.optim.SGD", {"momentun": 0.1}, MISSPELT),
        ("users_parts.Scaled", {"momentun": 0.1}, MISSPELT),
        ("torch.optim.SGD", {"lr": -1}, REFUSED),
        ("torch.optim.SGD", {"nesterov": True}, REFUSED),
        ("users_parts.Scaled", {"scale": 0.1}, None),
    ],
)
def test_settings_of_a_group_are_those_that_the_optimizer_takes_for_all(
    target: str, settings: dict[str, Any], message: str | None
) -> None:
    made = builder(optimizer={"_target_": target, "lr": 0.1}, param_groups={"bias": settings})
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            made.optimizer(nn.Linear(1, 1))
    else:
        assert [group["scale"] for group in one_optimizer(made, nn.Linear(1, 1)).param_groups] == [1.0, 0.1]


@pytest.mark.parametrize(
    ("optimizer", "groups", "rates"),
    [
        ({"lr": 0.1}, {"bias": {"lr_scale": 0.5}}, {"weight": 0.1, "bias": 0.05}),
        ({"lr": 0.4}, {"bias": {"lr_scale": 0.5}}, {"weight": 0.4, "bias": 0.2}),
        ({}, {"bias": {"lr_scale": 3}}, {"weight": 0.001, "bias": 0.003}),
        ({"lr": 0.1}, {"*": {"lr_scale": 0.5}, "bias": {"lr_scale": 2, "tag": "x"}}, {"weight": 0.05, "bias": 0.2}),
        ({"lr": 0.1}, {"*": {"lr": 0.3}, "bias": {"lr_scale": 0.0}}, {"weight": 0.3, "bias": 0.0}),
        ({"lr": 0.1}, {"bias": {"lr_scale": -1}}, r"param_groups.bias.lr_scale is -1, but it must be a factor"),
        ({"lr": 0.1}, {"bias": {"lr_scale": "half"}}, r"param_groups.bias.lr_scale is 'half', but it must be a factor"),
        ({"lr": 0.1}, {"bias": {"lr_scal": 1}}, "no setting 'lr_scal'"),
    ],
)
def test_the_rate_of_a_group_may_be_in_units_of_the_optimizers(
    optimizer: dict[str, Any], groups: dict[str, Any], rates: Any
) -> None:
    made = builder(optimizer={"_target_": "torch.optim.AdamW", **optimizer}, param_groups=groups)
    model = nn.Linear(1, 1)
    if isinstance(rates, str):
        with pytest.raises(ConfigError, match=rates):
            made.optimizer(model)
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    set_rates = {names[group["params"][0]]: group["lr"] for group in one_optimizer(made, model).param_groups}
    assert set_rates == pytest.approx(rates)


def test_an_optimizer_without_a_rate_has_none_to_scale() -> None:
    made = builder(optimizer={"_target_": "torch.optim.Rprop"}, param_groups={"bias": {"lr_scale": 2}})
    assert [group["lr"] for group in one_optimizer(made, nn.Linear(1, 1)).param_groups] == [0.01, 0.02]
    made = builder(optimizer={"_target_": "users_parts.Rateless"}, param_groups={"bias": {"lr_scale": 2}})
    with pytest.raises(ConfigError, match="lr_scale is 2, but Rateless has no lr to multiply"):
        made.optimizer(nn.Linear(1, 1))


def test_a_complaint_of_a_constructor_of_ours_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"decay is 1\.5, but it must be .* \(callbacks\.ema\.decay\)"):
        builder().make({"_target_": "trainer_cli.EMA", "decay": 1.5}, "callbacks.ema")


def test_a_schedule_gets_its_length_and_durations_in_steps() -> None:
    made = builder(scheduler={"_target_": "trainer_cli.WarmupCosine", "warmup": "0.5ep"})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = made.schedulers(_loop(100, 20))(optimizer)
    rates = []
    for _ in range(11):
        rates += schedule.get_last_lr()
        schedule.step()
    assert rates == sorted(rates)
    assert rates.index(1.0) == 10, "the peak after ten steps"


OF_TORCH = "torch.optim.lr_scheduler."


@pytest.mark.parametrize(
    ("node", "total", "message"),
    [
        ({"_target_": f"{OF_TORCH}StepLR", "step_size": "7st"}, 10, "steps once an epoch and counts these"),
        ({"_target_": f"{OF_TORCH}ReduceLROnPlateau", "patience": "2ep"}, 10, "steps once an evaluation and counts"),
        (
            {"_target_": "trainer_cli.WarmupCosine"},
            None,
            r"needs the number of steps.* set loop\.steps_per_epoch=N, or",
        ),
        (
            {"_target_": "trainer_cli.WarmupCosine", "warmup": "0.1dur"},
            None,
            r"0\.1dur.* loop\.steps_per_epoch=N",
        ),
        (
            {"_target_": "trainer_cli.WarmupCosine", "warmup": "30min"},
            10,
            r"not a number of steps.*Give it in steps",
        ),
    ],
)
def test_a_schedule_that_cannot_be_had_is_refused(node: dict[str, Any], total: int | None, message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ConfigError, match=message):
        builder(scheduler=node).schedulers(_loop(total, None))(optimizer)


@pytest.mark.parametrize(
    ("metric", "interval"), [("train/loss", "log"), ("val/loss", "evaluation"), (None, "evaluation")]
)
def test_the_interval_of_a_plateau_follows_its_metric(metric: str | None, interval: str) -> None:
    made = builder(scheduler={"_target_": f"{OF_TORCH}ReduceLROnPlateau", "metric": metric})
    assert made.schedulers(_loop(10, None)).interval == interval
    factory: Any = scheduler_factory(torch.optim.lr_scheduler.ReduceLROnPlateau, _loop(10, None), metric=metric)
    assert factory.interval == interval


def by_name(name: str, optimizer: Any, *, steps: int = 0) -> Any:
    """As transformers.get_scheduler, which takes the optimizer second."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps) if name == "linear" else None


def by_keyword(*, steps: int, optimizer: Any) -> Any:
    return by_name("linear", optimizer, steps=steps)


@pytest.mark.parametrize("target", [by_name, by_keyword])
def test_a_schedule_gets_its_optimizer_by_name_where_it_is_not_the_first_argument(target: Any) -> None:
    arguments = {"steps": "0.5dur"} | ({"name": "linear"} if target is by_name else {})
    loop, optimizer = _loop(10, 5), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    built = builder(scheduler={"_target_": f"{__name__}.{target.__name__}", **arguments}).schedulers(loop)
    made = scheduler_factory(target, loop, **arguments)
    assert [built(optimizer).total_iters, made(optimizer).total_iters] == [5, 5]


def test_a_mapping_of_schedules_keeps_its_names_and_leaves_out_what_is_null() -> None:
    node = {"_target_": f"{OF_TORCH}OneCycleLR", "max_lr": 1.0}
    made = builder(scheduler={"warm": {"_target_": f"{OF_TORCH}LinearLR"}, "off": None, "cycle": node})
    schedulers = made.schedulers(_loop(30, None))
    assert list(schedulers) == ["warm", "cycle"]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    assert schedulers["cycle"](optimizer).total_steps == 30
    assert builder(scheduler=None).schedulers(_loop(30, None)) is None


def _loop(total_steps: int | None, steps_per_epoch: int | None) -> TrainingLoop:
    loop = TrainingLoop()
    loop.planned_steps, loop.planned_epoch_steps = total_steps, steps_per_epoch
    return loop


def test_a_subclass_replaces_the_callback_that_saves_and_has_its_place_and_settings(tmp_path: Path) -> None:
    made = builder(callbacks={"checkpoint": {"_target_": "users_parts.Saver", "max_checkpoints": 2}})
    trainer = made.trainer(made.data(), identity=RunIdentity(run_id="abc"), run_dir=tmp_path)
    saver = trainer.checkpoint
    assert isinstance(saver, Saver)
    assert (saver.folder, saver.identity.run_id) == (tmp_path / "checkpoints", "abc")
    assert (saver.settings.max_checkpoints, saver.settings.save_interval) == (2, "1ep")
    assert "checkpoint" not in made.evaluator(made.data()).callbacks


def test_another_callback_under_the_name_of_the_saver_is_refused(tmp_path: Path) -> None:
    made = builder(callbacks={"checkpoint": {"_target_": "users_parts.Quiet"}})
    with pytest.raises(ConfigError, match=r"takes no argument|belongs a subclass"):
        made.trainer(made.data(), identity=RunIdentity(run_id="abc"), run_dir=tmp_path)


def test_the_packages_of_all_targets_are_named() -> None:
    config = TrainConfig(model={"_target_": "mine.Net", "inner": [{"_target_": "theirs.Part"}]}, optimizer=SGD)
    assert target_packages(config) == ("mine", "theirs", "torch", "trainer_cli")


def test_a_deterministic_run_allows_deterministic_kernels_only(tmp_path: Path) -> None:
    made = builder(deterministic=True)
    try:
        made.trainer(made.data(), identity=RunIdentity(run_id="abc"), run_dir=tmp_path)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("own", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": True}, None)])
def test_an_optimizer_is_fused_where_it_can_be_unless_the_config_chose(own: dict[str, Any], fused: bool | None) -> None:
    made = one_optimizer(builder(optimizer={**SGD, **own}), nn.Linear(2, 1))
    assert made.defaults["fused"] is fused


@pytest.mark.parametrize("loggers", [{}, {"jsonl": {"_target_": "trainer_cli.JsonlLogger"}}], ids=["none", "jsonl"])
def test_a_run_without_a_console_logger_shows_no_metrics_on_a_terminal(
    loggers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    made = builder(loggers=loggers)
    data = made.data()
    assert list(made.trainer(data, identity=RunIdentity(), run_dir=tmp_path).loggers) == list(loggers)
    assert not made.evaluator(data).loggers
    assert not made.shapes(data).loggers
