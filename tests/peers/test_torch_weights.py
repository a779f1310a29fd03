"""A training starts from weights in the formats of torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from states import same
from torch import nn

from trainer_cli import LoadOptions, Trainer, TrainingLoop, load_checkpoint
from trainer_cli.commands.command_line import main

PROJECT = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, batch):
        return self.line(batch[0]).square().mean()


class Data:
    train = val = torch.utils.data.TensorDataset(torch.ones(4, 2))
"""


def assert_same(loaded: Any, expected: Any) -> None:
    assert same(dict(loaded), dict(expected)), loaded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, batch: list[torch.Tensor]) -> Any:
        return self.second(self.first(batch[0])).square().mean()


@functools.cache
def net() -> Net:
    torch.manual_seed(3)
    return Net()


class Stateful:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])


def dcp_state(form: str) -> dict[str, Any]:
    weights = net().state_dict()
    optimizer = torch.optim.Adam(net().parameters())
    states: dict[str, dict[str, Any]] = {
        "Stateful": {"app": Stateful(net())},
        "module": {"model": net()},
        "top": dict(weights),
        "model": {"model": weights},
        "state_dict": {"state_dict": weights},
        "model and optim": {"model": weights, "optim": optimizer.state_dict()},
    }
    return states[form]


def save_by_dcp(path: Path, form: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dcp_state(form), checkpoint_id=path, no_dist=True)


def save_by_dcp_async(path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    cast("Any", async_save(dcp_state("model"), checkpoint_id=path, no_dist=True)).result()


def save_by_torch_save_to_dcp(path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch.save(net().state_dict(), path.with_suffix(".pt"))
    torch_save_to_dcp(path.with_suffix(".pt"), path)


def save_by_hf_writer(path: Path, consolidated: bool) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(path=str(path), save_distributed=consolidated, enable_consolidation=consolidated)
    save(dict(net().state_dict()), storage_writer=writer, no_dist=True)


def save_by_checkpointer(path: Path) -> None:
    path.mkdir()
    torch.save({"model": net().state_dict(), "epoch": 3}, path / "checkpoint_0.pt")


@pytest.mark.parametrize(
    ("write", "arguments"),
    [
        (save_by_dcp, ["Stateful"]),
        (save_by_dcp, ["module"]),
        (save_by_dcp, ["top"]),
        (save_by_dcp, ["model"]),
        (save_by_dcp, ["state_dict"]),
        (save_by_dcp, ["model and optim"]),
        (save_by_dcp_async, []),
        (save_by_torch_save_to_dcp, []),
        (save_by_hf_writer, [False]),
        (save_by_hf_writer, [True]),
        (save_by_checkpointer, []),
    ],
)
def test_a_checkpoint_of_torch_gives_its_weights(
    folder: Path, write: Callable[..., None], arguments: list[Any]
) -> None:
    with warnings.catch_warnings():
        # Those of torch, about itself.
        warnings.simplefilter("ignore")
        write(folder / "other", *arguments)
    model = Net()
    epoch, _ = load_checkpoint(folder / "other", model, finetune=True)
    assert epoch == 0
    assert_same(model.state_dict(), net().state_dict())


def test_a_training_starts_from_the_weights_of_checkpoint_0_pt(folder: Path) -> None:
    save_by_checkpointer(folder / "other")
    trainer = Trainer(
        model=Net,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        loop=TrainingLoop(max_duration=1, eval_interval=None),
        device="cpu",
    )
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    trainer.fit(data, ckpt_path=folder / "other", load=LoadOptions(states=["model"]))
    assert_same(trainer.model.state_dict(), net().state_dict())


def test_the_command_evaluates_the_weights_of_checkpoint_0_pt(folder: Path) -> None:
    (folder / "peer_net.py").write_text(PROJECT)
    (folder / "other").mkdir()
    weights = {"line.weight": torch.tensor([[2.0, 3.0]]), "line.bias": torch.tensor([0.5])}
    torch.save({"model": weights}, folder / "other" / "checkpoint_0.pt")
    parts = ["model=null", "model={_target_: peer_net.Net}", "data=null", "data={_target_: peer_net.Data}"]
    assert main(["validate", "experiment=digits_mlp", *parts, "ckpt=other", "validate.folder=results"]) == 0
    (line,) = (folder / "results" / "validation.jsonl").read_text().splitlines()
    assert json.loads(line)["val/loss"] == 5.5**2
