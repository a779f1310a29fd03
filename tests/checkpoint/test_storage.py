"""The local storage keeps the promises of the Storage port; then what it does on its disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import FaultyDisk
from storage_contract import StorageContract, put

from trainer_cli.storage import local
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


class Keeps(Disk):
    """Gives no folder up, as long as it does not have to."""

    keeps = True

    def rmdir(self, path: Path) -> None:
        if self.keeps:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        super().rmdir(path)


class ReadsOnly(Disk):
    """Of a user who may not write."""

    def rename(self, old: Path, new: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(old))

    def rmdir(self, path: Path) -> None:
        self.rename(path, path)

    unlink = rmdir


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "not" / "yet", run_id="run1", attempt=3)

    def test_other_files_in_the_folder_are_not_checkpoints(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        (storage.root / "step2").write_text("a file")
        (storage.root / ".hidden").mkdir()
        (storage.root / "step3").symlink_to(storage.root / "nowhere")
        (storage.root / "loop").symlink_to(storage.root / "loop")
        assert storage.names() == ["step1"]

    def test_everything_is_at_rest_before_the_folder_gets_its_name_and_that_too(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        put(LocalStorage(tmp_path / "checkpoints", disk=disk, run_id="r", attempt=1), "step1", a=b"a", b=b"b" * 100_000)
        steps = [one for one in disk.operations if not one.startswith("stat")]
        assert steps == [
            "mkdir checkpoints",
            f"fsync_dir {tmp_path.name}",
            "mkdir .tmp.step1.r.1",
            "open_new a",
            "write file",
            "fsync file",
            "open_new b",
            "write file",
            "fsync file",
            "open_new manifest.json",
            "write file",
            "fsync file",
            "fsync_dir .tmp.step1.r.1",
            "rename .tmp.step1.r.1",
            "fsync_dir checkpoints",
        ]

    def test_a_removal_takes_the_manifest_away_first_and_for_good(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        storage = LocalStorage(tmp_path, disk=disk, run_id="r", attempt=1)
        put(storage, "step1", a=b"a")
        disk.operations.clear()
        assert storage.remove("step1")
        steps = [one for one in disk.operations if not one.startswith("stat")]
        assert steps == [
            "open manifest.json",
            "listdir step1",
            "rename manifest.json",
            "fsync_dir step1",
            "rename step1",
            f"fsync_dir {tmp_path.name}",
            "listdir .trash.step1.r.1",
            "unlink .removed.r",
            "unlink a",
            "rmdir .trash.step1.r.1",
        ]

    def test_a_partial_folder_in_the_way_is_renamed_aside_and_kept(
        self, storage: LocalStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        (storage.root / "step1").mkdir(parents=True)
        (storage.root / "step1" / "rank0.safetensors").write_bytes(b"half")
        put(storage, "step1", a=b"whole")
        assert storage.peek("step1", "a") == b"whole"
        assert hidden(storage.root) == [".aside.step1.run1.3"]
        assert (storage.root / ".aside.step1.run1.3" / "rank0.safetensors").read_bytes() == b"half"
        assert "quarantined" in caplog.text
        storage.sweep()
        assert hidden(storage.root) == [".aside.step1.run1.3"]
        (storage.root / "step2").write_text("a file")
        put(storage, "step2")
        assert (storage.root / ".aside.step2.run1.3").read_text() == "a file"

    def test_sweep_clears_away_what_this_run_left_and_nothing_else(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        for name in (
            ".tmp.step5.run1.1",
            ".trash.step5.run1.2-4",
            ".tmp.step5.run2.1",
            ".trash.step5.other.1",
            ".aside.step5.run1.1",
            ".git",
            "notes",
            "step7",
        ):
            (storage.root / name / "deeper").mkdir(parents=True)
            (storage.root / name / "deeper" / "file").write_text("x")
        outside = storage.root.parent / "outside"
        outside.write_text("mine")
        (storage.root / ".tmp.step5.run1.1" / "link").symlink_to(outside)
        assert storage.sweep() == [".tmp.step5.run1.1", ".trash.step5.run1.2-4"]
        assert hidden(storage.root) == [".aside.step5.run1.1", ".git", ".tmp.step5.run2.1", ".trash.step5.other.1"]
        assert storage.names() == ["notes", "step1", "step7"]
        assert outside.read_text() == "mine"

    def test_sweep_leaves_what_is_just_being_written(self, storage: LocalStorage) -> None:
        with storage.writing("step1") as folder:
            assert storage.sweep() == []
            with folder.create("manifest.json"):
                pass
            folder.publish()
        assert storage.names() == ["step1"]

    def test_sweep_finishes_a_removal_that_died_and_leaves_other_partial_folders(self, storage: LocalStorage) -> None:
        for name, marker in (("step1", ".removed.run1"), ("step2", ".removed.run2"), ("step3", "rank0.json")):
            (storage.root / name).mkdir(parents=True)
            (storage.root / name / marker).write_text("{}")
        assert storage.sweep() == ["step1"]
        assert storage.names() == ["step2", "step3"]
        assert hidden(storage.root) == []

    def test_a_save_over_a_half_removed_folder_leaves_nothing_aside(self, storage: LocalStorage) -> None:
        (storage.root / "step1").mkdir(parents=True)
        (storage.root / "step1" / ".removed.run1").write_text("{}")
        put(storage, "step1", a=b"new")
        assert storage.peek("step1", "a") == b"new"
        assert hidden(storage.root) == []

    def test_a_reader_in_another_process_holds_removal_back(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        with (storage.root / "step1" / "manifest.json").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            assert not storage.remove("step1")
        assert storage.remove("step1")

    def test_a_checkpoint_that_is_being_removed_cannot_be_read(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        with (storage.root / "step1" / "manifest.json").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(FileNotFoundError, match="being removed"), storage.reading("step1"):
                pass

    def test_a_manifest_that_is_replaced_while_it_is_opened_is_opened_again(self, storage: LocalStorage) -> None:
        class Amends(Disk):
            """Replaces the manifest between its opening and its lock, once."""

            replaced = False

            def lock(self, fd: int, *, exclusive: bool) -> bool:
                if not self.replaced:
                    self.replaced = True
                    other.amend("step1", b"new")
                return super().lock(fd, exclusive=exclusive)

        other = LocalStorage(storage.root)
        put(other, "step1", a=b"a")
        storage.disk = Amends()
        with storage.reading("step1"):
            assert not other.remove("step1")
        assert other.remove("step1")

    @pytest.mark.parametrize("at", range(1, 30))
    def test_an_amendment_that_fails_midway_leaves_a_checkpoint_that_can_be_read_amended_and_removed(
        self, storage: LocalStorage, at: int
    ) -> None:
        put(storage, "step1", a=b"a")
        saved = storage.peek("step1", "manifest.json")
        storage.disk = FaultyDisk(at)
        try:
            storage.amend("step1", b"new")
        except OSError:
            assert storage.disk.struck
        storage.disk = Disk()
        with storage.reading("step1"):
            assert storage.peek("step1", "manifest.json") in (saved, b"new")
            assert not storage.remove("step1")
        storage.amend("step1", b"newer")
        assert set(storage.sizes("step1")) == {"a", "manifest.json"}
        storage.disk = FaultyDisk(at)
        with contextlib.suppress(OSError):
            storage.amend("step1", b"newest")
        storage.disk = Disk()
        assert storage.remove("step1")

    @pytest.mark.parametrize("ends", ["partial", "complete", "complete and read"])
    def test_a_reader_without_write_permission_ends_where_a_replacement_was_cut_short(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, ends: str
    ) -> None:
        monkeypatch.setattr(local, "_REMOVAL_S", 0.1)
        put(storage, "step1", a=b"a")
        old = storage.root / ".replaced.step1"
        (storage.root / "step1").rename(old)
        if ends == "partial":
            (old / "manifest.json").unlink()
        storage.disk = ReadsOnly()
        with contextlib.ExitStack() as stack:
            if ends == "complete and read":
                fcntl.flock(stack.enter_context((old / "manifest.json").open()), fcntl.LOCK_SH)
            assert storage.names() == []
            with pytest.raises(FileNotFoundError), storage.reading("step1"):
                pass
        assert (old / "a").read_bytes() == b"a"

    def test_a_checkpoint_that_was_read_is_removed_while_a_process_forked_meanwhile_lives(
        self, storage: LocalStorage
    ) -> None:
        put(storage, "step1", a=b"a")
        waits, ends = os.pipe()
        with storage.reading("step1"):
            if (child := os.fork()) == 0:
                os.close(ends)
                os.read(waits, 1)
                os._exit(0)
        os.close(waits)
        assert storage.remove("step1")
        os.close(ends)
        os.waitpid(child, 0)

    def test_a_linked_checkpoint_is_read_but_not_removed(
        self, storage: LocalStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        elsewhere = LocalStorage(tmp_path / "elsewhere")
        put(elsewhere, "step1", a=b"far")
        storage.root.mkdir(parents=True)
        (storage.root / "step1").symlink_to(tmp_path / "elsewhere" / "step1")
        assert storage.peek("step1", "a") == b"far"
        assert not storage.remove("step1")
        assert not storage.remove("step1")
        assert caplog.text.count("symbolic link") == 1, "said once"
        assert elsewhere.peek("step1", "a") == b"far"

    def test_a_partial_folder_is_cleared_away(self, storage: LocalStorage) -> None:
        (storage.root / "step7").mkdir(parents=True)
        (storage.root / "step7" / "rank0.json").touch()
        assert storage.clear("step7")
        assert list(storage.root.iterdir()) == []

    def test_bytes_are_freed_behind_and_a_failure_is_reported_once_and_tried_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        waiting: list[Any] = []
        disk = FaultyDisk()
        storage = LocalStorage(tmp_path, disk=disk, run_id="r", attempt=1, later=waiting.append)
        for name in ("step1", "step2", "step3"):
            put(storage, name, a=b"a")
        assert storage.remove("step1")
        assert storage.names() == ["step2", "step3"]
        assert [path.name for path in tmp_path.glob(".trash.*")] == [".trash.step1.r.1"]
        caplog.set_level(logging.WARNING)
        disk.operations.clear()
        disk.at, disk.persistent = 1, True
        for work in waiting:
            work()
        assert caplog.text.count("it will be tried again") == 1
        for work in waiting:
            work()
        assert caplog.text.count("it will be tried again") == 1
        waiting.clear()
        disk.at = None
        assert storage.remove("step2")
        for work in waiting:
            work()
        assert hidden(tmp_path) == []

    @pytest.mark.parametrize("count", [1, 3])
    def test_what_could_not_be_deleted_goes_with_the_next_removal_once_it_can(self, tmp_path: Path, count: int) -> None:
        disk = Keeps()
        storage = LocalStorage(tmp_path, disk=disk, run_id="r", attempt=1)
        for step in range(count + 1):
            put(storage, f"step{step}")
        for step in range(count):
            assert storage.remove(f"step{step}")
        assert len(hidden(tmp_path)) == count
        disk.keeps = False
        assert storage.remove(f"step{count}")
        assert hidden(tmp_path) == []

    def test_a_pipe_instead_of_a_file_is_refused_without_waiting(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        os.mkfifo(storage.root / "step1" / "a")
        assert set(storage.sizes("step1")) == {"manifest.json"}
        with pytest.raises(OSError, match="Not a plain file"):
            storage.peek("step1", "a")

    def test_an_enormous_manifest_is_not_read(self, storage: LocalStorage) -> None:
        put(storage, "step1")
        os.truncate(storage.root / "step1" / "manifest.json", 2**40)
        with pytest.raises(OSError, match="too large"):
            storage.peek("step1", "manifest.json")

    def test_what_cannot_be_cleared_away_is_reported_and_left_for_the_next_attempt(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = FaultyDisk()
        storage = LocalStorage(tmp_path, disk=disk, run_id="r", attempt=1)
        put(storage, "step1", a=b"a")
        caplog.set_level(logging.WARNING)
        disk.operations.clear()
        storage.remove("step1")
        unlink = disk.operations.index("unlink a") + 1
        put(storage, "step1", a=b"a")
        disk.operations.clear()
        disk.at, disk.persistent = unlink, True
        assert storage.remove("step1")
        assert "cannot delete" in caplog.text
        assert hidden(tmp_path) == [".trash.step1.r.1"]
        assert LocalStorage(tmp_path, run_id="r", attempt=2).sweep() == [".trash.step1.r.1"]
        assert hidden(tmp_path) == []

    def test_a_run_id_that_cannot_be_in_a_name_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="run id"):
            LocalStorage(tmp_path, run_id="a/b")


class OverNfs(Disk):
    """Locks a file against all others only where it is open for writing, as Linux does over NFS."""

    def lock(self, fd: int, *, exclusive: bool) -> bool:
        reads = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if exclusive and reads and stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return super().lock(fd, exclusive=exclusive)


def test_checkpoints_are_removed_over_nfs_too(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, disk=OverNfs())
    put(storage, "step1", a=b"alpha")
    with storage.reading("step1"):
        assert not storage.remove("step1")
    assert storage.remove("step1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_file_that_may_not_be_written_is_opened_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def opened(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(number, os.strerror(number))
        return taken(path, flags, *mode)

    taken = os.open
    (tmp_path / "f").touch()
    monkeypatch.setattr(os, "open", opened)
    fd = Disk().open_to_lock(tmp_path / "f")
    try:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    finally:
        os.close(fd)
