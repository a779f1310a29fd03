"""A folder with a trained run, and a copy of it to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import SMALL, trained


@pytest.fixture(scope="session")
def _original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    trained(*SMALL, "name=base", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def base(_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `base` of 20 steps with checkpoints at 0, 10 and 20."""
    return Path(shutil.copytree(_original, tmp_path_factory.mktemp("base"), dirs_exist_ok=True))


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(base, tmp_path / "place")
    return tmp_path / "place"
