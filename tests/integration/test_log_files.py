"""A log file that can no longer be written ends in one message: the training's where metrics would be lost."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import pytest
from command import make_project, names, records, train

from trainer_cli.errors import DISK_CURES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's devices that refuse every write")

BREAKS = '''
"""Puts $DEVICE in place of $FILE at the end of the sixth step, where the command has it open and under its name."""

import os
from pathlib import Path

from trainer_cli import Callback


class Breaks(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.progress.step == 6 and "FILE" in os.environ:
            for entry in os.scandir("/proc/self/fd"):
                if os.path.exists(entry) and os.environ["FILE"] in os.readlink(entry):
                    os.dup2(os.open(os.environ["DEVICE"], os.O_WRONLY), int(entry.name))
            # tensorboard opens its file for each write.
            for path in Path("runs/mine/tensorboard").glob(f"{os.environ['FILE']}*"):
                path.unlink()
                path.symlink_to(os.environ["DEVICE"])
'''
FIT = ("experiment=mine", "+callbacks.breaks={_target_: mine.breaks.Breaks}", "checkpoint.save_async=false")
NUMBERS = {"/proc/self/mem": errno.EIO, "/dev/full": errno.ENOSPC}
DEVICES = {"/proc/self/mem": "Input/output error", "/dev/full": "No space left on device"}


def broken(project: Path, file: str, device: str) -> tuple[int, list[str]]:
    """The exit code of a fit whose file breaks after step 6, and the errors on stderr, each with its help."""
    done = train("fit", *FIT, cwd=project, FILE=file, DEVICE=device)
    assert "Traceback" not in done.err
    assert "--- Logging error ---" not in done.err
    return done.code, re.findall(r"^error: .*\n(?:  --> .*\n)?(?:help: .*\n)?", done.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "device"),
    [("metrics.jsonl", "/proc/self/mem"), ("metrics.jsonl", "/dev/full"), ("events.out", "/dev/full")],
)
def test_metrics_that_cannot_be_written_end_the_training_in_one_message(tmp_path: Path, file: str, device: str) -> None:
    why, is_full = DEVICES[device], device == "/dev/full"
    project = make_project(tmp_path, **{"mine/breaks.py": BREAKS})
    code, (error,) = broken(project, file, device)
    run = project / "runs/mine"
    (path,) = run.rglob(f"{file}*")
    assert (code, error) == (
        75 if is_full else 1, f"error: {why}\n  --> {path.relative_to(project)}\n"
        f"help: What was committed before is intact. {DISK_CURES[NUMBERS[device]]}"
        f"{' Then run the same command again to resume at step 0.' if is_full else ''}\n",
    )  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("stopped" if is_full else "failed", 8)
    assert why in summary["reason"]
    assert names(run / "checkpoints") == ["step0"]
    assert train("fit", *FIT, cwd=project).code == 0, "the same command goes on where the disk is well"
    assert [record["step"] for record in records(run / "metrics.jsonl")] == list(range(4, 41, 4))


@pytest.mark.parametrize(("device", "why"), DEVICES.items(), ids=["EIO", "ENOSPC"])
def test_a_log_that_cannot_be_written_is_reported_once_and_the_training_goes_on(
    tmp_path: Path, device: str, why: str
) -> None:
    project = make_project(tmp_path, **{"mine/breaks.py": BREAKS})
    code, messages = broken(project, "train.log", device)
    assert (code, messages) == (
        0, [f"error: runs/mine/train.log could not be written: {why}. The run continues without it.\n"],
    )  # fmt: skip
    assert names(project / "runs/mine/checkpoints") == ["step0", "step16", "step32", "step40"]


def test_a_log_that_cannot_be_opened_is_reported_once_and_the_training_goes_on(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    assert train("fit", "experiment=mine", "loop.max_duration=8st", cwd=project).code == 0
    (project / "runs/mine/train.log").unlink()
    (project / "runs/mine/train.log").mkdir()
    done = train("fit", "experiment=mine", cwd=project)
    assert done.code == 0, done.err
    assert done.err.count("train.log could not be written: Is a directory. The run continues without it.") == 1
