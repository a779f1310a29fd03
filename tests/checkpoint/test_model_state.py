"""Models, optimizers and random generators to state trees and back, through real files."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_parts import compiled
from states import restore_model, restore_optimizer, same
from torch import nn

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.state.generators import capture_rng, restore_rng
from trainer_cli.state.model_state import capture_model
from trainer_cli.state.names import name_parameters, unwrap
from trainer_cli.state.optimizer_state import capture_optimizer, find_misplaced, fit_optimizer
from trainer_cli.state.weights import are_finite


class Net(nn.Module):
    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(5, width)
        self.conv = nn.Conv2d(2, width, 3)
        cast("Any", self.conv).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        image = self.conv(torch.ones(len(tokens), 2, 3, 3)).flatten(1)
        return self.head(self.norm(self.emb(tokens) + image)).square().mean()


def through_disk(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / "step0"
    make_sync_checkpointer().save(tree, path)
    return make_sync_checkpointer().load(path)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 5, (6,), generator=generator)).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(groups(model), lr=0.01, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(groups(model), lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "momentum": lambda model: torch.optim.SGD(groups(model), lr=0.01, momentum=0.9, nesterov=True),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.01),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, 3)
    tree = through_disk(tmp_path, {"model": capture_model(model), "optimizer": capture_optimizer(model, optimizer)})
    train(model, optimizer, 3, seed=6)
    other = Net(seed=1)
    again = OPTIMIZERS[kind](other)
    report = restore_model(other, tree["model"])
    restore_optimizer(other, again, tree["optimizer"])
    assert report.missing == report.unexpected == []
    train(other, again, 3, seed=6)
    assert same(capture_model(other), capture_model(model))
    assert same(capture_optimizer(other, again), capture_optimizer(model, optimizer))


def test_optimizer_state_follows_names_not_the_order_of_parameters(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 2)
    state = through_disk(tmp_path, capture_optimizer(model, optimizer))
    assert "unused" not in state["state"]
    assert "unused" in state["groups"][0]["params"]
    assert "frozen" not in state["groups"][0]["params"]
    turned = torch.optim.AdamW([p for p in reversed(list(model.parameters())) if p.requires_grad])
    restore_optimizer(model, turned, state)
    for name, parameter in model.named_parameters():
        assert (name in state["state"]) == (parameter in turned.state)
        if parameter in turned.state:
            assert torch.equal(turned.state[parameter]["exp_avg"], state["state"][name]["exp_avg"])


def test_group_settings_come_from_the_checkpoint_unless_they_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = through_disk(tmp_path, capture_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    restore_optimizer(model, optimizer, state, keep_settings=["lr"])
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)
    restore_optimizer(model, optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_does_not_fit_is_refused_in_one_table_and_untouched() -> None:
    model = Net()
    optimizer = torch.optim.AdamW([model.emb.weight, model.unused])
    state = capture_optimizer(
        model, torch.optim.AdamW([{"params": [weight]} for weight in (model.emb.weight, model.norm.weight)])
    )
    with pytest.raises(UserError) as caught:
        restore_optimizer(model, optimizer, state)
    text = str(caught.value)
    assert "1 parameter groups, but the checkpoint has 2" in text
    assert "unused: missing in group 0 of the checkpoint" in text
    with pytest.raises(
        UserError, match=r"it is a torch.optim.sgd.SGD, but the checkpoint has a torch.optim.adamw.AdamW"
    ):
        restore_optimizer(model, torch.optim.SGD([model.emb.weight]), capture_optimizer(model, optimizer))


def test_everything_that_does_not_fit_is_reported_in_one_table_and_nothing_is_loaded() -> None:
    model, other = Net(), Net(width=6, seed=1)
    state = capture_model(other)
    state["norm.running_mean"] = torch.zeros(4, dtype=torch.float64)
    state["frozen"] = 3
    state["more"] = torch.ones(1)
    del state["unused"]
    before = {name: value.clone() for name, value in capture_model(model).items()}
    with pytest.raises(UserError) as caught:
        restore_model(model, state)
    text = str(caught.value)
    for row in (
        "emb.weight: has shape (5, 4) in this model, but (5, 6) in the checkpoint",
        "norm.running_mean: is torch.float32 in this model, but torch.float64 in the checkpoint",
        "frozen: is a Tensor in this model, but a int in the checkpoint",
        "unused: missing in the checkpoint",
        "more: not in this model",
    ):
        assert row in text
    assert same(capture_model(model), before)


def test_without_strict_other_names_are_reported_but_other_shapes_are_still_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    state = capture_model(Net(seed=1))
    state["more"] = state.pop("unused")
    report = restore_model(model, state, strict=False)
    assert (report.missing, report.unexpected) == (["unused"], ["more"])
    assert report.lines == ["unused: missing in the checkpoint", "more: not in this model"]
    assert torch.equal(model.conv.weight, state["conv.weight"])
    with pytest.raises(UserError, match="has shape"):
        restore_model(model, capture_model(Net(width=6)), strict=False)


def test_ignored_keys_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    kept = model.emb.weight.detach().clone()
    state = capture_model(Net(width=4, seed=1))
    state["emb.weight"] = state["head.weight"] = torch.zeros(1)
    report = restore_model(model, state, ignore_keys=["emb.*", "head.*", "tail.*"])
    assert report.ignored == ["emb.weight", "head.weight"]
    assert torch.equal(model.emb.weight, kept)
    assert "'tail.*' matches nothing" in caplog.text


def test_one_name_of_a_tied_pair_is_enough_but_two_values_are_refused() -> None:
    model = Net()
    state = dict(capture_model(Net(seed=1)))
    del state["head.weight"]
    assert restore_model(model, state).missing == []
    assert torch.equal(model.head.weight, state["emb.weight"])
    state["head.weight"] = state["emb.weight"] + 1
    with pytest.raises(UserError, match=r"head.weight: is tied to emb.weight in this model, but differs"):
        restore_model(model, state)


@pytest.mark.parametrize("compiles", [False, True])
def test_wrappers_leave_no_trace_in_names(compiles: bool) -> None:
    model = Net()
    wrapped = nn.DataParallel(compiled(model) if compiles else model)
    assert unwrap(wrapped) is model
    assert same(capture_model(wrapped), capture_model(model))
    restore_model(wrapped, capture_model(Net(seed=1)))
    assert torch.equal(model.conv.weight, Net(seed=1).conv.weight)
    optimizer = torch.optim.SGD(model.parameters())
    assert capture_optimizer(wrapped, optimizer) == capture_optimizer(model, optimizer)


def test_a_model_with_a_part_called_module_keeps_its_names() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert list(capture_model(model)) == ["module.weight", "module.bias"]
    restore_model(model, capture_model(nn.ModuleDict({"module": nn.Linear(1, 1)})))


def test_extra_state_of_modules_travels_along(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    model, other = Counting(1, 1), Counting(1, 1)
    model.seen = 7
    restore_model(other, through_disk(tmp_path, capture_model(model)))
    assert other.seen == 7


def test_a_captured_model_has_its_own_memory_under_every_name() -> None:
    part = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": part, "b": nn.Sequential(part, nn.BatchNorm1d(2))})
    captured = capture_model(model)
    assert list(captured) == list(model.state_dict())
    assert captured["b.0.weight"].data_ptr() == captured["a.weight"].data_ptr() == part.weight.data_ptr()
    assert name_parameters(model) == {value: name for name, value in model.named_parameters()}


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]

    draw()
    state = through_disk(tmp_path, {"rng": capture_rng()})["rng"]
    expected = draw()
    draw()
    restore_rng(state)
    assert draw() == expected


def test_random_states_of_missing_gpus_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = capture_rng()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    restore_rng(state, warn=True)
    assert "random states of 1 GPUs, but there are 0 here" in caplog.text


@pytest.mark.parametrize(("before", "now", "gpus"), [(1, 0, 1), (0, 1, 2), (1, 1, 2)])
def test_a_run_goes_on_with_its_random_numbers_on_a_gpu_of_another_number(
    before: int, now: int, gpus: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fakes of torch's calls."""
    restored: dict[int, Any] = {}
    for name, value in {
        "is_available": True, "is_initialized": True, "device_count": 2, "current_device": before,
        "get_rng_state_all": ["of GPU 0", "of GPU 1"],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    state = capture_rng()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now)

    def set_rng_state(state: Any, index: int = now) -> None:
        restored[index] = state

    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    restore_rng(state, warn=True)
    assert restored[now] == f"of GPU {before}"
    assert "random states of" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([1.0, 2.0], True),
        (["max", "max", "max"], True),  # whose sum leaves the range
        ([1.0, "nan"], False),
        (["inf", 1.0], False),
        (["-inf", 1.0], False),
        (["inf", "-inf"], False),
        (["max", "max", "nan"], False),
    ],
    ids=str,
)
def test_weights_are_finite_where_each_of_their_numbers_is(
    dtype: torch.dtype, values: list[float | str], finite: bool
) -> None:
    numbers = [torch.finfo(dtype).max if value == "max" else float(value) for value in values]
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert are_finite([torch.ones(2), tensor, torch.ones(1, dtype=torch.bfloat16)]) is finite
    assert are_finite([tensor]) is finite


class Renamed(nn.Module):
    """Translates the names of its first version, by the way that `how` names."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)
        itself: Any = self
        if how == "hook":
            itself._register_load_state_dict_pre_hook(_translate)
        if how == "method":
            itself.register_load_state_dict_pre_hook(lambda module, *arguments: _translate(*arguments))
        if how == "missing":
            itself.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
        if how == "unexpected":
            itself.register_load_state_dict_post_hook(lambda module, keys: keys.unexpected_keys.clear())

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if self.how == "override":
            _translate(state, prefix)
        super()._load_from_state_dict(state, prefix, *arguments)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if self.how == "load_state_dict":
            state_dict = dict(state_dict)
            _translate(state_dict, "")
        return super().load_state_dict(state_dict, strict, assign)


def _translate(state: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}first.")]:
        # Other values too: translated twice they would be wrong.
        state[key.replace("first.", "a.", 1)] = state.pop(key) * 2


def _old_renamed(**more: torch.Tensor) -> dict[str, Any]:
    weights = Renamed().state_dict()
    return {key.replace("a.", "first."): value for key, value in weights.items()} | more


def _weight_norm(make: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(make(nn.Linear(3, 2)), nn.Linear(2, 1))


def _without_counters() -> dict[str, Any]:
    return {key: value for key, value in Net(seed=1).state_dict().items() if not key.endswith("num_batches_tracked")}


LOADED_BY_HOOKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "weight_norm": (
        lambda: _weight_norm(nn.utils.parametrizations.weight_norm),
        lambda: _weight_norm(nn.utils.weight_norm).state_dict(),
    ),
    "no_counter": (Net, _without_counters),
    **{how: (partial(Renamed, how), _old_renamed) for how in ("hook", "method", "override", "load_state_dict")},
    "nested": (lambda: nn.Sequential(Renamed("hook")), lambda: {f"0.{k}": v for k, v in _old_renamed().items()}),
    "compiled": (
        lambda: compiled(Renamed("override")),
        _old_renamed,
    ),
    "compiled_part": (
        lambda: nn.Sequential(compiled(Renamed("override"))),
        lambda: {f"0._orig_mod.{key}": value for key, value in _old_renamed().items()},
    ),
    "missing": (lambda: Renamed("missing"), lambda: {"a.weight": torch.ones(2, 3)}),
    "unexpected": (
        lambda: Renamed("unexpected"),
        lambda: {**Renamed().state_dict(), "old.weight": torch.ones(2)},
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("case", LOADED_BY_HOOKS)
def test_names_that_modules_translate_are_loaded_as_by_load_state_dict(case: str) -> None:
    make, state_of = LOADED_BY_HOOKS[case]
    state = dict(state_of())
    torch.manual_seed(3)
    expected, loaded = make(), make()
    loaded.load_state_dict(expected.state_dict())
    unwrap(expected).load_state_dict(state, strict=True)
    restore_model(loaded, state)
    assert same(dict(expected.state_dict()), dict(loaded.state_dict()))


def test_hooks_change_nothing_where_names_are_missing_still() -> None:
    model = Renamed("hook")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"a\.bias: missing in the checkpoint\n  other: not in this model"):
        restore_model(
            model,
            {
                "first.weight": torch.ones(2, 3),
                "b.weight": torch.ones(2, 2),
                "b.bias": torch.ones(2),
                "other": torch.ones(1),
            },
        )
    assert same(before, dict(model.state_dict()))


def test_what_is_ignored_keeps_its_values_where_a_hook_translates_its_name() -> None:
    model = Renamed("hook")
    before = model.a.bias.clone()
    report = restore_model(model, _old_renamed(), ignore_keys=["a.bias"])
    assert report.ignored == ["a.bias"]
    assert torch.equal(model.a.bias, before)


def test_an_error_of_a_hook_is_a_line_of_the_table() -> None:
    def refuse(
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        errors.append("weights of version 1 cannot be loaded")

    model = nn.Linear(2, 2)
    cast("Any", model)._register_load_state_dict_pre_hook(refuse)
    with pytest.raises(UserError, match="weights of version 1 cannot be loaded"):
        restore_model(model, {"weight": torch.ones(2, 2)})


# Optimizers to state trees and back: every state exactly, or a line of the table.


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _through_disk(tmp_path: Any, tree: Any) -> Any:
    make_sync_checkpointer().save({"optimizer": tree}, tmp_path / "step0")
    return make_sync_checkpointer().load(tmp_path / "step0")["optimizer"]


class Peculiar(torch.optim.Optimizer):
    """Keeps numbers, texts, lists and mappings of tensors of their own type, something of no parameter, and a count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        state: dict[Any, Any] = self.state
        state["all"] = {"seen": self.count}
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = state[parameter]
                kept["steps"] = kept.get("steps", 0) + 1
                kept["name"] = "odd"
                exact = parameter.grad.double() / 3
                kept["history"] = [*kept.get("history", [])[-1:], exact]
                kept["by"] = {"sign": parameter.grad.sign().to(torch.int8), "none": None}
                parameter.add_(sum(kept["history"]).to(parameter.dtype), alpha=-group["lr"] / kept["steps"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.pop("count")
        super().load_state_dict(state)


def test_states_of_any_form_go_on_bit_for_bit(tmp_path: Any) -> None:
    model, other = _model(), _model()
    optimizer = Peculiar(model.parameters())
    for seed in range(3):
        _step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    again = Peculiar(other.parameters())
    restore_optimizer(other, again, _through_disk(tmp_path, capture_optimizer(model, optimizer)))
    assert again.state[other.get_parameter("0.weight")]["history"][0].dtype == torch.float64
    assert again.state[other.get_parameter("0.weight")]["by"]["sign"].dtype == torch.int8
    for one, own in ((model, optimizer), (other, again)):
        _step(one, own, 9)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    assert (again.count, dict[Any, Any](again.state)["all"]) == (4, {"seen": 4})


def test_a_fresh_optimizer_and_parameters_without_a_gradient_have_no_state(tmp_path: Any) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    tree = _through_disk(tmp_path, capture_optimizer(model, optimizer))
    assert tree["state"] == {}
    other = _model()
    again = torch.optim.AdamW(other.parameters())
    restore_optimizer(other, again, tree)
    assert not again.state
    model[1].requires_grad_(False)
    _step(model, optimizer)
    tree = _through_disk(tmp_path / "more", capture_optimizer(model, optimizer))
    assert list(tree["state"]) == ["0.weight", "0.bias"]
    restore_optimizer(other, again, tree)
    assert other[1].weight not in again.state


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (lambda t: t["state"]["0.weight"].update(exp_avg=torch.zeros(3, 4)), "0.weight: its exp_avg has shape (3, 4)"),
        (lambda t: t["state"]["0.weight"].update(exp_avg=torch.zeros(12)), "0.weight: its exp_avg has shape (12,)"),
        (
            lambda t: t["state"]["0.bias"].update(exp_avg=torch.zeros(4, dtype=torch.int32)),
            "0.bias: its exp_avg is torch.int32 in the checkpoint, but the parameter is torch.float32",
        ),
        (
            lambda t: t["state"]["0.bias"].update(exp_avg=torch.zeros(4, dtype=torch.float16)),
            "0.bias: its exp_avg is torch.float16",
        ),
        (lambda t: t["groups"][0]["params"].remove("1.bias"), "1.bias: missing in group 0 of the checkpoint"),
        (lambda t: t["groups"][0]["params"].append("2.bias"), "2.bias: not in group 0 of this optimizer"),
        (lambda t: t["groups"][0].update(amsgrad=True), "0.weight: its max_exp_avg_sq is missing in the checkpoint"),
        (lambda t: t["state"].update({"3.bias": {}}), "3.bias: has state, but is in no group of the checkpoint"),
    ],
)
def test_what_does_not_fit_is_in_the_table_and_nothing_is_taken(change: Any, row: str) -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    tree = capture_optimizer(model, optimizer)
    change(tree)
    again = torch.optim.Adam(model.parameters(), lr=7)
    with pytest.raises(UserError) as caught:
        restore_optimizer(model, again, tree)
    assert row in str(caught.value)
    assert not again.state
    assert again.param_groups[0]["lr"] == 7


def test_a_setting_that_is_kept_and_needs_more_than_was_saved_is_refused() -> None:
    model = _model()
    optimizer = torch.optim.RMSprop(model.parameters())
    _step(model, optimizer)
    tree = capture_optimizer(model, optimizer)
    for setting, needed in ({"centered": True}, "grad_avg"), ({"momentum": 0.9}, "momentum_buffer"):
        again = torch.optim.RMSprop(model.parameters(), **setting)
        faults = fit_optimizer(model, again, tree, keep_settings=list(setting)).faults
        assert faults == [f"{name}: its {needed} is missing in the checkpoint" for name in tree["state"]]


def test_how_a_step_is_computed_is_configured_here_and_what_it_computes_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True, weight_decay=0.1)
    _step(model, optimizer)
    tree = capture_optimizer(model, optimizer)
    again = torch.optim.AdamW(model.parameters(), fused=True, weight_decay=0.2, lr=1)
    fit_optimizer(model, again, tree, moved=["lr"]).load()
    group = again.param_groups[0]
    assert (group["fused"], group["foreach"], group["weight_decay"], group["lr"]) == (True, None, 0.1, 0.001)
    assert [record.message for record in caplog.records] == [
        "optimizer: weight_decay is 0.1, as in the checkpoint; 0.2 is configured"
    ]
    _step(model, again)


def test_optimizer_states_of_higher_precision_are_not_cast_down(tmp_path: Any) -> None:
    model = nn.Linear(2, 2, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    exact = torch.tensor([[1.0000001, 2], [3, 4]])
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact.clone()}
    state = _through_disk(tmp_path, capture_optimizer(model, optimizer))
    again = torch.optim.AdamW(model.parameters())
    restore_optimizer(model, again, state)
    assert again.state[model.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(again.state[model.weight]["exp_avg"], exact)


def test_the_count_of_steps_stays_on_the_cpu_as_a_scalar(tmp_path: Any) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)
    again = torch.optim.AdamW(model.parameters())
    restore_optimizer(model, again, _through_disk(tmp_path, capture_optimizer(model, optimizer)))
    step = again.state[model.get_parameter("0.weight")]["step"]
    assert (step.shape, step.device.type, float(step)) == (torch.Size([]), "cpu", 1.0)


def test_one_name_with_and_without_a_wrappers_prefix_is_refused() -> None:
    model = _model()
    state = capture_model(model)
    state["_orig_mod.0.bias"] = torch.ones(4)
    with pytest.raises(UserError, match=r"0\.bias: two tensors of the checkpoint get this name"):
        restore_model(model, state)


def test_gradients_do_not_change_the_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = capture_optimizer(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    after = capture_optimizer(model, optimizer)
    assert before["state"].keys() == after["state"].keys() == {"weight", "bias"}
    assert torch.equal(before["state"]["weight"]["exp_avg"], after["state"]["weight"]["exp_avg"])
    assert model.weight.grad is not None


class CountedName(str):
    """A name that counts how often it is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedName.lookups += 1
        return super().__hash__()


def test_comparing_groups_looks_each_name_up_a_fixed_number_of_times() -> None:
    live = [[CountedName(f"layer{number}") for number in range(1000)], [CountedName("other")]]
    saved = [[*live[0][1:], CountedName("new")], live[1]]
    assert find_misplaced(live, saved) == [
        "layer0: missing in group 0 of the checkpoint",
        "new: not in group 0 of this optimizer",
    ]
    assert CountedName.lookups == 4 * 1001


class WithOwnLoad(torch.optim.AdamW):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "has_hook", "expected"),
    [(torch.optim.AdamW, False, range), (torch.optim.AdamW, True, list), (WithOwnLoad, False, list)],
    ids=["torch alone", "a hook", "a load of its own"],
)
def test_torch_searches_no_list_for_each_tensor_of_the_state(
    kind: type[torch.optim.AdamW], has_hook: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: set[type] = set()
    cast = torch.optim.Optimizer._process_value_according_to_param_policy

    def spy(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> torch.Tensor:
        searched.update(type(group["params"]) for group in param_groups)
        return cast(param, value, param_id, param_groups, key)

    model = _model()
    optimizer, again = (
        kind([{"params": layer.parameters(), "lr": 0.1 * number} for number, layer in enumerate(model)], fused=True)
        for _ in range(2)
    )
    _step(model, optimizer)
    if has_hook:
        again.register_load_state_dict_pre_hook(lambda made, state: None)
    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(spy))
    state = capture_optimizer(model, optimizer)
    restore_optimizer(model, again, state)
    assert searched == {expected}
    loaded = capture_optimizer(model, again)
    assert loaded["groups"] == state["groups"]
    assert all(
        torch.equal(state["state"][name][key], kept[key]) for name, kept in loaded["state"].items() for key in kept
    )
    assert all(type(group["params"]) is list for group in again.param_groups)
