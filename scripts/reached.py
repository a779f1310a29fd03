"""Which test files a change of the package can reach, by what each of them ran when it was recorded.

`tests/reached.json`, written by `scripts/record.py`, has the functions of the package that each test file ran, in its
own process or in those that it started. A change within a function reaches the files that ran it. A change of anything
else, such as a constant, a field or an import, has a name: it reaches the files that ran a function which mentions the
name, or import it themselves. A function that is new since the recording is followed by its name, too.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = "tests/reached.json"


@dataclass
class Table:
    """The recorded functions of test files."""

    ran: dict[str, set[str]] = field(default_factory=dict)
    """`trainer_cli.module:Class.method` -> the test files that ran it, none for what no test ran."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Each recorded test file -> seconds of a processor; of the clock if it starts processes."""
    starts_processes: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Table:
        table = cls()
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            table.seconds = {test: abs(seconds) for test, seconds in stored["seconds"].items()}
            table.starts_processes = {test for test, seconds in stored["seconds"].items() if seconds < 0}
            tests = sorted(table.seconds)
            groups = [{test for n, test in enumerate(tests) if int(text, 36) >> n & 1} for text in stored["groups"]]
            for module, functions in stored["functions"].items():
                for name, group in functions.items():
                    table.ran[f"{module}:{name}"] = {*groups[group]}
        return table

    def add_functions(self, names: Iterable[str]) -> None:
        """Add functions that no test file ran yet. All files must be recorded after that."""
        self.ran |= {name: set() for name in names}

    def put(self, test: str, functions: Iterable[str], *, seconds: float, starts_processes: bool) -> None:
        """Replace what is known of a test file.

        Functions that are not in the table stay unknown: other files may have run them, too, had they been recorded.
        """
        self.drop(test)
        self.seconds[test] = max(round(seconds, 1), 0.1)
        if starts_processes:
            self.starts_processes.add(test)
        for name in self.ran.keys() & set(functions):
            self.ran[name].add(test)

    def drop(self, test: str) -> None:
        """Forget a test file."""
        self.seconds.pop(test, None)
        self.starts_processes.discard(test)
        for tests in self.ran.values():
            tests.discard(test)

    def write(self, path: Path) -> None:
        """Write one line for each test file, set of test files and module. Negative seconds: it starts processes."""
        bit = {test: 1 << n for n, test in enumerate(sorted(self.seconds))}
        masks = {name: sum(bit[test] for test in tests) for name, tests in self.ran.items()}
        groups = {mask: n for n, mask in enumerate(sorted(set(masks.values())))}
        functions: dict[str, dict[str, int]] = defaultdict(dict)
        for name in sorted(masks):
            module, _, function = name.partition(":")
            functions[module][function] = groups[masks[name]]
        parts: dict[str, Mapping[str, object] | Iterable[object]] = {
            "seconds": {t: -s if t in self.starts_processes else s for t, s in sorted(self.seconds.items())},
            "groups": [_to_base_36(mask) for mask in groups],
            "functions": functions,
        }
        texts = []
        for part, values in parts.items():
            is_mapping = isinstance(values, Mapping)
            rows = values.items() if isinstance(values, Mapping) else (("", value) for value in values)
            lines = [
                (f"{json.dumps(key)}:" if is_mapping else "") + json.dumps(value, separators=(",", ":"))
                for key, value in rows
            ]
            opened, closed = "{}" if is_mapping else "[]"
            texts.append(f'"{part}":{opened}\n' + ",\n".join(lines) + f"\n{closed}")
        path.write_text("{" + ",\n".join(texts) + "}\n", encoding="utf-8")


def _to_base_36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits or "0"


class Source:
    """The parts of a module, without positions and docstrings.

    Attributes:
        functions: qualified name -> its code, without that of the functions in it.
        signatures: qualified name -> its arguments.
        top: name of the module -> the code that defines it, without the functions in it.
        inner: name in the body of a class -> the code that defines it.
        prose: the docstrings.
    """

    def __init__(self, text: str) -> None:
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)
        self.signatures: dict[str, list[ast.AST]] = defaultdict(list)
        self.top: dict[str, list[ast.AST | str]] = defaultdict(list)
        self.inner: dict[str, list[ast.AST | str]] = defaultdict(list)
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        self.prose = [
            node.value.value
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        self.imported = {
            alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
        }
        """Each name that is imported, at whatever place."""
        self._read(tree.body, "", "")

    def mentions(self) -> Iterator[tuple[str, set[str]]]:
        """Each function, with the identifiers in it."""
        return ((name, set(_identifiers(nodes))) for name, nodes in self.functions.items())

    def definitions(self) -> Iterator[tuple[str, set[str]]]:
        """Each name of the module, with the identifiers in the code that defines it."""
        return ((name, set(_identifiers(nodes))) for name, nodes in self.top.items())

    def _read(self, body: Iterable[ast.stmt], prefix: str, top: str) -> None:
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self._read(node.orelse, prefix, top)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._read_function(node, prefix)
                (self.inner if top else self.top)[node.name].append(f"{prefix} function")
            else:
                code: ast.AST = node
                if isinstance(node, ast.ClassDef):
                    self._read(node.body, f"{prefix}{node.name}.", top or node.name)
                    code = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
                for name in _names_defined(node) or {""}:
                    if top:
                        self.inner[name] += [prefix, code]
                    self.top[top or name] += [name, code]

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
        name = f"{prefix}{node.name}"
        inside: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []

        class Cut(ast.NodeTransformer):
            outer = f"{name}.<locals>."

            def visit_ClassDef(self, child: ast.ClassDef) -> ast.AST:
                before, self.outer = self.outer, f"{self.outer}{child.name}."
                self.generic_visit(child)
                self.outer = before
                return child

            def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
                inside.append((self.outer, node))
                return ast.Pass()

            visit_AsyncFunctionDef = visit_FunctionDef

        first = int(ast.get_docstring(node, clean=False) is not None)
        body = [Cut().visit(child) for child in node.body[first:]]
        # Two functions can have one name: a property and its setter.
        self.functions[name] += [node.args, *node.decorator_list, *body, *([node.returns] if node.returns else [])]
        self.signatures[name].append(node.args)
        for outer, child in inside:
            self._read_function(child, outer)


def read_sources(root: Path) -> dict[str, Source]:
    """Each module of the package."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): Source(
            path.read_text("utf-8")
        )
        for path in sorted((root / "trainer_cli").rglob("*.py"))
    }


def _names_defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _identifiers(nodes: Iterable[ast.AST | str]) -> Iterator[str]:
    pending = [node for node in nodes if isinstance(node, ast.AST)]
    while pending:
        # Of the type that `kind` is: `isinstance` takes longer.
        node: Any = pending.pop()
        kind = type(node)
        if kind is ast.Name:
            yield node.id
            continue
        if kind is ast.Attribute:
            yield node.attr
        elif kind is ast.alias:
            yield node.name.rpartition(".")[2]
        elif kind is ast.keyword and node.arg:
            yield node.arg
        elif kind is ast.Constant:
            if isinstance(node.value, str) and node.value.isidentifier():
                yield node.value
            continue
        for field_name in node._fields:
            value = getattr(node, field_name, None)
            if isinstance(value, list):
                pending += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and field_name != "ctx":
                pending.append(value)


@dataclass(frozen=True)
class Name:
    """A name whose meaning has changed; `module` is None for an attribute, which may be read anywhere."""

    name: str
    module: str | None = None


class Differences:
    """What differs between two states of the package's modules."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.names: set[Name] = set()
        self.signatures: set[Name] = set()
        """Functions of the module, and classes, of which not only the body differs: tests may read a signature."""
        self.is_prose = False

    def compare(self, module: str, before: Source, after: Source) -> None:
        """Add what differs between two states of a module."""
        self.is_prose |= before.prose != after.prose
        # New functions have new names; those that are gone were called by what ran them.
        new = after.functions.keys() - before.functions.keys()
        self.functions |= {f"{module}:{name}" for name in _differing(before.functions, after.functions) - new}
        self.signatures |= {
            Name(name.partition(".")[0], module)
            for name in _differing(before.signatures, after.signatures)
            if "." not in name or name.endswith(".__init__")
        }
        for name in _differing(before.top, after.top):
            # A statement without a name: whatever the module has may differ.
            self.names |= {Name(name, module)} if name else {Name(each, module) for each in after.top if each}
        self.names |= {Name(name) for name in _differing(before.inner, after.inner) if name}


def _differing(before: Mapping[str, Sequence[object]], after: Mapping[str, Sequence[object]]) -> set[str]:
    return {
        name
        for name in before.keys() | after.keys()
        if _dump(before.get(name, ())) != _dump(after.get(name, ())) or (name in before) != (name in after)
    }


def _dump(nodes: Sequence[object]) -> list[object]:
    return [ast.dump(node) if isinstance(node, ast.AST) else node for node in nodes]


class Reach:
    """Finds the test files that ran something of the changes."""

    def __init__(self, table: Table, sources: Mapping[str, Source]) -> None:
        self.table, self.sources = table, sources
        self._in_functions: dict[str, set[str]] = defaultdict(set)
        self._in_definitions: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for module, source in sources.items():
            for function, identifiers in source.mentions():
                for name in identifiers:
                    self._in_functions[name].add(f"{module}:{function}")
            for top, identifiers in source.definitions():
                for name in identifiers - {top}:
                    self._in_definitions[name].add((module, top))

    def follow(self, differences: Differences) -> tuple[set[str], set[Name]]:
        """The test files that ran what differs or mentions it, and all names that have another meaning by it."""
        tests: set[str] = set()
        seen: set[Name] = set()
        followed: set[str] = set()
        names, functions = set(differences.names), set(differences.functions)
        while names or functions:
            for function in functions:
                followed.add(function)
                if function in self.table.ran:
                    tests |= self.table.ran[function]
                else:
                    module, _, qualified = function.partition(":")
                    *outer, name = qualified.split(".")
                    if "<locals>" in outer:
                        # Runs where the function around it runs.
                        around = f"{module}:{qualified.rpartition('.<locals>.')[0]}"
                        names |= set() if around in followed else {Name(around.partition(":")[2].rpartition(".")[2])}
                    else:
                        names.add(Name(name) if outer else Name(name, module))
            functions = set()
            seen |= names
            found: set[Name] = set()
            for changed in names:
                functions |= {
                    each for each in self._in_functions[changed.name] if self._sees(each.partition(":")[0], changed)
                }
                found |= {
                    Name(top, module)
                    for module, top in self._in_definitions[changed.name]
                    if self._sees(module, changed)
                }
            names, functions = found - seen, functions - followed
        return tests, seen

    def _sees(self, module: str, name: Name) -> bool:
        """Whether an identifier in a module can be this name."""
        if name.module is None or name.module == module:
            return True
        imported = self.sources[module].imported
        return name.name in imported or name.module.rpartition(".")[2] in imported
