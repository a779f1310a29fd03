"""Hydra: composing, and instantiating."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate


def test_hydra_reports_a_defaults_list_that_leads_back_to_itself(tmp_path: Path) -> None:
    """It recurses until the stack overflows. `config/hydra_errors.py` names the line."""
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        try:
            compose("a")
        except HydraException:
            return
        except RecursionError as error:
            overflow = error
    assert isinstance(overflow, HydraException)


@pytest.mark.parametrize("target", ["pathlib.Path.touch", "builtins.open", "shutil.copyfile"])
def test_hydra_refuses_targets_that_write_files(target: str, tmp_path: Path) -> None:
    """It blocks some names, and says itself that this is no boundary. `components/targets.py` allows a recovered config
    only the packages that are trusted."""
    source, path = tmp_path / "source", tmp_path / "written"
    source.write_text("text")
    arguments = {
        "pathlib.Path.touch": [path],
        "builtins.open": [str(path), "w"],
        "shutil.copyfile": [str(source), str(path)],
    }[target]
    try:
        made = instantiate({"_target_": target}, *arguments)
        if hasattr(made, "close"):
            made.close()
    except HydraException:
        return
    assert not path.exists()
