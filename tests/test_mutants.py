"""The mutants of scripts/mutants.py fit the code of today; whether tests notice them takes an hour to show."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import MUTANTS

ROOT = Path(__file__).parents[1]
ADDONS = "trainer_cli/addons/"
THERE = [
    name for name, mutant in MUTANTS.items() if not mutant.file.startswith(ADDONS) or (ROOT / mutant.file).exists()
]
"""The mutants without those of deleted add-ons."""


@pytest.mark.parametrize("name", THERE)
def test_a_mutant_changes_one_text_and_names_tests_that_exist(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    for test in mutant.tests:
        file, *names = test.split("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert all(f" {part}" in content for part in names), test
