"""Layers without cycles, pure modules that stay pure, fast answers without torch, and figures that only go down."""

from __future__ import annotations

import ast
import graphlib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from walk import Walk, traced

from trainer_cli.commands.command_line import main

PACKAGE = Path(__file__).parents[1] / "trainer_cli"
ROOT = PACKAGE.name

FLOORS = (
    "version addon containers elsewhere bounds gc_pause memory png signals strict_json torch_compat",
    "environment lazy leaves terminal",
    "errors goodput",
    "patterns ranks user_cache",
    "metric_names parts",
    "steps files",
    "values layout models",
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
    "selection",
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
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


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


@cache
def _imports(name: str) -> Sequence[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with the line; type checking left out."""
    return list(_imported(TREES[name]))


@cache
def _from_imports() -> Sequence[tuple[str, str, str]]:
    """Each module, with the module and the name of each of its `from module import name`, behind whatever face."""
    return [
        (name, FACES.get(node.module or "", {}).get(alias.name, node.module or ""), alias.name)
        for name, tree in TREES.items()
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
        assert node.level == 0, f"line {node.lineno}: imports name the whole path"
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
    upward = [
        f"line {line}: {imported}"
        for imported, line in _ours(name)
        if imported.split(".")[1] != folder and _floor(imported) >= _floor(name)
    ]
    assert not upward, f"{name} is of floor {_floor(name)}"


def test_an_add_on_is_imported_by_its_own_modules_alone() -> None:
    imports = [
        f"{MODULES[name].relative_to(PACKAGE.parent)}:{line} imports {imported}"
        for name in MODULES
        for imported, line in (_ours(name) if name != ROOT else ())
        if imported.startswith(f"{ROOT}.addons.") and _package_of(imported) != _package_of(name)
    ]
    assert not imports, (
        "its folder can be deleted: ask for a part (trainer_cli/parts.py), or move the name into the core"
    )


def test_there_is_no_import_cycle() -> None:
    graph = {name: {found for found, _ in _ours(name) if found != name} for name in MODULES if name != ROOT}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("port", PORTS)
def test_storage_and_format_never_import_one_another(port: str) -> None:
    others = tuple(other for other in PORTS if other != port)
    sideways = [
        f"{name}:{line} {found}"
        for name in MODULES
        if name.startswith(port)
        for found, line in _ours(name)
        if found.startswith(others)
    ]
    assert not sideways


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name in PURE))
def test_a_pure_module_has_no_torch_clock_disk_or_chance(name: str) -> None:
    impure = [f"line {line}: {found}" for found, line in _imports(name) if found.split(".")[0] in IMPURE]
    assert not impure


def test_trainer_knows_hooks_but_not_callbacks_nor_hydra() -> None:
    unknown = [
        f"{name}:{line} {found}"
        for name in MODULES
        if name.startswith(f"{ROOT}.trainer")
        for found, line in _imports(name)
        if found.startswith((f"{ROOT}.callbacks", "hydra", "omegaconf"))
    ]
    assert not unknown


def _takes(module: str, *wanted: str) -> list[str]:
    """The modules that import one of these names from a module."""
    return sorted({user for user, source, name in _from_imports() if source == module and name in wanted})


def test_only_arguments_build_and_plan_get_the_objects_that_targets_name() -> None:
    """`import_target` and `resolve` are where trust is asked for; nothing else makes an object of a `_target_`."""
    users = _takes(f"{ROOT}.components.targets", "import_target", "resolve")
    assert users == [f"{ROOT}.{name}" for name in ("components.bind", "running.build", "running.planning")]
    assert _takes("hydra.utils", "instantiate", "call", "get_object") == []


_OWN_PLURAL = re.compile(r"""\} [\w ]+\{['"]e?s['"](\[| \*)|['"]e?s['"]\[|(['"])(\w+)\2 if \w+ == 1 else \2\3s\2""")


def test_counts_are_written_by_format_count_alone() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert not {name: match[0] for name, text in texts.items() if (match := _OWN_PLURAL.search(text))}


PICKLES = ("dcp", "torch_file")
"""The readers of pickles, which run nothing that is in them."""


def test_only_restricted_readers_import_pickle() -> None:
    users = {name for name in MODULES if any(found == "pickle" for found, _ in _imports(name))}
    assert users == {f"{ROOT}.addons.formats.{name}" for name in PICKLES}


@pytest.mark.parametrize("name", list(MODULES))
def test_the_first_line_says_why_the_file_exists(name: str) -> None:
    assert ast.get_docstring(TREES[name])


@pytest.mark.parametrize("name", [ROOT, *FACES])
def test_a_package_init_holds_a_docstring_and_lazy_names(name: str) -> None:
    tree = TREES[name]
    assert ast.get_docstring(tree)
    statements = [ast.unparse(node) for node in tree.body[1:]]
    lazy = [
        "from trainer_cli.lazy import add_lazy_names",
        "add_lazy_names(globals(), of_addons=True)" if name == ROOT else "add_lazy_names(globals())",
    ]
    assert statements in ([], lazy)
    # The names are read from the stub by words, here as Python reads them.
    face = _face(name)
    assert not [f"{each} from {module}" for each, module in face.items() if not module.startswith(f"{name}.")]
    assert face.keys() <= set(dir(importlib.import_module(name)))


MOST_NAMES = 20
"""The names that a package offers to other packages, at most: what needs more is several packages."""


@pytest.mark.parametrize("name", FACES)
def test_a_package_offers_few_names(name: str) -> None:
    assert len(FACES[name]) <= MOST_NAMES


@pytest.mark.parametrize("name", FACES)
def test_no_module_hides_a_name_of_its_package(name: str) -> None:
    """An import of a module makes it an attribute of its package, in the place of a name that is spelt like it."""
    assert not {each for each in FACES[name] if f"{name}.{each}" in MODULES}


_OF_EVERYBODY = (f"{ROOT}.__main__", f"{ROOT}.errors", f"{ROOT}.terminal")
"""The door of the command, the tree of errors, and the words and widths of a terminal."""
BESIDE = [name for name in MODULES if name.count(".") == 1 and name not in FACES and name not in _OF_EVERYBODY]


@pytest.mark.parametrize("name", BESIDE)
def test_a_module_beside_the_packages_offers_few_names(name: str) -> None:
    taken = {alias for user, module, alias in _from_imports() if user != ROOT and module == name}
    assert len(taken) <= MOST_NAMES


GATES = {
    "names that are taken past the face of a package": 0,
    "lines that importing trainer_cli.trainer.trainer brings in": 19_250,
    "tokens of code": 508_750,
    "names of public classes with several meanings": 0,
}
"""What makes the package hard to read, at most. A change that lowers a figure lowers it here, too; one that raises a
figure says in its commit what a user gains."""


@pytest.mark.parametrize("figure", GATES)
def test_the_package_becomes_no_harder_to_read(figure: str, figures: dict[str, int]) -> None:
    assert figures[figure] <= GATES[figure], f"{figure}: {figures[figure]}"
    assert figures[figure] >= 0.98 * GATES[figure], f"write {figures[figure]} for {figure!r} into GATES"


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    classes: dict[str, set[str]] = defaultdict(set)
    for name, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(name)
    return dict(
        zip(
            GATES,
            (
                len(_taken_past_faces()),
                _lines_loaded_by(f"{ROOT}.trainer.trainer"),
                sum(_count_tokens(MODULES[name], tree) for name, tree in TREES.items()),
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
        for name, tree in TREES.items()
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
    long = [
        f"{name}:{node.lineno} {node.name} has {size} lines"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (size := _size(node)) > MOST_LINES
    ]
    assert not long


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
    short = [
        f"{path.relative_to(root)}:{line}"
        for folder in ("tests", "scripts/campaign")
        for path in sorted((root / folder).rglob("*.py"))
        for line in _short_limits(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not short, f"a limit is at least {SHORTEST_LIMIT_S} s, and no test compares a measured time"


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
    assert not loaded & {"torch", "numpy", "tensorboard", "rich"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]], ids=" ".join)
def test_help_and_version_load_neither_torch_nor_hydra(arguments: list[str], tmp_path: Path) -> None:
    assert not _loaded_after(_verb(*arguments), tmp_path) & {"torch", "hydra", "omegaconf"}


@pytest.mark.parametrize("arguments", [["config", "+experiment=digits_mlp"], ["list"]], ids=" ".join)
def test_a_fast_verb_loads_no_torch(arguments: list[str], tmp_path: Path) -> None:
    assert "torch" not in _loaded_after(_verb(*arguments), tmp_path)


def test_composing_the_config_of_a_fit_loads_no_torch(tmp_path: Path) -> None:
    code = f"from {ROOT}.processes import compose_fit\ncompose_fit(['+experiment=digits_mlp'])"
    assert not _loaded_after(code, tmp_path) & {"torch", "numpy"}


def test_a_report_loads_neither_torch_nor_hydra(tmp_path: Path) -> None:
    made = f"from {ROOT}.runs.run_dir import RunDir\nRunDir('x').create('name: x', [], {{}}).release()\n"
    assert not _loaded_after(made + _verb("report", "x"), tmp_path) & {"torch", "hydra", "omegaconf"}


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
    assert not set(walk.stations) - walk.reached
    extra = [f"{module}, called by {caller}" for module, caller in walk.callers.items() if module not in modules]
    assert not extra
    assert not modules - set(walk.callers)


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


def _global_draws(tree: ast.AST) -> Iterator[str]:
    """The calls that draw from, seed or set a global generator of Python, NumPy or torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            yield from (
                f"line {node.lineno}: from {node.module} import {alias.name}"
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
            yield f"line {node.lineno}: {owner}.{name}"


@pytest.mark.parametrize("name", MODULES)
def test_nothing_draws_from_the_global_generators(name: str) -> None:
    draws = list(_global_draws(TREES[name]))
    may_draw = name.removeprefix(f"{ROOT}.") in _MAY_DRAW
    assert bool(draws) == may_draw, f"{draws}: a training draws from the same generators"
