"""The memory that a process has, and that it can have within the limits of its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.memory import _control_group_bytes, available_bytes, peak_resident_bytes, resident_bytes


def test_memory_that_is_resident_counts_now_and_at_the_peak() -> None:
    now = resident_bytes()
    assert now is None or 1_000_000 < now <= 1.1 * peak_resident_bytes()


@pytest.mark.parametrize("statm", [None, "", "7", "7 many"], ids=["absent", "empty", "short", "a word"])
def test_without_a_counter_the_memory_is_unknown(statm: str | None, tmp_path: Path) -> None:
    if statm is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/statm").write_text(statm)
    assert resident_bytes(tmp_path) is None


def test_the_memory_that_can_be_had_is_known_here() -> None:
    assert (available_bytes() or 0) > 1_000_000


@pytest.mark.parametrize(
    ("message", "groups", "left"),
    [
        ("0::/\n", {"": ("900", 500, 100)}, [500]),
        ("0::/job/step\n", {"job": ("700", 300, 0), "job/step": ("max", 300, 0)}, [400]),
        ("0::/job/step\n", {"job": ("max", 9, 0), "job/step": ("50", 40, 0)}, [10]),
        ("0::/not/seen/inside\n", {"": ("60", 10, 5)}, [55]),
        ("", {"": ("60", 10, 0)}, [50]),
        ("0::/\n", {}, []),
    ],
    ids=["a container", "a job's limit", "a step's limit", "another path inside",
         "no file of groups", "no group"],
)  # fmt: skip
def test_the_limits_of_every_group_above_the_process_count(
    tmp_path: Path, message: str, groups: dict[str, tuple[str, int, int]], left: list[int]
) -> None:
    for path, (most, now, cached) in groups.items():
        folder = tmp_path / "root" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{now}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    (tmp_path / "own").write_text(message)
    found = list(_control_group_bytes(tmp_path / "root", tmp_path / "own"))
    assert sorted(set(found), reverse=True) == left
