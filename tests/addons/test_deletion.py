"""Each add-on can be deleted, and all of them: everything else works, and what needs one names it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDONS = sorted(path.parent.name for path in (ROOT / "trainer_cli/addons").glob("*/addon.py"))
SHIPPED = json.loads((ROOT / "trainer_cli/addons/shipped.json").read_text(encoding="utf-8"))
SPEC = importlib.util.spec_from_file_location("addons", ROOT / "scripts" / "addons.py")
assert SPEC is not None
assert SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)
CASES = {**{name: [name] for name in ADDONS}, "all": ADDONS}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What failed in each copy."""
    folder = tmp_path_factory.mktemp("copies")
    for name, deleted in CASES.items():
        copy = folder / name
        for top in ("trainer_cli", *script.TOPS):
            shutil.copytree(ROOT / top, copy / top)
        # As in a wheel.
        shutil.copytree(ROOT / "configs", copy / "trainer_cli/configs")
        for addon in deleted:
            shutil.rmtree(copy / "trainer_cli/addons" / addon)
        # What else the tests of the pages read.
        for file in ROOT.iterdir():
            if not file.name.startswith(".") and not (copy / file.name).exists():
                (copy / file.name).symlink_to(file)
        for page, text in script.prune_pages({addon: SHIPPED[addon] for addon in deleted}).items():
            (copy / page.relative_to(ROOT)).unlink()
            if text is not None:
                (copy / page.relative_to(ROOT)).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/without_addons.py"), str(folder)],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_without_an_addon_everything_else_works(name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[name], "\n".join(failures[name])


def test_code_outside_of_an_addon_imports_its_classes_from_its_modules() -> None:
    """mypy takes a module for `Any` if its add-on was deleted, but not an attribute of `trainer_cli`."""
    # With an earlier place of a name, which goes with `exact`.
    allowed = {(Path("trainer_cli/testing/resume.py"), "assert_resume_is_exact")}
    of = {name: addon for addon, brings in SHIPPED.items() for name in brings["names"]}
    used = re.compile(rf"\btrainer_cli\.(?:{'|'.join(of)})\b|from trainer_cli import")
    found = set()
    for file in (file for top in ("trainer_cli", "tests", "scripts") for file in (ROOT / top).rglob("*.py")):
        if not used.search(text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(ast.Name("trainer_cli"), attr=name):
                    names = {name}
                case ast.ImportFrom("trainer_cli", aliases):
                    names = {each.name for each in aliases}
                case _:
                    continue
            place = file.relative_to(ROOT)
            found |= {(place, name) for name in names & of.keys() if f"addons/{of[name]}/" not in place.as_posix()}
    assert found <= allowed
