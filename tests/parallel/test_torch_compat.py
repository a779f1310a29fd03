"""Steps without what torch wraps around them: the same numbers, and all of it back where it does something."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from trainer_cli.torch_compat import (
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    next_batch,
    overflow_flags,
    step_lightly,
)

MADE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.1, fused=False),
    "AdamW fused": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "Adam with amsgrad": lambda parameters: Adam(parameters, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _is_light(optimizer: Optimizer) -> bool:
    return "step" in vars(optimizer)


@pytest.mark.parametrize("name", MADE)
def test_a_light_step_is_the_same_bit_for_bit(name: str) -> None:
    models = _model(), _model()
    heavy, light = (MADE[name](model.parameters()) for model in models)
    step_lightly(light)
    assert _is_light(light)
    for _ in range(3):
        for model, optimizer in zip(models, (heavy, light), strict=True):
            _gradients(model)
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        assert other.requires_grad
        assert other.grad_fn is None


def test_a_closure_is_evaluated_with_gradients() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    step_lightly(optimizer)

    def closure() -> Any:
        loss: Any = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure)
    assert loss.requires_grad


def test_hooks_of_a_step_are_called_even_if_registered_later() -> None:
    optimizer = SGD(_model().parameters(), lr=0.1)
    step_lightly(optimizer)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    everybodys = torch.optim.optimizer if hasattr(torch.optim, "optimizer") else sys.modules[Optimizer.__module__]
    handle = everybodys.register_optimizer_step_post_hook(lambda *_: called.append("everybody's"))
    optimizer.step()
    handle.remove()
    assert called == ["before", "after", "everybody's"]


def test_a_profiler_sees_the_step_under_its_name() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    step_lightly(optimizer)
    _gradients(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profiler.key_averages()}


def test_a_schedule_of_torch_finds_the_step_it_expects() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1)
    step_lightly(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _gradients(model)
    optimizer.step()
    scheduler.step()  # warns where no step of the optimizer came before
    assert scheduler.get_last_lr() == pytest.approx([0.01])


class _Own(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Bare(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        return None


@pytest.mark.parametrize("kind", [_Own, _Bare])
def test_a_step_that_is_not_torchs_own_stays_as_it_is(kind: Callable[[Any], Optimizer]) -> None:
    optimizer = kind(_model().parameters())
    step_lightly(optimizer)
    assert not _is_light(optimizer)


def test_a_step_that_was_replaced_stays_replaced() -> None:
    optimizer = SGD(_model().parameters(), lr=0.1)

    def own(closure: Any = None) -> None:
        pass

    cast("Any", optimizer).step = own
    step_lightly(optimizer)
    assert optimizer.step is own


_IN_A_NEW_PROCESS = """
import sys, torch
from torch.optim import AdamW, Optimizer
from trainer_cli.commands.command_line import main
from trainer_cli.torch_compat import leave_compiler_out, step_lightly

assert main(["plan", "experiment=text"]) == 0
assert "torch._dynamo" not in sys.modules, "a plan imported the compiler"
shaped = torch.empty(3, device="meta").normal_().sqrt() / 3

def untraced():
    return Optimizer.zero_grad.__wrapped__.__dynamo_disable

leave_compiler_out()
model = torch.nn.Linear(2, 1)
optimizer = AdamW(model.parameters())
step_lightly(optimizer)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules, "the compiler was imported"

ours = untraced()
compiled = torch.compile(model, backend="eager")
compiled(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.state_dict()
assert "torch._dynamo" in sys.modules
assert untraced() is not ours, "torch's own is not back"
assert (shaped.exp() / 3).shape == (3,)
assert model.weight.grad is None

whole = torch.compile(optimizer.step, backend="eager")
model(torch.ones(1, 2)).sum().backward()
before = model.weight.detach().clone()
whole()
assert not torch.equal(before, model.weight), "a compiled step did nothing"
print("done")
"""


def test_the_compiler_is_left_out_until_somebody_compiles() -> None:
    process = subprocess.run([sys.executable, "-c", _IN_A_NEW_PROCESS], capture_output=True, text=True)
    assert process.stdout.endswith("\ndone\n"), process.stderr


FOREACH: dict[str, Callable[[list[Tensor]], None]] = {
    "_foreach_div_": lambda tensors: foreach_div_(tensors, 3.0),
    "_foreach_lerp_": lambda tensors: foreach_lerp_(tensors, [torch.ones(3), torch.zeros(2)], 0.25),
    "_foreach_copy_": lambda tensors: foreach_copy_(tensors, [torch.ones(3), torch.zeros(2)]),
}


@pytest.mark.parametrize("name", FOREACH)
def test_one_kernel_for_many_tensors_gives_what_one_for_each_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(torch, name), "torch has no such kernel any more: remove its use"
    together, each = ([torch.arange(3.0), torch.full((2,), 5.0)] for _ in range(2))
    FOREACH[name](together)
    monkeypatch.delattr(torch, name)
    FOREACH[name](each)
    assert all(torch.equal(one, other) for one, other in zip(together, each, strict=True))
    assert not torch.equal(together[1], torch.full((2,), 5.0))


@pytest.mark.parametrize(("gradient", "overflowed"), [(1.0, 0.0), (float("inf"), 1.0)])
def test_overflow_flags_say_whether_a_step_is_skipped(gradient: float, overflowed: float) -> None:
    model, scaler = _model(), torch.amp.GradScaler("cpu")
    optimizer = SGD(model.parameters(), lr=0.1)
    loss: Any = sum(parameter.sum() for parameter in model.parameters()) * gradient
    cast("Any", scaler.scale(loss)).backward()
    scaler.unscale_(optimizer)
    assert [float(flag) for flag in overflow_flags(scaler, optimizer)] == [overflowed]
    assert overflow_flags(object(), optimizer) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_batch_is_the_same_without_torchs_range_for_profilers(
    is_missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(torch._C._autograd, "_profiler_enabled"), "torch has no such name any more: remove its use"
    numbers: Any = range(5)
    iterator = iter(DataLoader(numbers, 2))
    assert hasattr(iterator, "_next_data"), "torch has no such name any more: remove its use"
    if is_missing:
        monkeypatch.delattr(torch._C._autograd, "_profiler_enabled")
    monkeypatch.setattr(type(iterator), "__next__", lambda self: "with the range")
    batches = [next_batch(iterator) for _ in range(3)]
    assert str(batches) == str(
        ["with the range"] * 3 if is_missing else [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4])]
    )


def test_private_names_of_torch_are_used_in_this_module_alone() -> None:
    package = Path(__file__).parents[2] / "trainer_cli"
    private = re.compile(
        r"torch\._(?!_)\w+|\._(opt_called|found_inf_per_device|dynamo|foreach_\w+|profiler_enabled|next_data)\b"
    )
    folders = ("parallel", "data", "trainer", "callbacks")
    files = [package / "torch_compat.py", *(path for folder in folders for path in (package / folder).glob("*.py"))]
    assert {file.name for file in files if private.search(file.read_text(encoding="utf-8"))} == {"torch_compat.py"}
