"""What hooks and steps change of `requires_grad` is as in a plain loop, and stays over every kind of resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import StopAt, StopInEvaluation, everything, loader, on, same, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.trainer.hooks import Callback

STEPS = 8


class Batches:
    """A loader of three batches."""

    def __init__(self) -> None:
        self.batches = [(torch.tensor([[k, 1.0], [1.0, k]]), torch.tensor([k, 1.0])) for k in (0.5, 1.5, 2.5)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


BATCHES = Batches()


class Net(nn.Module):
    """Its body is trained, its middle is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.middle.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.head(self.middle(self.body(batch[0]).tanh()).tanh()).squeeze(-1) - batch[1]).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def _set(**parts_at: dict[int, bool]) -> Callable[[Any, int], None]:
    """A function that sets `requires_grad` of parts before steps."""

    def change(model: Any, step: int) -> None:
        for part, values in parts_at.items():
            if step in values:
                model.get_submodule(part).requires_grad_(values[step])

    return change


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "unfrozen once": _set(middle={5: True}),
    "frozen once": _set(body={5: False}),
    "frozen, then unfrozen": _set(body={2: False, 6: True}),
    "unfrozen, then frozen": _set(middle={2: True, 6: False}),
    "one frozen as the other is unfrozen": _set(body={3: False, 7: True}, middle={3: True}),
    "in turn": _set(body={k: k % 2 == 0 for k in range(9)}, middle={k: k % 2 == 1 for k in range(9)}),
}


def _loop_by_hand(change: Callable[[Any, int], None]) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = _sgd(model)
    for step in range(1, STEPS + 1):
        change(model, step)
        model(BATCHES.batches[(step - 1) % 3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _before_steps(change: Callable[[Any, int], None]) -> Callback:
    return on(on_train_batch_start=lambda trainer, model, *_: change(model, trainer.progress.step + 1))


def _fit(
    folder: Path, *callbacks: Callback, hooks: Callable[[], Callback], data: Any = None, steps: int = STEPS, **more: Any
) -> Any:
    made = trainer(
        Net,
        optimizer=_sgd,
        callbacks=[hooks(), *callbacks],
        settings={"max_duration": steps, "eval_interval": 3},
        checkpoint=CheckpointerCallback(folder, save_async=False),
        **more,
    )
    made.fit(loader() if data is None else data, loader(4, shuffle=False))
    return made


def _state(made: Any) -> Any:
    """The flags in clear, beside all that a checkpoint has."""
    return everything(made), {name: parameter.requires_grad for name, parameter in made.model.named_parameters()}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_those_of_a_plain_loop_straight_and_resumed(change: str, tmp_path: Path) -> None:
    expected = _loop_by_hand(CHANGES[change])
    hooks = partial(_before_steps, CHANGES[change])
    assert same(_fit(tmp_path / "straight", hooks=hooks, data=BATCHES).model.state_dict(), expected) == []
    for stop in range(1, STEPS):
        _fit(tmp_path / "parts", StopAt(stop), hooks=hooks, data=BATCHES)
    assert same(_fit(tmp_path / "parts", hooks=hooks, data=BATCHES).model.state_dict(), expected) == []


def _at(steps: dict[int, tuple[str, bool]], **more: Any) -> Callable[[], Callback]:
    """A callback that sets `requires_grad` of a part at the end of steps, and has further hooks."""

    def change(trainer: Any, model: Any, *_: Any) -> None:
        if (found := steps.get(trainer.progress.step)) is not None:
            model.get_submodule(found[0]).requires_grad_(found[1])

    return lambda: on(on_train_batch_end=change, **more)


def _freeze_body(trainer: Any, *_: Any) -> None:
    trainer.model.body.requires_grad_(False)


def _switch_body(trainer: Any, model: Any, *_: Any) -> None:
    model.body.requires_grad_(not model.body.weight.requires_grad)


TABLE: dict[str, tuple[Callable[[], Callback], dict[str, Any]]] = {
    "frozen in setup, unfrozen later": (_at({4: ("body", True)}, setup=_freeze_body), {}),
    "frozen at the start of a fit, unfrozen later": (_at({4: ("body", True)}, on_fit_start=_freeze_body), {}),
    "frozen before each stretch, unfrozen in it": (_at({4: ("body", True)}, on_train_start=_freeze_body), {}),
    "other in each stretch": (_at({}, on_train_start=_switch_body), {}),
    "scheduled": (_at({}), {"freeze": {"body.*": 4}}),
    "scheduled, but unfrozen before": (_at({2: ("body", True)}), {"freeze": {"body.*": 5}}),
    "scheduled, and frozen after": (_at({6: ("body", False)}), {"freeze": {"body.*": 4}}),
    "scheduled, and frozen before another rule ends": (
        _at({3: ("body", False)}), {"freeze": {"body.*": 2, "head.bias": 5}},
    ),
    "frozen for the run, and unfrozen": (_at({3: ("body", True)}), {"freeze": ["body.bias"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_a_stop_changes_nothing(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit(tmp_path / "straight", hooks=hooks, **more))
    for stop in (1, 3, 4, 6, 7):
        _fit(tmp_path / f"at{stop}", StopAt(stop), hooks=hooks, **more)
        resumed = _fit(tmp_path / f"at{stop}", hooks=hooks, **more)
        assert (resumed.loaded_step, same(expected, _state(resumed))) == (stop, [])


@pytest.mark.parametrize("case", TABLE)
def test_neither_does_a_stop_in_an_evaluation_or_an_end_that_is_moved(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit(tmp_path / "straight", hooks=hooks, **more))
    _fit(tmp_path / "evaluation", StopInEvaluation(3), hooks=hooks, **more)
    assert same(expected, _state(_fit(tmp_path / "evaluation", hooks=hooks, **more))) == []
    for end in (3, 5):
        _fit(tmp_path / f"end{end}", hooks=hooks, steps=end, **more)
        assert same(expected, _state(_fit(tmp_path / f"end{end}", hooks=hooks, **more))) == []


@pytest.mark.parametrize("case", TABLE)
def test_a_fit_continues_those_before_it_and_begins_anew_if_asked_to(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    expected = _state(_fit(tmp_path / "straight", hooks=hooks, **more))
    settings = {"max_duration": STEPS, "eval_interval": 3}
    made = trainer(Net, optimizer=_sgd, callbacks=[hooks(), StopAt(2), StopAt(5)], settings=settings, **more)
    for ckpt_path in ({}, {}, {}, {"ckpt_path": None}, {}, {}):
        made.fit(loader(), loader(4, shuffle=False), **ckpt_path)
        if made.progress.step == STEPS:
            state = _state(made)
            assert same((expected[0]["model"], expected[1]), (state[0]["model"], state[1])) == []
    assert made.progress.step == STEPS


@pytest.mark.parametrize("case", TABLE)
def test_a_rollback_trains_what_its_checkpoint_did(case: str, tmp_path: Path) -> None:
    hooks, more = TABLE[case]
    seen: dict[int, list[dict[str, bool]]] = {}

    def look(trainer: Any, model: Any, *_: Any) -> None:
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        seen.setdefault(trainer.progress.step + 1, []).append(flags)
        if trainer.progress.step == 5 and len(seen[6]) == 1:
            trainer.ask_to_roll_back()

    made = trainer(
        Net,
        optimizer=_sgd,
        callbacks=[hooks(), on(on_train_batch_start=look)],
        settings={"max_duration": STEPS},
        checkpoint=CheckpointerCallback(tmp_path, save_interval=2, save_async=False),
        **more,
    )
    made.fit(loader())
    assert [len(flags) for flags in seen.values()] == [1, 1, 1, 1, 2, 2, 1, 1]
    assert all(flags[0] == flags[-1] for flags in seen.values())


def test_what_the_user_sets_after_a_load_stays(tmp_path: Path) -> None:
    _fit(tmp_path / "run", hooks=_at({4: ("body", False)}), steps=6)
    made = trainer(Net, optimizer=_sgd, settings={"max_duration": 7})
    made.load_checkpoint(tmp_path / "run/step6")
    assert not made.model.body.weight.requires_grad
    made.save_checkpoint(tmp_path / "copy")
    made.model.body.weight.requires_grad_(True)
    made.fit(loader())
    assert [parameter.requires_grad for parameter in made.model.body.parameters()] == [True, False]
    again = trainer(Net, optimizer=_sgd)
    again.load_checkpoint(tmp_path / "copy")
    assert not any(parameter.requires_grad for parameter in again.model.body.parameters())


@pytest.mark.parametrize(
    ("states", "frozen"),
    [(["model"], False), (["model", "optimizer"], False), (["model", "progress"], True), (["all"], True)],
)
def test_the_changes_belong_to_the_progress_of_a_training(states: list[str], frozen: bool, tmp_path: Path) -> None:
    _fit(tmp_path, hooks=_at({4: ("body", False)}), steps=6)
    made = trainer(Net, optimizer=_sgd)
    made.load_checkpoint(tmp_path / "step6", LoadOptions(states=states))
    assert made.model.body.weight.requires_grad is not frozen


def test_a_checkpoint_without_the_state_leaves_all_as_hooks_set_it(tmp_path: Path) -> None:
    def forget(trainer: Any, state: dict[str, Any]) -> None:
        del state["requires_grad"]

    hooks = _at({4: ("body", True)}, on_fit_start=_freeze_body)
    _fit(tmp_path, on(postprocess_checkpoint=forget), hooks=hooks, steps=6)
    assert not _fit(tmp_path, hooks=hooks).model.body.weight.requires_grad


def test_only_what_differs_from_the_build_is_saved(tmp_path: Path) -> None:
    made = _fit(tmp_path, hooks=_at({4: ("body", False)}), freeze={"head.bias": 7}, steps=6)
    assert made.checkpoint_state()["requires_grad"]["changed"] == {"body.weight": False, "body.bias": False}


@pytest.mark.parametrize("saved", [7, {"changed": 7}, {"changed": {"body.weight": "no"}}, {}])
def test_a_state_of_another_layout_is_refused(saved: Any, tmp_path: Path) -> None:
    def spoil(trainer: Any, state: dict[str, Any]) -> None:
        state["requires_grad"] = saved

    _fit(tmp_path, on(postprocess_checkpoint=spoil), hooks=_at({}), steps=1)
    with pytest.raises(UserError, match="does not fit this run"):
        _fit(tmp_path, hooks=_at({}))


def test_a_checkpoint_with_nan_in_a_part_whose_turn_it_is_not_is_not_finite(tmp_path: Path) -> None:
    def spoil(trainer: Any, model: Any, *_: Any) -> None:
        model.body.requires_grad_(False)
        with torch.no_grad():
            model.body.weight.fill_(float("nan"))

    made = trainer(Net, optimizer=_sgd)
    spoil(made, made.model)
    made.save_checkpoint(tmp_path / "step0")
    assert not make_sync_checkpointer().manifest(tmp_path / "step0").finite
