"""The modes of modules are those of a plain loop: `train()` is called before the first step and after evaluations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import StopAt, StopInEvaluation, on, same, trainer
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.trainer import Trainer

STEPS, EVAL_INTERVAL = 6, 2


class Net(nn.Module):
    """A backbone with a norm and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        return (self.head(self.backbone(x)).squeeze(-1) - y).square().mean()


class FrozenBackbone(Net):
    """Keeps its backbone in evaluation mode by an override, as many models do."""

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self


class LoadedBackbone(Net):
    """Its backbone is in evaluation mode, as `from_pretrained` returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.eval()


class Merging(Net):
    """Adds an adapter to a weight in evaluation mode, and takes it out in training mode, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.merged = nn.Parameter(torch.full((1, 8), 0.25)), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode is self.merged:
            self.merged = not mode
            with torch.no_grad():
                self.head.weight += self.adapter.round(decimals=1) if self.merged else -self.adapter.round(decimals=1)
        return self

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        loss = super().forward(batch)
        return loss if self.merged else loss + self.adapter.square().sum()


class WholeInEval(Net):
    """As a whole in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()


class Batches:
    """A loader of fixed batches."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(4, 2, generator=generator) for _ in range(count)]
        self.batches = [(x, x.sum(1)) for x in inputs]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


TRAIN, VAL = Batches(4, seed=1), Batches(2, seed=2)
Each = Callable[[nn.Module, int], None]
"""What is done with the model before a step."""


def loop_by_hand(make: Callable[[], nn.Module], accum: int = 1, each: Each | None = None) -> tuple[list[Any], Any]:
    """The losses, and the weights at the end, of a plain loop."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, position = [], 0
    model.train()
    for step in range(1, STEPS + 1):
        if each is not None:
            each(model, step)
        for _ in range(accum):
            loss = model(TRAIN.batches[position % len(TRAIN)])
            (loss / accum).backward()
            losses.append(loss.item())
            position += 1
        optimizer.step()
        optimizer.zero_grad()
        if step % EVAL_INTERVAL == 0:
            model.eval()
            with torch.no_grad():
                for batch in VAL:
                    model(batch)
            model.train()
    return losses, model.state_dict()


def run(
    make: Any, *callbacks: Callback, accum: int = 1, each: Each | None = None, folder: Path | None = None, **more: Any
) -> tuple[list[Any], Any]:
    """The same by a trainer."""
    losses: list[float] = []

    def before(trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        if each is not None and batch_idx % accum == 0:
            each(model, trainer.progress.step + 1)

    hooks = on(
        on_train_batch_start=before,
        on_train_batch_end=lambda trainer, model, outputs, *_: losses.append(outputs.item()),
    )
    if folder is not None:
        more["checkpoint"] = CheckpointerCallback(folder, save_interval=1, max_checkpoints=None)
    settings = {
        "max_duration": STEPS, "eval_interval": EVAL_INTERVAL, "grad_accum_steps": accum, **more.pop("settings", {}),
    }  # fmt: skip
    made = trainer(make, callbacks=[hooks, *callbacks], settings=settings, **more)
    made.fit(TRAIN, VAL)
    return losses, made.model.state_dict()


def toggle(model: nn.Module, step: int) -> None:
    """Put a part into evaluation mode at one step and back at a later one: an evaluation lies between them or not."""
    if step in (2, 5):
        model.get_submodule("backbone").eval()
    if step == 6:
        model.get_submodule("backbone").train()


def freeze_once(model: nn.Module, step: int) -> None:
    """Put a part into evaluation mode at one step in the middle of a stretch."""
    if step == 3:
        model.get_submodule("backbone.2").eval()


MODELS = [Net, FrozenBackbone, LoadedBackbone, WholeInEval, Merging]


@pytest.mark.parametrize("each", [None, toggle, freeze_once])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("make", MODELS)
def test_losses_and_weights_are_those_of_a_plain_loop(make: Any, accum: int, each: Each | None) -> None:
    assert same(run(make, accum=accum, each=each), loop_by_hand(make, accum, each)) == []


STOPS = {
    **{f"after step {step}": StopAt(step) for step in (1, 2, 3, 5)},
    "in the evaluation": StopInEvaluation(4),
}


@pytest.mark.parametrize(
    "stop",
    [
        "after step 3",
        "in the evaluation",
        *(pytest.param(f"after step {step}", marks=pytest.mark.campaign) for step in (1, 2, 5)),
    ],
)
@pytest.mark.parametrize("each", [None, toggle, freeze_once])
@pytest.mark.parametrize("make", MODELS)
def test_a_resumed_training_is_that_of_a_plain_loop(make: Any, each: Each | None, stop: str, tmp_path: Path) -> None:
    first, _ = run(make, STOPS[stop], each=each, folder=tmp_path)
    rest, weights = run(make, each=each, folder=tmp_path)
    assert len(first) < STEPS
    assert same((first + rest, weights), loop_by_hand(make, each=each)) == []


@pytest.mark.parametrize("first", range(1, STEPS))
@pytest.mark.parametrize("each", [toggle, freeze_once])
def test_a_finished_training_is_extended_in_the_modes_of_a_longer_one(each: Each, first: int, tmp_path: Path) -> None:
    losses, _ = run(Net, each=each, folder=tmp_path, settings={"max_duration": first})
    rest, weights = run(Net, each=each, folder=tmp_path)
    assert same((losses + rest, weights), loop_by_hand(Net, each=each)) == []


def test_a_second_fit_continues_in_the_modes_of_the_first() -> None:
    hooks = on(on_train_batch_start=lambda trainer, model, *_: freeze_once(model, trainer.progress.step + 1))
    made = trainer(Net, callbacks=[hooks, StopAt(3)], settings={"max_duration": STEPS, "eval_interval": EVAL_INTERVAL})
    made.fit(TRAIN, VAL)
    made.fit(TRAIN, VAL)
    assert same(made.model.state_dict(), loop_by_hand(Net, each=freeze_once)[1]) == []


def test_a_rollback_restores_the_modes_of_its_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def hook(trainer: Trainer, model: nn.Module, *_: Any) -> None:
        step = trainer.progress.step + 1
        if step in (2, 4) and len(seen) < 4:
            model.get_submodule("backbone").train(step == 4)
        seen.append((step, model.get_submodule("backbone").training))
        if len(seen) == 4:
            trainer.ask_to_roll_back()

    checkpoint = CheckpointerCallback(tmp_path, fixed_steps=[2])
    made = trainer(Net, callbacks=[on(on_train_batch_start=hook)], checkpoint=checkpoint)
    made.fit(TRAIN)
    assert seen[:5] == [(1, True), (2, False), (3, False), (4, True), (3, False)]


@pytest.mark.parametrize("patterns", [["backbone"], ["backbone.*"], ["re:backbone([.].*)?"]])
def test_modules_that_match_a_pattern_stay_in_evaluation_mode(patterns: list[str], tmp_path: Path) -> None:
    expected = loop_by_hand(FrozenBackbone)
    assert same(run(Net, eval_modules=patterns), expected) == []
    first, _ = run(Net, StopAt(3), eval_modules=patterns, folder=tmp_path)
    rest, weights = run(Net, eval_modules=patterns, folder=tmp_path)
    assert same((first + rest, weights), expected) == []


def test_a_norm_that_is_unfrozen_stays_in_the_mode_that_the_model_gives_it() -> None:
    for make, unfrozen in ((Net, True), (FrozenBackbone, False)):
        made = trainer(make, freeze={"backbone.1.*": 2})
        made.fit(TRAIN, VAL)
        assert made.model.get_submodule("backbone.1").training is unfrozen


@pytest.mark.parametrize("pattern", ["bakbone", "bakbone.*"])
def test_a_pattern_that_matches_no_module_is_an_error(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"eval_modules: 'bakbone.*' matches no module .* Did you mean 'backbone"):
        trainer(Net, eval_modules=[pattern])


LINES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "all in training mode": (Net, {}, []),
    "a part as loaded": (LoadedBackbone, {}, ["backbone: put"]),
    "the whole model": (WholeInEval, {}, ["the model: put"]),
    "kept by an override": (FrozenBackbone, {}, []),
    "kept by a pattern": (LoadedBackbone, {"eval_modules": ["backbone"]}, []),
    "a frozen norm": (Net, {"freeze": ["backbone.1.*"]}, []),
    "frozen for a while": (Net, {"freeze": {"backbone.1.*": 2}}, []),
    "put there by a hook of each stretch": (
        Net,
        {"callbacks": [on(on_train_start=lambda trainer, model, *_: model.backbone.eval())]},
        [],
    ),
    "put there once": (
        Net,
        {"callbacks": [on(on_train_batch_start=lambda made, model, *_: freeze_once(model, made.progress.step + 1))]},
        ["backbone.2: put"],
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_one_line_names_the_modules_that_leave_evaluation_mode(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, settings, starts = LINES[case]
    with caplog.at_level(logging.INFO, logger="trainer_cli"):
        trainer(make, **settings, settings={"max_duration": STEPS, "eval_interval": EVAL_INTERVAL}).fit(TRAIN, VAL)
    lines = [message for message in caplog.messages if "evaluation into training mode" in message]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * len(starts)
