"""A dotted `_target_` looked up without running anything: files and syntax trees, names followed as an import would.

The answer is sure or it is Unknown, which is no mistake: a compiled module, a decorator or a metaclass that may do
anything, a name bound on two ways. The live check in run/build.py tells the rest.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_cli.config.modules import BrokenError, Finder, Module, UnreadableError, literal_names
from trainer_cli.config.parameters import Kind, Parameter
from trainer_cli.config.scopes import Binding, Scope, scope_of
from trainer_cli.config.signatures import (
    SAME_CLASS,
    keeps_signature,
    last_name,
    listed,
    odd_class,
    options_of,
    own_fields,
)


class Found(NamedTuple):
    """It is there. `kind`: class, function, module or value; `parameters` null where they cannot be told."""

    kind: str
    name: str
    parameters: tuple[Parameter, ...] | None = None
    made_in: str = ""
    """The module that defines it."""


class Absent(NamedTuple):
    """It is not there: what lacks which part, and the names that are there instead."""

    what: str
    part: str
    names: tuple[str, ...]


class Broken(NamedTuple):
    """A file on the way is not Python."""

    problem: str
    file: str
    line: int


class Unknown:
    """It cannot be told without importing."""


Answer = Found | Absent | Broken | Unknown

_TYPING = ("typing", "typing_extensions")
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp, ast.DictComp)
_OF_EVERY_CLASS = frozenset((*dir(type), *dir(object)))


class _Class(NamedTuple):
    module: Module
    node: ast.ClassDef
    scope: Scope


class _Function(NamedTuple):
    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    in_class: bool = False


class _Value:
    """A constant: neither class nor function."""


class _Object:
    """`object`, or a base that adds no constructor to it."""


class _Missing(NamedTuple):
    """Sure not to be there; the names that are."""

    names: tuple[str, ...] = ()


_Thing = Module | _Class | _Function | _Value | _Object | _Missing | Unknown
_UNKNOWN = Unknown()


class Statics:
    """Answers about targets, for a project whose roots come first on `sys.path` when it runs."""

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self._finder = Finder([*map(str, roots), *sys.path])
        self._active: set[tuple[str, str]] = set()
        self._answers: dict[str, Answer] = {}

    def look_up(self, path: str) -> Answer:
        """What a dotted path names."""
        if path not in self._answers:
            try:
                self._answers[path] = self._walk(path.split("."))
            except BrokenError as error:
                self._answers[path] = Broken(error.problem, error.file, error.line)
            except (UnreadableError, OSError, RecursionError):
                self._answers[path] = _UNKNOWN
        return self._answers[path]

    def _walk(self, parts: Sequence[str]) -> Answer:
        top = self._finder.module(parts[0])
        if top is None:
            return Absent(f"there is no package {parts[0]!r}", parts[0], tuple(self._finder.tops()))
        thing: _Thing = top
        for depth, part in enumerate(parts[1:], start=1):
            above, found = thing, self._member(thing, part)
            if isinstance(found, Unknown) and depth < len(parts) - 1 and _is_no_module_of_torch(above, part):
                found = _Missing(tuple(self._finder.names(top)))
            if isinstance(found, _Missing):
                kind = ""
                if isinstance(above, Module):
                    kind = "package " if above.folders else "module "
                return Absent(f"{kind}{'.'.join(parts[:depth])} has no {part!r}", part, found.names)
            if isinstance(found, Unknown | _Object | _Value) and depth < len(parts) - 1:
                return _UNKNOWN
            thing = found
        match thing:
            case Module():
                return Found("module", parts[-1])
            case _Class():
                takes = self._if_readable(lambda: self._constructor(thing))
                return Found("class", thing.node.name, takes, thing.module.name)
            case _Function():
                if not isinstance(thing.node, ast.Lambda) and not keeps_signature(thing.node):
                    return _UNKNOWN
                name = parts[-1] if isinstance(thing.node, ast.Lambda) else thing.node.name
                return Found("function", name, self._if_readable(lambda: self._parameters(thing)), thing.module.name)
            case _Value():
                return Found("value", parts[-1])
        return _UNKNOWN

    @staticmethod
    def _if_readable(ask: Callable[[], tuple[Parameter, ...] | None]) -> tuple[Parameter, ...] | None:
        try:
            return ask()
        except (UnreadableError, BrokenError):
            return None

    def _member(self, thing: _Thing, part: str) -> _Thing:
        if isinstance(thing, Module):
            return self._attribute(thing, part)
        if isinstance(thing, _Class):
            return self._class_member(thing, part)
        return _UNKNOWN

    # Modules

    def _attribute(self, module: Module, name: str) -> _Thing:
        """A name of a module: what it binds, else a submodule. Once round a circle of imports nothing can be told."""
        if (module.name, name) in self._active:
            return _UNKNOWN
        self._active.add((module.name, name))
        try:
            inner = self._submodule(module, name)
            if inner is not None and not module.binds_itself(name):
                # A star that brings a namesake out of the very submodule would stand before it.
                namesake = module.has_star and inner.scope.of(name)
                return _UNKNOWN if namesake else inner
            found = self._bound(module, name)
            return found if inner is None or not isinstance(found, _Missing) else inner
        finally:
            self._active.discard((module.name, name))

    def _submodule(self, module: Module, name: str) -> Module | None:
        return self._finder.module(f"{module.name}.{name}") if module.folders else None

    def _bound(self, module: Module, name: str) -> _Thing:
        scope = module.scope
        ways = scope.of(name)
        real = [way for way in ways if not way.typing]
        if not real and ways and module.is_open:
            # Bound for type checkers, and by `__getattr__` when it runs: the usual way to import late.
            real = ways
        things = [self._thing(module, scope, way) for way in real]
        for node, _ in scope.stars:
            if any(not way.conditional for way in real) and node.lineno < max(
                getattr(way.node, "lineno", 0) for way in real
            ):
                continue
            found = self._through_star(module, node, name)
            if not isinstance(found, _Missing):
                things.append(found)
        if not things:
            if module.is_open:
                return _UNKNOWN
            own = [
                name for name, ways in scope.bindings.items() if not all(isinstance(w.node, ast.Import) for w in ways)
            ]
            return _Missing((*own, *self._finder.names(module)))
        # An import that fails has another way beside it, or tells its own story when it runs.
        return _one_of([thing for thing in things if not isinstance(thing, _Missing)])

    def _through_star(self, module: Module, node: ast.ImportFrom, name: str) -> _Thing:
        try:
            source = self._finder.module(module.absolute(node))
            if source is None:
                return _UNKNOWN
            exported = literal_names(source)
        except UnreadableError:
            return _UNKNOWN
        if name not in exported if exported is not None else name.startswith("_"):
            return _Missing()
        return self._attribute(source, name)

    def _thing(self, module: Module, scope: Scope, way: Binding) -> _Thing:
        node = way.node
        try:
            if isinstance(node, ast.ClassDef):
                return _Class(module, node, scope_of(node.body))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return _Function(module, node)
            if isinstance(node, ast.Import):
                return self._finder.module(way.source) or _Missing()
            if isinstance(node, ast.ImportFrom):
                return self._imported(module, module.absolute(node), way.source)
        except UnreadableError:
            return _UNKNOWN
        except BrokenError:
            if way.conditional:
                return _Missing()
            raise
        return self._value(module, scope, node)

    def _imported(self, module: Module, source: str, name: str) -> _Thing:
        if source in _TYPING:
            return _Object() if name == "Generic" else _UNKNOWN
        origin = self._finder.module(source)
        if origin is None:
            return _Missing()
        if origin is module:
            return self._submodule(module, name) or _UNKNOWN
        return self._attribute(origin, name)

    def _value(self, module: Module, scope: Scope, node: ast.AST | None) -> _Thing:
        """What an expression that is assigned stands for."""
        if isinstance(node, ast.Name):
            return self._named(module, scope, node.id)
        if isinstance(node, ast.Attribute):
            return self._member(self._value(module, scope, node.value), node.attr)
        if isinstance(node, ast.Lambda):
            return _Function(module, node)
        return _Value() if isinstance(node, _LITERALS) else _UNKNOWN

    def _named(self, module: Module, scope: Scope, name: str) -> _Thing:
        """What a name means in a body of a module."""
        if scope is not module.scope and (ways := scope.of(name)):
            return _one_of([self._thing(module, scope, way) for way in ways])
        found = self._attribute(module, name)
        if isinstance(found, _Missing) and hasattr(builtins, name):
            return _Object() if name == "object" else _UNKNOWN
        return found

    # Classes

    def _class_member(self, owner: _Class, part: str) -> _Thing:
        names: list[str] = []
        for one in self._order(owner):
            if one is None:
                return _UNKNOWN
            ways = [way for way in one.scope.of(part) if not way.typing]
            if ways:
                things = [self._thing(one.module, one.scope, way) for way in ways]
                found = _one_of([thing for thing in things if not isinstance(thing, _Missing)])
                if isinstance(found, _Function) and not isinstance(found.node, ast.Lambda):
                    return _Function(found.module, found.node, in_class=True)
                return _UNKNOWN if isinstance(found, _Function | _Value) else found
            names += one.scope.bindings
            if odd_class(one.node) or any(n.value is not None for n in one.node.keywords if n.arg != "metaclass"):
                return _UNKNOWN
            if re.search(rf"\b{re.escape(one.node.name)}\.{re.escape(part)}\b", one.module.text):
                return _UNKNOWN
        return _UNKNOWN if part in _OF_EVERY_CLASS else _Missing(tuple(names))

    def _order(self, owner: _Class) -> Iterator[_Class | None]:
        """The classes in which attributes are looked up, in order; None, and no more, where that cannot be told."""
        yield owner
        if not owner.node.bases:
            return
        try:
            order = self._linear(owner)
        except (UnreadableError, BrokenError, RecursionError):
            yield None
            return
        yield from order[1:]

    def _linear(self, owner: _Class) -> list[_Class | None]:
        """The linearisation C3; up to None, where a base is unknown."""
        lines: list[list[_Class | None]] = []
        for base in owner.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self._value(owner.module, owner.module.scope, expression)
            if isinstance(found, _Class):
                lines.append(self._linear(found))
            elif not isinstance(found, _Object):
                lines.append([None])
        if len(lines) == 1:
            return [owner, *lines[0]]
        if any(None in line for line in lines):
            return [owner, None]
        lines.append([line[0] for line in lines])
        order: list[_Class | None] = [owner]
        while lines := [line for line in lines if line]:
            head = next((line[0] for line in lines if not any(_holds(other[1:], line[0]) for other in lines)), None)
            if head is None:
                return [*order, None]
            order.append(head)
            lines = [line[1:] if _same(line[0], head) else line for line in lines]
        return order

    def _constructor(self, owner: _Class) -> tuple[Parameter, ...] | None:
        """What making an object of the class takes: the first `__new__` or `__init__` in order, or its fields."""
        if not all(last_name(one) in SAME_CLASS or self._is_dataclass(owner, one) for one in owner.node.decorator_list):
            return None
        for one in self._order(owner):
            if one is None or "__signature__" in one.scope.bindings:
                return None
            for name in ("__new__", "__init__"):
                ways = one.scope.of(name)
                if ways:
                    made = self._thing(one.module, one.scope, ways[0])
                    if len(ways) > 1 or not isinstance(made, _Function) or isinstance(made.node, ast.Lambda):
                        return None
                    above = [] if one is owner else list(self._order(owner))
                    if any(other is None or odd_class(other.node, decorated=other is one) for other in above):
                        return None
                    if odd_class(one.node, decorated=one is not owner):
                        return None
                    return self._parameters(_Function(made.module, made.node, in_class=True), skip_first=True)
            if any(self._is_dataclass(one, decorator) for decorator in one.node.decorator_list):
                return self._fields(one)
            if odd_class(one.node, decorated=one is not owner):
                return None
            if one is not owner and "__init_subclass__" in one.scope.bindings:
                return None
        return ()

    def _fields(self, owner: _Class) -> tuple[Parameter, ...] | None:
        """What the `__init__` takes that `@dataclass` writes."""
        order = list(self._order(owner))
        fields: dict[str, Parameter | None] = {}
        for one in reversed(order):
            if one is None:
                return None
            marks = [mark for mark in one.node.decorator_list if self._is_dataclass(one, mark)]
            if marks:
                options = options_of(marks[0])
                if options is None or (options.get("init") is False):
                    return None
                for field in own_fields(one.node, keyword_only=bool(options.get("kw_only"))):
                    if field is None:
                        return None
                    fields[field[0]] = field[1]
        taken = [field for field in fields.values() if field is not None]
        ordered = [field for field in taken if field.kind is not Kind.KEYWORD_ONLY]
        return (*ordered, *(field for field in taken if field.kind is Kind.KEYWORD_ONLY))

    def _is_dataclass(self, owner: _Class, decorator: ast.expr) -> bool:
        """Whether a decorator is the standard library's `dataclass`, and no namesake."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute):
            return ast.unparse(target) == "dataclasses.dataclass"
        ways = owner.module.scope.of(target.id) if isinstance(target, ast.Name) else []
        origins = [way for way in ways if isinstance(way.node, ast.ImportFrom) and way.node.module == "dataclasses"]
        return bool(origins) and len(origins) == len(ways) and origins[0].source == "dataclass"

    # Functions

    def _parameters(self, function: _Function, *, skip_first: bool = False) -> tuple[Parameter, ...] | None:
        node = function.node
        if not isinstance(node, ast.Lambda):
            if not keeps_signature(node):
                return None
            if function.in_class and "classmethod" in map(last_name, node.decorator_list):
                skip_first = True
        taken = list(listed(node.args))
        if skip_first:
            if not taken:
                return None
            if taken[0].by_position:
                taken = taken[1:]
        return tuple(taken)


def _is_no_module_of_torch(above: _Thing, part: str) -> bool:
    """Whether a name is sure to hold no target: what torch's source does not mention is written in C, and no module."""
    if not isinstance(above, Module) or above.name != "torch" or not part.islower():
        return False
    return re.search(rf"\b{re.escape(part)}\b", above.text) is None


def _one_of(things: Sequence[_Thing]) -> _Thing:
    """The thing that a name is, where it is the same on every way; a constant stands in for what is not there."""
    real: Sequence[_Thing] = [thing for thing in things if not isinstance(thing, _Value)] or things
    return real[0] if real and all(_same(thing, real[0]) for thing in real) else _UNKNOWN


def _same(one: object, other: object) -> bool:
    if isinstance(one, _Class | _Function) and isinstance(other, _Class | _Function):
        return one.node is other.node
    return one is other or (isinstance(one, _Value) and isinstance(other, _Value))


def _holds(line: Sequence[_Class | None], one: _Class | None) -> bool:
    return any(_same(other, one) for other in line)
