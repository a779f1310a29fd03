"""Print the test files that the changes since main can reach: what `scripts/test --changed` runs.

Of a change in a module of the package: those that ran what differs (scripts/reached.py), those that read the sources,
and those that are new since tests/reached.json was recorded and reach the module by name. Of a change of any other
file: those that reach it by name.

A file reaches by name what it imports, inside functions too, and what it names in a string:

    "trainer_cli.running.fitting"      that module, as in a table of modules to import
    "trainer_cli.EMA"           the module that has this public name
    "rank_claims.py"            in tests: that helper, started as a process
    "*.py", "*.yaml"            in tests: all modules, all configs
    "fit", "experiment=text"    in tests that reach the command: the verb, and the config with the classes it names

A test also reaches the conftest.py files above it. A changed page, script, config or other file stands for the files
that name it, or one of its folders, in a path. `tests`, all of them, is printed where there is none, for a module that
is gone, and for a file of the project's root that is no page (pyproject.toml).
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import reached

PACKAGE = "trainer_cli"
TOP = f"{PACKAGE}/__init__.py"
"""Imports the public names when they are used, so that it reaches none by itself."""
MAIN = f"{PACKAGE}/commands/command_line.py"
"""Imports verbs when they are called, as the `addon.py` of each add-on names them."""
PARTS = f"{PACKAGE}/parts.py"
"""Imports parts of add-ons when they are asked for, as the `addon.py` of each add-on names them."""
CONFIGS = f"{PACKAGE}/config/search_path.py"
"""Finds configs by their names."""
TESTS, CAMPAIGN = "tests/", "scripts/campaign/"
"""The tests, and the package `campaign`, some trials of which are tests."""
ALL = ["tests"]


class Graph:
    """What each Python file and each config of a project reaches."""

    def __init__(self, root: Path) -> None:
        self._root = root
        python = {
            str(path.relative_to(root)): path
            for folder in (PACKAGE, TESTS, CAMPAIGN)
            for path in (root / folder).rglob("*.py")
        }
        self._nodes = {file: list(_walk(ast.parse(path.read_bytes(), file))) for file, path in python.items()}
        # What the face of a package imports when it is asked for.
        for stub in (root / PACKAGE).rglob("__init__.pyi"):
            self._nodes[str(stub.relative_to(root)).removesuffix("i")] += _walk(ast.parse(stub.read_bytes()))
        self._strings = {file: _strings(nodes) for file, nodes in self._nodes.items()}
        self._helpers = {_stem(file): file for file in python if file.startswith(TESTS) and not _is_test(file)}
        self._public = {name: module for module, name in _imported(self._nodes[TOP])}
        brought: dict[str, dict[str, str]] = {"names": {}, "parts": {}}
        for file in filter(_names_verbs, self._nodes):
            for kind, values in brought.items():
                values |= table_in(self._nodes[file], kind)
        self._public |= {name: module for module, names in brought["names"].items() for name in names.split()}
        self._parts = {
            constant: brought["parts"][part].partition(":")[0]
            for constant, part in parts_in(self._nodes.get(PARTS, ())).items()
            if part in brought["parts"]
        }
        self._verbs = {
            verb: module
            for file, nodes in self._nodes.items()
            if _names_verbs(file)
            for verb, module in verbs_in(nodes).items()
        }
        self._configs: dict[str, list[str]] = {}
        self._texts = {
            str(path.relative_to(root)): re.sub("#.*", "", path.read_text("utf-8"))
            for folder in (root / "configs", *root.glob(f"{PACKAGE}/addons/*/configs"))
            for path in folder.rglob("*.yaml")
        }
        for file in self._texts:
            self._configs.setdefault(_stem(file), []).append(file)
        self._edges = {file: set(self._reached(file)) for file in python if file != TOP}
        for file, text in self._texts.items():
            self._edges[file] = {*self._modules_in(text), *self._configs_in([text])}

        self.tests = sorted(filter(_is_test, self._edges))

    def reach(self, changed: Iterable[str]) -> list[str]:
        """The test files that the changed files reach; `ALL` if one may reach any."""
        sources: set[str] = set()
        for file in (file.removesuffix("i") if file.endswith(".pyi") else file for file in changed):
            if file in self._nodes and file != TOP:
                sources.add(file)
            elif not _is_test(file):
                naming = self._naming(file)
                if not naming:
                    return ALL
                sources |= naming
        return [test for test in self.tests if not sources.isdisjoint(self.closure(test))]

    def select(self, changed: Iterable[str], table: reached.Table, read_before: Callable[[str], str]) -> list[str]:
        """The test files that the changed files reach, by the recorded functions where that is possible.

        Args:
            changed: the files that differ.
            table: the recorded functions.
            read_before: reads a file as it was, empty if it was not there.
        """
        changed = set(changed)
        modules = {file for file in changed if file.startswith(f"{PACKAGE}/") and file.endswith((".py", ".pyi"))}
        modules -= {TOP, f"{TOP}i"}
        named = self.reach(changed - modules)
        if named == ALL or not modules:
            return named
        differences = reached.Differences()
        for file in modules:
            path = self._root / file
            after = path.read_text("utf-8") if path.is_file() else ""
            differences.compare(_module(file), reached.Source(read_before(file)), reached.Source(after))
        tests = set(named) | self.find_runners(differences, table)
        if unknown := {*self.tests} - table.seconds.keys():
            by_name = self.reach(modules)
            tests |= unknown if by_name == ALL else unknown & {*by_name}
        if differences.is_prose:
            tests |= {*self.reach(["docs/generated.py"])}
        return sorted(tests & {*self.tests})

    def find_runners(self, differences: reached.Differences, table: reached.Table) -> set[str]:
        """The test files that ran what differs, mention its name, or read the sources."""
        sources = {}
        # Most changes are within functions that were recorded, and need no names.
        if differences.names or not differences.functions <= table.ran.keys():
            sources = reached.read_sources(self._root)
        tests, names = reached.Reach(table, sources).follow(differences)
        wanted = {(name.module, name.name) for name in names | differences.signatures if name.module is not None}
        # From the module, or a face above it.
        wanted |= {(module[: match.start()], name) for module, name in wanted for match in re.finditer(r"\.", module)}
        for test in self.tests:
            own = self._follow({test}, within=TESTS)
            reads_sources = any(word.endswith("*.py") for file in own for word in self._strings[file])
            if reads_sources or any(not wanted.isdisjoint(self._taken(file)) for file in own):
                tests.add(test)
        return tests

    def _taken(self, file: str) -> set[tuple[str, str]]:
        """(module, name) of what a file of the tests imports, takes as an attribute, or has in a string."""
        dotted = (text.replace(":", ".").split(".") for text in self._strings[file] if text.startswith(f"{PACKAGE}."))
        named = {(".".join(parts[:n]), parts[n]) for parts in dotted for n in range(1, len(parts))}
        return named | set(_imported(self._nodes[file]))

    def closure(self, test: str) -> set[str]:
        """All that a test reaches."""
        found = self._follow({test})
        words = {word for file in found if file.startswith((TESTS, CAMPAIGN)) for word in self._strings[file]}
        if MAIN in found:
            verbs = {part for word in words for part in word.split()} & self._verbs.keys()
            found |= self._follow({self._verbs[verb] for verb in verbs})
        if CONFIGS in found:
            found |= self._follow({"configs/config.yaml", *self._configs_in(words)})
        if any(word.endswith("*.yaml") for word in words):
            found |= self._follow(set(self._texts))
        if any(word.endswith("*.py") for word in words):
            # It reads them, and runs none.
            found |= self._nodes.keys()
        return found

    def _follow(self, files: set[str], within: str = "") -> set[str]:
        found: set[str] = set()
        while files:
            found |= files
            edges = (other for file in files for other in self._edges.get(file, ()))
            files = {other for other in edges if other.startswith(within)} - found
        return found

    def _naming(self, file: str) -> set[str]:
        """The files with a string that names this one, or one of its folders without modules, in a path."""
        *folders, name = PurePosixPath(file).parts
        if (not folders and not name.endswith(".md")) or (
            name.endswith(".py") and file.startswith((f"{PACKAGE}/", TESTS, CAMPAIGN))
        ):
            return set()
        parts = {name} if "." in name else set()
        modules = [PurePosixPath(module) for module in self._nodes if not module.startswith(CAMPAIGN)]
        parts |= set(folders) - {folder for module in modules for folder in module.parts[:-1]}
        return {
            other
            for other, strings in self._strings.items()
            if _stem(other) != "conftest" and any(not parts.isdisjoint(text.split("/")) for text in strings)
        }

    def _reached(self, file: str) -> Iterator[str]:
        for module, name in _imported(self._nodes[file]):
            yield from self._files_of(f"{module}.{name}")
            if module == f"{PACKAGE}.parts" and name in self._parts:
                yield from self._files_of(self._parts[name])
        strings, tested = self._strings[file], file.startswith((TESTS, CAMPAIGN))
        for text in () if _names_verbs(file) else strings:
            yield from self._modules_in(text)
            if tested and text.endswith(".py") and _stem(text) in self._helpers:
                yield self._helpers[_stem(text)]
        if {"-m", PACKAGE} <= strings:
            yield f"{PACKAGE}/__main__.py"
        if any(isinstance(node, ast.Name) and node.id == "listed_verbs" for node in self._nodes[file]) and file != MAIN:
            yield from self._verbs.values()
        for folder in PurePosixPath(file).parents if tested else ():
            yield from {f"{folder}/conftest.py"} & self._nodes.keys()

    def _files_of(self, name: str) -> Iterator[str]:
        """The file of a module, or of one of its names, of the package or of the helpers of the tests."""
        first, _, rest = name.partition(".")
        if first != PACKAGE and first in self._helpers:
            yield self._helpers[first]
        folder = {PACKAGE: "", "campaign": "scripts/"}.get(first)
        while name and folder is not None:
            path = folder + self._public.get(rest, name).replace(".", "/")
            yield from {f"{path}.py", f"{path}/__init__.py"} & self._nodes.keys() - {TOP}
            name = name.rpartition(".")[0]
            rest = name.partition(".")[2]

    def _modules_in(self, text: str) -> Iterator[str]:
        for name in re.findall(rf"\b(?:{PACKAGE}|campaign)\.[\w.]*\w", text):
            yield from self._files_of(name)

    def _configs_in(self, texts: Iterable[str]) -> set[str]:
        words = {word for text in texts for word in re.findall(r"\w+", text)}
        return {file for word in words & self._configs.keys() for file in self._configs[word]}


def _names_verbs(file: str) -> bool:
    return file == MAIN or (file.startswith(PACKAGE) and file.endswith("/addon.py"))


def _module(file: str) -> str:
    return file.partition(".")[0].removesuffix("/__init__").replace("/", ".")


def _stem(file: str) -> str:
    return PurePosixPath(file).stem


def _is_test(file: str) -> bool:
    return file.startswith(TESTS) and PurePosixPath(file).match("test_*.py")


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but those for type checkers alone."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _walk(child)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """(module, name) for each name that is imported, or taken from the package as an attribute."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            yield PACKAGE, node.attr


def _strings(nodes: Iterable[ast.AST]) -> set[str]:
    """The strings of a module without its docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return {node.value for node in constants if isinstance(node.value, str)}


def verbs_in(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The verbs of the command, with the files of their modules."""
    dicts = [node for node in nodes if isinstance(node, ast.Dict)]
    return {
        ast.literal_eval(verb): ast.literal_eval(entry.args[0]).replace(".", "/") + ".py"
        for table in dicts
        for verb, entry in zip(table.keys, table.values, strict=True)
        if isinstance(verb, ast.Constant) and isinstance(entry, ast.Call) and ast.unparse(entry.func) == "Verb"
    }


def table_in(nodes: Iterable[ast.AST], kind: str) -> dict[str, str]:
    """The entries of `names` or `parts` of an `AddOn`."""
    calls = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "AddOn")
    tables = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == kind)
    return {name: text for table in tables for name, text in ast.literal_eval(table).items()}


def parts_in(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The constants that are parts, with the names of the parts."""
    return {
        node.target.id: ast.literal_eval(node.value.args[0])
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "AddOnPart"
    }


def find_base(root: Path) -> str:
    """The commit where this branch left main; the last one of a clone of another branch, which has no main."""
    return _git(root, "merge-base", "HEAD", "main").strip() if _git(root, "branch", "--list", "main") else "HEAD"


def changed_files(root: Path) -> list[str]:
    """The files that differ from where this branch left main, committed or not, and the new ones."""
    differing = _git(root, "diff", "--name-only", "--no-renames", find_base(root))
    return [*differing.splitlines(), *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def read_at(root: Path, commit: str, file: str) -> str:
    """A file as it was in a commit, empty if it was not there."""
    done = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=root, capture_output=True, text=True)
    return done.stdout


def main(root: Path) -> None:
    """Print the test files, and on stderr how many they are and how long they take."""
    table, base = reached.Table.read(root / reached.TABLE), find_base(root)
    graph = Graph(root)
    selected = graph.select(changed_files(root), table, lambda file: read_at(root, base, file))
    tests = graph.tests if selected == ALL else selected
    seconds = sum(table.seconds.get(test, 0) for test in tests)
    unknown = sum(test not in table.seconds for test in tests)
    print(
        f"{len(tests)} of {len(graph.tests)} test files: {seconds:.0f} s, one after another"
        + (f", and {unknown} that are not in {reached.TABLE}" if unknown else ""),
        file=sys.stderr,
    )
    print("\n".join(selected))


if __name__ == "__main__":
    # A collection would take longer than the parsing, and find nothing.
    gc.disable()
    main(Path(__file__).resolve().parents[1])
