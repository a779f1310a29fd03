"""Runs whose checkpoints older commits wrote, in tests/checkpoint/old; `python old_runs.py NAME` writes a set anew.

Each run has been stopped at step 4 of 8. An archive holds only what a resume needs and no name of the machine.
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

import trainer_cli

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests/checkpoint/old"
FITS = Path(__file__).with_name("fits.py")

ALONE = (
    "experiment=digits_mlp", "model.hidden=[4]", "model.dropout=0.2", "data.augment=true", "data.batch_size=8",
    "callbacks=[default,ema]", "callbacks.ema.decay=0.9", "loop.max_duration=8", "loop.eval_interval=4",
    "loop.log_interval=1", "checkpoint.save_interval=4", "checkpoint.pre_train_checkpoint=false",
    "scheduler.warmup=2", "loggers.tensorboard=null", "logging.console=off",
)  # fmt: skip
TWO_RANKS = (*ALONE, "model.dropout=0", "data.batch_size=4", "data.global_batch_size=8")
SHARDED = (*TWO_RANKS, "parallel=fsdp", "parallel.wrap_min_parameters=100")
STOP = "loop.hard_stop=4"
TEXT = (
    "experiment=char_gpt", "data.path=text.txt", "model.layers=1", "model.heads=1", "model.width=8", "data.context=8",
    "data.batch_size=4", "+callbacks.samples={_target_: trainer_cli.TextSamples, prompts: [\"0123\"], every: 4}",
    "callbacks=[default,norms,learning_rate_monitor,swa]", "loop.max_duration=8", "loop.eval_interval=4",
    "loop.log_interval=1", "loop.eval_steps=2", "checkpoint.save_interval=4", "checkpoint.pre_train_checkpoint=false",
    "loggers.tensorboard=null", "logging.console=off",
)  # fmt: skip
SPARSE = (
    *ALONE, "callbacks=[default,ema,check_finite]",
    "+callbacks.rigl={_target_: trainer_cli.RigL, sparsity: 0.5, parameters: [layers.*weight], every: 2, stop: 8}",
)  # fmt: skip

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

COMPONENTS: Mapping[str, tuple[str, ...]] = {
    name: overrides
    for name, needed, overrides in (("text", "GPT", TEXT), ("sparse", "RigL", SPARSE))
    if needed in trainer_cli.__all__
}
"""Runs of the components of add-ons, whose classes have moved since; not those of an add-on that was deleted."""
SETS = {"runs": [*ONE_PROCESS, *TWO_PROCESSES], "components": list(COMPONENTS)}
"""Archive -> the runs in it."""
TEXT_FILE = "".join(f"{number} squared is {number**2}.\n" for number in range(100))

_LEFT_OUT = (".lock", "provenance.json", "train.log", "report.html")
"""Files with paths of the machine; a resume reads none of them."""


def fit_alone(name: str, *overrides: str) -> None:
    """Train in this process, in the run directory `name`."""
    from trainer_cli.commands.command_line import main

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
    """Put every old run into a folder, with the text that one of them reads."""
    for name in SETS:
        with tarfile.open(OLD / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    (folder / "text.txt").write_text(TEXT_FILE)


def _pack(folder: Path, name: str) -> None:
    with tarfile.open(OLD / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.name in _LEFT_OUT:
                continue
            content = path.read_bytes()
            if path.name == "environment.json":
                content = json.dumps({**json.loads(content), "host": "writer", "project_root": "/project"}).encode()
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write(name: str) -> None:
    """Train every run of a set up to its stop with the code that is imported, and replace the archive."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        text = Path("text.txt")
        text.write_text(TEXT_FILE)
        for run, overrides in {**ONE_PROCESS, **COMPONENTS}.items():
            if run in SETS[name]:
                fit_alone(run, *overrides, STOP)
        on_two_ranks = {run: (*overrides, STOP) for run, overrides in TWO_PROCESSES.items() if run in SETS[name]}
        if on_two_ranks:
            fit_on_two_ranks(on_two_ranks)
        text.unlink()
        _pack(Path(folder), name)
        os.chdir(ROOT)


if __name__ == "__main__":
    write(sys.argv[1])
