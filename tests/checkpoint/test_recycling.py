"""Files of removed checkpoints are written over by the next save, and by nobody's loss."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.testing.faults import FaultyDisk

BLOCK = 8192
OLD, NEW = Random(1).randbytes(5 * BLOCK + 77), Random(2).randbytes(4 * BLOCK + 4097)


def put(storage: LocalStorage, name: str, tensors: bytes = NEW, file: str = "tensors") -> None:
    with storage.writing(name) as folder:
        for one, content in {file: tensors, "small": b"{}", "manifest.json": b"{}"}.items():
            with folder.create(one) as sink:
                sink.write(content)


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def is_made_anew(storage: LocalStorage, file: str = "tensors") -> bool:
    """True where the last save made a new file. (A file system gives the number of a deleted one again.)"""
    disk = storage.disk
    assert isinstance(disk, FaultyDisk)
    last = [one for one in disk.operations if one.endswith(f" {file}") and one.startswith(("open_new", "rename"))][-1]
    return last == f"open_new {file}"


def inode(path: Path) -> int:
    return path.stat().st_ino


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(block_bytes=BLOCK)


@pytest.fixture
def storage(tmp_path: Path, disk: FaultyDisk) -> LocalStorage:
    """With step1 removed, whose file waits, and step2 there."""
    storage = LocalStorage(tmp_path / "checkpoints", disk=disk, run_id="r", attempt=1, recycle=True)
    put(storage, "step1", OLD)
    put(storage, "step2", OLD)
    return storage


@pytest.fixture
def removed(storage: LocalStorage) -> int:
    number = inode(storage.root / "step1" / "tensors")
    assert storage.remove("step1")
    return number


@pytest.mark.parametrize("size", [len(NEW), len(OLD), len(OLD) + BLOCK, 4 * BLOCK, BLOCK, 5, 0])
def test_the_file_of_a_removed_folder_is_written_over_and_cut_to_its_size(storage, removed, size):
    assert storage.peek("step2", "tensors") == OLD
    content = (NEW + OLD)[:size]
    put(storage, "step3", content)
    assert inode(storage.root / "step3" / "tensors") == removed
    assert not is_made_anew(storage)
    assert storage.peek("step3", "tensors") == content
    assert storage.peek("step2", "tensors") == OLD


def test_a_file_is_taken_only_once_its_folder_is_removed_for_good(storage, disk):
    disk.operations.clear()
    assert storage.remove("step1")
    put(storage, "step3")
    steps = [one for one in disk.operations if not one.startswith(("stat", "write", "fsync file", "open_new"))]
    assert steps == [
        "open manifest.json",
        "rename manifest.json",
        "fsync_dir step1",
        "rename step1",
        "fsync_dir checkpoints",
        "listdir .trash.step1.r.1",
        "mkdir .tmp.step3.r.1",
        "rename tensors",
        "open_old tensors",
        "is_alone file",
        "bypass_cache file",
        "truncate file",
        "fsync_dir .tmp.step3.r.1",
        "rename .tmp.step3.r.1",
        "fsync_dir checkpoints",
    ]


def test_one_waits_at_most_and_none_once_all_is_settled(storage, disk):
    for number in range(3, 9):
        put(storage, f"step{number}")
    for number in range(1, 6):
        assert storage.remove(f"step{number}")
        assert hidden(storage.root) == [f".trash.step{number}.r.1"]
    assert storage.settle()
    assert hidden(storage.root) == []


def test_a_folder_of_small_files_is_deleted_at_once(storage):
    put(storage, "step3", b"small")
    assert storage.remove("step3")
    assert hidden(storage.root) == []


def test_without_being_asked_to_nothing_waits(tmp_path):
    storage = LocalStorage(tmp_path, disk=FaultyDisk(block_bytes=BLOCK))
    put(storage, "step1")
    assert storage.remove("step1")
    assert hidden(tmp_path) == []


def test_what_a_killed_run_left_waiting_is_swept_by_the_next(storage, removed):
    assert hidden(storage.root) == [".trash.step1.r.1"]
    later = LocalStorage(storage.root, run_id="r", attempt=2)
    assert later.sweep() == [".trash.step1.r.1"]
    assert hidden(storage.root) == []


@contextmanager
def opened(path: Path) -> Iterator[None]:
    with path.open("rb"):
        yield


@contextmanager
def opened_for_writing(path: Path) -> Iterator[None]:
    with path.open("r+b"):
        yield


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    yield
    memory.close()


@contextmanager
def linked(path: Path) -> Iterator[None]:
    os.link(path, path.parents[2] / "mine")
    yield
    assert (path.parents[2] / "mine").read_bytes() == OLD


@contextmanager
def linked_by_a_symbol(path: Path) -> Iterator[None]:
    path.rename(path.parents[2] / "mine")
    path.symlink_to(path.parents[2] / "mine")
    yield
    assert (path.parents[2] / "mine").read_bytes() == OLD


@contextmanager
def of_another_mode(path: Path) -> Iterator[None]:
    path.chmod(0o400)
    yield


@pytest.mark.parametrize("held", [opened, opened_for_writing, mapped, linked, linked_by_a_symbol, of_another_mode])
@pytest.mark.parametrize("late", [False, True], ids=["before its removal", "after it"])
def test_a_file_that_somebody_holds_is_left_to_them(storage, held, late):
    folder = storage.root / "step1"
    if late:
        assert storage.remove("step1")
        folder = storage.root / ".trash.step1.r.1"
    with held(folder / "tensors"), (folder / "tensors").open("rb") as reader:
        if held in (linked, linked_by_a_symbol, of_another_mode):
            reader.close()
        if not late:
            assert storage.remove("step1")
        put(storage, "step3")
        assert storage.peek("step3", "tensors") == NEW
        assert is_made_anew(storage)
        if not reader.closed:
            assert reader.read() == OLD
    assert storage.settle()
    assert hidden(storage.root) == []


def test_where_nobody_can_tell_whether_a_file_is_held_it_is_not_written_over(storage, removed, monkeypatch):
    monkeypatch.setattr("trainer_cli.checkpoint.storage.disk._LEASE", None)
    put(storage, "step3")
    assert is_made_anew(storage)


def test_looking_leaves_no_lease_behind(storage, removed):
    with storage.writing("step3") as folder, folder.create("tensors") as sink:
        sink.write(NEW)
        os.close(os.open(folder.path / "tensors", os.O_RDONLY | os.O_NONBLOCK))
    assert inode(storage.root / "step3" / "tensors") == removed


def test_another_name_of_a_file_is_a_new_file(storage, removed):
    put(storage, "step3", file="others")
    assert is_made_anew(storage, "others")
    assert storage.peek("step3", "others") == NEW


def test_a_save_that_failed_takes_the_file_with_it(storage, removed):
    def write_half() -> None:
        with storage.writing("step3") as folder, folder.create("tensors") as sink:
            sink.write(NEW)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        write_half()
    assert hidden(storage.root) == [".trash.step1.r.1"]
    put(storage, "step3")
    assert storage.peek("step3", "tensors") == NEW
    assert storage.peek("step2", "tensors") == OLD


@pytest.mark.parametrize("operation", ["rename tensors", "open_old tensors", "is_alone file"])
def test_what_cannot_be_written_over_is_no_reason_for_a_save_to_fail(storage, removed, disk, operation):
    class Fails(FaultyDisk):
        def _do(self, name: str, on: Any, *rest: Any) -> Any:
            if operation == f"{name} {'file' if isinstance(on, int) else os.path.basename(on)}":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super()._do(name, on, *rest)

    storage.disk = Fails(block_bytes=BLOCK)
    put(storage, "step3")
    assert storage.peek("step3", "tensors") == NEW
    assert is_made_anew(storage)
    assert storage.settle()
    assert hidden(storage.root) == []


@pytest.mark.parametrize("size", [5 * BLOCK, 5])
def test_a_full_disk_gets_the_waiting_files_back_and_the_save_goes_on(storage, removed, size):
    class Full(Disk):
        block_bytes = BLOCK

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if hidden(storage.root) == [".tmp.step3.r.1"]:
                return super().write(fd, data, offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.disk = Full()
    put(storage, "step3", NEW[:size], file="others")
    assert storage.peek("step3", "others") == NEW[:size]
    with pytest.raises(OSError, match="No space"):
        put(storage, "step4", file="others")
