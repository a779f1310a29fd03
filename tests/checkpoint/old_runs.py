"""Runs whose checkpoints an older commit wrote, packed in old/runs.tar.xz; `python old_runs.py` writes the set anew.

Each run has been stopped at step 4 of 8. The archive holds only what a resume needs and no name of the machine.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "parallel"))
ARCHIVE = HERE / "old/runs.tar.xz"
FITS = HERE.parent / "parallel/fits.py"

ALONE = (
    "experiment=digits_mlp", "model.hidden=[4]", "model.dropout=0.2", "data.augment=true", "data.batch_size=8",
    "callbacks=[default,ema]", "callbacks.ema.decay=0.9", "loop.max_duration=8", "loop.eval_interval=4",
    "loop.log_interval=1", "checkpoint.save_interval=4", "checkpoint.pre_train_checkpoint=false",
    "scheduler.warmup=2", "loggers.tensorboard=null", "logging.console=off",
)  # fmt: skip
TWO_RANKS = (*ALONE, "model.dropout=0", "data.batch_size=4", "data.global_batch_size=8")
SHARDED = (*TWO_RANKS, "parallel=fsdp", "parallel.wrap_min_parameters=100")
STOP = "loop.hard_stop=4"

ONE_PROCESS: Mapping[str, tuple[str, ...]] = {
    "tensors": ALONE,
    "tensors_sha256": (*ALONE, "checkpoint.digest=sha256"),
    "torch_file": (*ALONE, "checkpoint.format=torch_file"),
    "huggingface": (*ALONE, "checkpoint.format=huggingface"),
    "archive": (*ALONE, "checkpoint.format=archive"),
    **{
        f"archive_{compression}": (*ALONE, "checkpoint.format=archive", f"checkpoint.compression={compression}")
        for compression in ("gz", "bz2", "xz", "lzma")
    },
}
TWO_PROCESSES: Mapping[str, tuple[str, ...]] = {
    "ddp": (*TWO_RANKS, "parallel=ddp"),
    "ddp_archive": (*TWO_RANKS, "parallel=ddp", "checkpoint.format=archive"),
    "fsdp": SHARDED,
    "fsdp_archive_gz": (*SHARDED, "checkpoint.format=archive", "checkpoint.compression=gz"),
}
"""The overrides of each run, by its folder."""

_LEFT_OUT = (".lock", "provenance.json", "train.log")
"""Files with paths of the machine; a resume reads none of them."""


def fit_alone(name: str, *overrides: str) -> None:
    """Train in this process, in the run directory `name`."""
    from trainer_cli.commands.main import main

    assert main(["fit", *overrides, f"run_dir={name}"]) == 0


def fit_on_two_ranks(jobs: Mapping[str, tuple[str, ...]]) -> None:
    """Train one after the other on two ranks, each in the run directory of its name."""
    from ranks import on_ranks

    listed = [[*overrides, f"run_dir={name}"] for name, overrides in jobs.items()]
    ends = on_ranks(2, FITS, json.dumps(listed))
    assert [code for code, _ in ends] == [0, 0], ends
    for _, output in ends:
        assert json.loads(output.rpartition("ENDS")[2]) == ["0"] * len(jobs), output


def unpack(folder: Path) -> None:
    """Put every old run into a folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def _pack(folder: Path) -> None:
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.name in _LEFT_OUT:
                continue
            content = path.read_bytes()
            if path.name == "environment.json":
                content = json.dumps({**json.loads(content), "host": "writer", "project_root": "/project"}).encode()
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write() -> None:
    """Train every run up to its stop with the code of this checkout, and replace the archive."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, overrides in ONE_PROCESS.items():
            fit_alone(name, *overrides, STOP)
        fit_on_two_ranks({name: (*overrides, STOP) for name, overrides in TWO_PROCESSES.items()})
        _pack(Path(folder))
        os.chdir(HERE)


if __name__ == "__main__":
    write()
