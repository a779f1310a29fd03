"""A save beside many checkpoints: what it asks of the disk, and what it does not take from memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from faulty_disk import FaultyDisk
from states import small_state
from tiny import loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.retention import Retention
from trainer_cli.catalog import catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.manifest import Manifest
from trainer_cli.policy.rules import BestRule, CheckpointKind, RetentionRules
from trainer_cli.schema.checkpoint_config import Removal
from trainer_cli.steps.intervals import Duration, Interval
from trainer_cli.storage.local import LocalStorage
from trainer_cli.trainer.hooks import Callback


class CallsBefore(Callback):
    """Notes how many operations the disk has done before the first step."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.disk, self.count = disk, 0

    def on_train_start(self, *args: Any) -> None:
        self.count = len(self.disk.operations)


def copy_as(path: Path, step: int, **changes: Any) -> None:
    """Another checkpoint of the same run, beside this one."""
    other = path.parent / f"step{step}"
    shutil.copytree(path, other)
    manifest = replace(Manifest.parse((path / "manifest.json").read_bytes()), name=other.name, step=step, **changes)
    (other / "manifest.json").write_bytes(manifest.to_bytes())


def calls(folder: Path, beside: int, **rules: Any) -> tuple[int, int]:
    """Operations of the disk of an attempt that resumes beside so many: before its first step, and at its six steps,
    all of which it saves."""

    def new_trainer(length: int, *callbacks: Callback, **settings: Any) -> Any:
        checkpoint = CheckpointerCallback(folder, save_async=False, **settings)
        # Before the first use: everything is counted.
        cast("Any", checkpoint.storage).disk = disk
        return trainer(callbacks=list(callbacks), settings={"max_duration": length}, checkpoint=checkpoint)

    disk = FaultyDisk()
    new_trainer(60, save_interval=None, pre_train_checkpoint=False).fit(loader(4, 4))
    for step in range(beside):
        copy_as(folder / "step60", step, finished=None)
    (folder / "notes").mkdir()
    before = CallsBefore(disk)
    new_trainer(66, before, **{"save_interval": 1, **rules}).fit(loader(4, 4))
    assert len(os.listdir(folder)) >= beside + 2
    return before.count, len(disk.operations) - before.count


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"max_checkpoints": 2, "keep_every": 1},
        {"remove": "never"},
        {"ephemeral_save_interval": 1, "save_interval": 3},
    ],
    ids=["all are kept", "all are multiples", "nothing is removed", "ephemeral ones go"],
)
def test_a_save_asks_no_more_of_the_disk_beside_more_checkpoints(memory_path: Path, rules: dict[str, Any]) -> None:
    (_, few), (_, many) = (calls(memory_path / str(beside), beside, **rules) for beside in (5, 50))
    assert few == many
    assert many < 6 * 100


def test_a_start_reads_no_manifest_that_the_process_has_read_before(memory_path: Path) -> None:
    # The callback finds its run in the folder, by a storage of its own that is not counted.
    (few, _), (many, _) = (calls(memory_path / str(beside), beside) for beside in (5, 50))
    # For each: is the manifest still that one, and was a removal interrupted?
    assert many - few == 2 * 45


def test_manifests_of_removed_checkpoints_do_not_fill_the_memory(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_MAX_REMOVED_PARSED", 5)
    catalog._parse_manifest.cache_clear()
    checkpoint = CheckpointerCallback(memory_path, save_interval=1, max_checkpoints=2, save_async=False)
    trainer(settings={"max_duration": 40}, checkpoint=checkpoint).fit(loader(4, 4))
    # Of a save the manifest may be parsed more than once, as it is amended.
    assert catalog._parse_manifest.cache_info().currsize < 20


@pytest.fixture
def retention(memory_path: Path) -> Retention:
    """Of four checkpoints, that of step 3 pinned, which were all looked at while nothing was to be removed."""
    for step in (1, 2, 3, 4):
        facts = CheckpointMetadata(run_id="r", step=step, metrics={"loss": float(step)})
        SyncCheckpointer().save(small_state(step), memory_path / f"step{step}", metadata=facts)
    (memory_path / "step3" / "pinned").touch()
    made = Retention(memory_path, LocalStorage(memory_path, run_id="r"), "r")
    made.retire(None)
    return made


def amend(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_bytes(replace(Manifest.parse(file.read_bytes()), **changes).to_bytes())


ONE, TWO = RetentionRules(max_checkpoints=1), RetentionRules(max_checkpoints=2)
BEST = RetentionRules(max_checkpoints=1, keep_best=BestRule("loss"))
HANDS: dict[str, tuple[RetentionRules, Callable[[Path], object], list[int]]] = {
    "nothing": (ONE, lambda root: None, [3, 4]),
    "one is pinned": (ONE, lambda root: (root / "step1" / "pinned").touch(), [1, 3, 4]),
    "one is unpinned": (ONE, lambda root: (root / "step3" / "pinned").unlink(), [4]),
    "one is damaged, which then stays": (ONE, lambda root: os.truncate(root / "step1/rank0.json", 1), [1, 3, 4]),
    "the newest is damaged": (ONE, lambda root: os.truncate(root / "step4/rank0.json", 1), [3, 4]),
    "one that counts is damaged": (TWO, lambda root: os.truncate(root / "step3/rank0.json", 1), [2, 3, 4]),
    "one is deleted": (ONE, lambda root: shutil.rmtree(root / "step4"), [3]),
    "the best is damaged": (BEST, lambda root: os.truncate(root / "step1/rank0.json", 1), [1, 2, 3, 4]),
    "one is another run's": (ONE, lambda root: amend(root / "step2", run_id="other"), [2, 3, 4]),
}


@pytest.mark.parametrize(("rules", "hand", "left"), HANDS.values(), ids=HANDS)
def test_what_others_did_since_the_last_save_counts_at_the_next(
    retention: Retention, rules: RetentionRules, hand: Callable[[Path], object], left: list[int]
) -> None:
    retention.rules = rules
    hand(retention.folder)
    retention.retire(None)
    assert sorted(os.listdir(retention.folder)) == [f"step{step}" for step in left]


def test_where_nothing_is_removed_a_save_looks_at_no_other_checkpoint(retention: Retention) -> None:
    disk = FaultyDisk()
    cast("Any", retention.storage).disk = disk
    retention.rules = RetentionRules(remove=Removal.never)
    retention.retire(4)
    assert not disk.operations
    retention.rules = RetentionRules()
    retention.retire(4)
    assert disk.operations


def test_one_that_became_permanent_is_not_removed_as_ephemeral(retention: Retention) -> None:
    for step in (1, 2):
        amend(retention.folder / f"step{step}", kind=CheckpointKind.ephemeral)
    retention = Retention(retention.folder, retention.storage, "r")
    retention.rules = RetentionRules(keep_every=Interval(Duration.parse("1st")))
    seen = retention.own()
    amend(retention.folder / "step2", kind=CheckpointKind.regular)
    retention.retire(None)
    assert [entry.manifest and entry.manifest.kind for entry in seen[:2]] == [CheckpointKind.ephemeral] * 2
    assert sorted(os.listdir(retention.folder)) == ["step2", "step3", "step4"]
