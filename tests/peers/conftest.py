"""What the tests of tests/peers share: a folder of their own.

The tables beside this file, one for each other trainer, list what its own test suite claims: its test, the claim, the
test of this suite that tries it, and what differs here and why. A claim that another folder's tests show already names
one of these; all others are tried here, grouped by theme, once for all trainers. tests/test_docs.py holds the tables to
the tests, and the site shows them.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, new for each test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
