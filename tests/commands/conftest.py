"""A user's project in the current folder, as `train new` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.commands.new import make_project


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project `mine`, in a folder called `shapes` that has no other beside it."""
    folder = tmp_path / "work" / "shapes"
    make_project(folder, "mine")
    monkeypatch.chdir(folder)
    return folder
