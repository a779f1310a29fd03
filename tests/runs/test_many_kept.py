"""A run that resumes beside checkpoints that it keeps: what it asks of the disk for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.checkpoint.storage import local
from trainer_cli.commands.main import main
from trainer_cli.testing.faults import FaultyDisk


def test_a_resume_looks_at_old_checkpoints_as_a_whole_only_for_what_it_writes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = [
        "fit", "experiment=digits_mlp", "name=kept", "loop.limit_train_batches=1", "loop.eval_interval=null",
        "loggers.tensorboard=null", "logging.console=off", "checkpoint.save_interval=1", "checkpoint.remove=never",
    ]  # fmt: skip
    assert main([*fit, "loop.max_duration=6"]) == 0
    (tmp_path / "runs/kept/checkpoints/step2/pinned").touch()
    disk = FaultyDisk()
    monkeypatch.setattr(local, "Disk", lambda: disk)
    assert main([*fit, "loop.max_duration=7"]) == 0
    # For the summary and for the report.
    assert disk.operations.count("listdir step3") == 2
