"""The mutants of scripts/mutants.py fit the code of today; whether tests notice them takes an hour to show."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).parents[1]
ADDONS = ROOT / "trainer_cli/addons"
IS_WHOLE = all((ADDONS / name).is_dir() for name in json.loads((ADDONS / "shipped.json").read_text("utf-8")))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_function_and_names_tests_that_exist(name: str) -> None:
    mutant = MUTANTS[name]
    try:
        path, changed = mutant.change(ROOT)
    except ValueError as error:
        if IS_WHOLE or "is defined in 0 files" not in str(error):
            raise
        pytest.skip("of an add-on that was deleted")
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(path.read_text(encoding="utf-8")))
    for test in mutant.tests:
        file, *names = test.split("::")
        content = (ROOT / file).read_text(encoding="utf-8")
        assert all(f" {part}" in content for part in names), test


MODULE = '''
LIMITS = {"a": 1}

class Writer:
    def close(self):
        # A comment.
        self.sync(
            self.file,  # And another.
        )
        if self.é and self.is_open: self.done()

    def open(self):
        """Opens."""
        self.sync(self.file)
        self.file = f"{self.name}"

def open(): ...
'''


@pytest.mark.parametrize(
    ("function", "old", "new", "changed"),
    [
        ("Writer.close", "self.sync(self.file)", "", ("self.sync(self.file)\n        if", "if")),
        ("Writer.close", "self.is_open", "True", ("and self.is_open", "and True")),
        ("Writer.close", "self.done()", "", ("self.done()", "pass")),
        (
            "Writer.open", "self.sync(self.file)", "self.a()\nself.b()",
            ("self.sync(self.file)\n        self.file =", "self.a()\n        self.b()\n        self.file ="),
        ),
        ("Writer.open", "f'{self.name}'", "None", ("f'{self.name}'", "None")),
        ("LIMITS", "1", "2", ("1}", "2}")),
        ("trainer_cli.writer:open", "...", "open()", ("...", "open()")),
    ],
)  # fmt: skip
def test_a_mutant_is_found_by_its_function_and_its_code(
    function: str, old: str, new: str, changed: tuple[str, str], tmp_path: Path
) -> None:
    _write(tmp_path, writer=MODULE, other="def open(): ...\n")
    path, text = Mutant(function, old, new, ()).change(tmp_path)
    assert path.name == "writer.py"
    plain = ast.unparse(ast.parse(MODULE))
    assert plain.count(changed[0]) == 1
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(plain.replace(*changed)))


@pytest.mark.parametrize(
    ("function", "old", "message"),
    [
        ("Writer.close", "self.sync(self.name)", "Writer.close has 'self.sync(self.name)' 0 times, not once"),
        ("Writer.open", "self", "Writer.open has 'self' 3 times, not once"),
        ("open", "...", "open is defined in 2 files, not one"),
        ("Writer.write", "...", "Writer.write is defined in 0 files"),
    ],
)
def test_a_mutant_that_does_not_fit_says_so(function: str, old: str, message: str, tmp_path: Path) -> None:
    _write(tmp_path, writer=MODULE, other="def open(): ...\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        Mutant(function, old, "None", ()).change(tmp_path)


def _write(root: Path, **modules: str) -> None:
    (root / "trainer_cli").mkdir()
    for name, text in modules.items():
        (root / f"trainer_cli/{name}.py").write_text(text, encoding="utf-8")
