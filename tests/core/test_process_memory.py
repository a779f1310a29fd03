"""The resident memory of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.core.process_memory import peak_resident_bytes, resident_bytes


def test_memory_that_is_resident_counts_now_and_at_the_peak() -> None:
    now = resident_bytes()
    assert now is None or 1_000_000 < now <= 1.1 * peak_resident_bytes()


@pytest.mark.parametrize("statm", [None, "", "7", "7 many"], ids=["absent", "empty", "short", "a word"])
def test_without_a_counter_the_memory_is_unknown(statm: str | None, tmp_path: Path) -> None:
    if statm is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self/statm").write_text(statm)
    assert resident_bytes(tmp_path) is None
