"""`train validate` gives each callback one `finalize` for each evaluated checkpoint, also where a checkpoint fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

EXPERIMENT = """# @package _global_
model: {_target_: counted.Net}
data: {_target_: counted.Data, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
callbacks: {counts: {_target_: counted.Counts}}
loop: {max_duration: 2, eval_interval: null}
device: cpu
"""
MODULE = """
import torch
from trainer_cli import Callback

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, batch):
        return super().forward(batch).square().mean()

class Data:
    def __init__(self):
        self.train = self.val = [torch.ones(2) for index in range(4)]

class Counts(Callback):
    calls = []

    def on_validate_end(self, trainer, model, loop):
        self.calls.append("end")

    def finalize(self):
        self.calls.append("finalize")
"""


def test_every_evaluated_checkpoint_ends_with_one_finalize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/counted.yaml").write_text(EXPERIMENT)
    (tmp_path / "counted.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "experiment=counted"]) == 0
    import counted  # type: ignore[import-not-found]

    counted.Counts.calls.clear()
    assert main(["validate", "ckpt=runs/counted/checkpoints/step*"]) == 0
    assert counted.Counts.calls == ["end", "finalize"] * 3
    assert sorted(os.listdir("runs/counted/checkpoints")) == ["step0", "step1", "step2"]
