"""Which test files a change of the package can reach, by what each of them ran when it was recorded.

`tests/reached.json`, written by `scripts/record.py`, has the functions of the package that each test file ran, in its
own process or in those that it started. A change within a function reaches the files that ran it. A change of anything
else, such as a constant, a field or an import, has a name: it reaches the files that ran a function which mentions the
name, or import it themselves. A function that is new since the recording is followed by its name, too. A name of a
module is mentioned in that module, and where it is imported from there. A name of a class may be mentioned anywhere, by
a test file that also ran a function of the class, or one that mentions the class.

Of a change that very many files ran, most of them by the way, `Table.choose` takes those that are most about it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

TABLE = "tests/reached.json"

SHARE = 0.1
"""The share of the time of all tests that those of a change take, if more ran it than are about it."""
Key = TypeVar("Key")


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

    def functions_of(self, module: str) -> set[str]:
        """The functions of a module that are in the table."""
        return {name for name in self.ran if _module_of(name) == module}

    def find_runners(self, functions: Iterable[str]) -> set[str]:
        """The test files that ran one of these functions."""
        return set[str]().union(*(self.ran[name] for name in functions))

    def choose(self, ran: Mapping[str, Set[str]], selected: Set[str] = frozenset()) -> set[str]:
        """The test files that are most about what differs, if all that ran it take more than `SHARE` of the whole time.

        Each function in turn has one more of its files chosen, the one that is most about its module, while there is
        time left. A file is about a module as far as the functions that it runs are of this module. Each counts by the
        logarithm of (number of all files / number of those that run it): what nearly all files run, tells nothing.

        Args:
            ran: function -> the test files that ran it.
            selected: what is selected anyway; a quarter of the time is left even if it takes more.
        """
        tests = set[str]().union(*ran.values()) - selected
        whole = SHARE * sum(self.seconds.values())
        left = max(whole - sum(self.seconds.get(test, 0.0) for test in selected), whole / 4)
        if sum(self.seconds[test] for test in tests) <= left:
            return tests
        shares = self._find_shares()
        waiting = {}
        # Those that few files ran first: the others may be run by the same files.
        for name in sorted(ran, key=lambda name: (len(ran[name]), name)):
            about = {test: shares[test][_module_of(name)] for test in ran[name] & tests}
            waiting[name] = sorted(about, key=lambda test: (about[test], test))
        chosen = set(selected)
        for number in range(1, len(tests) + 1):
            for name, candidates in waiting.items():
                while candidates and len(ran[name] & chosen) < number:
                    test = candidates.pop()
                    if self.seconds[test] <= left or chosen <= selected:
                        chosen.add(test)
                        left -= self.seconds[test]
        return chosen - selected

    def _find_shares(self) -> dict[str, dict[str, float]]:
        """How much each test file is about each module."""
        weights: dict[str, dict[str, float]] = {test: defaultdict(float) for test in self.seconds}
        for name, runners in self.ran.items():
            for test in runners:
                weights[test][_module_of(name)] += math.log(len(self.seconds) / len(runners))
        for test, of_modules in weights.items():
            whole = sum(of_modules.values()) or 1.0
            weights[test] = defaultdict(float, {module: weight / whole for module, weight in of_modules.items()})
        return weights

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
        inner: (class of the module, name in its body) -> the code that defines it.
        prose: the docstrings.
    """

    def __init__(self, text: str) -> None:
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)
        self.signatures: dict[str, list[ast.AST]] = defaultdict(list)
        self.top: dict[str, list[ast.AST | str]] = defaultdict(list)
        self.inner: dict[tuple[str, str], list[ast.AST | str]] = defaultdict(list)
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        self.prose = [
            node.value.value
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        self.imported = {
            (node.module or "", alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.imported |= {(alias.name, "*") for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        """(module, name) of all that is imported, at whatever place; `*` for the module itself."""
        self._read(tree.body, "", "")

    def mentions(self) -> Iterator[tuple[str, set[str]]]:
        """Each function, with the identifiers in it."""
        return ((name, set(_identifiers(nodes))) for name, nodes in self.functions.items())

    def definitions(self) -> Iterator[tuple[str, set[str]]]:
        """Each name of the module, with the identifiers in its definition; its own only where it is imported."""
        for name, nodes in self.top.items():
            is_imported = any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
            yield name, set(_identifiers(nodes)) - (set() if is_imported else {name})

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
                (self.inner[top, node.name] if top else self.top[node.name]).append(f"{prefix} function")
            else:
                code: ast.AST = node
                if isinstance(node, ast.ClassDef):
                    self._read(node.body, f"{prefix}{node.name}.", top or node.name)
                    code = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
                for name in _names_defined(node) or {""}:
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        code = _import_of(node, name)
                    if top:
                        self.inner[top, name] += [prefix, code]
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
            # The face of a package has a stub that lists what it imports when it is asked for.
            path.read_text("utf-8") + (stub.read_text("utf-8") if (stub := path.with_suffix(".pyi")).is_file() else "")
        )
        for path in sorted((root / "trainer_cli").rglob("*.py"))
    }


def _names_defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _import_of(node: ast.Import | ast.ImportFrom, name: str) -> ast.stmt:
    """The part of an import that defines a name."""
    aliases = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] == name]
    return ast.Import(aliases) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, aliases, node.level)


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
            if isinstance(node.value, str) and (node.value.isidentifier() or re.fullmatch(r"[\w-]+\.\w+", node.value)):
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
    """A name whose meaning has changed: of a module, or of a class of it."""

    name: str
    module: str
    owner: str | None = None
    """The class that an attribute is of. It may be read anywhere."""

    @classmethod
    def of_attribute(cls, name: str, module: str, owner: str) -> Name:
        # What Python itself reads, such as `__init__`, is mentioned by nobody.
        return cls(owner, module) if name.startswith("__") else cls(name, module, owner)


class Differences:
    """What differs between two states of the package's modules."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.names: set[Name] = set()
        self.signatures: set[Name] = set()
        """Functions of the module, and classes, of which not only the body differs: tests may read a signature."""
        self.files: set[str] = set()
        """Files that are read, and are no modules."""
        self.is_code = self.is_prose = False

    def compare(self, module: str, before: Source, after: Source) -> None:
        """Add what differs between two states of a module."""
        self.is_code = True
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
        self.names |= {
            Name.of_attribute(name, module, owner) for owner, name in _differing(before.inner, after.inner) if name
        }


def _differing(before: Mapping[Key, Sequence[object]], after: Mapping[Key, Sequence[object]]) -> set[Key]:
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
        self._users: dict[Name, set[str]] = {}
        self._in_functions: dict[str, set[str]] = defaultdict(set)
        self._in_definitions: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for module, source in sources.items():
            for function, identifiers in source.mentions():
                for name in identifiers:
                    self._in_functions[name].add(f"{module}:{function}")
            for top, identifiers in source.definitions():
                for name in identifiers:
                    self._in_definitions[name].add((module, top))

    def follow(self, differences: Differences) -> tuple[dict[str, set[str]], set[Name]]:
        """Follow what differs to what mentions it.

        Returns:
            the recorded functions that differ or mention what differs, with the test files that ran them for that, and
            all names that have another meaning by it.
        """
        ran: dict[str, set[str]] = defaultdict(set)
        seen: set[Name] = set()
        followed: set[str] = set()
        names, functions = set(differences.names), set(differences.functions)
        for file in differences.files:
            names |= self._find_constants(file)
            functions |= self._find_readers(file)
        while names or functions:
            followed |= functions
            around: set[str] = set()
            for function in functions:
                module, _, qualified = function.partition(":")
                *outer, name = qualified.split(".")
                if function in self.table.ran:
                    ran[function] |= self.table.ran[function]
                elif "<locals>" in outer:
                    # Runs where the function around it runs.
                    around.add(f"{module}:{qualified.rpartition('.<locals>.')[0]}")
                else:
                    names.add(Name.of_attribute(name, module, outer[0]) if outer else Name(name, module))
            seen |= names
            found: set[Name] = set()
            for changed in names:
                mentions = {each for each in self._in_functions[changed.name] if self._sees(_module_of(each), changed)}
                if changed.owner is not None:
                    users = self._find_users(Name(changed.owner, changed.module))
                    for function in mentions & self.table.ran.keys():
                        ran[function] |= self.table.ran[function] & users
                    mentions -= self.table.ran.keys()
                around |= mentions
                found |= {
                    Name(top, module)
                    for module, top in self._in_definitions[changed.name]
                    if self._sees(module, changed if changed.owner is None else Name(changed.owner, changed.module))
                }
            names, functions = found - seen, around - followed
        return ran, seen

    def _find_constants(self, file: str) -> set[Name]:
        """The names of modules that are defined by the name of a file."""
        return {Name(top, module) for module, top in self._in_definitions[PurePosixPath(file).name]}

    def _find_readers(self, file: str) -> set[str]:
        """The functions with the name of a file, or of its folder without modules; else of modules beside it."""
        *folders, name = PurePosixPath(file).parts
        of_modules = {part for module in self.sources for part in module.split(".")[:-1]}
        words = [name, *[folder for folder in folders if folder not in of_modules][:1]]
        if found := {function for word in words for function in self._in_functions[word]}:
            return found
        beside = [module for module in self.sources if module.split(".")[:-1] == folders]
        return set().union(*map(self.table.functions_of, [] if self._find_constants(file) else beside))

    def _find_users(self, owner: Name) -> set[str]:
        """The test files that may have had an instance of a class: they ran its functions, or some that mention it."""
        if owner not in self._users:
            # Where a class leads to itself, by what is not recorded.
            self._users[owner] = {*self.table.seconds}
            differences = Differences()
            differences.names.add(owner)
            ran, names = self.follow(differences)
            own = {(name.module, name.name) for name in names}
            methods = {f for f in self.table.ran if (_module_of(f), f.partition(":")[2].partition(".")[0]) in own}
            self._users[owner] = set().union(*ran.values(), self.table.find_runners(methods))
        return self._users[owner]

    def _sees(self, module: str, name: Name) -> bool:
        """Whether an identifier in a module can be this name."""
        if name.owner is not None or name.module == module:
            return True
        origins = [name.module, *_packages_above(name.module)]
        imported = self.sources[module].imported
        return any(
            # From its module, or the face of a package that holds it; or as an attribute of one of these.
            (origin, name.name) in imported
            or (not imported.isdisjoint({(origin, "*"), _split(origin)}) and self._has(origin, name))
            for origin in origins
        )

    def _has(self, origin: str, name: Name) -> bool:
        """Whether a module defines a name, or imports it as the face of a package does."""
        return origin == name.module or (
            origin in self.sources and any(each == name.name for _, each in self.sources[origin].imported)
        )


def _module_of(function: str) -> str:
    return function.partition(":")[0]


def _split(module: str) -> tuple[str, str]:
    package, _, last = module.rpartition(".")
    return package, last


def _packages_above(module: str) -> Iterator[str]:
    """The packages that hold a module, from the nearest."""
    while module := module.rpartition(".")[0]:
        yield module
