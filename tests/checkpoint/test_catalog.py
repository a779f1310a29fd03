"""What is there, valid or not, is asked of the disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import FaultyDisk
from small_parts import present
from states import reseal, same, small_state

from trainer_cli.catalog.catalog import GONE, REMOVING, Catalog, newest_intact, newest_of_all
from trainer_cli.catalog.history import CheckpointHistory, Life
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.errors import CheckpointError
from trainer_cli.files.json_lines import parse_rows, read_rows
from trainer_cli.layout.naming import Naming
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.policy.rules import CheckpointKind, Saved
from trainer_cli.running.start import _verify_beside
from trainer_cli.storage.base import ReadableFolder
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.hidden_names import removed_marker
from trainer_cli.storage.local import LocalStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    checkpointer = SyncCheckpointer()
    for step, run, finite in ((10, "a", True), (9, "a", True), (100, "b", True), (200, "a", False)):
        facts = CheckpointMetadata(
            run_id=run, step=step, finite=finite, kind=CheckpointKind.ephemeral if step == 9 else CheckpointKind.regular
        )
        checkpointer.save(small_state(step), tmp_path / f"step{step}", metadata=facts)
    return tmp_path


def problems(root: Path) -> dict[str, Any]:
    return {entry.name: entry.problem for entry in Catalog(LocalStorage(root)).entries()}


def test_entries_come_in_the_order_of_their_steps(root: Path) -> None:
    entries = Catalog(LocalStorage(root)).entries()
    assert [entry.step for entry in entries] == [9, 10, 100, 200]
    assert all(entry.valid for entry in entries)


def test_the_newest_of_a_run_is_not_another_runs_and_is_finite(root: Path) -> None:
    catalog = Catalog(LocalStorage(root))
    assert present(catalog.newest_valid()).name == "step100"
    assert present(catalog.newest_valid("a")).name == "step10"
    assert catalog.newest_valid("c") is None


def test_the_facts_for_the_policy_come_from_the_manifest(root: Path) -> None:
    (root / "step10" / "pinned").touch()
    saved = [entry.facts for entry in Catalog(LocalStorage(root)).entries()]
    assert saved[0] == Saved("step9", 9, CheckpointKind.ephemeral)
    assert saved[1] == Saved("step10", 10, CheckpointKind.regular, pinned=True)
    assert saved[3] == Saved("step200", 200, CheckpointKind.regular, finite=False)


def manifests_read(root: Path) -> tuple[list[str], int]:
    """The checkpoints as a new catalog remembers them, and how many manifests it read for that."""
    disk = FaultyDisk()
    names = [entry.name for entry in Catalog(LocalStorage(root, disk=disk)).remembered()]
    return names, disk.operations.count("open manifest.json")


def test_the_catalogs_of_a_process_read_a_manifest_once_until_it_changes(root: Path) -> None:
    assert manifests_read(root) == (["step9", "step10", "step100", "step200"], 4)
    assert manifests_read(root) == (["step9", "step10", "step100", "step200"], 0)
    path = root / "step9" / "manifest.json"
    path.write_bytes(replace(Manifest.parse(path.read_bytes()), step=150).to_bytes())
    shutil.rmtree(root / "step10")
    assert manifests_read(root) == (["step100", "step9", "step200"], 1)


def test_what_is_remembered_is_what_is_listed(root: Path) -> None:
    shutil.copytree(root / "step10", root / "kept")
    path = root / "step100" / "manifest.json"
    path.write_bytes(replace(Manifest.parse(path.read_bytes()), kind=CheckpointKind.replayed).to_bytes())
    (root / "step9" / "manifest.json").unlink()
    (root / "step300").write_text("a file")
    catalog = Catalog(LocalStorage(root))
    assert catalog.remembered() == catalog.entries()
    assert [(entry.name, entry.partial) for entry in catalog.entries()] == [
        ("step9", True),
        ("step10", False),
        ("step200", False),
    ]


def test_only_the_newest_are_looked_at_as_a_whole_when_the_newest_is_chosen(root: Path) -> None:
    os.truncate(root / "step100" / "rank0.safetensors", 5)
    (root / "step10" / "pinned").touch()
    disk = FaultyDisk()
    newest = present(Catalog(LocalStorage(root, disk=disk)).newest_valid())
    assert (newest.name, newest.pinned) == ("step10", True)
    assert [call for call in disk.operations if call.startswith("listdir step")] == [
        "listdir step200",
        "listdir step100",
        "listdir step10",
    ]


def test_what_is_partial_or_damaged_is_listed_with_its_problem_and_never_newest(root: Path) -> None:
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


COPIES = ["best_so_far", "step10 copy", "step10_backup", "step10.bak", "my-paper", "step500", "step9999", "step10-ema"]


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_what_a_user_copied_or_renamed_is_no_checkpoint_of_a_run_but_can_be_named(
    root: Path, name: str, renamed: bool
) -> None:
    if renamed:
        (root / "step10").rename(root / name)
    else:
        shutil.copytree(root / "step10", root / name)
    catalog = Catalog(LocalStorage(root))
    assert [entry.name for entry in catalog.entries()] == ["step9", *(["step10"] * (not renamed)), "step100", "step200"]
    assert present(catalog.newest_valid("a")).name == ("step9" if renamed else "step10")
    copy = catalog.entry(name)
    assert (copy.valid, copy.step, copy.is_copy) == (True, 10, True)
    assert same(dict(SyncCheckpointer().load(root / name)), small_state(10))


@pytest.mark.parametrize("pattern", ["step{step}", "step{step:06}", "ep{epoch}-ba{batch}", "{run_name}.{samples}-x"])
@pytest.mark.parametrize("suffix", [None, "best"])
def test_a_checkpoint_of_any_pattern_is_known_by_its_own_name(tmp_path: Path, pattern: str, suffix: str | None) -> None:
    naming = Naming(pattern, suffix)
    for step in (1, 2):
        counts = {"step": step, "epoch": 0, "batch": step, "samples": 4 * step, "run_name": "mine"}
        name = naming.name(counts)
        path = tmp_path / "here" / name
        SyncCheckpointer().save({"a": step}, path, metadata=CheckpointMetadata(run_id="r", step=step))
        shutil.copytree(path, f"{path}-kept")
    shutil.copytree(tmp_path / "here", tmp_path / "moved")
    for folder in (tmp_path / "here", tmp_path / "moved"):
        assert [entry.step for entry in Catalog(LocalStorage(folder)).valid("r")] == [1, 2]


def test_an_old_manifest_without_a_name_is_judged_by_the_step_in_the_name_of_its_folder(root: Path) -> None:
    for name in ("step10", "step100"):
        path = root / name / "manifest.json"
        path.write_bytes(replace(Manifest.parse(path.read_bytes()), name=None).to_bytes())
    (root / "step10").rename(root / "step500")
    (root / "step100").rename(root / "mine")
    assert problems(root)["step500"] == "its manifest is of step 10"
    assert problems(root)["mine"] is None


def test_a_copy_in_the_way_of_a_save_is_set_aside(root: Path) -> None:
    (root / "step10").rename(root / "step11")
    metadata = CheckpointMetadata(run_id="a", step=11)
    SyncCheckpointer().save(small_state(11), root / "step11", metadata=metadata, overwrite=False)
    assert same(dict(SyncCheckpointer().load(root / "step11")), small_state(11))
    assert [name for name in os.listdir(root) if name.startswith(".aside.step11.")]


def test_a_format_that_does_not_exist_is_a_problem_of_the_checkpoint(root: Path) -> None:
    path = root / "step10" / "manifest.json"
    path.write_bytes(replace(Manifest.parse(path.read_bytes()), format="zarr").to_bytes())
    assert problems(root)["step10"] == "its format 'zarr' is unknown"


def test_files_that_the_manifest_does_not_list_are_ignored(root: Path) -> None:
    (root / "step10" / "notes.txt").write_text("mine")
    (root / "step10" / "folder").mkdir()
    (root / "latest").mkdir()
    assert problems(root) == dict.fromkeys(["step9", "step10", "step100", "step200"])


def test_no_fault_while_listing_makes_a_checkpoint_vanish_unseen(root: Path) -> None:
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

    def __init__(self, root: Path, name: str, at: int, keep: bool = False) -> None:
        self.left = at
        self.remove = partial(half_remove, root / name) if keep else partial(LocalStorage(root).remove, name)

    def stat(self, path: str | Path, *, follow: bool = True) -> os.stat_result:
        self.count()
        return super().stat(path, follow=follow)

    def open(self, path: str | Path) -> int:
        self.count()
        return super().open(path)

    def listdir(self, path: str | Path) -> list[str]:
        self.count()
        return super().listdir(path)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.remove()


def half_remove(path: Path) -> None:
    (path / "manifest.json").rename(path / removed_marker("other"))


@pytest.mark.parametrize("at", range(1, 40))
def test_one_that_is_removed_while_it_is_looked_at_is_valid_or_not_there(root: Path, at: int) -> None:
    entries = Catalog(LocalStorage(root, disk=RemovesMidway(root, "step10", at))).entries()
    assert {entry.name for entry in entries} | {"step10"} == {"step9", "step10", "step100", "step200"}
    assert [entry.problem for entry in entries if not entry.valid] == []


class SavesAndRemovesMidway(RemovesMidway):
    """Another process saves a checkpoint and removes all others before operation number `at` of this one."""

    def __init__(self, root: Path, at: int) -> None:
        super().__init__(root, "step10", at)
        self.remove = partial(save_and_remove, root)


def save_and_remove(root: Path) -> None:
    earlier = LocalStorage(root).names()
    SyncCheckpointer().save(small_state(300), root / "step300", metadata=CheckpointMetadata(run_id="a", step=300))
    for name in earlier:
        LocalStorage(root).remove(name)


@pytest.mark.parametrize("at", range(1, 40))
def test_a_name_is_found_where_all_that_were_listed_are_removed_meanwhile(root: Path, at: int) -> None:
    assert Catalog(LocalStorage(root, disk=SavesAndRemovesMidway(root, at))).names()


@pytest.mark.parametrize("at", range(1, 40))
def test_a_valid_one_is_found_where_all_that_were_listed_are_removed_meanwhile(root: Path, at: int) -> None:
    entries = Catalog(LocalStorage(root, disk=SavesAndRemovesMidway(root, at))).entries()
    assert entries
    assert all(entry.valid for entry in entries)


@pytest.mark.parametrize("at", range(1, 40))
def test_one_whose_removal_has_begun_is_neither_damaged_nor_said_to_have_been_partial(root: Path, at: int) -> None:
    entries = Catalog(LocalStorage(root, disk=RemovesMidway(root, "step10", at, keep=True))).entries()
    assert len(entries) == 4
    assert all(
        entry.valid or (entry.name, entry.problem, entry.removed) == ("step10", REMOVING, True) for entry in entries
    )


def test_one_that_is_not_there_is_removed_and_not_valid(root: Path) -> None:
    entry = Catalog(LocalStorage(root)).entry("step11")
    assert (entry.valid, entry.removed, entry.problem) == (False, True, GONE)


# Which of them is the newest whose bytes are sound, and what is done while they are read.


@pytest.fixture
def catalog(memory_path: Path) -> Catalog:
    checkpointer = SyncCheckpointer()
    for step in (1, 2, 3):
        checkpointer.save(
            small_state(step), memory_path / f"step{step}", metadata=CheckpointMetadata(run_id="r", step=step)
        )
    return Catalog(LocalStorage(memory_path, run_id="r"))


def damage(catalog: Catalog, step: int) -> None:
    file = catalog.storage.root / f"step{step}" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize(("damaged", "left"), [([], 3), ([3], 2), ([3, 2], 1)])
def test_work_is_done_beside_each_reading_and_changes_nothing_of_the_choice(
    catalog: Catalog, damaged: list[int], left: int
) -> None:
    for step in damaged:
        damage(catalog, step)
    done = []
    found = newest_intact(catalog, "r", check=partial(_verify_beside, lambda: done.append(threading.current_thread())))
    assert found is not None
    assert found.step == left
    assert done == [threading.main_thread()] * (len(damaged) + 1)
    assert [entry.step for entry in catalog.entries()] == list(range(1, left + 1)), "the damaged are set aside"


def test_a_failure_of_that_work_is_its_own_and_sets_nothing_aside(catalog: Catalog) -> None:
    def fails() -> None:
        raise ImportError("no torch here")

    damage(catalog, 3)
    with pytest.raises(ImportError, match="no torch"):
        newest_intact(catalog, "r", check=partial(_verify_beside, fails))
    assert len(catalog.entries()) == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-verifying"]


def state_of(value: str) -> bytes:
    return f'{{"version": 1, "state": {{"a": {value}}}}}'.encode()


def header_of(fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


HOSTILE = {
    "nested lists": ("rank0.json", state_of("[" * 100_000 + "]" * 100_000)),
    "no JSON": ("rank0.json", b"\xff\xfe"),
    "a tensor that no file has": ("rank0.json", state_of('{"$":"tensor","v":"b"}')),
    "no header": ("rank0.safetensors", b""),
    "no tensors": ("rank0.safetensors", header_of({})),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_whatever_reading_raises_is_damage_and_the_next_older_one_is_taken(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, hostile: tuple[str, bytes]
) -> None:
    reseal(catalog.storage.root / "step3", *hostile)
    assert catalog.why_damaged(catalog.entry("step3")) is not None
    with pytest.raises(DamagedCheckpoint):
        SyncCheckpointer().load(catalog.storage.root / "step3")
    found = newest_intact(catalog, "r")
    assert found is not None
    assert found.step == 2
    assert "step3 is quarantined as " in caplog.text


@pytest.mark.parametrize("damage_of_copy", ["content", "size", "manifest"])
@pytest.mark.parametrize("own", ["none", "damaged", "valid"])
def test_damaged_copies_are_an_error_unless_the_run_has_a_checkpoint_of_its_own(
    tmp_path: Path, own: str, damage_of_copy: str
) -> None:
    folders = {name: Catalog(LocalStorage(tmp_path / name)) for name in ("own", "copies")}
    for name in folders:
        if name == "copies" or own != "none":
            SyncCheckpointer().save(
                small_state(), tmp_path / name / "step3", metadata=CheckpointMetadata(run_id="r", step=3)
            )
    if own == "damaged":
        damage(folders["own"], 3)
    if damage_of_copy == "content":
        damage(folders["copies"], 3)
    else:
        file = "manifest.json" if damage_of_copy == "manifest" else "rank0.json"
        (tmp_path / "copies" / "step3" / file).write_bytes(b"{")
    choose = partial(newest_of_all, list(folders.values()), "r", quarantine=False)
    if own == "valid":
        assert present(choose())[0] is folders["own"]
    else:
        with pytest.raises(CheckpointError, match=f"{'own' if own == 'damaged' else 'copies'} holds checkpoints, but"):
            choose()


def test_one_that_became_another_runs_since_it_was_remembered_is_not_chosen(catalog: Catalog) -> None:
    assert len(catalog.remembered()) == 3
    path = catalog.storage.root / "step3" / "manifest.json"
    path.write_bytes(replace(Manifest.parse(path.read_bytes()), run_id="other").to_bytes())
    assert present(catalog.newest_valid("r")).step == 2


@pytest.mark.parametrize(("limit", "step"), [(None, 3), (3, 3), (2, 2)])
def test_a_run_that_went_back_resumes_that_step_and_no_later_one(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, limit: int | None, step: int
) -> None:
    assert present(newest_intact(catalog, "r", limit=limit)).step == step
    assert ("step3 is not used: the run went back to step 2" in caplog.text) is (limit == 2)
    assert len(catalog.entries()) == 3


def test_a_look_sets_nothing_aside(catalog: Catalog) -> None:
    damage(catalog, 3)
    assert present(newest_intact(catalog, "r", quarantine=False)).step == 2
    assert [entry.step for entry in catalog.entries()] == [1, 2, 3]


def test_a_partial_one_is_no_reason_for_a_message_and_none_alone_is_an_error(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    (catalog.storage.root / "step4").mkdir()
    assert present(newest_intact(catalog, "r")).step == 3
    assert caplog.text == ""
    for step in (1, 2, 3):
        shutil.rmtree(catalog.storage.root / f"step{step}")
    assert newest_intact(catalog, "r") is None


def test_one_whose_manifest_is_lost_is_named_and_never_silently_passed_over(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    (catalog.storage.root / "step3/manifest.json").unlink()
    assert present(newest_intact(catalog, "r")).step == 2
    message = "checkpoint step3 is not used: it has no manifest"
    assert [record.message for record in caplog.records] == [message]
    for step in (1, 2):
        shutil.rmtree(catalog.storage.root / f"step{step}")
    assert newest_intact(catalog, "r") is None
    assert [record.message for record in caplog.records] == [message] * 2
    assert (catalog.storage.root / "step3").is_dir()


UNREAD = {
    "the disk fails": OSError(errno.EIO, "Input/output error"),
    "there is no memory": MemoryError(),
}


@pytest.mark.parametrize("error", UNREAD.values(), ids=UNREAD)
def test_one_that_cannot_be_read_now_is_reported_and_stays(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, error: OSError | MemoryError
) -> None:
    def check(folder: ReadableFolder, manifest: Manifest) -> None:
        if manifest.step == 3:
            raise error

    assert present(newest_intact(catalog, "r", check=check)).step == 2
    assert "step3 is not used: it cannot be read: " in caplog.text
    assert [entry.step for entry in catalog.entries()] == [1, 2, 3]


@pytest.mark.parametrize("alone", [False, True])
def test_one_with_an_unreadable_manifest_is_reported_and_stays(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    (catalog.storage.root / "step3" / "manifest.json").write_bytes(b"{")
    if alone:
        for step in (1, 2):
            shutil.rmtree(catalog.storage.root / f"step{step}")
        with pytest.raises(CheckpointError, match="none is valid:\n  step3: "):
            newest_intact(catalog, "r")
    else:
        assert present(newest_intact(catalog, "r")).step == 2
        assert "step3 is not used: " in caplog.text
    assert (catalog.storage.root / "step3").is_dir()


@pytest.mark.parametrize(
    ("own", "copies", "newest", "verified"),
    [
        ([2], [2], ("own", 2), ["own"]),
        ([2], [1], ("own", 2), ["own"]),
        ([2], [3], ("copies", 3), ["own", "copies"]),
        ([], [1], ("copies", 1), ["copies"]),
        ([], [], None, []),
    ],
)
def test_a_copy_is_verified_and_taken_only_if_it_is_newer(
    tmp_path: Path, own: list[int], copies: list[int], newest: tuple[str, int] | None, verified: list[str]
) -> None:
    catalogs, read = [], []
    for name, steps in (("own", own), ("copies", copies)):
        catalogs.append(Catalog(LocalStorage(tmp_path / name)))
        for step in steps:
            metadata = CheckpointMetadata(run_id="r", step=step)
            SyncCheckpointer().save(small_state(), tmp_path / name / f"step{step}", metadata=metadata)
    found = newest_of_all(catalogs, "r", check=lambda folder, manifest: read.append(manifest.step))
    assert (found and (found[0].folder.name, found[1].step)) == newest
    assert len(read) == len(verified)


def test_a_copy_that_is_damaged_and_newer_is_passed_over_for_an_older_one_of_the_run(tmp_path: Path) -> None:
    catalogs = [Catalog(LocalStorage(tmp_path / name)) for name in ("own", "copies")]
    for catalog, step in ((catalogs[0], 2), (catalogs[1], 1), (catalogs[1], 3)):
        metadata = CheckpointMetadata(run_id="r", step=step)
        SyncCheckpointer().save(small_state(), catalog.folder / f"step{step}", metadata=metadata)
    damage(catalogs[1], 3)
    found = newest_of_all(catalogs, "r", quarantine=False)
    assert found is not None
    assert (found[0].folder.name, found[1].step) == ("own", 2)


def test_a_pin_that_cannot_be_read_counts_as_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(name: str) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    catalog = Catalog(LocalStorage(root))
    monkeypatch.setattr(catalog.storage, "is_pinned", fails)
    assert all(entry.pinned for entry in catalog.entries())
    assert "cannot see whether step10 is pinned, so it is kept" in caplog.text


@pytest.mark.parametrize("content", [b"", b"altered", None])
def test_a_small_file_that_is_not_what_was_written_is_damage(root: Path, content: bytes | None) -> None:
    storage = LocalStorage(root)
    manifest = present(Catalog(storage).entry("step10").manifest)
    path = root / "step10" / "rank0.json"
    assert Catalog(storage).read_small("step10", "rank0.json", manifest) == path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"rank0\.json is missing, or not what was written"):
        Catalog(storage).read_small("step10", "rank0.json", manifest)


# checkpoints.jsonl: saves and removals with their reasons, read as lives of checkpoints.


def told(file: Path) -> list[tuple[Any, ...]]:
    return [(one.name, one.step, one.kind, one.reason, one.removed_reason) for one in Life.read_all(read_rows(file))]


def test_a_reason_outlives_its_checkpoint_and_a_second_life_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.jsonl"
    history = CheckpointHistory(file)
    history.saved("step5", 5, "ephemeral", "every 5 steps, ephemeral")
    history.saved("step10", 10, "ephemeral", "every 5 steps, ephemeral")
    history.removed("step5", "ephemeral, and step10 is newer")
    # The word of older versions, which manifests have too.
    history.saved("step10", 10, "permanent", "every 10 steps")
    history.saved("step5", 5, "regular", 'asked "by" a file\n')
    history.removed("step1", "a checkpoint of before the record")
    assert told(file) == [
        ("step5", 5, "ephemeral", "every 5 steps, ephemeral", "ephemeral, and step10 is newer"),
        ("step10", 10, "regular", "every 10 steps", None),
        ("step5", 5, "regular", 'asked "by" a file\n', None),
        ("step1", None, "", "", "a checkpoint of before the record"),
    ]
    first, *_ = Life.read_all(read_rows(file))
    assert first.saved_at is not None
    assert first.removed_at is not None
    assert first.saved_at <= first.removed_at


def test_a_torn_line_spoils_neither_the_one_before_it_nor_the_next(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints.jsonl"
    history = CheckpointHistory(file)
    history.saved("step1", 1, "permanent", "one")
    file.write_bytes(file.read_bytes() + b'{"time": 17, "eve')
    history.saved("step2", 2, "permanent", "two")
    assert [one[0] for one in told(file)] == ["step1", "step2"]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\x00\x00", b"[]", b"7", b'{"event": "saved"}', b'{"time": "x", "event": "saved", "name": "a"}',
        b'{"time": 1, "event": "saved", "name": "a", "step": [], "reason": ""}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_line_of_another_kind_is_left_out(line: bytes) -> None:
    good = json.dumps({"time": 1, "event": "saved", "name": "a", "step": 1, "kind": "permanent", "reason": "r"})
    assert [one.name for one in Life.read_all(parse_rows([line, good.encode()]))] == ["a"]


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("trainer_cli").propagate = True
    history = CheckpointHistory(tmp_path / "gone" / "checkpoints.jsonl")
    history.saved("step1", 1, "permanent", "one")
    history.removed("step1", "two")
    # An earlier test may have left the handler at a second logger: then the one record is there twice.
    (record,) = {id(record): record for record in caplog.records}.values()
    assert "checkpoints.jsonl could not be written: No such file or directory" in record.getMessage()
