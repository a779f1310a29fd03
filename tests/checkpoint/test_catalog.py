"""What is there, valid or not, is asked of the disk."""

from __future__ import annotations

import errno
import os

import pytest
from states import small_state

from trainer_cli.checkpoint.catalog import GONE, REMOVING, Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.naming import removed_marker
from trainer_cli.checkpoint.policy import Kind, Saved
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.testing.faults import FaultyDisk


@pytest.fixture
def root(tmp_path):
    checkpointer = SyncCheckpointer()
    for step, run, finite in ((10, "a", True), (9, "a", True), (100, "b", True), (200, "a", False)):
        facts = CheckpointMetadata(
            run_id=run, step=step, finite=finite, kind=Kind.ephemeral if step == 9 else Kind.permanent
        )
        checkpointer.save(small_state(step), tmp_path / f"step{step}", metadata=facts)
    return tmp_path


def problems(root):
    return {entry.name: entry.problem for entry in Catalog(LocalStorage(root)).entries()}


def test_entries_come_in_the_order_of_their_steps(root):
    entries = Catalog(LocalStorage(root)).entries()
    assert [entry.step for entry in entries] == [9, 10, 100, 200]
    assert all(entry.valid for entry in entries)


def test_the_newest_of_a_run_is_not_another_runs_and_is_finite(root):
    catalog = Catalog(LocalStorage(root))
    assert catalog.newest_valid().name == "step100"
    assert catalog.newest_valid("a").name == "step10"
    assert catalog.newest_valid("c") is None


def test_the_facts_for_the_policy_come_from_the_manifest(root):
    (root / "step10" / "pinned").touch()
    saved = [entry.saved() for entry in Catalog(LocalStorage(root)).entries()]
    assert saved[0] == Saved("step9", 9, Kind.ephemeral)
    assert saved[1] == Saved("step10", 10, Kind.permanent, pinned=True)
    assert saved[3] == Saved("step200", 200, Kind.permanent, finite=False)


def test_what_is_partial_or_damaged_is_listed_with_its_problem_and_never_newest(root):
    (root / "step10" / "manifest.json").unlink()
    os.truncate(root / "step100" / "rank0.safetensors", 5)
    (root / "step9" / "rank0.json").unlink()
    (root / "step300").mkdir()
    (root / "step0").mkdir()
    (root / "step0" / "manifest.json").write_text("{")
    found = problems(root)
    assert "partial" in found["step10"]
    assert "5 bytes instead of" in found["step100"]
    assert "rank0.json is missing" in found["step9"]
    assert "partial" in found["step300"]
    assert "not JSON" in found["step0"]
    assert Catalog(LocalStorage(root)).newest_valid() is None


def test_a_renamed_checkpoint_is_not_taken_for_another_step(root):
    (root / "step10").rename(root / "step500")
    assert problems(root)["step500"] == "its manifest is of step 10"


def test_files_that_the_manifest_does_not_list_are_ignored(root):
    (root / "step10" / "notes.txt").write_text("mine")
    (root / "step10" / "folder").mkdir()
    (root / "latest").mkdir()
    assert problems(root) == dict.fromkeys(["step9", "step10", "step100", "step200"])


def test_no_fault_while_listing_makes_a_checkpoint_vanish_unseen(root):
    counting = FaultyDisk()
    assert len(Catalog(LocalStorage(root, disk=counting)).entries()) == 4
    for at in range(1, len(counting.operations) + 1):
        for number in (errno.EIO, errno.EACCES):
            disk = FaultyDisk(at, number=number)
            try:
                entries = Catalog(LocalStorage(root, disk=disk)).entries()
            except OSError:
                continue
            assert len(entries) == 4
            assert sum(entry.problem is not None or entry.pinned for entry in entries) == 1, counting.operations[at - 1]


class RemovesMidway(Disk):
    """Another process removes a checkpoint before operation number `at` of this one."""

    def __init__(self, root, name, at, keep=False):
        self.left, self.remove = at, lambda: half_remove(root / name) if keep else LocalStorage(root).remove(name)

    def stat(self, path, *, follow=True):
        self.count()
        return super().stat(path, follow=follow)

    def open(self, path):
        self.count()
        return super().open(path)

    def listdir(self, path):
        self.count()
        return super().listdir(path)

    def count(self):
        self.left -= 1
        if self.left == 0:
            self.remove()


def half_remove(path):
    (path / "manifest.json").rename(path / removed_marker("other"))


@pytest.mark.parametrize("at", range(1, 40))
def test_one_that_is_removed_while_it_is_looked_at_is_valid_or_not_there(root, at):
    entries = Catalog(LocalStorage(root, disk=RemovesMidway(root, "step10", at))).entries()
    assert {entry.name for entry in entries} | {"step10"} == {"step9", "step10", "step100", "step200"}
    assert [entry.problem for entry in entries if not entry.valid] == []


@pytest.mark.parametrize("at", range(1, 40))
def test_one_whose_removal_has_begun_is_neither_damaged_nor_said_to_have_been_partial(root, at):
    entries = Catalog(LocalStorage(root, disk=RemovesMidway(root, "step10", at, keep=True))).entries()
    assert len(entries) == 4
    assert all(
        entry.valid or (entry.name, entry.problem, entry.removed) == ("step10", REMOVING, True) for entry in entries
    )


def test_one_that_is_not_there_is_removed_and_not_valid(root):
    entry = Catalog(LocalStorage(root)).entry("step11")
    assert (entry.valid, entry.removed, entry.problem) == (False, True, GONE)
