"""Files of JSON lines: read while they grow, each line once, and after a resume has cut them back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_cli.files import json_lines
from trainer_cli.files.json_lines import GrowingFile, Lines, Rows, read_last_row, read_rows


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
