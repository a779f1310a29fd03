"""Saving and loading in a loop of one's own: everything or the model alone, and nothing unless all fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_cli import SyncCheckpointer, latest_checkpoint, load_checkpoint, save_checkpoint
from trainer_cli.errors import CheckpointError, UserError


class Training:
    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, steps: int = 2) -> list[float]:
        losses = []
        for step in range(steps):
            loss = self.model(torch.full((2, 3), float(step + 1))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    @property
    def parts(self) -> tuple[nn.Module, Any, Any]:
        return self.model, self.optimizer, self.scheduler


def test_a_loaded_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    one.train()
    save_checkpoint(tmp_path / "step2", 7, *one.parts, best=0.25, history=[1, 2])
    assert load_checkpoint(latest_checkpoint(tmp_path), *other.parts) == (7, {"best": 0.25, "history": [1, 2]})
    assert other.train() == one.train()


def test_a_schedule_is_optional(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    save_checkpoint(tmp_path / "step1", 1, one.model, one.optimizer)
    assert load_checkpoint(tmp_path / "step1", other.model, other.optimizer) == (1, {})
    with pytest.raises(CheckpointError, match=r"has no lr_scheduler .*To load the model alone, add finetune=True"):
        load_checkpoint(tmp_path / "step1", *other.parts)


def test_fine_tuning_loads_the_model_alone_from_epoch_0(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    one.train()
    save_checkpoint(tmp_path / "step1", 3, *one.parts, note="x")
    assert load_checkpoint(tmp_path / "step1", *other.parts, finetune=True) == (0, {"note": "x"})
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not other.optimizer.state
    torch.save({"model": one.model.state_dict()}, tmp_path / "x.pt")
    assert load_checkpoint(tmp_path / "x.pt", Training(seed=2).model, finetune=True) == (0, {})
    with pytest.raises(UserError, match=r"only its weights can be loaded\. Add finetune=True"):
        load_checkpoint(tmp_path / "x.pt", other.model)


class Refusing(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("not mine")


@pytest.mark.parametrize(
    ("width", "schedule", "why"),
    [
        (5, None, r"0\.weight: has shape \(4, 3\) in this model, but \(5, 3\)"),
        (
            4,
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            r"(?s)lr_scheduler +T_max: missing.*step_size: not in this schedule",
        ),
        (4, lambda optimizer: Refusing(optimizer, 1, gamma=0.5), "not mine"),
    ],
    ids=["a model of another width", "another schedule", "a schedule that refuses its state"],
)
def test_nothing_is_changed_unless_all_fits(tmp_path: Path, width: int, schedule: Any, why: str) -> None:
    save_checkpoint(tmp_path / "step1", 1, *Training(width=width).parts)
    other = Training(seed=1)
    before = [parameter.clone() for parameter in other.model.parameters()]
    own = other.scheduler if schedule is None else schedule(other.optimizer)
    with pytest.raises((UserError, ValueError), match=why):
        load_checkpoint(tmp_path / "step1", other.model, other.optimizer, own)
    assert all(torch.equal(*pair) for pair in zip(before, other.model.parameters(), strict=True))
    assert not other.optimizer.state


def test_a_model_with_more_layers_is_loaded_unless_strict(tmp_path: Path) -> None:
    one = Training()
    save_checkpoint(tmp_path / "step1", 1, *one.parts)
    more = nn.Sequential(*one.model, nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"2\.weight: missing in the checkpoint"):
        load_checkpoint(tmp_path / "step1", more, finetune=True)
    load_checkpoint(tmp_path / "step1", more, finetune=True, strict=False)


def test_the_cure_of_weights_that_do_not_fit_is_an_argument_that_helps(tmp_path: Path) -> None:
    one, other = Training(), Training(seed=1)
    save_checkpoint(tmp_path / "step2", 7, *one.parts)
    head = nn.Sequential(other.model[0], nn.Linear(4, 5))
    with pytest.raises(UserError, match=re.escape("add ignore_keys=['1.*'].")):
        load_checkpoint(tmp_path / "step2", head, finetune=True)
    load_checkpoint(tmp_path / "step2", head, finetune=True, ignore_keys=["1.*"])
    assert torch.equal(head[0].weight, one.model[0].weight)
    inner = nn.ModuleDict({"net": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))})
    with pytest.raises(UserError, match=re.escape("add key_mapping={'*': 'net.*'}.")):
        load_checkpoint(tmp_path / "step2", inner, finetune=True)
    load_checkpoint(tmp_path / "step2", inner, finetune=True, key_mapping={"*": "net.*"})
    assert torch.equal(inner["net"][1].weight, one.model[1].weight)
    with pytest.raises(UserError, match=r"Nothing was loaded\. To load the model alone, add finetune=True\."):
        load_checkpoint(tmp_path / "step2", other.model, torch.optim.SGD(other.model.parameters(), lr=0.1))


def test_what_is_not_there_or_cannot_be_saved_is_named(tmp_path: Path) -> None:
    one = Training()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "step9", one.model)
    with pytest.raises(UserError, match="thing"):
        save_checkpoint(tmp_path / "step3", 1, one.model, one.optimizer, thing=object())


@pytest.mark.parametrize(
    ("kept", "lacking"),
    [
        ((), "model and no epoch and no optimizer and no lr_scheduler"),
        (("model", "epoch", "optimizer"), "lr_scheduler"),
        (("epoch", "lr_scheduler", "optimizer"), "model"),
        (("model", "epoch", "lr_scheduler"), "optimizer"),
        (("model", "lr_scheduler", "optimizer"), "epoch"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(tmp_path: Path, kept: tuple[str, ...], lacking: str) -> None:
    save_checkpoint(tmp_path / "step1", 1, *Training().parts)
    whole = SyncCheckpointer().read(tmp_path / "step1")
    SyncCheckpointer().save({name: whole[name] for name in kept}, tmp_path / "step2")
    with pytest.raises(CheckpointError, match=rf"the checkpoint has no {lacking} \("):
        load_checkpoint(tmp_path / "step2", *Training(seed=1).parts)


@pytest.mark.parametrize("with_schedule", [True, False])
def test_a_rate_that_the_schedule_moved_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_schedule: bool
) -> None:
    def parts() -> tuple[Any, ...]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, schedule = parts()
    optimizer.step()
    schedule.step()
    save_checkpoint(tmp_path / "step1", 1, model, optimizer, schedule)
    load_checkpoint(tmp_path / "step1", *parts()[: 3 if with_schedule else 2])
    assert ("lr is 0.01" in caplog.text) is not with_schedule
