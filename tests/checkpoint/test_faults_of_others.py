"""Faults that the checkpointers of PyTorch had: settings ignored, a file or much space for each tensor, gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer_cli import make_async_checkpointer, make_sync_checkpointer


@pytest.mark.parametrize("make", [make_sync_checkpointer, make_async_checkpointer])
def test_x3_settings_are_used(tmp_path: Path, make: type) -> None:
    checkpointer = make(digest="sha256", format="torch_file")
    checkpointer.save({"x": torch.ones(2)}, tmp_path / "step1")
    checkpointer.close()
    manifest = make_sync_checkpointer().manifest(tmp_path / "step1")
    assert manifest.format == "torch_file"
    assert {entry.algorithm for entry in manifest.files.values()} == {"sha256"}


MANY = """
import resource, sys
import torch
from trainer_cli import make_async_checkpointer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
state = {f"t{number}": torch.full((3,), float(number)) for number in range(500)}
checkpointer = make_async_checkpointer()
for step in (1, 2):
    checkpointer.save(state, f"{sys.argv[1]}/step{step}")
checkpointer.close()
loaded = checkpointer.load(f"{sys.argv[1]}/step2")
assert all(torch.equal(loaded[name], value) for name, value in state.items())
"""


@pytest.mark.slow
def test_x5_more_tensors_than_open_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_d7_gradients_do_not_change_the_state() -> None:
    from trainer_cli.checkpoint.optimizer_state import capture_optimizer

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = capture_optimizer(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    after = capture_optimizer(model, optimizer)
    assert before["state"].keys() == after["state"].keys() == {"weight", "bias"}
    assert torch.equal(before["state"]["weight"]["exp_avg"], after["state"]["weight"]["exp_avg"])
    assert model.weight.grad is not None


def test_d10_small_tensors_take_little_space(tmp_path: Path) -> None:
    state = {f"scalar{number}": torch.tensor(float(number)) for number in range(3000)}
    make_sync_checkpointer().save(state, tmp_path / "step1")
    assert sum(path.stat().st_size for path in (tmp_path / "step1").iterdir()) < 1_000_000
