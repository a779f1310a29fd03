"""Files are changed whole or not at all, and read while they grow; what is said of a disk that is full."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path

import pytest
from dying_disk import Died, die_at
from hypothesis import given, strategies as st

from trainer_cli.checkpoint.disk_space import FreeSpace, NeededSpace, find_shortage, why_no_room
from trainer_cli.errors import UserError
from trainer_cli.files import durable as files, json_lines
from trainer_cli.files.json_lines import GrowingFile, Lines, Rows, read_last_row, read_rows

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

    def noting_rename(old: Path, new: Path) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", noting_rename)
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


# Files of JSON lines: read while they grow, each line once, and after a resume has cut them back.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def add(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_each_line_is_returned_once_and_only_when_it_is_complete(path: Path) -> None:
    growing = GrowingFile(path, 10)
    assert growing.read() == Lines([])
    add(path, "one\ntw")
    assert growing.read() == Lines([b"one"])
    assert growing.read() == Lines([])
    add(path, "o\nthree\n")
    assert growing.read() == Lines([b"two", b"three"])


@pytest.mark.parametrize("most", [0, 3, 5000])
@pytest.mark.parametrize("block", [1, 64, 1 << 16])
def test_the_first_call_returns_the_last_lines(
    path: Path, most: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block)
    lines = [f"line {number}" * (number % 3) for number in range(400)]
    add(path, "".join(f"{line}\n" for line in lines) + "torn")
    growing = GrowingFile(path, most)
    assert growing.read() == Lines([line.encode() for line in lines][max(0, 400 - most) :])
    add(path, " line\nnext\n")
    assert growing.read() == Lines([b"torn line", b"next"])


def test_a_call_reads_only_what_is_new(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, "a line of some length\n" * 5000)
    growing = GrowingFile(path, 10)
    growing.read()
    add(path, "new\n")
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        content = pread(descriptor, length, offset)
        read.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", counted)
    assert growing.read() == Lines([b"new"])
    assert sum(read) < 500
    read.clear()
    growing.read()
    assert read == []


@pytest.mark.parametrize("kept", ["", "a\n", "a\nb\n"])
@pytest.mark.parametrize("added", ["", "x\n", "x\ny\nz\nand longer than it was before\n"])
def test_a_file_that_was_cut_back_is_read_again_however_much_it_has_grown_since(
    path: Path, kept: str, added: str
) -> None:
    add(path, "a\nb\nc\n")
    growing = GrowingFile(path, 10)
    growing.read()
    os.truncate(path, len(kept))
    add(path, added)
    expected = [line.encode() for line in (kept + added).splitlines()]
    assert growing.read() == Lines(expected, restarted=True)


def test_a_file_that_was_replaced_or_vanished_is_read_again(path: Path) -> None:
    add(path, "a\nb\n")
    growing = GrowingFile(path, 10)
    growing.read()
    other = path.with_name("other")
    add(other, "a\nb\nc\n")
    other.rename(path)
    assert growing.read() == Lines([b"a", b"b", b"c"], restarted=True)
    path.unlink()
    assert growing.read() == Lines([], restarted=True)
    add(path, "d\n")
    assert growing.read() == Lines([b"d"])


def test_lines_without_a_row_are_left_out_and_counted_until_the_file_is_cut_back(path: Path) -> None:
    growing = GrowingFile(path)
    add(path, '{"step": 1, "time": 5}\n\n[]\n{"step": -1}\n{"step": 2}\n')
    assert growing.read_rows("step", "time") == Rows([{"step": 1, "time": 5}])
    assert growing.unread == 3
    add(path, "\0\0\n")
    growing.read_rows("step", "time")
    assert growing.unread == 4
    os.truncate(path, 23)
    assert growing.read_rows("step", "time") == Rows([{"step": 1, "time": 5}], restarted=True)
    assert growing.unread == 0


def test_all_rows_and_the_last_one_leave_out_a_truncated_line(path: Path) -> None:
    assert (read_rows(path), read_last_row(path)) == ([], {})
    add(path, '{"step": 1}\n{"step": 2}\n{"step": 3}')
    assert (read_rows(path), read_last_row(path)) == ([{"step": 1}, {"step": 2}], {"step": 2})
    add(path, "\n7\n")
    assert (len(read_rows(path)), read_last_row(path)) == (3, {})


# What is said of a disk that the checkpoints of a training do not fit on.


SAVE = NeededSpace(1_000_000, 5)
"""Takes 1,120,480 bytes with the ends of blocks and what is left for logs."""
TB = 10**12


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (FreeSpace(None, None), None),
        (FreeSpace(1_120_480, 5), None),
        (FreeSpace(1_120_479, 5), "it needs 1,000,000 bytes and 120,480 for blocks and logs, 1,120,479 bytes are free"),
        (FreeSpace(0, None), "0 bytes are free"),
        (FreeSpace(TB, 4), "it needs 5 files, and the file system can hold 4 more (free inodes)"),
        (FreeSpace(None, 4), "5 files"),
    ],
)
def test_a_save_that_would_not_leave_room_for_the_logs_does_not_fit(free: FreeSpace, words: str | None) -> None:
    why = why_no_room(SAVE, free)
    assert why is None if words is None else words in (why or "")


def test_no_more_than_16_mib_are_left_for_the_logs() -> None:
    assert NeededSpace(TB, 5).with_logs == TB + 5 * 4096 + 2**24


@pytest.mark.parametrize(
    ("saves", "free", "refuses", "words"),
    [
        # (saves at a time beyond those on the disk, free space)
        (9, FreeSpace(TB, TB), None, ""),
        (9, FreeSpace(None, None), None, ""),
        (9, FreeSpace(5_000_000, TB), False, "will be full before the run ends: it needs 9,000,000 bytes"),
        (9, FreeSpace(2_000_000, TB), True, "no room for the first saves: it needs 2,000,000 bytes"),
        (9, FreeSpace(TB, 40), False, "it needs 45 files"),
        (9, FreeSpace(TB, 9), True, "it needs 10 files"),
        # The only save of a run, or the second beside one that is there.
        (1, FreeSpace(1_200_000, TB), None, ""),
        (1, FreeSpace(1_000_000, TB), True, "it needs 1,000,000 bytes"),
        # None is added to what is there, as after a resume whose newest is removed at the start.
        (0, FreeSpace(100, TB), None, ""),
    ],
)
def test_two_saves_that_do_not_fit_refuse_the_training_and_more_of_them_warn(
    saves: int, free: FreeSpace, refuses: bool | None, words: str
) -> None:
    shortage = find_shortage(SAVE, SAVE.times(saves), free)
    if refuses is None:
        assert shortage is None
    else:
        assert shortage is not None
        assert shortage.refuses is refuses
        assert words in shortage.text
