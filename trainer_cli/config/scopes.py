"""What the names of a body are bound to, as its statements would bind them: of a module, or of a class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Binding(NamedTuple):
    """One way in which a name gets its value."""

    node: ast.AST | None
    """A definition, an import, or the expression assigned; null: anything else, such as a loop's variable."""
    conditional: bool = False
    """Only on one way through the module: in `if`, `try` or a loop."""
    typing: bool = False
    """Only for type checkers."""
    source: str = ""
    """Of an import from a module: the name there. Of `import a.b as c`: the module."""


@dataclass(slots=True)
class Scope:
    """What is bound in a body, in order, and whence stars import. Later bindings come last."""

    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[tuple[ast.ImportFrom, bool]] = field(default_factory=list)

    def of(self, name: str) -> list[Binding]:
        """How a name may have got its last value: nothing before the last certain one."""
        ways = self.bindings.get(name, [])
        certain = [index for index, way in enumerate(ways) if not way.conditional and not way.typing]
        return ways[certain[-1] :] if certain else ways


def scope_of(body: Sequence[ast.stmt]) -> Scope:
    """What a body binds: of a module or a class."""
    scope = Scope()
    _bind(scope, body, conditional=False, typing=False)
    return scope


def _bind(scope: Scope, body: Sequence[ast.stmt], *, conditional: bool, typing: bool) -> None:
    def add(name: str, node: ast.AST | None, source: str = "") -> None:
        scope.bindings.setdefault(name, []).append(Binding(node, conditional, typing, source))

    def deeper(inner: Sequence[ast.stmt], certain: bool = False) -> None:
        _bind(scope, inner, conditional=conditional or not certain, typing=typing)

    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                add(statement.name, statement)
            case ast.Import():
                for alias in statement.names:
                    top = alias.name.partition(".")[0]
                    add(alias.asname or top, statement, alias.name if alias.asname else top)
            case ast.ImportFrom():
                for alias in statement.names:
                    if alias.name == "*":
                        if not typing:
                            scope.stars.append((statement, conditional))
                    else:
                        add(alias.asname or alias.name, statement, alias.name)
            case ast.Assign():
                for target in statement.targets:
                    for name in _names(target):
                        add(name, statement.value if isinstance(target, ast.Name) else None)
            case ast.AnnAssign():
                if statement.value is not None and isinstance(statement.target, ast.Name):
                    add(statement.target.id, statement.value)
            case ast.AugAssign():
                for name in _names(statement.target):
                    add(name, None)
            case ast.If():
                test = ast.unparse(statement.test)
                known = re.fullmatch(r"(not )?(?:\w+\.)?TYPE_CHECKING", test)
                first, second = (statement.body, statement.orelse)
                if known:
                    if known[1]:
                        first, second = second, first
                    _bind(scope, first, conditional=True, typing=True)
                    deeper(second, certain=True)
                else:
                    deeper(first)
                    deeper(second)
            case ast.Try() | ast.TryStar():
                deeper(statement.body)
                for handler in statement.handlers:
                    deeper(handler.body)
                deeper(statement.orelse)
                deeper(statement.finalbody, certain=True)
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    for name in _names(item.optional_vars):
                        add(name, None)
                deeper(statement.body, certain=True)
            case ast.For() | ast.AsyncFor():
                for name in _names(statement.target):
                    add(name, None)
                deeper(statement.body)
                deeper(statement.orelse)
            case ast.While():
                deeper(statement.body)
                deeper(statement.orelse)
            case ast.Match():
                for case in statement.cases:
                    deeper(case.body)
            case ast.Delete():
                for target in statement.targets:
                    for name in _names(target):
                        add(name, None)


def _names(target: ast.expr | None) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _names(element)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)
