"""Parameter groups that a callback adds in the middle of a run: a resume makes them again, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import StopAt, everything, loader, same, trainer
from torch import Tensor, nn

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback

ADDED_AT = 4


class Frozen(nn.Module):
    """Its body is not trained at first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)
        self.body.requires_grad_(False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.head(self.body(batch[0]).relu()).squeeze(-1) - batch[1]).square().mean()


class Unfreeze(Callback):
    """Adds the body's weight, and its bias as a group of its own that stays untrained, at a step."""

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step == ADDED_AT:
            model.body.weight.requires_grad_(True)
            trainer.optimizer.add_param_group({"params": [model.body.weight], "lr": 0.02})
            trainer.optimizer.add_param_group({"params": [model.body.bias]})


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def _fit(folder: Path, *callbacks: Callback, optimizer: str = "Adam", schedule: bool = False, **more: Any) -> Any:
    made = trainer(
        Frozen,
        optimizer=lambda m: OPTIMIZERS[optimizer]([p for p in m.parameters() if p.requires_grad]),
        schedulers=(lambda o: WarmupCosine(o, 10, warmup=2)) if schedule else None,
        callbacks=[Unfreeze(), *callbacks],
        settings={"max_duration": 10},
        checkpoint=CheckpointerCallback(folder, save_async=False, **more),
    )
    made.fit(loader())
    return made


@pytest.mark.parametrize("schedule", [False, True], ids=["constant rate", "schedule"])
@pytest.mark.parametrize("stop", [ADDED_AT, 7])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_makes_the_added_groups_again(tmp_path: Path, optimizer: str, stop: int, schedule: bool) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
    straight = _fit(tmp_path / "straight", **settings)
    assert len(straight.optimizer.param_groups) == 3
    _fit(tmp_path / "parts", StopAt(stop), **settings)
    resumed = _fit(tmp_path / "parts", **settings)
    assert resumed.loaded_step == stop
    assert same(everything(straight), everything(resumed)) == []
    assert [p.requires_grad for p in resumed.model.parameters()] == [True, False, True, True]


def test_going_back_to_before_a_group_was_added_removes_it(tmp_path: Path) -> None:
    class Plant(Callback):
        done = False

        def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
            if trainer.progress.step == ADDED_AT + 1 and not self.done:
                self.done = True
                batch[1].fill_(float("nan"))

    made = _fit(tmp_path, CheckFinite("roll_back"), Plant(), save_interval=3)
    assert made.progress.step == 10
    assert len(made.optimizer.param_groups) == 3, "added again"


def test_a_config_with_fewer_groups_is_refused_as_before(tmp_path: Path) -> None:
    def fit(model: Any, groups: int) -> None:
        trainer(
            model,
            optimizer=lambda m: torch.optim.SGD([{"params": [p]} for p in list(m.parameters())[:groups]], lr=0.1),
            checkpoint=CheckpointerCallback(tmp_path, save_async=False),
        ).fit(loader())

    fit(Trained, 4)
    with pytest.raises(UserError, match="it has 3 parameter groups, but the checkpoint has 4"):
        fit(Trained, 3)


class Trained(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)
