"""A run of some hundred steps that was never trained: its files alone."""

from __future__ import annotations

import json
from pathlib import Path

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.steps.progress import Progress


def save_a_long_run(project: Path) -> None:
    """The run `digits` of 450 steps, with a checkpoint at step 400 and the position of its data there."""
    run = RunDir(project / "runs/digits")
    run.create("run_dir: runs/digits\ndata: {batch_size: 32}\n", [], {"run_id": "digits"}).release()
    run.metrics_file.write_text(json.dumps({"step": 450, "epoch": 10.0, "time": 0.0}) + "\n")
    progress = Progress(400, epoch=8, batch=40, epoch_samples=40 * 32)
    state = {"order": "feistel-1", "seed": 0, "length": 1438, "sample_offset": progress.epoch_samples}
    make_sync_checkpointer().save(
        {"data": state, "progress": progress.state_dict()},
        run.checkpoints_folder / "step400",
        metadata=CheckpointMetadata(run_id="digits", attempt=1, step=400, progress=progress.state_dict()),
    )
