"""Before the first step the planned checkpoints are compared with what the disk has left."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import loader, trainer
from torch import nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.policy.rules import CheckpointKind, Saved
from trainer_cli.policy.simulation import Peak, Save, Timeline
from trainer_cli.running.free_space import check_space, estimate_size, optimizer_bytes
from trainer_cli.running.planning import StartPoint
from trainer_cli.steps.progress import Progress
from trainer_cli.storage.disk import Disk

SIZE = 1_000_000
NEW = StartPoint(Progress())


class Left(Disk):
    """Says that so much is free."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def free_bytes(self, path: Path) -> int | None:
        return self.size_bytes


class Wide(nn.Module):
    """A training of 60,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 20_000)

    def forward(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.linear(batch[0]).square().mean()
        return loss


def trainer_with(folder: Path, free_bytes: int, **settings: Any) -> Any:
    checkpoint = CheckpointerCallback(folder, **settings)
    cast("Any", checkpoint.storage).disk = Left(free_bytes)
    return trainer(checkpoint=checkpoint)


def timeline(count: int, present: int = 0) -> Timeline:
    """A plan with so many checkpoints on the disk at a time, the present ones included."""
    saves = [Save(f"step{step}", step, CheckpointKind.regular, "", SIZE) for step in range(count - present)]
    return Timeline(saves=saves, peak=Peak(count, count, count * SIZE))


class WithBase(nn.Module):
    """Half a checkpoint is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.base = nn.Parameter(torch.zeros(SIZE // 8), requires_grad=False)


@pytest.mark.parametrize(
    ("settings", "has_links", "says"),
    [
        ({}, True, None),
        ({}, False, "warns"),
        ({"link_frozen": False}, True, "warns"),
        ({"format": "archive"}, True, "warns"),
    ],
)
def test_what_checkpoints_share_is_counted_once_where_the_file_system_has_links(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    has_links: bool,
    says: str | None,
) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        # As FAT does.
        monkeypatch.setattr(os, "link", refuse)
    checkpoint = CheckpointerCallback(tmp_path, **settings)
    # Ten of which half is shared take five and a half, and the logs some more.
    cast("Any", checkpoint.storage).disk = Left(7 * SIZE)
    with caplog.at_level(logging.WARNING):
        check_space(trainer(WithBase, checkpoint=checkpoint), NEW, timeline(10), SIZE)
    assert [record.levelname for record in caplog.records] == (["WARNING"] if says else [])
    assert os.listdir(tmp_path) == [], "the trial leaves nothing"


@pytest.mark.parametrize(
    ("free_bytes", "policy", "says"),
    [
        (10 * SIZE, "raise", None),
        (3 * SIZE, "raise", "warns"),
        (2 * SIZE, "raise", "refuses"),
        # A disk that cannot be written does not end this training.
        (2 * SIZE, "warn", "warns"),
    ],
)
def test_a_training_whose_checkpoints_do_not_fit_is_warned_of_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, free_bytes: int, policy: str, says: str | None
) -> None:
    made = trainer_with(tmp_path, free_bytes, on_save_error=policy)
    if says == "refuses":
        with pytest.raises(UserError, match=r"no room for the first saves: it needs 2,000,000 bytes"):
            check_space(made, NEW, timeline(5), SIZE)
        return
    check_space(made, NEW, timeline(5), SIZE)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (says == "warns")
    assert all(str(tmp_path) in warning and f"{free_bytes:,} bytes are free" in warning for warning in warnings)


def test_checkpoints_that_are_on_the_disk_need_no_further_space(tmp_path: Path) -> None:
    saved = tuple(Saved(f"step{step}", step, CheckpointKind.regular) for step in (1, 2, 3))
    start_point = StartPoint(Progress(), saved=saved, sizes={item.name: SIZE for item in saved})
    check_space(trainer_with(tmp_path, 2 * SIZE), start_point, timeline(4, present=3), SIZE)
    with pytest.raises(UserError, match="it needs 1,000,000 bytes"):
        check_space(trainer_with(tmp_path, SIZE), start_point, timeline(4, present=3), SIZE)


def test_a_state_that_is_not_dense_has_no_estimated_size(tmp_path: Path) -> None:
    """It is refused by its name when the state is tried."""
    model = nn.Linear(6, 1)
    model.register_buffer("adjacency", torch.eye(6).to_sparse())
    made = trainer(model, checkpoint=CheckpointerCallback(tmp_path))
    assert estimate_size(made, NEW) == 28


def test_a_resume_counts_with_the_size_of_the_newest_checkpoint(tmp_path: Path) -> None:
    saved = Saved("step9", 9, CheckpointKind.regular), Saved("step1", 1, CheckpointKind.regular)
    start_point = StartPoint(Progress(), saved=saved, sizes={"step9": 77, "step1": 5})
    assert estimate_size(trainer_with(tmp_path, SIZE), start_point) == 77


def test_the_estimated_size_is_a_little_less_than_that_of_the_checkpoint(tmp_path: Path) -> None:
    made = trainer(
        Wide,
        settings={"max_duration": 1},
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        checkpoint=CheckpointerCallback(tmp_path),
    )
    estimated = estimate_size(made, NEW)
    made.fit(loader(10, 4))
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "step1").iterdir())
    assert estimated == 3 * 240_000
    assert estimated < size_bytes < estimated + 20_000


class Foreign(torch.optim.SGD):
    """An optimizer of a user."""


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True, fused=True), 3),
        (torch.optim.RMSprop, 1),
        # Its step needs a closure.
        (torch.optim.LBFGS, 0),
        (lambda parameters: Foreign(parameters, momentum=0.9), 0),
    ],
    ids=["SGD", "momentum", "AdamW", "amsgrad", "RMSprop", "LBFGS", "foreign"],
)
def test_the_state_of_an_optimizer_is_counted_before_its_first_step(make: Any, states: int) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    model[1].requires_grad_(False)
    optimizer, before = make(model.parameters()), torch.get_rng_state()
    assert optimizer_bytes(optimizer) == states * 4 * 110
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
