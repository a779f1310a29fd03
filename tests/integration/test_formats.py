"""Each `checkpoint.format` through the real command: a resume is bit-identical, and checkpoints are evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import SMALL, records
from forks import Forks

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer

pytestmark = pytest.mark.slow


def state(run: Path) -> dict[str, Any]:
    found = make_sync_checkpointer().read(run / "checkpoints/step20")
    del found["progress"]["seconds"], found["progress"]["last_seconds"]
    return {"text": json.dumps(found, default=lambda value: value.tolist(), sort_keys=True)}


@pytest.fixture(scope="module")
def straight(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert forks.fit(folder, *SMALL, "name=straight").code == 0
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
    forks: Forks, tmp_path: Path, straight: Path, format: str, more: tuple[str, ...], file: str
) -> None:
    own = (*SMALL, "name=own", f"checkpoint.format={format}", *more)
    assert forks.fit(tmp_path, *own, "loop.hard_stop=10").code == 0
    assert (tmp_path / "runs/own/checkpoints/step10" / file).is_file()
    result = forks.fit(tmp_path, *own)
    assert result.code == 0, result.err
    assert "resuming at step 10 from step10" in result.err
    assert state(tmp_path / "runs/own") == state(straight)
    assert forks.run(tmp_path, "ckpt", "verify", "runs/own").code == 0
    assert "step20" in forks.run(tmp_path, "ckpt", "ls", "runs/own").out
    assert forks.run(tmp_path, "validate", "ckpt=runs/own/checkpoints/step*").code == 0
    assert len(records(tmp_path / "runs/own/validation/validation.jsonl")) == 3
    assert forks.run(tmp_path, "ckpt", "export", "runs/own", "--format", "torch").code == 0


def test_a_compression_without_an_archive_is_refused(forks: Forks, tmp_path: Path) -> None:
    result = forks.fit(tmp_path, *SMALL, "checkpoint.compression=gz")
    assert result.code == 2
    assert "checkpoint.compression is gz, but checkpoint.format is tensors" in result.err
    assert "Set checkpoint.format=archive, or leave compression out." in result.err
