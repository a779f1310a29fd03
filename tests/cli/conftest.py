"""A user's project in the current folder, as `train new` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.cli.new import make_project


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project `shapes`, and nothing else in its folder's parent."""
    folder = tmp_path / "work" / "shapes"
    make_project(folder, "shapes")
    monkeypatch.chdir(folder)
    return folder
