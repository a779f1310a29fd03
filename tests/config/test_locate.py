"""Where YAML is looked for, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_cli.config import search_path
from trainer_cli.config.search_path import SearchPath
from trainer_cli.errors import ConfigError


def package_in(folder: Path, *, wheel: bool = False, project: str | None = "trainer-cli") -> Path:
    package = folder / "trainer_cli"
    package.mkdir(parents=True)
    (package / "configs" if wheel else folder / "configs").mkdir()
    if project is not None:
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return package


def folders(dirs: list[Path]) -> SearchPath:
    return SearchPath(dirs, Path(), Path(), "config")


def test_the_named_folder_stands_before_the_projects_own_and_the_shipped_one(tmp_path: Path) -> None:
    package = package_in(tmp_path / "checkout")
    for name in ("mine", "work/configs"):
        (tmp_path / name).mkdir(parents=True)
    dirs = search_path.config_dirs(tmp_path / "mine", tmp_path / "work", package)
    assert dirs == [tmp_path / "mine", tmp_path / "work/configs", tmp_path / "checkout/configs"]


def test_a_folder_is_searched_once(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    assert search_path.config_dirs(Path("configs"), tmp_path, package) == [tmp_path / "configs"]


def test_a_wheel_carries_its_configs_inside(tmp_path: Path) -> None:
    package = package_in(tmp_path / "site-packages", wheel=True, project=None)
    assert search_path.shipped_folder("configs", package) == package / "configs"


@pytest.mark.parametrize("project", [None, "someone-elses"])
def test_a_configs_folder_beside_the_package_counts_only_in_our_own_checkout(
    tmp_path: Path, project: str | None
) -> None:
    assert search_path.shipped_folder("configs", package_in(tmp_path, project=project)) is None


def test_a_named_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a folder \(--config-dir\)"):
        search_path.config_dirs(Path("nowhere"), tmp_path, package_in(tmp_path))


def test_the_project_root_holds_the_configs_in_use(tmp_path: Path) -> None:
    assert search_path.project_root(Path("a/conf"), tmp_path) == tmp_path / "a"
    assert search_path.project_root(None, tmp_path) == tmp_path


def test_options_of_an_earlier_folder_stand_before_later_ones_and_nested_ones_have_paths(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for file in (first / "model/mlp.yaml", second / "model/mlp.yaml", second / "model/big/gpt.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# text\n")
    assert folders([first, second]).options("model") == {
        "big/gpt": second / "model/big/gpt.yaml",
        "mlp": first / "model/mlp.yaml",
    }


def test_experiments_come_first_among_the_groups(tmp_path: Path) -> None:
    for group in ("model", "data", "experiment"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "x.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    assert folders([tmp_path]).groups() == ["experiment", "data", "model"]


def test_what_is_hidden_no_file_or_linked_to_nothing_is_no_config(tmp_path: Path) -> None:
    group = tmp_path / "configs/model"
    for file in ("mine.yaml", ".mine.yaml", "old.yaml/note.txt", ".git/kept.yaml", "notes.yml", "deep/.backup/x.yaml"):
        (group / file).parent.mkdir(parents=True, exist_ok=True)
        (group / file).write_text("# text\n")
    (group / ".#mine.yaml").symlink_to("somebody@somewhere.1234")  # As an editor marks a file that is being changed.
    (group / "gone.yaml").symlink_to("nowhere.yaml")
    (group / "round.yaml").symlink_to("round.yaml")
    os.mkfifo(group / "pipe.yaml")
    (tmp_path / "configs/.idea").symlink_to("model")
    (tmp_path / "configs/.#config.yaml").symlink_to("somebody@somewhere.1234")
    (tmp_path / "configs/config.yaml").write_text("")
    dirs = [tmp_path / "configs"]
    assert folders(dirs).options("model") == {"mine": group / "mine.yaml"}
    assert folders(dirs).groups() == folders(dirs).every_group() == ["model"]
    assert folders(dirs).primaries() == ["config"]


def test_links_to_files_and_folders_are_followed_as_hydra_follows_them(tmp_path: Path) -> None:
    team, dirs = tmp_path / "team", [tmp_path / "configs"]
    for file in (team / "backbone/resnet.yaml", team / "trials/deep/wide.yaml", dirs[0] / "experiment/mine.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (dirs[0] / "backbone").symlink_to("../team/backbone")
    (dirs[0] / "experiment/team").symlink_to(team / "trials")
    (dirs[0] / "experiment/same.yaml").symlink_to("mine.yaml")
    assert folders(dirs).groups() == ["experiment", "backbone"]
    assert folders(dirs).every_group() == ["backbone", "experiment", "experiment/team", "experiment/team/deep"]
    assert list(folders(dirs).options("backbone")) == ["resnet"]
    assert folders(dirs).options("experiment") == {
        name: dirs[0] / f"experiment/{name}.yaml" for name in ("mine", "same", "team/deep/wide")
    }


def test_links_that_lead_back_are_followed_no_further(tmp_path: Path) -> None:
    for file in ("model/a.yaml", "other/b.yaml"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("")
    (tmp_path / "model/again").symlink_to(".")
    (tmp_path / "model/up").symlink_to("..")
    (tmp_path / "model/other").symlink_to("../other")
    (tmp_path / "other/model").symlink_to("../model")
    assert list(folders([tmp_path]).options("model")) == ["a", "other/b", "up/other/b"]


def test_a_file_that_cannot_be_read_has_no_description(tmp_path: Path) -> None:
    assert search_path.SearchPath.describe_file(tmp_path / "gone.yaml") == ""
    assert search_path.SearchPath.describe_file(tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A model.\nx: 1\n", "A model."),
        ("# @package _global_\n# An experiment.\n", "An experiment."),
        ("\n#\n# Late.\n", "Late."),
        ("x: 1\n# not this\n", ""),
        ("", ""),
    ],
)
def test_the_description_is_the_first_comment(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert search_path.SearchPath.describe_file(file) == expected
