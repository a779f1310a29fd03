"""Each add-on can be deleted, and all of them: everything else works, and what needs one names it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDONS = sorted(path.parent.name for path in (ROOT / "trainer_cli/addons").glob("*/addon.py"))
CASES = {**{name: [name] for name in ADDONS}, "all": ADDONS}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What failed in each copy."""
    folder = tmp_path_factory.mktemp("copies")
    for name, deleted in CASES.items():
        copy = folder / name
        shutil.copytree(ROOT / "trainer_cli", copy / "trainer_cli")
        # As in a wheel.
        shutil.copytree(ROOT / "configs", copy / "trainer_cli/configs")
        shutil.copytree(ROOT / "docs", copy / "docs")
        for addon in deleted:
            shutil.rmtree(copy / "trainer_cli/addons" / addon)
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
