"""Where YAML is looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.config import locate
from trainer_cli.errors import ConfigError


def package_in(folder: Path, *, wheel: bool = False, project: str | None = "trainer-cli") -> Path:
    package = folder / "trainer_cli"
    package.mkdir(parents=True)
    (package / "configs" if wheel else folder / "configs").mkdir()
    if project is not None:
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return package


def test_the_named_folder_stands_before_the_projects_own_and_the_shipped_one(tmp_path: Path) -> None:
    package = package_in(tmp_path / "checkout")
    for name in ("mine", "work/configs"):
        (tmp_path / name).mkdir(parents=True)
    dirs = locate.config_dirs(tmp_path / "mine", tmp_path / "work", package)
    assert dirs == [tmp_path / "mine", tmp_path / "work/configs", tmp_path / "checkout/configs"]


def test_a_folder_is_searched_once(tmp_path: Path) -> None:
    package = package_in(tmp_path)
    assert locate.config_dirs(Path("configs"), tmp_path, package) == [tmp_path / "configs"]


def test_a_wheel_carries_its_configs_inside(tmp_path: Path) -> None:
    package = package_in(tmp_path / "site-packages", wheel=True, project=None)
    assert locate.shipped_configs(package) == package / "configs"


@pytest.mark.parametrize("project", [None, "someone-elses"])
def test_a_configs_folder_beside_the_package_counts_only_in_our_own_checkout(
    tmp_path: Path, project: str | None
) -> None:
    assert locate.shipped_configs(package_in(tmp_path, project=project)) is None


def test_a_named_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a folder \(--config-dir\)"):
        locate.config_dirs(Path("nowhere"), tmp_path, package_in(tmp_path))


def test_the_project_root_holds_the_configs_in_use(tmp_path: Path) -> None:
    assert locate.project_root(Path("a/conf"), tmp_path) == tmp_path / "a"
    assert locate.project_root(None, tmp_path) == tmp_path


def test_options_of_an_earlier_folder_stand_before_later_ones_and_nested_ones_have_paths(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for file in (first / "model/mlp.yaml", second / "model/mlp.yaml", second / "model/big/gpt.yaml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# text\n")
    assert locate.options([first, second], "model") == {
        "big/gpt": second / "model/big/gpt.yaml",
        "mlp": first / "model/mlp.yaml",
    }


def test_experiments_come_first_among_the_groups(tmp_path: Path) -> None:
    for group in ("model", "data", "experiment"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "x.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    assert locate.groups([tmp_path]) == ["experiment", "data", "model"]


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
    assert locate.description(file) == expected
