"""Each `checkpoint.format` through the real command: a resume is bit-identical, and checkpoints are evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, records, train

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer

pytestmark = pytest.mark.slow


def state(run: Path) -> dict[str, Any]:
    found = make_sync_checkpointer().read(run / "checkpoints/step20")
    # Of a log: its records have times.
    del found["progress"]["seconds"], found["progress"]["last_seconds"], found["log_marks"]
    return {"text": json.dumps(found, default=lambda value: value.tolist(), sort_keys=True)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert train("fit", *SMALL, "name=straight", cwd=folder).code == 0
    return folder / "runs/straight"


@pytest.mark.parametrize(
    ("format", "more", "file"),
    [
        ("torch_file", (), "rank0.pt"),
        ("huggingface", (), "model.safetensors"),
        ("archive", (), "rank0.tar"),
        ("archive", ("checkpoint.compression=gz",), "rank0.tar.gz"),
    ],
)
def test_a_resume_is_bit_identical(
    tmp_path: Path, straight: Path, format: str, more: tuple[str, ...], file: str
) -> None:
    own = (*SMALL, "name=own", f"checkpoint.format={format}", *more)
    assert train("fit", *own, "loop.hard_stop=10", cwd=tmp_path).code == 0
    assert (tmp_path / "runs/own/checkpoints/step10" / file).is_file()
    result = train("fit", *own, cwd=tmp_path)
    assert result.code == 0, result.err
    assert "resuming at step 10 from step10" in result.err
    assert state(tmp_path / "runs/own") == state(straight)
    assert train("ckpt", "verify", "runs/own", cwd=tmp_path).code == 0
    assert "step20" in train("ckpt", "ls", "runs/own", cwd=tmp_path).out
    assert train("validate", "ckpt=runs/own/checkpoints/step*", cwd=tmp_path).code == 0
    assert len(records(tmp_path / "runs/own/validation/validation.jsonl")) == 3
    assert train("ckpt", "export", "runs/own", "--format", "torch", cwd=tmp_path).code == 0


def test_a_compression_without_an_archive_is_refused(tmp_path: Path) -> None:
    result = train("fit", *SMALL, "checkpoint.compression=gz", cwd=tmp_path)
    assert result.code == 2
    assert "checkpoint.compression is gz, but checkpoint.format is tensors" in result.err
    assert "Set checkpoint.format=archive, or leave compression out." in result.err
