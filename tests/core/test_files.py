"""Files are changed whole or not at all, also when the process dies between two operations."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path

import pytest
from dying_disk import Died, die_at
from hypothesis import given
from hypothesis import strategies as st

from trainer_cli.errors import UserError
from trainer_cli.files import durable as files

REPLACES = ("fsync", "replace", "unlink")


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_replacement_that_dies_leaves_old_or_new(nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        die_at(patch, nth, REPLACES)
        with pytest.raises(Died):
            files.replace(path, [b"n", b"ew"])
    assert path.read_bytes() == (b"old" if nth <= 2 else b"new")
    files.replace(path, [b"newer"])
    assert path.read_bytes() == b"newer"


def test_a_replacement_that_fails_leaves_no_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, [b"new"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"old"


@given(content=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_exactly_the_named_spans_are_kept(
    content: bytes, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("spans") / "log"
    path.write_bytes(content)
    points = sorted({min(cut, len(content)) for cut in cuts})
    spans = list(zip(points[::2], points[1::2], strict=False))
    expected = b"".join(content[start:stop] for start, stop in spans)
    assert files.keep_spans(path, spans) == (expected != content)
    assert path.read_bytes() == expected


def test_spans_of_any_size_are_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = os.urandom(3_000_000)
    path.write_bytes(content)
    assert files.keep_spans(path, [(0, 2_500_000), (2_500_001, 3_000_000)])
    assert path.read_bytes() == content[:2_500_000] + content[2_500_001:]


def test_all_of_a_file_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync covers only what the kernel has, and not a buffer of Python."""
    calls: list[object] = []
    fsync, rename = os.fsync, os.replace

    def noting(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append("rename"), rename(old, new)))
    files.replace(tmp_path / "x", [b"n", b"ew"])
    assert calls == [3, "rename", "folder"]


def test_cutting_the_end_needs_no_room_for_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abcdef")
    before = path.stat().st_ino
    assert files.keep_spans(path, [(0, 2), (2, 3)])
    assert (path.read_bytes(), path.stat().st_ino) == (b"abc", before)


def test_a_lock_need_not_wait_and_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    with files.locked_file(path), pytest.raises(BlockingIOError), files.locked_file(path, wait=False):
        pass

    def refusing(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    with pytest.raises(UserError, match="cannot be locked: No locks") as e, files.locked_file(path):
        pass
    assert e.value.cure == "Its file system has no file locks; choose a folder on another."


@pytest.mark.parametrize("number", files.REFUSED, ids=errno.errorcode.__getitem__)
def test_a_file_system_without_fsync_is_warned_of_once_and_no_obstacle(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refusing)
    files.warn_of_no_fsync.cache_clear()
    files.sync(tmp_path)
    assert caplog.messages == [], "some network file systems offer it for files only, which loses no content"
    file = files.AppendedFile(tmp_path / "log")
    file.append(b"record")
    file.sync()
    file.close()
    files.replace(tmp_path / "summary.json", [b"x"])
    assert (tmp_path / "log").read_bytes() + (tmp_path / "summary.json").read_bytes() == b"recordx"
    (message,) = caplog.messages
    assert message.startswith(f"a file system in use refuses fsync ({os.strerror(number)}): ")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's devices that refuse every write")
@pytest.mark.parametrize(("device", "number"), [("/dev/full", errno.ENOSPC), ("/proc/self/mem", errno.EIO)])
def test_what_could_not_be_appended_names_its_file_and_is_not_tried_again_at_close(
    tmp_path: Path, device: str, number: int
) -> None:
    path = tmp_path / "log"
    path.symlink_to(device)
    file = files.AppendedFile(path)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        file.append(b"record")
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    file.close()


def test_a_sync_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = files.AppendedFile(tmp_path / "log")
    file.append(b"record")
    monkeypatch.setattr(os, "fsync", failing)
    for work, path in (
        (file.sync, tmp_path / "log"),
        (lambda: files.replace(tmp_path / "summary.json", [b"x"]), tmp_path / "summary.json"),
        (lambda: files.keep_spans(tmp_path / "log", [(0, 2)]), tmp_path / "log"),
        (lambda: files.sync(tmp_path), tmp_path),
    ):
        with pytest.raises(OSError, match="Input/output error") as caught:
            work()
        assert caught.value.filename == str(path)
    file.close()


@pytest.mark.parametrize("knows", [True, False])
def test_a_forked_process_keeps_no_lock(knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, ends = os.pipe()
    with files.private_file(tmp_path / "lock", os.O_RDWR | os.O_CREAT) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            if not knows:
                # As where the fork comes between the opening and the note of it.
                patch.setattr(files, "_private", set())
            child = os.fork()
        if child == 0:
            os.close(ends)
            holds = any(_is_same(descriptor, tmp_path / "lock") for descriptor in range(3, 1024))
            files.close_private(held)
            os.read(waits, 1)
            os._exit(int(holds))
    os.close(waits)
    with files.private_file(tmp_path / "lock", os.O_RDWR) as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(ends)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == int(not knows)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
