"""What a definition takes, read off its syntax tree: a function's parameters, a dataclass's fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from trainer_cli.config.parameters import NO_DEFAULT, Kind, Parameter, parameter

_SAME_SIGNATURE = ("staticmethod", "classmethod", "final", "override", "no_grad", "enable_grad", "inference_mode",
                   "abstractmethod", "deprecated")  # fmt: skip
SAME_CLASS = ("final", "runtime_checkable", "total_ordering")
_PLAIN_METACLASSES = ("ABCMeta", "type")
_CLASS_VAR = re.compile(r"['\"]?(?:\w+\.)*ClassVar\b")


def odd_class(node: ast.ClassDef, *, decorated: bool = True) -> bool:
    """Whether a metaclass or decorator may change what the class has or takes."""
    metaclasses = [last_name(word.value) for word in node.keywords if word.arg == "metaclass"]
    marks = [last_name(one) for one in node.decorator_list] if decorated else []
    return any(name not in _PLAIN_METACLASSES for name in metaclasses) or any(
        mark not in (*SAME_CLASS, "dataclass") for mark in marks
    )


def keeps_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function takes, with its decorators, what it takes without."""
    return all(last_name(mark) in _SAME_SIGNATURE for mark in node.decorator_list)


def last_name(node: ast.expr) -> str:
    """The last part of a name, called or not."""
    target = node.func if isinstance(node, ast.Call) else node
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def listed(arguments: ast.arguments) -> Iterator[Parameter]:
    """The parameters of a definition."""
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(placed) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (one, default) in enumerate(zip(placed, defaults, strict=True)):
        kind = Kind.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else Kind.POSITIONAL_OR_KEYWORD
        yield _parameter(one, kind, default)
    if arguments.vararg is not None:
        yield Parameter(arguments.vararg.arg, Kind.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(one, Kind.KEYWORD_ONLY, default)
    if arguments.kwarg is not None:
        yield Parameter(arguments.kwarg.arg, Kind.VAR_KEYWORD)


def _parameter(one: ast.arg, kind: object, default: ast.expr | None) -> Parameter:
    return parameter(one.arg, kind, one.annotation, _literal(default), has_default=default is not None)


def _literal(node: ast.expr | None) -> object:
    try:
        return NO_DEFAULT if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return NO_DEFAULT


def options_of(mark: ast.expr) -> dict[str, object] | None:
    """The keywords of a decorator; None where one is computed."""
    words = mark.keywords if isinstance(mark, ast.Call) else []
    options = {word.arg or "": _literal(word.value) for word in words}
    return None if NO_DEFAULT in options.values() else options


def own_fields(node: ast.ClassDef, *, keyword_only: bool) -> Iterator[tuple[str, Parameter | None] | None]:
    """The fields that a dataclass adds: name and parameter, null for one that is not given; None: cannot be told."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, annotation, value = statement.target.id, statement.annotation, statement.value
        if _CLASS_VAR.match(ast.unparse(annotation)):
            continue
        if last_name(annotation) == "KW_ONLY":
            keyword_only = True
            continue
        options: dict[str, object] = {}
        has_default = value is not None
        default = _literal(value)
        if isinstance(value, ast.Call) and last_name(value) == "field":
            names = {word.arg for word in value.keywords}
            has_default = bool(names & {"default", "default_factory"})
            options = {word.arg or "": _literal(word.value) for word in value.keywords}
            default = options.get("default", NO_DEFAULT)
            if any(options.get(name) is NO_DEFAULT for name in ("init", "kw_only") if name in options):
                yield None
        if options.get("init") is False:
            yield name, None
            continue
        kind = Kind.KEYWORD_ONLY if options.get("kw_only", keyword_only) else Kind.POSITIONAL_OR_KEYWORD
        yield name, parameter(name, kind, annotation, default, has_default=has_default)
