"""Add-ons of other distributions: where they are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unprivileged import nobody

from trainer_cli import addon


def test_a_distribution_names_its_addon_as_an_entry_point(tmp_path: Path) -> None:
    assert not addon._has_addon(os.fspath(tmp_path))
    distribution = tmp_path / "other-1.0.dist-info"
    distribution.mkdir()
    assert not addon._has_addon(os.fspath(tmp_path))
    (distribution / "entry_points.txt").write_text("[trainer_cli.addons]\nother = other.addon:ADDON\n")
    assert addon._has_addon(os.fspath(tmp_path))


@pytest.mark.root
def test_a_folder_of_the_search_path_that_may_not_be_listed_has_no_addon() -> None:
    with nobody() as folder:
        (folder / "closed").mkdir(mode=0o100)
        assert not addon._has_addon(os.fspath(folder / "closed"))
