"""A frozen config comes back as it was, whatever became of the YAML it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.config.compose import compose, diff, freeze, thaw


def test_a_frozen_config_comes_back_without_the_yaml_that_it_came_from(empty_folder: Path) -> None:
    options = Path("configs/experiment")
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text("# @package _global_\noptimizer:\n  lr: 1.0e-05\nresume_allow: [seed]\n")
    composed = compose(["experiment=mine", "resume=must", "name=x", "trust=[there]"])
    file = empty_folder / "KEY.yaml"
    file.write_text(freeze(composed, "sweep/KEY"))
    (options / "mine.yaml").write_text("][")
    Path("configs/config.yaml").write_text("][")
    thawed = thaw(file, ["experiment=mine"])
    assert [change.key for change in diff(composed.raw, thawed.raw)] == ["run_dir"]
    assert thawed.config.run_dir == "runs/x/sweep/KEY"
    assert (thawed.config.resume, thawed.config.resume_allow) == ("must", ["seed"])
    assert thawed.overrides == ["experiment=mine"]
    assert thawed.project_root == empty_folder
    assert thawed.where("optimizer.lr").startswith("KEY.yaml:")


def test_the_project_is_the_one_that_holds_the_given_configs(empty_folder: Path) -> None:
    Path("project/configs").mkdir(parents=True)
    file = empty_folder / "KEY.yaml"
    file.write_text(freeze(compose([]), "there"))
    assert thaw(file, [], config_dir=Path("project/configs")).project_root == empty_folder / "project"


def test_secrets_stay_out_of_it(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hush")
    text = freeze(compose(["trust=['${oc.env:TOKEN}']"]), "there")
    assert "${oc.env:TOKEN}" in text
    assert "hush" not in text
