"""scripts/changed.py prints the tests that changed files can reach."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import listed_verbs

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("changed", ROOT / "scripts" / "changed.py")
assert SPEC is not None
assert SPEC.loader is not None
changed = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(changed)

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
    found = {}
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
