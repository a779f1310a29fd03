"""The size of a checkpoint that is not there yet is that of the one which is then saved."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError
from trainer_cli.format.open import new_format
from trainer_cli.running.build import Builder, Data
from trainer_cli.running.checkpoint_size import CheckpointSize, checkpoint_size
from trainer_cli.schema.checkpoint_config import CheckpointConfig, CheckpointFormat
from trainer_cli.schema.sections import LoopConfig, TrainConfig
from trainer_cli.steps.progress import Progress

DATA = {"_target_": "trainer_cli.Digits", "batch_size": 50}
MLP = {"_target_": "trainer_cli.MLP", "hidden": [64]}


class Tied(nn.Module):
    """Two layers that share a weight, a buffer, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.last = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(300))

    def forward(self, batch: Any) -> Any:
        x, y = batch
        x = self.frozen(self.second(self.first(x.flatten(1))))
        return nn.functional.cross_entropy(self.last(x), y)


class Looking(Tied):
    """Looks at values when it is made, which there are none of without memory."""

    def __init__(self) -> None:
        super().__init__()
        assert self.first.weight.sum().item() != 1.0


def _optimizer(name: str, **settings: Any) -> dict[str, Any]:
    return {"optimizer": {"_target_": f"torch.optim.{name}", "lr": 0.01, **settings}}


CASES: dict[str, dict[str, Any]] = {
    "sgd": _optimizer("SGD"),
    "momentum": _optimizer("SGD", momentum=0.9),
    "amsgrad": _optimizer("AdamW", amsgrad=True),
    "fused": _optimizer("Adam", fused=True),
    "factored": {**_optimizer("Adafactor"), "param_groups": {"*bias*": {"weight_decay": 0.1}}},
    "tied and frozen": {**_optimizer("Adam"), "model": {"_target_": "users_own.Tied"}},
    "not without values": {**_optimizer("Adam"), "model": {"_target_": "users_own.Looking"}},
    "an archive": {**_optimizer("Adam"), "format": "archive"},
    "a schedule and an average": {
        **_optimizer("Adam"),
        "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1},
        "callbacks": {"ema": {"_target_": "trainer_cli.EMA"}, "early": {"_target_": "trainer_cli.EarlyStopping"}},
    },
}


def builder(folder: Path, *, format: str = "tensors", **sections: Any) -> Builder:
    loop = LoopConfig(max_duration=3, eval_steps=1, log_interval=1)
    checkpoint = CheckpointConfig(folder=str(folder), save_interval=3, format=CheckpointFormat(format))
    config = {"model": MLP, "data": DATA, "device": "cpu", "loop": loop, "checkpoint": checkpoint, **sections}
    return Builder(TrainConfig(**config), Trust())


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])


def size_of(made: Builder, data: Data) -> CheckpointSize:
    checkpoint = made.config.checkpoint
    form = new_format(checkpoint.format, checkpoint.compression)
    return checkpoint_size(made, data, Progress(step=3, batch=3, samples=150), form, beside=5)


@pytest.mark.parametrize("case", CASES)
def test_it_weighs_what_is_then_saved(tmp_path: Path, case: str) -> None:
    made = builder(tmp_path, **CASES[case])
    data = made.data()
    size = size_of(made, data)
    trainer = made.trainer(data, identity=RunIdentity(extra_files={"config.yaml": b"12345"}), run_dir=tmp_path)
    trainer.fit(data.train, data.val)
    saved = []
    for step in (0, 3):
        files = json.loads((tmp_path / f"step{step}/manifest.json").read_text())["files"]
        saved.append(sum(file["size_bytes"] for file in files.values()))
    assert size.note is None
    assert [size.before_training, size.trained] == pytest.approx(saved, rel=0.005)
    assert [size.at(0), size.at(3)] == [size.before_training, size.trained]


def test_what_cannot_be_reported_is_said(tmp_path: Path) -> None:
    made = builder(tmp_path, **_optimizer("LBFGS"))
    weight = size_of(made, made.data())
    assert weight.trained == pytest.approx(weight.before_training, rel=0.01)
    assert weight.note is not None
    assert weight.note.startswith("the state of LBFGS is not counted: ")
    assert CheckpointSize().at(7) == 0


@pytest.mark.parametrize("optimizer", ["SGD", "LBFGS"])
def test_a_message_of_a_part_is_shown_once(optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = {"_target_": "trainer_cli.WarmupCosine", "warmup": 9}
    made = builder(tmp_path, scheduler=scheduler, **_optimizer(optimizer))
    size_of(made, made.data())
    assert caplog.messages.count("warmup of 9 steps is cut: the run has 3 steps") == 1
    logging.getLogger("trainer_cli.later").warning("later")
    assert caplog.messages[-1] == "later"


def test_a_model_that_cannot_be_made_is_reported_as_by_fit(tmp_path: Path) -> None:
    made = builder(tmp_path, model={**MLP, "hidden": [4]}, **_optimizer("SGD", lr=-1.0))
    with pytest.raises(ConfigError, match=r"refused its arguments: Invalid learning rate: -1"):
        size_of(made, made.data())
