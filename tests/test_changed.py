"""scripts/changed.py prints the tests that changed files can reach."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import recorder

import advice
import changed
import reached
from trainer_cli.commands.command_line import listed_verbs

ROOT = Path(__file__).parents[1]
PROJECT = {
    "trainer_cli/__init__.py": "",
    "trainer_cli/__init__.pyi": "from trainer_cli.callbacks.ema import EMA as EMA\n",
    "trainer_cli/core/__init__.py": "",
    "trainer_cli/files/durable.py": "def write(): ...\n",
    "trainer_cli/callbacks/ema.py": "from trainer_cli.core import files\n",
    "trainer_cli/config/search_path.py": "FOLDER = 'configs'\n",
    "trainer_cli/running/fitting.py": "def fit():\n    import trainer_cli.config.search_path\n",
    "trainer_cli/commands/fit.py": "from trainer_cli.running.fitting import fit\n",
    "trainer_cli/commands/top.py": "PAGE = 'top_page.html'\n",
    "trainer_cli/commands/top_page.html": "",
    "trainer_cli/commands/command_line.py": (
        "VERBS = {'fit': Verb('trainer_cli.commands.fit'), 'top': Verb('trainer_cli.commands.top')}\n"
    ),
    "trainer_cli/parts.py": "SWEEP: AddOnPart = AddOnPart('fit.sweep')\nPLAN: AddOnPart = AddOnPart('fit.plan')\n",
    "trainer_cli/runs/sweeps.py": (
        "from trainer_cli.parts import SWEEP\nif TYPE_CHECKING:\n    import trainer_cli.running.fitting\n"
    ),
    "trainer_cli/addons/jobs/addon.py": (
        "ADDON = AddOn(names={'trainer_cli.addons.jobs.job': 'Job'},"
        " parts={'fit.sweep': 'trainer_cli.addons.jobs.sweep:run'})"
    ),
    "trainer_cli/addons/jobs/job.py": "",
    "trainer_cli/addons/jobs/sweep.py": "",
    "trainer_cli/__main__.py": "from trainer_cli.commands.command_line import main\n",
    "configs/config.yaml": "defaults: [{callbacks: none}]\n",
    "configs/callbacks/none.yaml": "# Not even ema\n",
    "configs/callbacks/ema.yaml": "_target_: trainer_cli.EMA\n",
    "docs/guide.md": "",
    "README.md": "",
    "pyproject.toml": "",
    "scripts/lint": "",
    "scripts/campaign/__init__.py": "",
    "scripts/campaign/classes.py": "MODULES = ['campaign.kills']\n",
    "scripts/campaign/kills.py": "",
    "tests/conftest.py": "PATHS = ['tests/core/test_files.py', 'docs']\n",
    "tests/support/command.py": "COMMAND = ['python', '-m', 'trainer_cli']\n",
    "tests/runs/conftest.py": "from trainer_cli.files.durable import write\n",
    "tests/runs/ranks.py": "",
    "tests/core/test_files.py": '"""As trainer_cli.running.fitting and docs."""\nfrom trainer_cli.core import files\n',
    "tests/runs/test_fit.py": "import command\ntrain('fit', 'callbacks=ema')\n",
    "tests/runs/test_plain.py": "import command\ntrain('fit')\nstart(HERE / 'ranks.py')\n",
    "tests/test_top.py": "import command\ntrain('top')\n",
    "tests/test_names.py": "import trainer_cli\ntrainer_cli.EMA\n",
    "tests/test_job.py": "import trainer_cli\ntrainer_cli.Job\n",
    "tests/test_sweeps.py": "import trainer_cli.runs.sweeps\n",
    "tests/test_tables.py": "from trainer_cli.commands.command_line import listed_verbs\nlisted_verbs()\n",
    "tests/test_campaign.py": "from campaign import classes\n",
    "tests/test_pages.py": "ROOT / 'docs'\nROOT / 'README.md'\n",
    "tests/test_whole_sources.py": "ROOT.rglob('*.py')\n",
}
RUNS = ["tests/runs/test_fit.py", "tests/runs/test_plain.py"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "reached"),
    [
        ("tests/test_names.py", ["tests/test_names.py"]),
        ("trainer_cli/running/fitting.py", [*RUNS, "tests/test_tables.py"]),
        ("trainer_cli/commands/top.py", ["tests/test_tables.py", "tests/test_top.py"]),
        ("trainer_cli/commands/command_line.py", [*RUNS, "tests/test_tables.py", "tests/test_top.py"]),
        ("trainer_cli/callbacks/ema.py", ["tests/runs/test_fit.py", "tests/test_names.py"]),
        # A part of an add-on, for what asks for it, and a public name of one.
        ("trainer_cli/addons/jobs/sweep.py", ["tests/test_sweeps.py"]),
        ("trainer_cli/addons/jobs/job.py", ["tests/test_job.py"]),
        ("trainer_cli/parts.py", ["tests/test_sweeps.py"]),
        ("tests/runs/conftest.py", RUNS),
        ("tests/runs/ranks.py", ["tests/runs/test_plain.py"]),
        # Errors list the configs.
        ("configs/callbacks/ema.yaml", [*RUNS, "tests/test_tables.py"]),
        ("trainer_cli/commands/top_page.html", ["tests/test_tables.py", "tests/test_top.py"]),
        ("docs/guide.md", ["tests/test_pages.py"]),
        ("README.md", ["tests/test_pages.py"]),
        ("scripts/campaign/kills.py", ["tests/test_campaign.py"]),
        ("tests/core/test_gone.py", []),
    ],
)
def test_a_change_runs_the_tests_that_reach_it(project: Path, file: str, reached: list[str]) -> None:
    everywhere = ["tests/test_whole_sources.py"] if reached else []
    assert changed.Graph(project).reach([file]) == [*reached, *everywhere]


@pytest.mark.parametrize("file", ["pyproject.toml", "scripts/lint", "trainer_cli/gone.py", "tests/support/gone.py"])
def test_what_may_reach_any_test_runs_all(project: Path, file: str) -> None:
    assert changed.Graph(project).reach(["tests/test_names.py", file]) == ["tests"]


def test_every_test_reaches_the_top_conftest(project: Path) -> None:
    tests = [name for name in PROJECT if Path(name).match("test_*.py")]
    assert changed.Graph(project).reach(["tests/conftest.py"]) == sorted(tests)
    for top in ("trainer_cli/__init__.py", "trainer_cli/__init__.pyi"):
        assert changed.Graph(project).reach([top]) == ["tests"]


def test_the_verbs_are_read_from_the_source_of_the_command() -> None:
    files = [ROOT / changed.MAIN, *(ROOT / "trainer_cli/addons").glob("*/addon.py")]
    found: dict[str, str] = {}
    for file in files:
        found |= changed.verbs_in(ast.walk(ast.parse(file.read_text("utf-8"))))
    assert found.items() >= {(verb, f"{known.module.replace('.', '/')}.py") for verb, known in listed_verbs().items()}
    assert all((ROOT / file).is_file() for file in (changed.CONFIGS, changed.TOP))


def test_what_differs_from_main_counts_committed_or_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name in ("committed", "edited", "removed", "same"):
        (tmp_path / name).write_text("before")
    git("init", "--initial-branch=main")
    git("add", ".")
    git("commit", "--message=first")
    git("switch", "--create=branch")
    (tmp_path / "committed").write_text("after")
    git("commit", "--all", "--message=second")
    (tmp_path / "edited").write_text("after")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").touch()
    assert changed.changed_files(tmp_path) == ["committed", "edited", "removed", "new"]


STEPS = """
from trainer_cli.core.units import UNITS
from trainer_cli.core.units import *

LIMIT = 3
LONGEST = LIMIT * 2
'''Not a docstring.'''

def count(value=1):
    '''Counts.'''
    def each():
        return value + 1
    return each()

def limit():
    return LONGEST

def unit():
    return UNITS

def measure():
    return Length().measured

def not_tested():
    return 1

class Length:
    size = 3

    @property
    def text(self):
        return "a"

    def _read(self):
        return self.size
"""
SIZES = "from trainer_cli.core.limits import LIMIT as UNITS\n\ndef area():\n    return UNITS\n"
UNITS = "UNITS = 1\nOTHER = 2\ndef convert(): ...\n"
RECORDED = {
    "tests/test_count.py": ["steps:count", "steps:count.<locals>.each"],
    "tests/test_length.py": ["steps:Length.text", "steps:Length._read"],
    "tests/test_limit.py": ["steps:limit"],
    "tests/test_measure.py": ["steps:measure"],
    "tests/test_size.py": ["sizes:area"],
    "tests/test_unit.py": ["steps:unit", "units:convert"],
}


@pytest.mark.parametrize(
    ("module", "old", "new", "selected"),
    [
        ("steps", "value + 1", "value + 2", ["count"]),
        ("steps", "(value=1)", "(value=2)", ["count"]),
        ("steps", 'return "a"', "return size", ["length"]),
        ("steps", "self.size", "self._size", ["length"]),
        ("steps", "return LONGEST", "return not_tested()", ["limit"]),
        # What nothing ran.
        ("steps", "return 1", "return 2", []),
        # A name, in functions and in what defines other names.
        ("steps", "LIMIT = 3", "LIMIT = 4", ["limit", "constants"]),
        ("steps", "LIMIT * 2", "LIMIT * 3", ["limit"]),
        ("steps", "size = 3", "size = 4", ["length", "measure"]),
        ("units", "UNITS = 1", "UNITS = 2", ["unit"]),
        ("units", "OTHER = 2", "OTHER = 3", []),
        ("steps", "import UNITS", "import OTHER as UNITS", ["unit"]),
        # A new function, by what mentions it: a method may be called by a class that this one is derived from. A test
        # that had no instance of the class cannot have called it.
        ("steps", "    size = 3\n", "    size = 3\n    def LONGEST(self): ...\n", []),
        ("steps", "    size = 3\n", "    size = 3\n    def measured(self): ...\n", ["measure"]),
        ("steps", "    size = 3\n", "    size = 3\n    def __len__(self): ...\n", ["measure"]),
        # The same name in another module is another.
        ("sizes", "import LIMIT as UNITS", "import LIMITS as UNITS", ["size"]),
        ("steps", "    size = 3\n", "    size = 3\n    def new(self): ...\n", []),
        # A function that is new since the recording, by the names of what calls it.
        ("steps", "return 3000", "return 3001", ["later"]),
        # Neither code.
        ("steps", "Not a docstring", "No docstring", ["docs"]),
        ("steps", "Counts", "It counts", ["docs"]),
        ("steps", "LIMIT = 3", "LIMIT = 3  # At most", []),
        # A signature, for what reads it.
        ("units", "convert()", "convert(value)", ["signatures", "unit"]),
    ],
)
def test_a_change_runs_the_tests_that_ran_what_differs(
    module: str, old: str, new: str, selected: list[str], tmp_path: Path
) -> None:
    late = "\ndef calls_late():\n    return late()\n\ndef late():\n    return 3000\n"
    files = {
        "trainer_cli/__init__.py": "",
        "trainer_cli/__init__.pyi": "",
        "trainer_cli/core/steps.py": STEPS + late,
        "trainer_cli/core/units.py": UNITS,
        "trainer_cli/core/sizes.py": SIZES,
        "docs/generated.py": "",
        "tests/test_docs.py": "ROOT / 'docs'\n",
        "tests/test_constants.py": "from limits import LIMIT\n",
        "tests/support/limits.py": "from trainer_cli.core.steps import LIMIT\n",
        "tests/test_signatures.py": "read('trainer_cli.core.units:convert')\n",
        **dict.fromkeys(RECORDED, ""),
        "tests/test_later.py": "",
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    table = reached.Table()
    table.add_functions(f"trainer_cli.core.{name}" for names in RECORDED.values() for name in names)
    table.add_functions(["trainer_cli.core.steps:not_tested", "trainer_cli.core.steps:calls_late"])
    for test in filter(changed._is_test, files):
        ran = [f"trainer_cli.core.{name}" for name in RECORDED.get(test, ())]
        table.put(test, ran, seconds=2, starts_processes=test == "tests/test_unit.py")
    table.put("tests/test_later.py", ["trainer_cli.core.steps:calls_late"], seconds=0.04, starts_processes=False)
    # A tenth of the time is enough for all that ran what differs.
    table.put("tests/test_long.py", [], seconds=100, starts_processes=False)
    table.write(tmp_path / reached.TABLE)
    table = reached.Table.read(tmp_path / reached.TABLE)
    assert table.starts_processes == {"tests/test_unit.py"}
    source = tmp_path / f"trainer_cli/core/{module}.py"
    before = source.read_text()
    assert before.count(old) == 1
    source.write_text(before.replace(old, new))
    found = changed.Graph(tmp_path).select([str(source.relative_to(tmp_path))], table, lambda _: before)
    assert found == sorted(f"tests/test_{name}.py" for name in selected)


def test_a_test_file_that_was_not_recorded_is_selected_by_names(project: Path) -> None:
    table = reached.Table()
    graph = changed.Graph(project)
    file = "trainer_cli/callbacks/ema.py"
    before = PROJECT[file] + "\nSIZE = 1\n"
    assert graph.select([file], table, lambda _: before) == graph.reach([file])
    table.put("tests/test_names.py", [], seconds=1, starts_processes=False)
    selected = graph.select([file], table, lambda _: before)
    assert selected == [test for test in graph.reach([file]) if "names" not in test]
    # Nothing is known of a module that is gone.
    assert {*graph.select(["trainer_cli/gone.py"], table, lambda _: "def f(): ...")} == {*graph.tests} - {
        "tests/test_names.py"
    }


def test_what_a_killed_process_and_its_fork_ran_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    code = (
        f"import os, recorder\nrecorder.start({str(tmp_path)!r})\nfrom trainer_cli import patterns\n"
        "if os.fork() == 0:\n    patterns.find_key('a', ['b'])\n    os._exit(0)\n"
        "os.wait()\npatterns.did_you_mean('a', ['b'])\nos.kill(os.getpid(), 9)\n"
    )
    support = Path(recorder.__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{support}", "REACHED_BY": "test"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=500)
    assert done.returncode == -signal.SIGKILL
    names = set((tmp_path / "test").read_text().splitlines())
    assert {"trainer_cli.patterns:find_key", "trainer_cli.patterns:did_you_mean"} <= names
    # What runs while a module is imported, runs for all tests.
    assert "trainer_cli.lazy:add_lazy_names" not in names


def test_the_recorder_and_the_table_name_functions_alike() -> None:
    source = (ROOT / "trainer_cli/lazy.py").read_text() + (
        "\nclass A:\n  class B:\n    async def f(self):\n      class C:\n        def g(self): 'Text'\n"
    )
    nodes = ast.walk(recorder.add_calls(source.encode(), "m"))
    subscripts = (node for node in nodes if isinstance(node, ast.Subscript))
    recorded = {ast.literal_eval(node.slice) for node in subscripts if ast.unparse(node.value) == "__reached__"}
    assert recorded == {f"m:{name}" for name in reached.Source(source).functions}
    assert "m:A.B.f.<locals>.C.g" in recorded


def test_the_tests_that_are_about_a_package_run_nearly_all_of_it_and_little_else() -> None:
    table = reached.Table()
    table.add_functions(f"trainer_cli.{name}" for name in ("state.a:f", "state.b:g", "files.io:read", "files.io:write"))
    for test, names, seconds in (
        ("tests/state/test_state.py", ("state.a:f", "state.b:g", "files.io:read"), 2.0),
        ("tests/core/test_files.py", ("files.io:read",), 1.0),
        ("tests/integration/test_all.py", ("state.a:f", "state.b:g", "files.io:read", "files.io:write"), 40.0),
    ):
        table.put(test, [f"trainer_cli.{name}" for name in names], seconds=seconds, starts_processes=False)
    assert advice.advise(table) == [
        ("trainer_cli.files", ["tests/core", "tests/integration"], 1.0, 41.0),
        ("trainer_cli.state", ["tests/state"], 1.0, 2.0),
    ]


def test_the_page_for_contributors_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| `trainer_cli[\w.]*` \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    folders = {folder for row in rows for folder in re.findall(r"`(.*?)`", row)}
    # An add-on can be deleted with its tests.
    assert [folder for folder in sorted(folders) if "/addons/" not in folder and not (ROOT / folder).exists()] == []
    assert len(rows) > 30, "scripts/test --record writes the table"


def _table(**files: tuple[float, tuple[str, ...]]) -> reached.Table:
    """Seconds and functions of test files."""
    table = reached.Table()
    table.add_functions(f"trainer_cli.{name}" for _, names in files.values() for name in names)
    for test, (seconds, names) in files.items():
        table.put(
            f"tests/test_{test}.py", [f"trainer_cli.{name}" for name in names], seconds=seconds, starts_processes=False
        )
    return table


def test_of_what_many_tests_run_those_are_chosen_that_are_most_about_it() -> None:
    core = ("trainer:fit", "config:compose")
    table = _table(
        loop=(6, (*core, "trainer:stop")),
        values=(6, (*core, "config:merge")),
        runs=(6, (*core, "trainer:stop", "config:merge", "runs:top", "runs:tail")),
        whole=(82, core),
    )
    ran = {name: table.ran[f"trainer_cli.{name}"] for name in (*core, "trainer:stop", "runs:top")}
    everywhere = table.ran["trainer_cli.trainer:fit"]
    assert len(everywhere) == 4

    def choose(*names: str, selected: frozenset[str] = frozenset()) -> set[str]:
        chosen = table.choose({f"trainer_cli.{name}": ran[name] for name in names}, selected)
        return {test.removeprefix("tests/test_").removesuffix(".py") for test in chosen}

    # A tenth are ten seconds.
    assert choose("trainer:fit") == {"loop"}
    assert choose("config:compose") == {"values"}
    # What fewer tests run is first.
    assert choose("trainer:fit", "runs:top") == {"runs"}
    # At least one, however long it takes; none more where one is selected anyway.
    table.seconds["tests/test_loop.py"] = 90
    assert choose("trainer:fit") == {"loop"}
    assert choose("trainer:fit", selected=frozenset({"tests/test_loop.py"})) == {"runs"}


CONFTEST = """
import pytest
def pytest_configure(): ...
@pytest.fixture(autouse=True)
def always(): ...
@pytest.fixture
def model():
    import builders
@pytest.fixture
def trained(model): ...
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "selected"),
    [
        # A fixture, for the tests that name it, or one that does.
        ("tests/conftest.py", "    import builders", "    import builders as other", ["model", "trained"]),
        ("tests/conftest.py", "trained(model): ...", "trained(model): return 1", ["trained"]),
        ("tests/support/builders.py", "1", "2", ["model", "trained"]),
        ("tests/conftest.py", "always(): ...", "always(): return 1", ["model", "other", "settings", "trained"]),
        ("tests/conftest.py", "configure(): ...", "configure(): return 1", ["model", "other", "settings", "trained"]),
        # The settings of linters, for the tests that read the file.
        ("pyproject.toml", "length = 1", "length = 2", ["settings"]),
    ],
)
def test_a_part_of_a_file_stands_for_the_tests_that_use_it(
    file: str, old: str, new: str, selected: list[str], tmp_path: Path
) -> None:
    files = {
        "trainer_cli/__init__.py": "",
        "pyproject.toml": "[project]\nname = 'a'\n[tool.ruff]\nlength = 1\n",
        "tests/conftest.py": CONFTEST,
        "tests/support/builders.py": "SIZE = 1\n",
        "tests/test_model.py": "def test_a(model): ...\n",
        "tests/test_other.py": "def test_a(): ...\n",
        "tests/test_settings.py": "'pyproject.toml'\nPATH = 'pyproject.toml'\n",
        "tests/test_trained.py": "@pytest.mark.usefixtures('trained')\ndef test_a(): ...\n",
    }
    before = files[file]
    assert before.count(old) == 1
    for name, text in {**files, file: before.replace(old, new)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = changed.Graph(tmp_path).select([file], reached.Table(), lambda _: before)
    assert found == [f"tests/test_{name}.py" for name in selected]


def test_a_file_beside_the_modules_is_for_the_tests_that_ran_what_reads_it(tmp_path: Path) -> None:
    files = {
        "trainer_cli/__init__.py": "",
        "trainer_cli/config/search_path.py": "def find(): ...\n",
        "trainer_cli/view/page.py": "PAGE = 'page.html'\ndef show():\n    return PAGE\n\ndef quiet(): ...\n",
        "trainer_cli/view/page.html": "",
        "trainer_cli/view/unnamed.js": "",
        "configs/config.yaml": "defaults: []\n",
        "configs/callbacks/ema.yaml": "",
        **dict.fromkeys(("tests/test_show.py", "tests/test_quiet.py", "tests/test_whole.py"), ""),
        "tests/test_ema.py": "from trainer_cli.config import search_path\nOVERRIDE = 'callbacks=ema'\n",
        "tests/test_plain.py": "from trainer_cli.config import search_path\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    table = _table(
        show=(1, ("view.page:show",)),
        quiet=(1, ("view.page:quiet",)),
        ema=(1, ("config.search_path:find",)),
        plain=(1, ("config.search_path:find",)),
        whole=(100, ()),
    )

    def select(file: str, before: str = "before") -> list[str]:
        found = changed.Graph(tmp_path).select([file], table, lambda _: before)
        return [test.removeprefix("tests/test_").removesuffix(".py") for test in found]

    assert select("trainer_cli/view/page.html") == ["show"]
    assert select("trainer_cli/view/unnamed.js") == ["quiet", "show"]
    assert select("configs/callbacks/ema.yaml") == ["ema"]
    assert select("configs/config.yaml") == ["ema", "plain"]
    # One that is new, for all that search.
    assert select("configs/callbacks/ema.yaml", before="") == ["ema", "plain"]
