"""What a `_target_` may name, for a user's own config and for one found on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer_cli
from trainer_cli.components import targets
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError

OWN = Trust()
WHERE = "model._target_, configs/model/mlp.yaml:2"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package, a module, a loose alias of `os.system`, and an environment inside it."""
    files = {
        "mine_pkg/__init__.py": "from os import system as innocent\nfrom mine_pkg.nets import Net\nVALUE = 3\n",
        "mine_pkg/nets.py": "class Net:\n    @classmethod\n    def made(cls): return cls()\ndef make(): return Net()\n",
        "mine_pkg/broken.py": "import not_there_at_all\n",
        "mine_pkg/failing.py": "raise ValueError('on import')\n",
        "mine_one.py": "class One: pass\n",
        "src/mine_src/__init__.py": "",
        ".venv/lib/other.py": "",
        "subprocess.py": "",
        "notes/readme.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("mine_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    ["mine_pkg.nets.Net", "mine_pkg.Net", "mine_pkg.nets.make", "mine_pkg.Net.made", "mine_one.One", "math.sqrt"],
)
def test_a_users_own_config_may_name_any_class_or_function(mine: Path, path: str) -> None:
    assert callable(targets.import_target(path, WHERE, OWN))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mine_pgk.Net", f"there is no package 'mine_pgk' ({WHERE})"),
        ("mine_pkg.nest.Net", f"package mine_pkg has no 'nest' ({WHERE}). Did you mean"),
        ("mine_pkg.nets.Nett", f"module mine_pkg.nets has no 'Nett' ({WHERE}). Did you mean 'Net'?"),
        ("mine_pkg.nets.Net.maid", "has no 'maid'"),
        ("Net", "is not a dotted name"),
        ("mine_pkg..Net", "is not a dotted name"),
        ("mine_pkg.class.x", "is not a dotted name"),
        ("mine_pkg.VALUE", "is of type int, but it must be a class or a function"),
        ("mine_pkg.nets", "is a module, but"),
    ],
)
def test_a_target_that_is_not_there_or_is_no_factory_is_reported(mine: Path, path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        targets.import_target(path, WHERE, OWN)
    assert expected in str(caught.value)
    assert "configs/model/mlp.yaml:2" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "error"), [("mine_pkg.broken.X", ModuleNotFoundError), ("mine_pkg.failing.X", ValueError)]
)
def test_an_error_inside_the_users_module_is_his_own_with_a_note(mine: Path, path: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        targets.import_target(path, WHERE, OWN)
    assert WHERE in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "path", ["os.system", "posix.system", "shutil.rmtree", "subprocess.Popen", "builtins.eval", "mine_pkg.innocent"]
)
def test_what_runs_or_destroys_anything_is_refused_by_whatever_name(mine: Path, path: str) -> None:
    for trust in (OWN, Trust(frozenset({"os", "posix", "shutil", "subprocess", "builtins", "mine_pkg"}))):
        with pytest.raises(ConfigError, match="blocked"):
            targets.import_target(path, WHERE, trust)


@pytest.mark.parametrize(
    "path", ["mine_pkg.nets.Net", "mine_pkg.Net", "mine_pkg.Net.made", "mine_one.One", "trainer_cli.data.x.Local"]
)
def test_a_recovered_config_may_name_the_project_and_our_components(
    mine: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.startswith("trainer_cli"):
        fake = type(sys)("trainer_cli.data.x")
        fake.Local = type("Local", (), {"__module__": "trainer_cli.data.x"})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trainer_cli.data.x", fake)
    assert callable(targets.import_target(path, WHERE, Trust.recovered(mine, [])))


@pytest.mark.parametrize(
    "path",
    [
        "math.sqrt",
        "other.X",
        "trainer_cli.commands.command_line.main",
        "trainer_cli.config.yaml.Path",
        "mine_alias.sqrt",
    ],
)
def test_a_recovered_config_may_name_nothing_else_not_even_by_an_alias(mine: Path, path: str) -> None:
    (mine / "mine_alias.py").write_text("from math import sqrt\n")
    with pytest.raises(ConfigError, match=r"comes from a config on disk .* trust=\["):
        targets.import_target(path, WHERE, Trust.recovered(mine, []))


def test_an_untrusted_package_is_not_even_imported(mine: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine_evil.py").write_text("raise SystemExit('imported')\n")
    sys.path.append(str(elsewhere))
    with pytest.raises(ConfigError, match="mine_evil"):
        targets.import_target("mine_evil.X", WHERE, Trust.recovered(mine, []))


def test_a_folder_of_the_projects_does_not_vouch_for_an_installed_namesake(mine: Path) -> None:
    (mine / "yaml").mkdir()
    (mine / "yaml/notes.py").write_text("")
    assert "yaml" in set(targets.find_project_packages(mine))
    import yaml

    assert not str(yaml.__file__).startswith(str(mine))
    with pytest.raises(ConfigError, match=r"comes from a config on disk"):
        targets.import_target("yaml.safe_load", WHERE, Trust.recovered(mine, []))


def test_an_environment_inside_the_project_is_not_the_project(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = mine / ".venv/lib"
    (site / "mine_installed.py").write_text("class Net: ...\n")
    (mine / "mine_installed").mkdir()
    (mine / "mine_installed/data.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    with pytest.raises(ConfigError, match=r"comes from a config on disk"):
        targets.import_target("mine_installed.Net", WHERE, Trust.recovered(mine, []))


def test_nothing_is_imported_by_way_of_an_alias(mine: Path) -> None:
    (mine / "mine_alias.py").write_text("import xml\n")
    for trust in (OWN, Trust.recovered(mine, [])):
        with pytest.raises(ConfigError):
            targets.import_target("mine_alias.xml.sax.saxutils.escape_not", WHERE, trust)
        with pytest.raises(ConfigError):
            targets.import_target("mine_alias.xml.dom.nosuch.X", WHERE, trust)


def test_a_module_that_ends_the_process_is_a_mistake_in_the_config(mine: Path) -> None:
    (mine / "mine_script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="importing mine_script ends the process"):
        targets.import_target("mine_script.X", WHERE, OWN)


def test_wrapped_and_nested_ones_of_the_projects_own_are_trusted(mine: Path) -> None:
    (mine / "mine_wrapped.py").write_text(
        "import contextlib, functools\n"
        "def logged(f):\n"
        "    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
        "@logged\ndef make(): ...\n"
        "def factory():\n    class Net:\n        def forward(self): ...\n    return Net\n"
        "Net = factory()\nNetTwo = type('NetTwo', (), {})\n"
        "class Outer:\n    class Inner: ...\n    @classmethod\n    @logged\n    def made(cls): ...\n"
    )
    for name in ("make", "Net", "NetTwo", "Outer.Inner", "Outer.made"):
        assert callable(targets.import_target(f"mine_wrapped.{name}", WHERE, Trust.recovered(mine, [])))


def test_a_checkout_of_ours_is_no_project_that_may_name_all_of_it() -> None:
    root = Path(targets.__file__).parents[2]
    for name in ("commands.command_line.main", "files.durable.replace", "running.build.Builder"):
        path = f"trainer_cli.{name}"
        with pytest.raises(ConfigError, match=r"comes from a config on disk"):
            targets.import_target(path, WHERE, Trust.recovered(root, []))


def test_a_projects_packages_are_its_own_and_no_standard_ones(mine: Path) -> None:
    assert set(targets.find_project_packages(mine)) == {"mine_pkg", "mine_one", "mine_src"}


def test_the_project_root_comes_first_on_the_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["a"])
    targets.import_from(tmp_path)
    targets.import_from(tmp_path)
    assert sys.path == [str(tmp_path), "a"]


def test_torchs_modules_optimizers_and_schedulers_are_trusted_and_nothing_else_of_it() -> None:
    code = """
from trainer_cli.components import targets
from trainer_cli.errors import ConfigError
import sys
assert "torch" not in sys.modules
trust = targets.Trust(frozenset())
for path in ("torch.nn.Linear", "torch.optim.AdamW", "torch.optim.lr_scheduler.StepLR", "torch.optim.Adam"):
    targets.import_target(path, "here", trust)
for path in ("torch.hub.load", "torch.load", "torch.nn.Module.apply", "torch.nn.init.zeros_"):
    try:
        targets.import_target(path, "here", trust)
    except ConfigError:
        continue
    raise SystemExit(path)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_relative_import_outside_a_package_says_what_to_do(mine: Path) -> None:
    (mine / "mine_relative.py").write_text("import os\nfrom .mine_one import One\n")
    with pytest.raises(ConfigError) as refused:
        targets.import_target("mine_relative.One", WHERE, OWN)
    assert f"{mine}/mine_relative.py:2: from .mine_one import One: it is in no package" in refused.value.what
    assert refused.value.cure == (
        "Import without the leading dot (from x import y), or move the modules into a folder with an __init__.py."
    )


@pytest.mark.parametrize("path", ["models.gpt.GPT", "callbacks.sparse_training.RigL", "trainer.warmup.WarmupCosine"])
@pytest.mark.parametrize("trust", [targets.Trust(), targets.Trust.recovered(Path("/nowhere"), [])], ids=["any", "disk"])
def test_a_public_class_is_found_by_the_module_in_which_it_once_was(path: str, trust: targets.Trust) -> None:
    assert targets.import_target(f"trainer_cli.{path}", WHERE, trust) is getattr(trainer_cli, path.rpartition(".")[2])
