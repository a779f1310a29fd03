"""Every primitive operation of a save and of a removal fails once, fails for good, or is the process's last.

Whichever it is: older checkpoints stay valid, no partial one is accepted, the next attempt clears away what
is left, and the next save of the same step succeeds.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from acts import (
    ACTS,
    CUT,
    assert_survives_error,
    assert_survives_power_cut,
    check_all_is_well,
    checkpointer_on,
    faulty,
    killed,
    operations,
    prepared,
    save,
    save_into_new_folder,
    save_second,
)
from faulty_disk import Fault
from forgetful import ForgetfulDisk
from states import same, small_state

from trainer_cli.errors import SaveError
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage

_CHANGES_NOTHING = {"stat", "open", "read", "listdir", "bypass_cache", "fsync", "fsync_dir"}
"""Operations after which a process that is killed leaves the same files as before them. Power cuts are other tests."""


def kills(planned: list[str]) -> list[int]:
    """The operations, counted from 1, before which a kill leaves other files than before the operation before it."""
    return [at for at in range(1, len(planned) + 1) if at == 1 or planned[at - 2].split()[0] not in _CHANGES_NOTHING]


@pytest.mark.parametrize(
    ("number", "persistent"),
    [
        pytest.param(errno.EIO, False, id="EIO-once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC-for good"),
        pytest.param(errno.EIO, True, id="EIO-for good", marks=pytest.mark.campaign),
        pytest.param(errno.ENOSPC, False, id="ENOSPC-once", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("act", ACTS)
def test_an_error_at_any_operation_loses_nothing(memory_path, act, number, persistent):
    planned = operations(act, memory_path / "planned")
    assert len(planned) > 10
    for at, operation in enumerate(planned, start=1):
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: operation {at}, {operation}"
        assert_survives_error(act, root, faulty(at, number=number, persistent=persistent), message)


@pytest.mark.parametrize("fault", [Fault.kill, Fault.tear])
@pytest.mark.parametrize("act", ACTS)
def test_a_kill_at_any_operation_loses_nothing(memory_path, act, fault):
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate(planned, start=1):
        if fault is Fault.tear and not operation.startswith("write"):
            continue  # the same as a kill at the next one
        if fault is Fault.kill and at not in kills(planned):
            continue  # the same as a kill at the one before
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: {fault} at operation {at}, {operation}"
        assert killed(act, root, faulty(at, fault)), message
        check_all_is_well(root, message)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what an open file holds is not reported")
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("act", CUT)
def test_a_power_cut_at_any_operation_loses_nothing(memory_path, act, seed):
    planned = operations(act, memory_path / "planned")
    for at, operation in enumerate([*planned, "the end"], start=1):
        root = prepared(memory_path / f"at{at}")
        message = f"{act.__name__}: the power cut before operation {at}, {operation}, {seed=}"
        assert_survives_power_cut(act, root, ForgetfulDisk(at, seed * 1000 + at), message)


def test_a_save_goes_past_the_page_cache(tmp_path):
    """The faults of this file would meet nothing of it otherwise."""
    names = {operation.split()[0] for operation in operations(save_second, tmp_path / "planned")}
    assert {"bypass_cache", "truncate"} <= names


def test_a_kill_while_the_first_checkpoint_of_a_run_is_saved_leaves_a_run_that_can_start(memory_path):
    for at in kills(operations(save_into_new_folder, memory_path / "planned")):
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
