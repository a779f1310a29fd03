"""Errors at every single operation of a save and of a removal, in the midst of a real training. For kills there see
scripts/campaign/kill_points.py."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command import Result, train
from compare import assert_same_run, assert_same_state, checkpoints

from trainer_cli.catalog.catalog import Catalog

TRAINING = (
    "model=mlp",
    "loggers=jsonl",
    "loop.max_duration=6",
    "loop.log_interval=1",
    "loop.eval_interval=null",
    "loop.eval_steps=1",
    "checkpoint.pre_train_checkpoint=false",
    "checkpoint.save_interval=null",
    "checkpoint.ephemeral_save_interval=2",
    "checkpoint.save_async=false",
    "run_dir=run",
)
"""Saves steps 2 and 4 for safety, and step 6 at the end."""
MODELS = {
    "all trained": ("model.hidden=[4]",),
    "linked": ("model.hidden=[512,512]", "model.dropout=0", "freeze=[layers.1.*,layers.4.*]"),
}
"""Of the second, later checkpoints link to the file of the frozen layers."""
_CHOICE = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["one of each kind", "all"]
)
"""Campaigns leave no operation out; otherwise there is one of each kind."""
_BLOCK_BYTES = 4096
"""So that the files of so small a training count as large."""
_LOOKS = 3
"""Operations of a save before its first change to the disk: is it there already, is its hidden name free?"""


class Campaign:
    """Trainings with a fault each, several at a time."""

    def __init__(self, folder: Path, model: str) -> None:
        self.model = model
        # As deep as the folders of the trainings with faults: each parent of a new directory is looked at.
        folder = folder / "reference"
        folder.mkdir()
        done = self.fit(folder, {})
        assert done.code == 0, done.err
        self.run = folder / "run"
        self.operations = [line for line in done.operations if not line.startswith("committed")]
        second, staging = (_number(done.operations, line) for line in ("committed step 6", "mkdir .tmp.step6"))
        self.second_save = range(staging - _LOOKS, second)
        self.removal = range(second, len(self.operations) + 1)
        links = [number for number in self.second_save if self.operations[number - 1].startswith("link ")]
        # With a look at the earlier file before, and two at the new one.
        self.linking = [number for link in links for number in range(link - 1, link + 3)]

    def fit(self, cwd: Path, disk: dict[str, Any]) -> Result:
        """One start of the training, on a disk with that fault, or without one.

        Operations have the same numbers in each run: deletions, which the writer thread makes even of synchronous
        saves, are waited for.
        """
        disk = {"block_bytes": _BLOCK_BYTES, "one_thread_at_a_time": True, **disk}
        return train("fit", *TRAINING, *MODELS[self.model], cwd=cwd, disk=disk)

    def choose(self, numbers: Sequence[int], *, every: bool) -> list[int]:
        """All of these operations, or the first of each kind in their order."""
        kinds = {self.operations[number - 1].split()[0]: number for number in reversed(numbers)}
        return list(numbers if every else kinds.values())

    def each(self, numbers: Iterable[int], folder: Path, check: Callable[[int, Path], None]) -> None:
        """Run a check for each operation, in a folder of its own."""

        def one(number: int) -> None:
            own = folder / str(number)
            own.mkdir()
            check(number, own)

        with ThreadPoolExecutor(2) as executor:
            list(executor.map(one, numbers))


@pytest.fixture(scope="module", params=MODELS)
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), request.param)


def _number(lines: list[str], beginning: str) -> int:
    """The operation of that line, counted from 1, or the next one where it is a message."""
    index = next(index for index, line in enumerate(lines) if line.startswith(beginning))
    return 1 + sum(not line.startswith("committed") for line in lines[:index])


def committed(done: Result) -> list[int]:
    """The steps that were said to be saved."""
    return [int(step) for step in re.findall(r"^committed step (\d+)", done.err, re.MULTILINE)]


def resumed(done: Result) -> int:
    """The step that a start went on from, or found to be the last."""
    found = re.search(r"^(?:resuming|\S+ is finished) at step (\d+)", done.err + done.out, re.MULTILINE)
    return int(found[1]) if found else 0


def sound(run: Path) -> list[str]:
    """The checkpoints whose every byte is as it was written."""
    catalog = Catalog.of(run / "checkpoints")
    return [entry.name for entry in catalog.entries() if catalog.why_damaged(entry) is None]


def test_the_faults_meet_a_whole_save_and_a_whole_removal(campaign: Campaign) -> None:
    assert checkpoints(campaign.run) == ["step6"]
    save = [campaign.operations[number - 1].split(".tmp")[0] for number in campaign.second_save]
    assert save[_LOOKS] == "mkdir "
    assert save[-2:] == ["rename ", "fsync_dir checkpoints"]
    removal = [campaign.operations[number - 1].split()[0] for number in campaign.removal]
    assert {"rename", "fsync_dir", "unlink", "rmdir"} <= set(removal)
    written = {campaign.operations[number - 1].split()[0] for number in campaign.second_save}
    assert {"open_new", "bypass_cache", "write", "truncate", "fsync"} <= written
    kinds = [campaign.operations[number - 1].split()[0] for number in campaign.linking]
    assert kinds == (["stat", "link", "stat", "stat"] if campaign.model == "linked" else [])


@_CHOICE
def test_a_save_that_fails_leaves_the_older_ones_and_can_be_made_again(
    campaign: Campaign, tmp_path: Path, every: bool
) -> None:
    def check(number: int, own: Path) -> None:
        # At every other operation the disk fails once; at the rest it is full from then on.
        full = number % 2 == 0 and number not in campaign.linking
        error = errno.ENOSPC if full else errno.EIO
        failed = campaign.fit(own, {"at": number, "fault": "error", "number": error, "persistent": full})
        if number in campaign.linking:
            # The file is written instead.
            assert failed.code == 0, failed.err
            assert committed(failed) == [2, 4, 6]
            assert sound(own / "run") == ["step6"]
            assert_same_run(own / "run", campaign.run)
            return
        assert failed.code == 1, failed.err
        assert "Traceback" not in failed.err
        renamed = number == campaign.second_save[-1]
        what = (
            "was written, but may not survive a power cut: its directory could not be fsynced"
            if renamed
            else "could not"
        )
        assert f"error: the checkpoint {what}" in failed.err
        assert os.strerror(error) in failed.err
        assert ("are free" in failed.err) is (full and not renamed)
        assert ("step6" in sound(own / "run")) is renamed
        assert "Older checkpoints are intact." in failed.err
        assert committed(failed) == [2, 4]
        assert "step4" in sound(own / "run")
        again = campaign.fit(own, {})
        assert again.code == 0, again.err
        assert resumed(again) >= 4
        assert_same_run(own / "run", campaign.run)

    # The last operation makes the save sure after it can be seen.
    numbers = {*campaign.choose(campaign.second_save[::-1], every=every), *campaign.linking}
    campaign.each(sorted(numbers), tmp_path, check)


@_CHOICE
def test_a_removal_that_fails_stops_no_training(campaign: Campaign, tmp_path: Path, every: bool) -> None:
    def check(number: int, own: Path) -> None:
        done = campaign.fit(own, {"at": number, "fault": "error"})
        assert done.code == 0, done.err
        assert committed(done) == [2, 4, 6]
        assert "step6" in sound(own / "run")
        assert_same_state(own / "run", campaign.run)

    campaign.each(campaign.choose(campaign.removal, every=every), tmp_path, check)
