"""Optimizers to state trees and back: every state exactly, or a line of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from states import restore_model, restore_optimizer
from torch import nn

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.state.model_state import capture_model
from trainer_cli.state.optimizer_state import capture_optimizer, find_misplaced, fit_optimizer


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
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.state["all"] = {"seen": self.count}
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
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
    assert again.state[other[0].weight]["history"][0].dtype == torch.float64
    assert again.state[other[0].weight]["by"]["sign"].dtype == torch.int8
    for one, own in ((model, optimizer), (other, again)):
        _step(one, own, 9)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    assert (again.count, again.state["all"]) == (4, {"seen": 4})


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
    step = again.state[model[0].weight]["step"]
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
