"""Layers without cycles, pure modules that stay pure, fast answers without torch, and figures that only go down."""

from __future__ import annotations

import ast
import graphlib
import importlib
import io
import itertools
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from walk import Walk, traced

from trainer_cli.commands.command_line import main

PACKAGE = Path(__file__).parents[1] / "trainer_cli"
ROOT = PACKAGE.name

FLOORS = (
    "version addon containers elsewhere bounds gc_pause memory png signals source_view strict_json torch_compat",
    "environment lazy leaves terminal",
    "errors goodput",
    "patterns ranks user_cache",
    "metric_names parts",
    "fit_parts search_parts steps files",
    "values layout models scratch user_key",
    "signatures",
    "loads",
    "schema",
    "auto_values messages policy",
    "keys",
    "components manifest",
    "dtensor",
    "tensor_files",
    "batches data storage format parallel loggers",
    "config state strategies catalog",
    "checkpoint outputs",
    "optim runs",
    "selection sweep_file",
    "origin",
    "trainer",
    "callbacks",
    "running",
    "processes",
    "commands",
    "addons",
    "testing __main__",
)
"""The folders of the package, from the lowest: a module imports only from its own folder or a lower floor."""
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
PORTS = [f"{ROOT}.{part}" for part in ("storage", "format")]
PURE_PACKAGES = (
    "auto_values bounds containers elsewhere goodput layout leaves loads manifest metric_names patterns policy ranks "
    "schema signatures steps values"
)
"""What decides and names, from plain values alone."""
# What would bring torch, a clock, the disk, other processes or chance into a pure module.
IMPURE = {
    "torch", "numpy", "time", "datetime", "os", "io", "shutil", "tempfile", "socket", "subprocess",
    "threading", "multiprocessing", "random", "secrets", "uuid",
}  # fmt: skip


def _modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


MODULES = _modules()
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}


@cache
def _parse(text: str) -> ast.Module:
    """Where a test needs it, not where tests are collected."""
    return ast.parse(text)


def _tree(name: str) -> ast.Module:
    return _parse(TEXTS[name])


def _trees() -> Iterator[tuple[str, ast.Module]]:
    return ((name, _tree(name)) for name in MODULES)


def _face(package: str) -> dict[str, str]:
    """The names that other packages take from a package, with the modules in which they are."""
    stub = MODULES[package].with_suffix(".pyi")
    if package == f"{ROOT}.addons" or not stub.is_file():
        # What stands in that of add-ons is written by scripts/addons.py, for type checkers alone.
        return {}
    return {
        alias.name: str(node.module)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        # The names of add-ons, of which the core knows none.
        if alias.name != "*"
    }


FACES = {name: _face(name) for name, path in MODULES.items() if path.name == "__init__.py" and name != ROOT}
PURE = [name for name in MODULES if name != ROOT and name.split(".")[1] in PURE_PACKAGES.split()]
PURE.append(f"{ROOT}.data.order")


def _place(name: str, line: int = 1) -> str:
    """The file of a module, with a line, as terminals make it a link."""
    return f"{MODULES[name].relative_to(PACKAGE.parent)}:{line}"


def _refuse(places: Iterable[str], rule: str) -> None:
    """Fail with each place that breaks a rule, and the rule with its usual cure in one sentence."""
    if listed := "\n".join(places):
        pytest.fail(f"{listed}\n{rule}", pytrace=False)


@cache
def _imports(name: str) -> Sequence[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with the line; type checking left out."""
    relative = (node for node in ast.walk(_tree(name)) if isinstance(node, ast.ImportFrom) and node.level)
    _refuse(
        (f"{_place(name, node.lineno)} imports from {'.' * node.level}{node.module or ''}" for node in relative),
        f"imports name the whole path: write `from {ROOT}. …`",
    )
    return list(_imported(_tree(name)))


@cache
def _from_imports() -> Sequence[tuple[str, str, str]]:
    """Each module, with the module and the name of each of its `from module import name`, behind whatever face."""
    return [
        (name, FACES.get(node.module or "", {}).get(alias.name, node.module or ""), alias.name)
        for name, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def _imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for other in node.orelse:
            yield from _imported(other)
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            behind_face = FACES.get(node.module or "", {}).get(alias.name)
            yield behind_face or (inner if inner in MODULES else node.module or ""), node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def _floor(name: str) -> int:
    """The floor of a module's folder."""
    return FLOOR_OF[name.split(".")[1]]


def _ours(name: str) -> list[tuple[str, int]]:
    # The top package holds the version and lazy names: it is below everything and imports nothing.
    return [(found, line) for found, line in _imports(name) if found.startswith(f"{ROOT}.")]


@pytest.mark.parametrize("name", [name for name in MODULES if name != ROOT])
def test_a_file_imports_only_from_its_own_folder_or_a_lower_floor(name: str) -> None:
    folder = name.split(".")[1]
    _refuse(
        (
            f"{_place(name, line)} imports {imported}, of floor {_floor(imported)}"
            for imported, line in _ours(name)
            if imported.split(".")[1] != folder and _floor(imported) >= _floor(name)
        ),
        f"a module of floor {_floor(name)} imports from lower floors alone (FLOORS): move what is needed down, "
        "or take it as an argument",
    )


def test_an_add_on_is_imported_by_its_own_modules_alone() -> None:
    _refuse(
        (
            f"{_place(name, line)} imports {imported}"
            for name in MODULES
            for imported, line in (_ours(name) if name != ROOT else ())
            if imported.startswith(f"{ROOT}.addons.") and _package_of(imported) != _package_of(name)
        ),
        "the folder of an add-on can be deleted: ask for a part (parts.py, fit_parts.py), or move the name down",
    )


def test_there_is_no_import_cycle() -> None:
    graph = {name: {found for found, _ in _ours(name) if found != name} for name in MODULES if name != ROOT}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # Each module is imported by the one after it.
        pairs = itertools.pairwise(error.args[1])
        lines = ((user, used, dict(_ours(user)).get(used, 1)) for used, user in pairs)
        _refuse(
            (f"{_place(user, line)} imports {used}" for user, used, line in lines),
            "imports form no circle: move what both need into a module below them, or pass it as an argument",
        )


@pytest.mark.parametrize("port", PORTS)
def test_storage_and_format_never_import_one_another(port: str) -> None:
    others = tuple(other for other in PORTS if other != port)
    _refuse(
        (
            f"{_place(name, line)} imports {found}"
            for name in MODULES
            if name.startswith(port)
            for found, line in _ours(name)
            if found.startswith(others)
        ),
        "storage and format know nothing of each other: let the checkpoint package pass what is needed",
    )


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name in PURE))
def test_a_pure_module_has_no_torch_clock_disk_or_chance(name: str) -> None:
    _refuse(
        (f"{_place(name, line)} imports {found}" for found, line in _imports(name) if found.split(".")[0] in IMPURE),
        "a pure module (PURE_PACKAGES) decides from plain values: let its caller read the clock, the disk or a tensor, "
        "and pass what it read",
    )


def test_trainer_knows_hooks_but_not_callbacks_nor_hydra() -> None:
    _refuse(
        (
            f"{_place(name, line)} imports {found}"
            for name in MODULES
            if name.startswith(f"{ROOT}.trainer.")
            for found, line in _imports(name)
            if found.startswith((f"{ROOT}.callbacks", "hydra", "omegaconf"))
        ),
        "the trainer calls hooks, and knows neither callbacks nor configs: add or use a hook (trainer/hooks.py)",
    )


def _takes(module: str, *wanted: str) -> list[str]:
    """The modules that import one of these names from a module."""
    return sorted({user for user, source, name in _from_imports() if source == module and name in wanted})


def test_only_arguments_build_and_plan_get_the_objects_that_targets_name() -> None:
    """`import_target` and `resolve` are where trust is asked for; nothing else makes an object of a `_target_`."""
    users = _takes(f"{ROOT}.components.targets", "import_target", "resolve")
    trusted = [f"{ROOT}.{name}" for name in ("components.bind", "running.build", "running.planning")]
    users = [
        *(user for user in users if user not in trusted),
        *_takes("hydra.utils", "instantiate", "call", "get_object"),
    ]
    _refuse(
        map(_place, users),
        "only these ask for trust before they import what a config names: call bind of components/bind.py",
    )


_OWN_PLURAL = re.compile(r"""\} [\w ]+\{['"]e?s['"](\[| \*)|['"]e?s['"]\[|(['"])(\w+)\2 if \w+ == 1 else \2\3s\2""")


def test_counts_are_written_by_format_count_alone() -> None:
    _refuse(
        (
            f"{_place(name, line)} writes {match[0]}"
            for name, lines in TEXTS.items()
            for line, text in enumerate(lines.splitlines(), 1)
            if (match := _OWN_PLURAL.search(text))
        ),
        "counts are written alike: call format_count",
    )


PICKLES = ("dcp", "torch_file")
"""The readers of pickles, which run nothing that is in them."""


def test_only_restricted_readers_import_pickle() -> None:
    readers = {f"{ROOT}.addons.formats.{name}" for name in PICKLES}
    users = {name: line for name in MODULES for found, line in _imports(name) if found == "pickle"}
    _refuse(
        (f"{_place(name, line)} imports pickle" for name, line in users.items() if name not in readers),
        "a pickle can run any code: read tensors by the restricted readers of addons/formats (PICKLES)",
    )
    assert users.keys() == readers & MODULES.keys(), "a reader imports pickle no more: take it out of PICKLES"


@pytest.mark.parametrize("name", list(MODULES))
def test_the_first_line_says_why_the_file_exists(name: str) -> None:
    _refuse(
        [] if ast.get_docstring(_tree(name)) else [_place(name)],
        "the first line of a module says why it exists: begin with a docstring of one sentence",
    )


@pytest.mark.parametrize("name", [ROOT, *FACES])
def test_a_package_init_holds_a_docstring_and_lazy_names(name: str) -> None:
    tree = _tree(name)
    statements = [ast.unparse(node) for node in tree.body[1:]]
    lazy = [
        "from trainer_cli.lazy import add_lazy_names",
        "add_lazy_names(globals(), of_addons=True)" if name == ROOT else "add_lazy_names(globals())",
    ]
    _refuse(
        [] if statements in ([], lazy) else [f"{_place(name, tree.body[1].lineno)} has more than its names"],
        f"an __init__.py is a docstring and `{lazy[-1]}`: move code into a module, and names into __init__.pyi",
    )
    # The names are read from the stub by words, here as Python reads them.
    face = _face(name)
    _refuse(
        (
            f"{_place(name)}i imports {each} from {module}"
            for each, module in face.items()
            if not module.startswith(f"{name}.")
        ),
        "a package offers names of its own modules: import others from where they are",
    )
    _refuse(
        (f"{_place(name)}i: {each} is not read" for each in face.keys() - set(dir(importlib.import_module(name)))),
        "a stub has nothing but `from module import name as name`",
    )


MOST_NAMES = 20
"""The names that a package offers to other packages, at most: what needs more is several packages."""


@pytest.mark.parametrize("name", FACES)
def test_a_package_offers_few_names(name: str) -> None:
    _refuse(
        [f"{_place(name)}i has {len(FACES[name])} names"] if len(FACES[name]) > MOST_NAMES else [],
        f"a package offers at most {MOST_NAMES} names: take out what only its own modules use, or make two packages",
    )


@pytest.mark.parametrize("name", FACES)
def test_no_module_hides_a_name_of_its_package(name: str) -> None:
    """An import of a module makes it an attribute of its package, in the place of a name that is spelt like it."""
    _refuse(
        (
            f"{_place(f'{name}.{each}')} has the name {each} of its package"
            for each in FACES[name]
            if f"{name}.{each}" in MODULES
        ),
        "an import of the module would replace the name: rename the module",
    )


_OF_EVERYBODY = (f"{ROOT}.__main__", f"{ROOT}.errors", f"{ROOT}.terminal")
"""The door of the command, the tree of errors, and the words and widths of a terminal."""
BESIDE = [name for name in MODULES if name.count(".") == 1 and name not in FACES and name not in _OF_EVERYBODY]


@pytest.mark.parametrize("name", BESIDE)
def test_a_module_beside_the_packages_offers_few_names(name: str) -> None:
    taken = {alias for user, module, alias in _from_imports() if user != ROOT and module == name}
    _refuse(
        [f"{_place(name)} is asked for {len(taken)} names"] if len(taken) > MOST_NAMES else [],
        f"a module beside the packages offers at most {MOST_NAMES} names: make it a package, or move some to users",
    )


GATES = {
    "names that are taken past the face of a package": 0,
    "lines that importing trainer_cli.trainer.trainer brings in": 19_500,
    "tokens of code": 552_566,
    "names of public classes with several meanings": 0,
}
"""What makes the package hard to read, at most. A change that lowers a figure lowers it here, too; one that raises a
figure says in its commit what a user gains."""


MEASURED_WITH = 15
"""The add-ons of which the figures are: they may be lower where some were deleted."""


@pytest.mark.parametrize("figure", GATES)
def test_the_package_becomes_no_harder_to_read(figure: str, figures: dict[str, int]) -> None:
    gate = f"tests/test_architecture.py: {figures[figure]} {figure}, where GATES has {GATES[figure]}"
    is_whole = sum(name.endswith(".addon") and ".addons." in name for name in MODULES) == MEASURED_WITH
    _refuse(
        [gate] if figures[figure] > GATES[figure] else [],
        "figures only go down: make the change smaller, or say in GATES' place what a user gains by it",
    )
    _refuse(
        [gate] if is_whole and figures[figure] < 0.98 * GATES[figure] else [],
        "a figure went down: write the lower one into GATES",
    )


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    classes: dict[str, set[str]] = defaultdict(set)
    for name, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(name)
    return dict(
        zip(
            GATES,
            (
                len(_taken_past_faces()),
                _lines_loaded_by(f"{ROOT}.trainer.trainer"),
                sum(_count_tokens(MODULES[name], tree) for name, tree in _trees()),
                sum(len(modules) > 1 for modules in classes.values()),
            ),
            strict=True,
        )
    )


def _package_of(module: str) -> str:
    """The package of a module; modules beside the packages have none."""
    parts = module.split(".")
    parent = ".".join(parts[: 3 if parts[1:2] == ["addons"] else 2])
    return parent if parent in FACES else ROOT


def _taken_past_faces() -> set[tuple[str, str]]:
    """Each module of another package from which something is imported, with the name."""
    return {
        (module, alias.name)
        for name, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        for module in [node.module or "" if isinstance(node, ast.ImportFrom) else alias.name]
        if _package_of(module) not in (ROOT, _package_of(name)) and name != ROOT
        if module not in FACES or f"{module}.{alias.name}" in MODULES
    }


def _lines_loaded_by(module: str) -> int:
    """Count the lines of the package's modules that a fresh interpreter has loaded after an import."""
    code = f"import sys, {module}\nprint(*(name for name in sys.modules if name.split('.')[0] == {ROOT!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=500)
    return sum(MODULES[name].read_text(encoding="utf-8").count("\n") for name in done.stdout.split())


_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def _count_tokens(path: Path, tree: ast.Module) -> int:
    """Count the tokens of a file without comments and docstrings."""
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(token.type not in _NO_CODE and token.start[0] not in docstrings for token in tokens)


MOST_LINES = 70
"""The lines of a function without its docstring, at most: in a longer one some lines have a name of their own."""


def test_no_function_is_longer_than_one_screen() -> None:
    _refuse(
        (
            f"{_place(name, node.lineno)} {node.name} has {size} lines"
            for name, tree in _trees()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (size := _size(node)) > MOST_LINES
        ),
        f"a function has at most {MOST_LINES} lines without its docstring: give some of them a name of their own",
    )


def _size(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    has_docstring = ast.get_docstring(function) is not None
    docstring = (function.body[0].end_lineno or 0) - function.body[0].lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


SHORTEST_LIMIT_S = 500
"""A limit of a test is a guard against hanging, for a machine that is busy with other things as well."""
_CLOCKS = ("monotonic", "perf_counter", "process_time", "time")


@pytest.mark.parametrize(
    ("code", "is_short"),
    [
        ("assert begun.wait(60)", True),
        ("saving.written.result(60)", True),
        ("subprocess.run(words, timeout=120)", True),
        ("join_processes(os.environ, timeout_s=60)", True),
        ("until = time.monotonic() + 60", True),
        ("assert time.monotonic() - began < 600", True),
        ("assert LIMIT_S > time.perf_counter() - began", True),
        ("HANG_S = 120.0", True),
        ("assert begun.wait(500)", False),
        ("until = time.monotonic() + LIMIT_S", False),
        # These are to expire.
        ("is_done.wait(0.2)", False),
        ("join_processes(address, timeout_s=1)", False),
    ],
)
def test_a_short_limit_and_a_measured_time_are_found(code: str, is_short: bool) -> None:
    assert bool(list(_short_limits(ast.parse(code)))) is is_short


def test_no_test_fails_because_the_machine_is_busy() -> None:
    root = PACKAGE.parent
    _refuse(
        (
            f"{path.relative_to(root)}:{line}"
            for folder in ("tests", "scripts/campaign")
            for path in sorted((root / folder).rglob("*.py"))
            for line in _short_limits(ast.parse(path.read_text(encoding="utf-8")))
        ),
        f"a limit is a guard against hanging, of at least {SHORTEST_LIMIT_S} s, and no test compares a measured time: "
        "wait for an event, or count calls",
    )


def _short_limits(tree: ast.AST) -> Iterator[int]:
    """The lines with a limit of more than ten seconds and less than a guard, or a measured time that is compared."""
    for node in ast.walk(tree):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            limits = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "timeout_s", "limit_s")]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "result"):
                limits += node.args
        elif isinstance(node, ast.Assign) and any(_names_limit(target) for target in node.targets):
            limits = [node.value]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _reads_clock(node.left):
            limits = [node.right]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.BinOp) and _reads_clock(side.left) for side in sides):
                yield node.lineno
        for limit in limits:
            seconds = limit.value if isinstance(limit, ast.Constant) else None
            if isinstance(seconds, int | float) and 10 < seconds < SHORTEST_LIMIT_S:
                yield limit.lineno


def _names_limit(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.lstrip("_") in ("LIMIT_S", "HANG_S")


def _reads_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CLOCKS


def _loaded_after(code: str, cwd: Path) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running the code."""
    script = (
        f"import sys, io\nsys.path.insert(0, {str(PACKAGE.parent)!r})\n{code}\n"
        "print(chr(10) + '::' + ' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("::")[2].split())


def _refuse_loaded(modules: set[str], what: str) -> None:
    _refuse(
        (f"{what} loads {module}" for module in sorted(modules)),
        "answers are fast because they load little: import it in the function that needs it, which "
        "`python -X importtime` shows",
    )


def _verb(*arguments: str) -> str:
    return (
        "from trainer_cli.commands.command_line import main\n"
        f"try:\n    code = main({list(arguments)!r})\n"
        "except SystemExit as end:\n    code = end.code\n"
        "assert not code, code"
    )


def test_importing_the_package_and_its_pure_modules_loads_no_torch(tmp_path: Path) -> None:
    modules = [name for name in PURE if name in MODULES] + [f"{ROOT}.runs.run_dir", f"{ROOT}.loggers.base"]
    loaded = _loaded_after("\n".join(f"import {name}" for name in [ROOT, *modules]), tmp_path)
    _refuse_loaded(loaded & {"torch", "numpy", "tensorboard", "rich"}, f"import {ROOT}")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_help_and_version_load_neither_torch_nor_hydra(arguments: list[str], tmp_path: Path) -> None:
    loaded = _loaded_after(_verb(*arguments), tmp_path)
    _refuse_loaded(loaded & {"torch", "hydra", "omegaconf"}, f"train {arguments[0]}")


@pytest.mark.parametrize("arguments", [["config", "+experiment=digits_mlp"], ["list"]], ids=" ".join)
def test_a_fast_verb_loads_no_torch(arguments: list[str], tmp_path: Path) -> None:
    _refuse_loaded(_loaded_after(_verb(*arguments), tmp_path) & {"torch"}, f"train {arguments[0]}")


def test_composing_the_config_of_a_fit_loads_no_torch(tmp_path: Path) -> None:
    code = f"from {ROOT}.processes import compose_fit\ncompose_fit(['+experiment=digits_mlp'])"
    _refuse_loaded(_loaded_after(code, tmp_path) & {"torch", "numpy"}, "compose_fit of trainer_cli/processes/fit.py")


@pytest.mark.addon("view")
def test_a_report_loads_neither_torch_nor_hydra(tmp_path: Path) -> None:
    made = f"from {ROOT}.runs.run_dir import RunDir\nRunDir('x').create('name: x', [], {{}}).release()\n"
    loaded = _loaded_after(made + _verb("report", "x"), tmp_path)
    _refuse_loaded(loaded & {"torch", "hydra", "omegaconf"}, "train report")


LONGEST = {"step": 8, "save": 10, "command": 10, "resume": 10, "evaluation": 8, "stop": 6}
"""The modules that a reader may have to open for each walk, at most."""


def _walks() -> dict[str, tuple[Walk, set[str]]]:
    """The walks of docs/architecture.md: beginnings and stations, and the modules that the page names."""
    page = (
        (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8").split("## Walks\n")[1].split("\n## ")[0]
    )
    walks = {}
    for name, limit, text in re.findall(r"- \*\*(\w+)\*\* \(at most (\d+)\)(.*?)(?=\n- \*\*|\Z)", page, re.DOTALL):
        assert int(limit) == LONGEST[name]
        parts = re.fullmatch(r"\s+from (.*)\s+to (.*)\s+through (.*)", text.rstrip(), re.DOTALL)
        assert parts, name
        begins, stations, modules = (re.findall(r"`([^`]+)`", part) for part in parts.groups())
        assert len(modules) <= LONGEST[name], name
        walks[name] = Walk(begins, stations), set(modules)
    assert list(walks) == list(LONGEST)
    return walks


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Walk, set[str]]]:
    """The walks, traced in a training that saves and evaluates, in one that resumes it, and in one that is stopped."""
    walks = _walks()
    fit = [
        "fit",
        "experiment=digits_mlp",
        f"run_dir={tmp_path_factory.mktemp('walks') / 'run'}",
        "loop.eval_interval=3",
        "checkpoint.save_interval=2",
        "checkpoint.save_async=true",
    ]
    resume, stop = {"resume": walks["resume"][0]}, {"stop": walks["stop"][0]}
    with traced({name: walk for name, (walk, _) in walks.items() if name not in {*resume, *stop}}):
        assert main([*fit, "loop.max_duration=4"]) == 0
    with traced(resume):
        assert main([*fit, "loop.max_duration=5"]) == 0
    with traced(stop):
        sender = "+callbacks.sender={_target_: walk.make_signal_sender, step: 2}"
        assert main([*fit, "loop.max_duration=4", sender, f"run_dir={tmp_path_factory.mktemp('stopped')}"]) == 75
    return walks


@pytest.mark.parametrize("name", LONGEST)
def test_a_walk_passes_the_modules_of_the_page(name: str, walks: dict[str, tuple[Walk, set[str]]]) -> None:
    walk, modules = walks[name]
    page = f"docs/architecture.md, walk {name!r}"
    stations = set(walk.stations) - walk.reached
    _refuse((f"{page}: {station} is not reached" for station in stations), "name the function where this is done now")
    extra = {module: caller for module, caller in walk.callers.items() if module not in modules}
    _refuse(
        (f"{ROOT}/{module} is called by {caller}, and not in {page}" for module, caller in extra.items()),
        f"a reader opens at most {LONGEST[name]} modules: call the next module directly, or name this one on the page",
    )
    _refuse((f"{page}: {each} is not passed" for each in modules - set(walk.callers)), "take it out of the page")


_OWN_GENERATORS = {"Random", "SystemRandom", "RandomState", "Generator", "default_rng", "MT19937", "PCG64", "mtrand"}
_READS = {"getstate", "get_state", "initial_seed"}
_DRAWS_OF_TORCH = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "manual_seed", "seed", "set_rng_state", "uniform_", "normal_", "random_", "bernoulli_",
    "exponential_", "geometric_", "cauchy_", "log_normal_", "random_split", "kaiming_uniform_", "xavier_uniform_",
}  # fmt: skip
_MAY_DRAW = {
    "trainer.setup": "seeds the generators at the start of a run",
    "data.random_state": "seeds the generators for a sample, and restores them",
    "state.generators": "restores the generators from a checkpoint",
    "data.datasets": "augments a sample, with the sample's own random numbers",
    "addons.jobs.fork_server": "seeds NumPy's generator in a new process",
    "addons.text.gpt": "initialises parameters",
}
"""Modules that change the global generators -> what for. A training with the same seed does it at the same place."""


def _global_draws(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines with the calls that draw from, seed or set a global generator of Python, NumPy or torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            yield from (
                (node.lineno, f"{node.module}.{alias.name}")
                for alias in node.names
                if alias.name not in _OWN_GENERATORS
            )
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        of_module = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
        if name not in _DRAWS_OF_TORCH and of_module != "random":
            continue
        owner = ast.unparse(node.func.value)
        is_own = any(keyword.arg == "generator" for keyword in node.keywords)
        if owner in ("random", "np.random", "numpy.random"):
            draws = name not in _OWN_GENERATORS | _READS
        else:
            draws = name in _DRAWS_OF_TORCH and not is_own and "generator" not in owner.lower()
        if draws:
            yield node.lineno, f"{owner}.{name}"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_draws_from_the_global_generators(name: str) -> None:
    draws = list(_global_draws(_tree(name)))
    if name.removeprefix(f"{ROOT}.") in _MAY_DRAW:
        assert draws, f"{_place(name)} draws no more: take it out of _MAY_DRAW"
    else:
        _refuse(
            (f"{_place(name, line)} calls {call}" for line, call in draws),
            "a training draws from the global generators, so nothing else does: use a generator of your own",
        )


WRONG = f"{ROOT}.values.wrong"


@pytest.mark.parametrize(
    ("module", "code", "check", "message"),
    [
        (WRONG, "from .kinds import a", lambda: _imports(WRONG), "1 imports from .kinds\nimports name the whole path"),
        (
            WRONG,
            "def f():\n    from trainer_cli.trainer import Trainer",
            lambda: test_a_file_imports_only_from_its_own_folder_or_a_lower_floor(WRONG),
            "2 imports trainer_cli.trainer.trainer, of floor",
        ),
        (
            WRONG,
            "import trainer_cli.addons.view.serve",
            lambda: test_an_add_on_is_imported_by_its_own_modules_alone(),
            "1 imports trainer_cli.addons.view.serve\nthe folder of an add-on can be deleted: ask for a part",
        ),
        (
            f"{ROOT}.storage.wrong",
            "import trainer_cli.format.base",
            lambda: test_storage_and_format_never_import_one_another(f"{ROOT}.storage"),
            "1 imports trainer_cli.format.base\nstorage and format know nothing of each other: let",
        ),
        (
            WRONG,
            "import trainer_cli\nimport time",
            lambda: test_a_pure_module_has_no_torch_clock_disk_or_chance(WRONG),
            "2 imports time\na pure module (PURE_PACKAGES) decides from plain values: let its caller read",
        ),
        (
            f"{ROOT}.trainer.wrong",
            "import omegaconf",
            lambda: test_trainer_knows_hooks_but_not_callbacks_nor_hydra(),
            "1 imports omegaconf\nthe trainer calls hooks, and knows neither callbacks nor configs: add or use a hook",
        ),
        (
            WRONG,
            "from hydra.utils import instantiate",
            lambda: test_only_arguments_build_and_plan_get_the_objects_that_targets_name(),
            "1\nonly these ask for trust before they import what a config names: call bind",
        ),
        (
            WRONG,
            "a = 1\nb = f\"{a} step{'s'[a == 1:]}\"",
            lambda: test_counts_are_written_by_format_count_alone(),
            "2 writes } step{'s'[\ncounts are written alike: call format_count",
        ),
        (
            WRONG,
            "import pickle",
            lambda: test_only_restricted_readers_import_pickle(),
            "1 imports pickle\na pickle can run any code: read tensors by the restricted readers",
        ),
        (
            WRONG,
            "import json",
            lambda: test_the_first_line_says_why_the_file_exists(WRONG),
            "1\nthe first line of a module says why it exists: begin with a docstring",
        ),
        (
            WRONG,
            "def f():\n" + "    f()\n" * 80,
            lambda: test_no_function_is_longer_than_one_screen(),
            "1 f has 81 lines\na function has at most 70 lines without its docstring: give some of them a name",
        ),
        (
            WRONG,
            "import random\nrandom.random()",
            lambda: test_nothing_draws_from_the_global_generators(WRONG),
            "2 calls random.random\na training draws from the global generators, so nothing else does: use a generator",
        ),
    ],
)
def test_a_broken_rule_is_printed_with_its_place_and_its_cure(
    module: str, code: str, check: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    for table, value in ((MODULES, path), (TEXTS, code)):
        monkeypatch.setitem(table, module, value)
    _imports.cache_clear()
    _from_imports.cache_clear()
    try:
        with pytest.raises(pytest.fail.Exception, match=re.escape(f"{path.relative_to(PACKAGE.parent)}:{message}")):
            check()
    finally:
        _imports.cache_clear()
        _from_imports.cache_clear()
