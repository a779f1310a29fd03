"""The library and the command train alike: the same model, data and settings end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run_program, trained
from compare import final_state

PROGRAM = """
import torch
from torch.optim import AdamW
from trainer_cli import CheckpointerCallback, Precision, Trainer, TrainingLoop, WarmupCosine
from trainer_cli import optimizer_factory, scheduler_factory
from trainer_cli.data.datasets import Digits
from trainer_cli.models.mlp import MLP

digits = Digits(augment=True)
loop = TrainingLoop(max_duration=20, eval_interval=10, log_interval=5, grad_accum_steps=2)
Trainer(
    model=lambda: MLP(hidden=[128], dropout=0.1),
    optimizer=optimizer_factory(AdamW, lr=0.003, param_groups={"*bias": {"weight_decay": 0.0}}),
    schedulers=scheduler_factory(WarmupCosine, loop, warmup="0.2ep"),
    precision=Precision(clip_norm=1.0),
    loop=loop,
    checkpoint=CheckpointerCallback("library/checkpoints", save_interval=None, pre_train_checkpoint=False),
    seed=3,
    deterministic=True,
    device="cpu",
).fit(digits.train, digits.val)
"""


EXPERIMENT = """
# @package _global_
defaults: [override /optimizer: null]
seed: 3
deterministic: true
device: cpu
model: {dropout: 0.1}
optimizer: {_target_: torch.optim.AdamW, lr: 0.003}
param_groups: {"*bias": {weight_decay: 0.0}}
scheduler: {_target_: trainer_cli.WarmupCosine, warmup: 0.2ep}
precision: {clip_norm: 1.0}
loop: {max_duration: 20, eval_interval: 10, log_interval: 5, grad_accum_steps: 2}
checkpoint: {save_interval: null, pre_train_checkpoint: false}
"""


def test_a_trainer_made_in_python_trains_as_one_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/mine.yaml").write_text(EXPERIMENT.lstrip())
    trained("experiment=mine", "run_dir=command", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    done = run_program(PROGRAM, folder=tmp_path)
    assert done.code == 0, done.out
    command, library = (final_state(tmp_path / name) for name in ("command", "library"))
    assert command["name"] == library["name"] == "step20"
    assert any(name.startswith("optimizer") for name in command)
    # Without loggers, the program's checkpoints say nothing of logs.
    assert command.pop("ranges").keys() == {"val/loss", "val/accuracy"}
    assert library.pop("ranges") is None
    # Of the program alone: a change of the config is refused.
    assert library["state"]["state"].pop("settings")["loop.grad_accum_steps"] == "2"
    assert command == library
