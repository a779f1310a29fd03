"""torch_checkpointing, where it is installed, such as in `.venv-bench`: it copies the state during the next step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

WIDTH = 8_000
SAVES = 5


class Normed(nn.Module):
    """A batch norm behind weights of 256 MB in the state, and in front of them in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(self.norm(inputs))
        return outputs


def test_a_background_save_holds_no_value_of_the_next_step(tmp_path: Path) -> None:
    """With the update guarded by `lock`, as its tutorial says. `checkpoint/snapshot` copies at the end of the step."""
    checkpointing = pytest.importorskip("torch_checkpointing")
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = checkpointing.CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager, model = config.build(), Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    later = set()
    for save in range(SAVES):
        at_save = {name: value.clone() for name, value in model.state_dict().items()}
        written = manager.save(str(tmp_path / f"{save}"), {"model": model.state_dict()})
        model(torch.randn(4, WIDTH) + save).square().mean().backward()
        with manager.lock():
            optimizer.step()
        optimizer.zero_grad()
        written.result()
        loaded = {name: torch.zeros_like(value) for name, value in at_save.items()}
        manager.load(str(tmp_path / f"{save}"), into={"model": loaded})
        later |= {name for name, value in loaded.items() if not torch.equal(value, at_save[name])}
    manager.close()
    assert later == set()
