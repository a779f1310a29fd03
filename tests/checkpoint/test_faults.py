"""Every primitive operation of a save and of a removal fails once, fails for good, or is the process's last.

Whichever it is: older checkpoints stay valid, no partial one is accepted, the next attempt clears away what
is left, and the next save of the same step succeeds.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forgetful import ForgetfulDisk, PowerCut
from states import same, small_state

from trainer_cli.checkpoint.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.core.naming import Hidden, parse_hidden
from trainer_cli.errors import SaveError
from trainer_cli.testing.faults import Fault, FaultyDisk


def checkpointer_on(disk: Disk, attempt: int = 1) -> SyncCheckpointer:
    return SyncCheckpointer(storage=lambda root: LocalStorage(root, disk=disk, run_id="run", attempt=attempt))


def save(root: Path, step: int, disk: Disk, attempt: int = 1) -> None:
    facts = CheckpointMetadata(run_id="run", attempt=attempt, step=step, files={"config.yaml": b"seed: 1\n"})
    path = root / f"step{step}"
    checkpointer_on(disk, attempt).save(small_state(step), path, metadata=facts, overwrite=False)


def save_second(root: Path, disk: Disk) -> None:
    save(root, 2, disk)


def save_over_partial(root: Path, disk: Disk) -> None:
    """The folder of a save that was killed long ago is in the way."""
    (root / "step2").mkdir(exist_ok=True)
    (root / "step2" / "rank0.json").write_text("half")
    save(root, 2, disk)


def save_over_damaged(root: Path, disk: Disk) -> None:
    if not (root / "step2").exists():
        save(root, 2, Disk())
        (root / "step2" / "config.yaml").write_bytes(b"seed: 2\n")
    save(root, 2, disk)


def save_into_new_folder(root: Path, disk: Disk) -> None:
    save(root / "deep" / "down", 2, disk)


def save_into_folder_of_another(root: Path, disk: Disk) -> None:
    """Another process has just made the folder."""
    disk.mkdir(root / "deep")
    save(root / "deep", 2, disk)


def replace_second(root: Path, disk: Disk) -> None:
    """A path that is given in Python has an older state."""
    if not (root / "step2").exists():
        checkpointer_on(Disk()).save(small_state(OLDER), root / "step2")
    checkpointer_on(disk).save(small_state(2), root / "step2")


def replace_second_by_two_renames(root: Path, disk: Disk) -> None:
    """The file system swaps no names."""

    def refuse(first: Path, second: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(first))

    disk.exchange = refuse  # type: ignore[method-assign]
    replace_second(root, disk)


def amend_second(root: Path, disk: Disk) -> None:
    """Metrics that were measured later are added to a manifest."""
    if not (root / "step2").exists():
        save(root, 2, Disk())
    manifest = Catalog(LocalStorage(root)).entry("step2").manifest
    assert manifest is not None
    LocalStorage(root, disk=disk, run_id="run").amend("step2", replace(manifest, metrics=LATER).to_bytes())


def remove_second(root: Path, disk: Disk) -> None:
    if not (root / "step2").exists():
        save(root, 2, Disk())
    LocalStorage(root, disk=disk, run_id="run", attempt=1).remove("step2")


OLDER = 7
LATER = {"val/loss": 1.0}
REPLACING = [replace_second, replace_second_by_two_renames]
FOLDERS = {save_into_new_folder: "deep/down", save_into_folder_of_another: "deep"}
CUT = [save_second, *FOLDERS, amend_second, remove_second, *REPLACING]
ACTS = [save_second, save_over_partial, save_over_damaged, remove_second, *REPLACING]


def faulty(at: int | None = None, fault: Fault = Fault.error, **more: Any) -> FaultyDisk:
    """A disk on which the file of tensors is a large one, written past the page cache, and all others small."""
    return FaultyDisk(at, fault, block_bytes=4096, **more)


def prepared(root: Path) -> Path:
    root.mkdir()
    save(root, 1, Disk())
    return root


def operations(act: Callable[[Path, Disk], None], root: Path) -> list[str]:
    disk = faulty()
    act(prepared(root), disk)
    return disk.operations


def check_all_is_well(root: Path, message: str) -> None:
    """What the next attempt finds, and that it can go on."""
    entries = {entry.name: entry for entry in Catalog(LocalStorage(root)).entries()}
    assert entries["step1"].valid, message
    reader = checkpointer_on(Disk(), attempt=2)
    assert same(dict(reader.load(root / "step1")), small_state(1)), message
    second = entries.get("step2")
    if message.startswith(("replace", "amend")):
        assert second is not None, message
        assert second.valid, message
        loaded = dict(reader.load(root / "step2"))
        assert same(loaded, small_state(2)) or same(loaded, small_state(OLDER)), message
        LocalStorage(root).remove("step2")
    elif second is not None and second.valid and "save_over_damaged" not in message:
        assert same(dict(reader.load(root / "step2")), small_state(2)), message
    LocalStorage(root, run_id="run", attempt=2).sweep()
    left = [hidden for name in os.listdir(root) if (hidden := parse_hidden(name)) is not None]
    assert all(hidden.kind is Hidden.quarantined for hidden in left), (message, left)
    save(root, 2, Disk(), attempt=2)
    assert same(dict(reader.load(root / "step2")), small_state(2)), message
    assert same(dict(reader.load(root / "step1")), small_state(1)), message


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("act", ACTS)
def test_an_error_at_any_operation_loses_nothing(memory_path, act, number, persistent):
    planned = operations(act, memory_path / "planned")
    assert len(planned) > 10
    for at, operation in enumerate(planned, start=1):
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: operation {at}, {operation}"
        disk = faulty(at, number=number, persistent=persistent)
        try:
            act(root, disk)
        except SaveError as error:
            text = str(error)
            assert os.strerror(number) in text, message
            assert str(root / "step2") in text, message
            assert number == errno.ENOSPC or "bytes" not in text, message
            assert "Older checkpoints are intact" in text, message
        except OSError:
            assert act is remove_second, message
        assert disk.struck, message
        check_all_is_well(root, message)


@pytest.mark.parametrize("fault", [Fault.kill, Fault.tear])
@pytest.mark.parametrize("act", ACTS)
def test_a_kill_at_any_operation_loses_nothing(memory_path, act, fault):
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate(planned, start=1):
        if fault is Fault.tear and not operation.startswith("write"):
            continue  # the same as a kill at the next one
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: {fault} at operation {at}, {operation}"
        assert killed(act, root, faulty(at, fault)), message
        check_all_is_well(root, message)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what an open file holds is not reported")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("act", CUT)
def test_a_power_cut_at_any_operation_loses_nothing(memory_path, act, seed):
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate([*planned, "the end"], start=1):
        root = prepared(memory_path / f"at{at}")
        disk = ForgetfulDisk(at, seed * 1000 + at)
        done = False
        with suppress(PowerCut):
            act(root, disk)
            done = True
        disk.lose(root, everything=done)
        message = f"{act.__name__}: the power cut before operation {at}, {operation}, {seed=}"
        if done:
            check_is_durable(act, root, message)
        check_all_is_well(root, message)


def check_is_durable(act: Callable[[Path, Disk], None], root: Path, message: str) -> None:
    """What was done before the power cut is not undone by it."""
    folder = root / FOLDERS.get(act, "")
    entry = Catalog(LocalStorage(folder)).entry("step2")
    assert entry.valid is (act is not remove_second), message
    if entry.valid:
        assert same(dict(checkpointer_on(Disk()).load(folder / "step2")), small_state(2)), message
    if act is amend_second:
        assert entry.manifest is not None, message
        assert entry.manifest.metrics == LATER, message


def test_a_save_goes_past_the_page_cache(tmp_path):
    """The faults of this file would meet nothing of it otherwise."""
    names = {operation.split()[0] for operation in operations(save_second, tmp_path / "planned")}
    assert {"bypass_cache", "truncate"} <= names


def test_a_kill_while_the_first_checkpoint_of_a_run_is_saved_leaves_a_run_that_can_start(memory_path):
    planned = operations(save_into_new_folder, memory_path / "planned")
    for at in range(1, len(planned) + 1):
        root = prepared(memory_path / f"at{at}")
        assert killed(save_into_new_folder, root, faulty(at, Fault.kill))
        LocalStorage(root / "deep" / "down", run_id="run", attempt=2).sweep()
        save(root / "deep" / "down", 2, Disk(), attempt=2)
        assert same(dict(checkpointer_on(Disk()).load(root / "deep" / "down" / "step2")), small_state(2))


def test_a_save_whose_fsync_failed_begins_anew_instead_of_trusting_a_second_fsync(memory_path):
    planned = operations(save_second, memory_path / "planned")
    for at, operation in enumerate(planned, start=1):
        if not operation.startswith("fsync "):
            continue
        root = prepared(memory_path / f"at{at}")
        disk = faulty(at)
        with pytest.raises(SaveError):
            save_second(root, disk)
        assert not any(later.startswith("fsync ") for later in disk.operations[at:])
        assert os.listdir(root) == ["step1"]


def test_a_slow_disk_changes_nothing(memory_path):
    root = prepared(memory_path / "root")
    save(root, 2, faulty(1, Fault.delay, persistent=True, delay_s=0.001))
    assert same(dict(checkpointer_on(Disk()).load(root / "step2")), small_state(2))


def test_a_full_disk_keeps_what_is_there_and_reports_what_is_needed(memory_path):
    planned = operations(save_second, memory_path / "planned")
    root = prepared(memory_path / "root")
    disk = faulty(1 + planned.index("write file"), number=errno.ENOSPC, persistent=True)
    needed = checkpointer_on(disk).format.plan(small_state(2)).total_bytes + len(b"seed: 1\n")
    with pytest.raises(
        SaveError, match=f"No space left on device; it needs {needed:,} bytes, and [0-9,]+ bytes are free"
    ):
        save(root, 2, disk)


def killed(act: Callable[[Path, Disk], None], root: Path, disk: Disk) -> bool:
    """Do it in a child process; True where that was killed midway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forking where other threads are
        child = os.fork()
    if child == 0:
        try:
            act(root, disk)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
