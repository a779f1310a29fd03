"""What is said of a disk that the checkpoints of a training do not fit on."""

from __future__ import annotations

import pytest

from trainer_cli.checkpoint.disk_space import FreeSpace, NeededSpace, find_shortage, why_no_room

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
