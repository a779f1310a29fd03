"""Run trials of one contender: `python -m campaign.peers.worker CONTENDER FOLDER`, with a line of JSON for each trial.

It runs in the environment in which the contenders are installed, and in a mount namespace of its own if it may mount
file systems. A line names a fault and the number of the trial; the answer is a line with verdict and detail.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from ext4 import shut_down

from campaign.peers.peer_savers import CONTENDERS, Contender
from campaign.peers.task import EVERY, STEPS
from campaign.peers.training import finish, import_as, training
from campaign.verdict import Outcome, Verdict

HALF = STEPS // 2
IMAGE_BYTES = 1 << 26


class Worker:
    """The trials of a contender, in a folder of this process alone."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender, self.folder = contender, folder
        import_as(contender, folder / "imports")
        began = time.monotonic()
        undisturbed = finish(contender, folder / "undisturbed")
        self.took_s = time.monotonic() - began
        if undisturbed.digest is None:
            raise RuntimeError(f"{contender.name} does not train: {undisturbed.output.decode()}")
        self.digest = undisturbed.digest
        self.size_bytes = size_of(folder / "undisturbed")
        with training(contender, folder / "half", HALF) as half:
            half.end()

    def run(self, fault: str, number: int) -> Outcome:
        """One trial. The random choices depend on the number alone."""
        random_ = random.Random(f"{fault} {number}")
        with temporary(self.folder / "trial") as folder:
            return FAULTS[fault](self, folder, number, random_)

    def go_on(self, folder: Path, announced: list[int]) -> Outcome:
        """Start the training again after a fault, and judge it.

        Args:
            announced: the steps whose saves must still be there.
        """
        after = finish(self.contender, folder)
        count, last = len(announced), max(announced, default=0)
        if after.hung:
            return Outcome(Verdict.hard_fail, "the start after the fault hangs", count)
        if after.digest is None:
            return Outcome(Verdict.hard_fail, f"the start after the fault fails: {after.last_words}", count)
        if after.resumed < last:
            return Outcome(Verdict.lost, f"step {last} was announced, step {after.resumed} was resumed", count)
        if after.digest != self.digest:
            return Outcome(Verdict.diverged, "the weights at the end are not those of the undisturbed run", count)
        return Outcome(Verdict.passed, announced=count)


def stop_and_go_on(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """No fault: the process ends after a save, and the same call goes on."""
    shutil.copytree(worker.folder / "half", folder / "run")
    return worker.go_on(folder / "run", [HALF])


def kill(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """kill -9 at a random moment of the training; in every other trial soon after a save was announced."""
    step = EVERY * random_.randint(1, STEPS // EVERY - 2) if number % 2 else 0
    delay_s = random_.random() * worker.took_s / (STEPS // EVERY if step else 1)
    while True:
        with training(worker.contender, folder / "run") as victim:
            victim.read_until_announced(step)
            victim.read_for(delay_s)
            ended = victim.digest is not None
        if not ended:
            return worker.go_on(folder / "run", victim.announced)
        # It was faster than the undisturbed one.
        shutil.rmtree(folder / "run")
        delay_s *= 0.7


def cut_power(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """A power cut just after an announcement; in every other trial some other file was fsynced in between."""
    with open(folder / "image", "wb") as image:
        image.truncate(IMAGE_BYTES)
    _call("mkfs.ext4", "-qF", str(folder / "image"))
    disk = folder / "disk"
    disk.mkdir()
    with mounted(disk, "-o", "loop", str(folder / "image")):
        with training(worker.contender, disk / "run") as victim:
            victim.read_until_announced(EVERY * random_.randint(1, STEPS // EVERY - 2))
            if number % 2:
                with open(disk / "other", "w") as file:
                    file.write("another program's")
                    file.flush()
                    os.fsync(file.fileno())
            shut_down(disk)
        announced = victim.announced
    with mounted(disk, "-o", "loop", str(folder / "image")):
        return worker.go_on(disk / "run", announced)


def flip_bit(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """One bit of the newest checkpoint is flipped."""

    def flip(content: bytearray) -> None:
        content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)

    return _damage(worker, folder, random_, flip)


def truncate(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """One file of the newest checkpoint is cut short."""

    def cut(content: bytearray) -> None:
        del content[random_.randrange(len(content)) :]

    return _damage(worker, folder, random_, cut)


def fill_disk(worker: Worker, folder: Path, number: int, random_: random.Random) -> Outcome:
    """The disk is full at a random moment; the training ends, space is made, and it is started again."""
    share = random_.uniform(0.25, 0.9)
    size = f"size={int(worker.size_bytes * share)}"
    with mounted(folder, "-t", "tmpfs", "-o", size, "none"):
        before = finish(worker.contender, folder / "run")
        if before.hung:
            return Outcome(Verdict.hard_fail, "the training hangs on a full disk", len(before.announced))
        _call("mount", "-o", f"remount,size={3 * worker.size_bytes + (1 << 24)}", str(folder))
        return worker.go_on(folder / "run", before.announced)


Trial = Callable[[Worker, Path, int, random.Random], Outcome]
FAULTS: dict[str, Trial] = {
    "stop": stop_and_go_on, "kills": kill, "cuts": cut_power, "flips": flip_bit, "truncations": truncate,
    "full": fill_disk,
}  # fmt: skip


def _damage(worker: Worker, folder: Path, random_: random.Random, change: Callable[[bytearray], None]) -> Outcome:
    """Change a file of the newest checkpoint, chosen by size; the one before it must be resumed, or the same weights
    come out."""
    shutil.copytree(worker.folder / "half", folder / "run", symlinks=True)
    newest = worker.contender.newest(folder / "run")
    assert newest is not None
    files = [path for path in (newest.rglob("*") if newest.is_dir() else [newest]) if path.is_file()]
    file = random_.choices(sorted(files), [path.stat().st_size for path in sorted(files)])[0]
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    outcome = worker.go_on(folder / "run", [HALF - EVERY])
    detail = outcome.detail and f"{file.name}: {outcome.detail}"
    return Outcome(outcome.verdict, detail)


@contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """A new folder, deleted at the end."""
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    """A file system on a folder."""
    _call("mount", *arguments, str(folder))
    try:
        yield
    finally:
        _call("umount", str(folder))


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def main(name: str, folder: Path, answers: TextIO) -> None:
    """Answer lines until there are no more."""
    contender = CONTENDERS[name]()
    worker = Worker(contender, folder)
    versions = {package: version(package) for package in contender.packages}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        fault, number = json.loads(line)
        try:
            outcome = worker.run(fault, number)
        except Exception as error:
            outcome = Outcome(Verdict.hard_fail, f"{type(error).__name__}: {error}")
        print(json.dumps([outcome.verdict, outcome.detail, outcome.announced]), file=answers, flush=True)


if __name__ == "__main__":
    # Children write to the standard output, too.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        main(sys.argv[1], Path(sys.argv[2]), answers)
