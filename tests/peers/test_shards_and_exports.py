"""Checkpoints of several ranks, and what is exported of one."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import parted, save_as
from small_runs import Net, fit, make_trainer, rows
from states import same
from thread_ranks import ThreadGroup, on_ranks
from torch import nn
from torch.distributed.tensor import Shard

from trainer_cli import (
    SaveError,
    latest_checkpoint,
    load_checkpoint,
    make_async_checkpointer,
    make_sync_checkpointer,
    save_checkpoint,
)
from trainer_cli.commands.command_line import main


def model_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def save_model(path: str | Path, seed: int = 0) -> Net:
    model = model_of(seed)
    save_checkpoint(path, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.mark.parametrize("root", ["local", "memory"])
def test_what_is_saved_is_found(folder: Path, root: str) -> None:
    place = folder / "saved" if root == "local" else f"memory://{uuid.uuid4().hex}"
    for step in (9, 10):
        save_model(f"{place}/step{step}", step)
    newest = latest_checkpoint(place)
    assert newest.name == "step10"
    loaded = Net()
    load_checkpoint(newest, loaded, finetune=True)
    assert same(weights(loaded), weights(model_of(10)))


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_gets_its_own_state_back(folder: Path, background: bool) -> None:
    """Each rank writes a file of its own, and gets back what only it has."""

    def act(group: ThreadGroup) -> Any:
        make = make_async_checkpointer if background else make_sync_checkpointer
        checkpointer = make(group=group)
        state = {"model": {"w": torch.ones(3)}, "rng": torch.arange(group.rank, group.rank + 3)}
        saving = checkpointer.save(state, folder / "step2")
        if saving is not None:
            saving.raise_failure()
        loaded = checkpointer.load(latest_checkpoint(folder))
        checkpointer.close()
        return same(loaded["rng"], state["rng"]), same(loaded["model"], state["model"])

    assert on_ranks(2, act) == [(True, True), (True, True)]
    for rank in range(2):
        assert list((folder / "step2").glob(f"rank{rank}.*"))


def test_what_two_ranks_saved_in_parts_loads_into_one(folder: Path) -> None:
    """What two ranks saved in parts is one tensor for one rank."""
    whole = torch.arange(24.0).reshape(6, 4)
    save_as(folder, (2,), lambda mesh, rank: {"model": {"w": parted(whole, mesh, Shard(0))}})
    assert same(make_sync_checkpointer().load(folder / "step1")["model"]["w"], whole)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)


def test_the_state_of_an_optimizer_that_lacks_frozen_parameters_comes_back(folder: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)

    first = fit(folder, loop={"max_duration": 2}, save={}, model=Frozen, optimizer=adam).trainer
    second = make_trainer(folder, loop={"max_duration": 2}, save={}, model=Frozen, optimizer=adam)
    second.fit(rows(4))
    states = [next(iter(made.optimizers.values())).state_dict() for made in (first, second)]
    assert len(states[0]["state"]) == 1
    assert same(*states)


def test_what_is_no_checkpoint_is_moved_aside(folder: Path) -> None:
    """A folder without a manifest is moved aside with its files; a checkpoint is refused."""
    checkpointer = make_sync_checkpointer()
    (folder / "step1").mkdir()
    (folder / "step1" / "notes.txt").write_text("mine")
    checkpointer.save({"a": 1}, folder / "step1", overwrite=False)
    (aside,) = folder.glob(".aside.step1.*")
    assert (aside / "notes.txt").read_text() == "mine"
    with pytest.raises(SaveError, match="it is valid, so it is not replaced"):
        checkpointer.save({"a": 2}, folder / "step1", overwrite=False)
    assert checkpointer.load(folder / "step1")["a"] == 1


def export(folder: Path, format: str, output: str, *flags: str) -> int:
    return main(["ckpt", "export", str(folder / "step1"), "--format", format, "-o", str(folder / output), *flags])


def test_the_mean_of_checkpoints_is_that_of_each_of_their_weights(folder: Path) -> None:
    models = [weights(save_model(folder / f"step{seed}", seed)) for seed in (1, 2, 3)]
    assert main(["ckpt", "average", str(folder / "step*"), "--output", str(folder / "mean")]) == 0
    mean = make_sync_checkpointer().load(folder / "mean")["model"]
    for name, value in mean.items():
        torch.testing.assert_close(value, torch.stack([model[name] for model in models]).mean(0))
