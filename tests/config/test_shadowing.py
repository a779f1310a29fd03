"""Modules of a project with the name of a library: one line says so, before one is taken for the other."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

import trainer_cli
from trainer_cli.commands.command_line import main
from trainer_cli.components.shadows import _LIBRARIES, refuse_shadows
from trainer_cli.components.targets import import_from
from trainer_cli.config.composing import from_yaml
from trainer_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("random.py", "random.py is hidden by Python's module random"),
        ("copy/__init__.py", "copy is hidden by Python's module copy"),
        ("yaml.py", "yaml.py is hidden by the library yaml"),
        ("trainer_cli.py", "trainer_cli.py is hidden by the library trainer_cli"),
        ("mailbox.py", "mailbox.py hides Python's module mailbox"),
    ],
)
def test_a_module_with_the_name_of_a_library_is_refused(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    before = list(sys.path)
    with pytest.raises(ConfigError) as refused:
        import_from(tmp_path)
    assert refused.value.what == message
    assert refused.value.cure == "Rename it."
    assert sys.path == before


@pytest.mark.parametrize(
    "file", ["model.py", "test.py", "random.txt", "copy/net.py", "trainer_cli/__init__.py", "src/random.py"]
)
def test_any_other_file_is_not(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    refuse_shadows(tmp_path)


def test_the_libraries_that_this_one_depends_on_are_known() -> None:
    needed = {one.split(";")[0].split(">")[0].lower() for one in requires("trainer-cli") or () if "extra ==" not in one}
    names = {name for name, owners in packages_distributions().items() if needed & {owner.lower() for owner in owners}}
    assert {name for name in names if name.isidentifier() and not name.startswith("_")} - _LIBRARIES <= {
        "functorch", "torchgen", "hydra_plugins"
    }  # fmt: skip


def test_a_recovered_config_says_so_in_place_of_a_lack_of_trust(empty_folder: Path) -> None:
    Path("copy.py").write_text("class Net: ...\n")
    Path("config.yaml").write_text("model: {_target_: copy.Net}\n")
    with pytest.raises(ConfigError, match=r"copy\.py is hidden by Python's module copy"):
        from_yaml(Path("config.yaml"), trusted=False, missing_ok=True)


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_a_verb_says_so(verb: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("random.py").touch()
    assert main([verb, "+experiment=digits_mlp"]) == 2
    assert "error: random.py is hidden by Python's module random\n" in capsys.readouterr().err


def test_python_m_takes_no_library_from_the_current_folder(empty_folder: Path) -> None:
    for name in ("random", "copy", "yaml", "numpy", "argparse"):
        Path(f"{name}.py").write_text("raise SystemExit(9)\n")
    env = {**os.environ, "PYTHONPATH": str(Path(trainer_cli.__file__).parents[1])}
    command = [sys.executable, "-m", "trainer_cli", "plan", "+experiment=digits_mlp"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2, done.stderr
    for name in ("random", "copy", "yaml", "numpy", "argparse"):
        assert f"{name}.py " in done.stderr
    assert "Traceback" not in done.stderr
