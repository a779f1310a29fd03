"""A mutant: one change of one function, named by the function and by code, so that neither moves nor formats matter."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """An expression, or statements, that a function has once, what is put in their place, and the tests that notice.

    `function` is its qualified name, `LocalStorage.commit`, which the package has once; `trainer_cli.manifest:read` if
    several modules have one of that name; the name of a class or of a constant of a module for what is in no function.
    `old` is compared with the code as Python reads it: without comments, line breaks and parentheses. Without `new` the
    statements are left out.
    """

    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def change(self, root: Path) -> tuple[Path, str]:
        """The file of the function, and its text with the change."""
        path, places = find_definitions(root, self.function)
        text = path.read_text(encoding="utf-8")
        is_expression = _is_expression(self.old) and _is_expression(self.new)
        old = ast.parse(self.old).body
        wanted = [ast.dump(node.value if is_expression and isinstance(node, ast.Expr) else node) for node in old]
        found = [
            (nodes, is_all)
            for place in places
            for nodes, is_all in (_expressions(place) if is_expression else _statements(place, len(wanted)))
            if [ast.dump(node) for node in nodes] == wanted
        ]
        if len(found) != 1:
            raise ValueError(f"{path}: {self.function} has {self.old!r} {len(found)} times, not once")
        (first, *_), is_all = found[0]
        last = found[0][0][-1]
        lines = text.encode().splitlines(keepends=True)
        begin, end = first.col_offset, last.end_col_offset or 0
        new = f"({self.new})" if is_expression else textwrap.indent(self.new or "pass", " " * begin)[begin:]
        before, after = lines[first.lineno - 1][:begin], lines[(last.end_lineno or 0) - 1][end:]
        is_left_out = not self.new and not is_all
        lines[first.lineno - 1 : last.end_lineno] = [] if is_left_out else [before + new.encode() + after]
        return path, b"".join(lines).decode()


def find_definitions(root: Path, name: str) -> tuple[Path, list[ast.AST]]:
    """The one file that defines a name, and the definitions: a property and its setter have one name."""
    module, _, qualified = name.rpartition(":")
    outermost, *_ = names = qualified.split(".")
    found = {}
    for path in [root / f"{module.replace('.', '/')}.py"] if module else _paths_by_name(root).get(outermost, ()):
        if places := [*_defined(_parse(path.read_text(encoding="utf-8")), names)]:
            found[path] = places
    if len(found) != 1:
        raise ValueError(f"{name} is defined in {len(found)} files, not one: {', '.join(map(str, found))}")
    return next(iter(found.items()))


@cache
def _paths_by_name(root: Path) -> dict[str, list[Path]]:
    """Name at the beginning of a line -> the modules of the package that may define it."""
    paths = defaultdict(list)
    for path in sorted((root / "trainer_cli").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"^(?:class |def |async def )?(\w+)", text, re.MULTILINE)):
            paths[name].append(path)
    return paths


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _defined(node: ast.AST, names: list[str]) -> Iterator[ast.AST]:
    if not names:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == names[0]:
                yield from _defined(child, names[1:])
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if names == [ast.unparse(target) for target in targets]:
                yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _defined(child, names)


def _is_expression(code: str) -> bool:
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        return False
    return True


def _expressions(tree: ast.AST) -> Iterator[tuple[list[ast.expr], bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            yield [node], False
        # The positions of what is in an f-string are those of another text, before Python 3.12.
        if not isinstance(node, ast.JoinedStr):
            yield from _expressions(node)


def _statements(tree: ast.AST, number: int) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Each sequence of so many statements, and whether it is the whole of a block."""
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if isinstance(body, list):
                yield from ((body[at : at + number], len(body) == number) for at in range(len(body) - number + 1))
