"""Verbs that answer at once load no library that takes long to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from long_run import save_a_long_run

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.runs.run_dir import RunDir

LIGHT = [
    "--help",
    "--version",
    "list",
    "top",
    "tail runs/done",
    "ckpt ls",
    "ckpt ls runs/done@best --json",
    "ckpt show runs/done@best --states",
    "ckpt pin runs/done@best",
    "ckpt unpin runs/done@best",
    "ckpt rm runs/done@step10 --yes",
    "data runs/digits 437",
    "data runs/digits --find 12",
]
COMPLETED = ["train fit +experiment=digits optimizer.", "train validate ckpt=", "train config --", "train list "]
WITHOUT_TORCH = ["ckpt show runs/done@best --norms", "ckpt diff runs/done@best runs/done@latest"]
CODE = """
import json, os, sys
from trainer_cli.commands.command_line import main
from trainer_cli import checkpoint_path, checkpoint_pattern, latest_checkpoint
light, completed, without_torch = json.loads(sys.argv[1])

def load_none_of(names, words):
    assert main(words) == 0, words
    assert not set(names) & set(sys.modules), (words, set(names) & set(sys.modules))

for line in light:
    load_none_of(("torch", "numpy", "hydra", "omegaconf", "tensorboard"), line.split())
for line in completed:
    os.environ["TRAIN_COMPLETE_LINE"] = line
    load_none_of(("torch", "numpy", "hydra", "omegaconf"), ["complete", "--answer"])
for line in without_torch:
    load_none_of(("torch",), line.split())
"""


def test_verbs_that_only_read_load_neither_torch_nor_numpy_nor_hydra(made: Path) -> None:
    """But `ckpt verify` and `ckpt prune`, which decode checkpoints as a resume does."""
    run = RunDir("runs/done")
    run.create("name: done\nrun_dir: runs/done\n", [], {"run_id": "done"}).release()
    run.metrics_file.write_text(json.dumps({"step": 10, "epoch": 0.1, "time": 0.0, "train/loss": 0.25}) + "\n")
    for step in (10, 20, 30):
        facts = CheckpointMetadata(run_id="done", step=step, metrics={"val/loss": abs(20 - step)})
        make_sync_checkpointer().save(
            {"model": {"w": torch.ones(2)}}, f"runs/done/checkpoints/step{step}", metadata=facts
        )
    save_a_long_run(made)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CODE, json.dumps([LIGHT, COMPLETED, WITHOUT_TORCH])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
