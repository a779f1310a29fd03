"""A folder of torch's own Checkpointer: each rank loads its file, and a model the weights that all ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.without_trainer import load_checkpoint
from trainer_cli.errors import CheckpointError, NoCheckpointError

RANKS = 12
"""Two digits: as texts, checkpoint_10.pt would come before checkpoint_2.pt."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(2, 1).state_dict()
    for rank in range(RANKS):
        torch.save({"model": model, "rank": rank, "rows": torch.arange(rank)}, tmp_path / f"checkpoint_{rank}.pt")
    return tmp_path


def _be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as one of several in torch's default group."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)


@pytest.mark.parametrize("rank", [0, 1, 2, 11])
@pytest.mark.parametrize("name", ["", "checkpoint_{rank}.pt"])
def test_each_rank_loads_its_own_file(folder: Path, rank: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _be_rank(rank, monkeypatch)
    loading = make_sync_checkpointer()
    loaded = loading.load(folder / name)
    assert loaded["rank"] == rank
    target: dict[str, Any] = {"rows": torch.zeros(rank, dtype=torch.int64), "rank": -1}
    assert loading.load(folder / name, target, strict=True).missing == []
    assert (target["rank"], target["rows"].tolist()) == (rank, list(range(rank)))
    model = nn.Linear(2, 1)
    load_checkpoint(folder / name, model, finetune=True)
    assert torch.equal(model.weight, loaded["model"]["weight"])


def test_a_rank_that_did_not_save_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "checkpoint_11.pt").unlink()
    _be_rank(11, monkeypatch)
    with pytest.raises(NoCheckpointError, match=r"there is no checkpoint_11\.pt: fewer ranks saved"):
        make_sync_checkpointer().load(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(1)},
            r"checkpoint_0\.pt has \(1, 2\) and checkpoint_7\.pt has",
        ),
        ({"weight": torch.ones(1, 2)}, r"checkpoint_0\.pt has \(1,\) and checkpoint_7\.pt lacks it"),
        ({"weight": torch.ones(1, 2), "bias": torch.ones(1), "more": torch.ones(1)}, r"checkpoint_0\.pt lacks it"),
    ],
)
def test_parts_of_a_sharded_model_are_no_model(folder: Path, model: dict[str, torch.Tensor], message: str) -> None:
    torch.save({"model": model}, folder / "checkpoint_7.pt")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, nn.Linear(2, 1), finetune=True)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", b"\x80\x02."])
def test_a_damaged_file_is_a_checkpoint_error(folder: Path, content: bytes) -> None:
    (folder / "checkpoint_0.pt").write_bytes(content)
    with pytest.raises(CheckpointError):
        make_sync_checkpointer().load(folder)
