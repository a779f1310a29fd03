"""Print the test files that the changes since main can reach: what `scripts/test --changed` runs.

Of a change in a module of the package: those that ran what differs (scripts/reached.py), those that read the sources,
and those that are new since tests/reached.json was recorded and reach the module by name. Of another file in the
package: those that ran a function with its name. Of a config: those that compose, and name it or what names it. Of any
other file: those that reach it by name.

If those that ran what differs take more than a tenth of the time of all tests, the files that are most about it are
printed, up to that tenth (`Table.choose`); how many are left out is said on stderr.

A file reaches by name what it imports, inside functions too, and what it names in a string:

    "trainer_cli.running.fitting"      that module, as in a table of modules to import
    "trainer_cli.EMA"           the module that has this public name
    "rank_claims.py"            in tests: that helper, started as a process
    "*.py", "*.yaml"            in tests: all modules, all configs
    "fit", "experiment=text"    in tests that reach the command: the verb, and the config with the classes it names

A test also reaches the conftest.py files above it, without the fixtures that it does not name. A changed page, script,
config or other file stands for the files that name it, or one of its folders, in a path. `tests`, all of them, is
printed where there is none, for a module that is gone, and for a file of the project's root that is no page, such as
pyproject.toml, unless only its settings of the linters differ.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import reached

PACKAGE = "trainer_cli"
TOP = f"{PACKAGE}/__init__.py"
"""Imports the public names when they are used, so that it reaches none by itself."""
MAIN = f"{PACKAGE}/commands/command_line.py"
"""Imports verbs when they are called, as the `addon.py` of each add-on names them."""
PARTS = tuple(f"{PACKAGE}/{name}.py" for name in ("parts", "fit_parts", "search_parts"))
"""Import parts of add-ons when they are asked for, as the `addon.py` of each add-on names them."""
CONFIGS = f"{PACKAGE}/config/search_path.py"
"""Finds configs by their names."""
TESTS, CAMPAIGN = "tests/", "scripts/campaign/"
"""The tests, and the package `campaign`, some trials of which are tests."""
DATA = (f"{PACKAGE}/", "configs/", "docs/")
"""Where files that are no modules are read by the package."""
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
            face = str(stub.relative_to(root)).removesuffix("i")
            self._nodes[face] = [*self._nodes[face], *_walk(ast.parse(stub.read_bytes()))]
        for file in [file for file in python if _stem(file) == "conftest"]:
            self._nodes |= _split_fixtures(file, self._nodes[file])
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
            for file in PARTS
            for constant, part in parts_in(self._nodes.get(file, ())).items()
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
        self._edges = {file: set(self._reached(file)) for file in self._nodes if file != TOP}
        for file, text in self._texts.items():
            self._edges[file] = {*self._modules_in(text), *self._configs_in([text])}

        self._closures: dict[str, set[str]] = {}
        self._taken_by: dict[str, set[tuple[str, str]]] = {}
        self.tests = sorted(filter(_is_test, self._edges))
        self.left_out: set[str] = set()
        """The tests that ran what differs and were not chosen by the last selection."""

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
        data = {file for file in changed - modules if file.startswith(DATA)}
        others = changed - modules - data
        named = self.reach(part for file in others for part in self._differing_parts(file, read_before))
        if named == ALL or not modules | data:
            return named
        differences = reached.Differences()
        for file in modules:
            path = self._root / file
            after = path.read_text("utf-8") if path.is_file() else ""
            differences.compare(_module(file), reached.Source(read_before(file)), reached.Source(after))
        tests = set(named)
        searching = table.functions_of(_module(CONFIGS))
        for file in data:
            tests |= self._find_naming(file)
            if file not in self._texts and not file.endswith(".yaml"):
                differences.files.add(file)
            elif file not in self._texts or not read_before(file):
                # A config that comes or goes, for what lists them.
                differences.functions |= searching
        if differences.is_prose:
            tests |= self._find_naming("docs/generated.py")
        reading, ran = self._find_runners(differences, table)
        composing = {*self.tests} & table.find_runners(searching)
        for file in data & self._texts.keys():
            # Few tests name it, and more have it from a helper or another config.
            ran[f"{file}:named"] = {test for test in composing if file in self._configs_in(self._strings[test])}
            ran[f"{file}:composed"] = {test for test in composing if file in self.closure(test)}
        tests = {*self.tests} & (tests | reading)
        if unknown := {*self.tests} - table.seconds.keys():
            by_name = self.reach(modules | data)
            tests |= unknown if by_name == ALL else unknown & {*by_name}
        chosen = table.choose(ran, tests)
        self.left_out = ({*self.tests} & set().union(*ran.values())) - tests - chosen
        return sorted({*self.tests} & (tests | chosen))

    def _find_naming(self, file: str) -> set[str]:
        """The tests that name a file, or one of its folders, in a path."""
        naming = {other for other in self._naming(file) if other.startswith((TESTS, CAMPAIGN))}
        # Most tests have the folder of the configs from the helper that starts commands, to list the experiments.
        itself = file.startswith("configs/")
        return {test for test in self.tests if not naming.isdisjoint({test} if itself else self.closure(test))}

    def _find_runners(
        self, differences: reached.Differences, table: reached.Table
    ) -> tuple[set[str], dict[str, set[str]]]:
        """The test files that mention what differs or read the sources, and those that ran each part of it."""
        sources = {}
        # Most changes are within functions that were recorded, and need no names.
        if differences.names or differences.files or not differences.functions <= table.ran.keys():
            sources = reached.read_sources(self._root)
        ran, names = reached.Reach(table, sources).follow(differences)
        tests = set[str]()
        wanted = {(name.module, name.name) for name in names | differences.signatures if name.owner is None}
        # From the module, or a face above it.
        wanted |= {(module[: match.start()], name) for module, name in wanted for match in re.finditer(r"\.", module)}
        for test in self.tests:
            own = self._follow({test}, within=TESTS)
            reads_sources = differences.is_code and any("*.py" in self._strings[file] for file in own)
            if reads_sources or any(not wanted.isdisjoint(self._taken(file)) for file in own):
                tests.add(test)
        return tests, ran

    def _differing_parts(self, file: str, read_before: Callable[[str], str]) -> set[str]:
        """A file; what stands for it where only a part of it differs, or only these scripts read it."""
        if file == reached.TABLE:
            return {"scripts/reached.py"}
        is_settings, is_conftest = file == "pyproject.toml", _stem(file) == "conftest"
        if not (is_settings or is_conftest) or not (path := self._root / file).is_file():
            return {file}
        texts = read_before(file), path.read_text("utf-8")
        if is_settings and _without_lint(texts[0]) == _without_lint(texts[1]):
            return {other for other, strings in self._strings.items() if file in strings and other.startswith(TESTS)}
        if is_conftest:
            old, new = (_split_fixtures(file, [*_walk(ast.parse(text))]) for text in texts)
            parts = {part for part in old.keys() | new.keys() if _dump(old.get(part, [])) != _dump(new.get(part, []))}
            # A test that uses a fixture which is gone fails, or uses that of a folder above.
            return parts if parts <= self._nodes.keys() else {file}
        return {file}

    def _taken(self, file: str) -> set[tuple[str, str]]:
        """(module, name) of what a file of the tests imports, takes as an attribute, or has in a string."""
        if file in self._taken_by:
            return self._taken_by[file]
        dotted = (text.replace(":", ".").split(".") for text in self._strings[file] if text.startswith(f"{PACKAGE}."))
        named = {(".".join(parts[:n]), parts[n]) for parts in dotted for n in range(1, len(parts))}
        self._taken_by[file] = named | set(_imported(self._nodes[file]))
        return self._taken_by[file]

    def closure(self, test: str) -> set[str]:
        """All that a test reaches."""
        if test in self._closures:
            return self._closures[test]
        found = self._follow({test})
        words = {word for file in found if file.startswith((TESTS, CAMPAIGN)) for word in self._strings[file]}
        if MAIN in found:
            verbs = {part for word in words for part in word.split()} & self._verbs.keys()
            found |= self._follow({self._verbs[verb] for verb in verbs})
        if CONFIGS in found:
            found |= self._follow({"configs/config.yaml", *self._configs_in(words)})
        if any(word.endswith("*.yaml") for word in words):
            found |= self._follow(set(self._texts))
        if "*.py" in words:
            # It reads them, and runs none.
            found |= self._nodes.keys()
        self._closures[test] = found
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
        modules = [PurePosixPath(module) for module in self._nodes if not module.startswith(CAMPAIGN)]
        named = set(folders) - {folder for module in modules for folder in module.parts[:-1]}

        def names(text: str) -> bool:
            *_, last = parts = text.split("/")
            # A path of another file in a folder is not that of this one.
            is_file = "." in last and "*" not in last
            return last == name if is_file else not named.isdisjoint(parts)

        return {
            other
            for other, strings in self._strings.items()
            if other.startswith((TESTS, CAMPAIGN) if not file.startswith(DATA) else "") and _stem(other) != "conftest"
            if any(map(names, strings))
        }

    def _reached(self, file: str) -> Iterator[str]:
        for module, name in _imported(self._nodes[file]):
            yield from self._files_of(f"{module}.{name}")
            if name == "listed_verbs":
                yield from self._verbs.values()
            if f"{module.replace('.', '/')}.py" in PARTS and name in self._parts:
                yield from self._files_of(self._parts[name])
        strings, tested = self._strings[file], file.startswith((TESTS, CAMPAIGN))
        for text in () if _names_verbs(file) else strings:
            yield from self._modules_in(text)
            if tested and text.endswith(".py") and _stem(text) in self._helpers:
                yield self._helpers[_stem(text)]
        if {"-m", PACKAGE} <= strings:
            yield f"{PACKAGE}/__main__.py"
        for folder in PurePosixPath(file).parents if tested else ():
            above = f"{folder}/conftest.py"
            fixtures = {f"{above}::{name}" for name in strings | _arguments(self._nodes[file])}
            yield from {above, *fixtures} & self._nodes.keys()

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


def _split_fixtures(file: str, nodes: Sequence[ast.AST]) -> dict[str, list[ast.AST]]:
    """The nodes of a conftest.py, and those of each fixture in it that only the tests that name it use."""
    fixtures = {
        node.name: node
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        if any(
            "pytest.fixture" in (text := ast.unparse(each)) and "autouse" not in text for each in node.decorator_list
        )
    }
    parts = {f"{file}::{name}": list(ast.walk(node)) for name, node in fixtures.items()}
    of_fixtures = {id(node) for part in parts.values() for node in part}
    return {file: [node for node in nodes if id(node) not in of_fixtures], **parts}


def _dump(nodes: Sequence[ast.AST]) -> list[str]:
    """The code of a part of a conftest.py, without positions."""
    ids = {id(node) for node in nodes}
    statements = nodes[0].body if nodes and isinstance(nodes[0], ast.Module) else nodes[:1]
    return [ast.dump(node) for node in statements if id(node) in ids]


def _without_lint(text: str) -> dict[str, object]:
    """The settings of a project, without those of tools that no test runs."""
    settings = tomllib.loads(text)
    tools = settings.get("tool", {})
    return {**settings, "tool": {tool: values for tool, values in tools.items() if tool not in ("ruff", "mypy")}}


def _arguments(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.arg for node in nodes if isinstance(node, ast.arg)}


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
    if graph.left_out:
        print(
            f"{len(graph.left_out)} more ran a change, too, and are less about it: "
            f"{sum(table.seconds[test] for test in graph.left_out):.0f} s; `scripts/test` runs all.",
            file=sys.stderr,
        )
    print("\n".join(selected))


if __name__ == "__main__":
    # A collection would take longer than the parsing, and find nothing.
    gc.disable()
    main(Path(__file__).resolve().parents[1])
