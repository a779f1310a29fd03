"""Saves, replacements and removals that meet a fault, and what must hold after each of them."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from faulty_disk import Fault, FaultyDisk
from forgetful import ForgetfulDisk, PowerCut
from states import same, small_state

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.errors import NO_SPACE, SaveError
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.hidden_names import Hidden, HiddenName
from trainer_cli.storage.local import LocalStorage

Act = Callable[[Path, Disk], None]


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

    cast("Any", disk).exchange = refuse
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
FOLDERS: dict[Act, str] = {save_into_new_folder: "deep/down", save_into_folder_of_another: "deep"}
CUT = [save_second, *FOLDERS, amend_second, remove_second, *REPLACING]
ACTS = [save_second, save_over_partial, save_over_damaged, remove_second, *REPLACING]


def faulty(at: int | None = None, fault: Fault = Fault.error, **more: Any) -> FaultyDisk:
    """A disk on which the file of tensors is a large one, written past the page cache, and all others small."""
    return FaultyDisk(at, fault, block_bytes=4096, **more)


@cache
def _first_checkpoint() -> Mapping[str, bytes]:
    """The files of the checkpoint that is in every prepared folder."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), 1, Disk())
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def prepared(root: Path) -> Path:
    root.mkdir()
    for name, content in _first_checkpoint().items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    return root


def operations(act: Act, root: Path) -> list[str]:
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
    left = [hidden for name in os.listdir(root) if (hidden := HiddenName.parse(name)) is not None]
    assert all(hidden.kind is Hidden.quarantined for hidden in left), (message, left)
    save(root, 2, Disk(), attempt=2)
    assert same(dict(reader.load(root / "step2")), small_state(2)), message
    assert same(dict(reader.load(root / "step1")), small_state(1)), message


def assert_survives_error(act: Act, root: Path, disk: FaultyDisk, message: str) -> None:
    """Do it on a disk that fails with `disk.number`: the error says so, and nothing that was committed is lost."""
    try:
        act(root, disk)
    except SaveError as error:
        text = str(error)
        assert os.strerror(disk.number) in text, message
        assert str(root / "step2") in text, message
        assert disk.number in NO_SPACE or "bytes" not in text, message
        assert "Older checkpoints are intact" in text, message
    except OSError:
        assert act is remove_second, message
    assert disk.struck, message
    check_all_is_well(root, message)


def assert_survives_power_cut(act: Act, root: Path, disk: ForgetfulDisk, message: str) -> None:
    """Do it on a disk that loses its power, if that comes before the end: nothing that was committed is lost."""
    done = False
    with suppress(PowerCut):
        act(root, disk)
        done = True
    disk.lose(root, everything=done)
    if done:
        check_is_durable(act, root, message)
    check_all_is_well(root, message)


def check_is_durable(act: Act, root: Path, message: str) -> None:
    """What was done before the power cut is not undone by it."""
    folder = root / FOLDERS.get(act, "")
    entry = Catalog(LocalStorage(folder)).entry("step2")
    assert entry.valid is (act is not remove_second), message
    if entry.valid:
        assert same(dict(checkpointer_on(Disk()).load(folder / "step2")), small_state(2)), message
    if act is amend_second:
        assert entry.manifest is not None, message
        assert entry.manifest.metrics == LATER, message


def killed(act: Act, root: Path, disk: Disk) -> bool:
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
