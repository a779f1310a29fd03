"""The check of metrics before step 1 leaves no trace, and an evaluation that a stop interrupted leaves none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Points, StopAt, StopInEvaluation, everything, same, trainer
from torch import nn
from torch.utils.data import DataLoader

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping, ThresholdStopper
from trainer_cli.trainer.model_call import ForwardState
from trainer_cli.trainer.scheduler_intervals import Scheduled
from trainer_cli.trainer.train_step import TrainStep


class Following(nn.Module):
    """Its forward changes all that a forward can, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.words = nn.Linear(2, 1), nn.Embedding(3, 2, max_norm=0.1)
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("not_saved", torch.zeros(()), persistent=False)
        self.extra = 0
        self.dropout = nn.Dropout(0.1)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = int(state)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.3)
            self.replaced = self.replaced + 1
            self.not_saved += 1
            self.frozen += 1
        self.extra += 1
        word = self.words(torch.arange(len(x)) % 3).sum(1)
        return (self.layer(self.dropout(x) - self.mean).squeeze(-1) + word - y).square().mean()


class Counting(TrainStep):
    """Counts forwards in a state of its own."""

    def __init__(self) -> None:
        self.forwards = 0

    def forward(self, batch: Any) -> Any:
        self.forwards += 1
        return super().forward(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"forwards": self.forwards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forwards = state["forwards"]


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


BEST = {"metric": "val/loss", "mode": "min", "count": 1}
# What wants a metric: callbacks, settings of the saver, of the loop, and the trainer's own.
OPTIONS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ([], {}, {}, {}),
    "keep_best": ([], {"keep_best": BEST}, {}, {}),
    "early stopping": ([lambda: EarlyStopping("val/loss", patience="90ep")], {}, {}, {}),
    "threshold": ([lambda: ThresholdStopper("val/loss", -1.0)], {}, {}, {}),
    "plateau": ([], {}, {}, {"schedulers": {"plateau": Scheduled(_plateau, "evaluation", metric="val/loss")}}),
    "sanity steps": ([], {}, {"eval_sanity_steps": 2}, {}),
}


def _fit(folder: Path, option: str, *callbacks: Any, max_duration: int = 9, **of_loop: Any) -> Any:
    makers, saver, loop, more = OPTIONS[option]
    made = trainer(
        Following, step=Counting(), callbacks=[*(make() for make in makers), *callbacks],
        settings={"max_duration": max_duration, "eval_interval": 3, **loop, **of_loop},
        checkpoint=CheckpointerCallback(folder, **{"save_interval": None, **saver}), **more,
    )  # fmt: skip
    train: Any = Points(12)
    made.fit(DataLoader(train, 4), DataLoader(Points(6), 2))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("option", OPTIONS)
def test_a_resume_of_a_model_whose_forward_changes_it_is_exact(option: str, tmp_path: Path) -> None:
    straight = _fit(tmp_path / "straight", option)
    for step in (2, 3, 5):
        _fit(tmp_path / "parts", option, StopAt(step))
    resumed = _fit(tmp_path / "parts", option)
    assert same(_without_options(straight), _without_options(resumed)) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_the_check_changes_nothing_at_a_start(option: str, tmp_path: Path) -> None:
    with_check = _fit(tmp_path / "with", option, max_duration=1)
    without = _fit(tmp_path / "without", "nothing", max_duration=1)
    assert same(everything(with_check)["model"], everything(without)["model"]) == []
    assert with_check.model.not_saved == without.model.not_saved
    assert with_check.step.forwards == without.step.forwards


def test_a_resume_after_an_interrupted_evaluation_is_exact(tmp_path: Path) -> None:
    """But for parameters that an evaluation changes in place: copies of all at each evaluation would be too much."""
    straight = _fit(tmp_path / "straight", "keep_best")
    _fit(tmp_path / "parts", "keep_best", StopInEvaluation(3, 1))
    resumed = _fit(tmp_path / "parts", "keep_best")
    differ = same(_without_options(straight), _without_options(resumed))
    assert [row for row in differ if not row.startswith(("/model/frozen", "/model/words"))] == []


def test_what_was_restored_is_in_the_same_tensors() -> None:
    model = Following()
    before = {name: (id(value), value.clone()) for name, value in (*model.named_parameters(), *model.named_buffers())}
    state = ForwardState(model, parameters=True)
    model((torch.ones(4, 2), torch.ones(4)))
    assert model.replaced == 1
    state.restore()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert (id(value), torch.equal(value, before[name][1])) == (before[name][0], True), name
    assert model.extra == 0


def _without_options(made: Any) -> dict[str, Any]:
    return {key: value for key, value in everything(made).items() if key != "callbacks"}
