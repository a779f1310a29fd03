"""The pages for contributors tell the truth: links, paths and names exist, and their examples run."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_cli
from trainer_cli import Callback, Logger, Trainer, TrainingLoop
from trainer_cli.commands import command_line as main
from trainer_cli.config.composing import compose

ROOT = Path(__file__).parents[1]
DOCS = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *DOCS]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
OWN_PARTS = (ROOT / "docs/own-callback.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_scripts_are_there_and_lines_have_at_most_120_columns(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    scripts = set(re.findall(r"\bscripts/[\w.]+", text))
    assert not [name for name in scripts if not (ROOT / name).exists()]
    # Blocks of output show it as it is printed.
    text = re.sub(r"^```text\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not [line for line in text.splitlines() if len(line) > 120]


def headings(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, "RELIABILITY.md", "BENCHMARKS.md"])
def test_every_linked_heading_exists(page: str) -> None:
    text, folder = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    links = re.findall(r"\]\(([^):#]*\.md)?#([^)]+)\)", text)
    assert [link for link in links if link[1] not in headings(folder / link[0] if link[0] else ROOT / page)] == []


def test_an_experiment_is_chosen_by_its_name_alone_except_where_the_spelling_of_hydra_is_explained() -> None:
    tops = ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md", "docs", "examples", "scripts", "configs", "trainer_cli")
    files = [file for top in tops for file in [ROOT / top, *(ROOT / top).rglob("*")]]
    other = re.compile(r"\+experiment=|\btrain (?:check )?\w+ [^`]*\bexperiment=")
    texts = {
        file: file.read_text("utf-8", errors="ignore") for file in files if file.is_file() and file.suffix != ".pyc"
    }
    explained = {file.relative_to(ROOT).as_posix() for file, text in texts.items() if other.search(text)}
    assert explained == {
        "docs/configuration.md",
        "trainer_cli/config/files.py",
        "trainer_cli/config/hydra_compat.py",
        "trainer_cli/config/overrides.py",
    }
    assert texts[ROOT / "docs/configuration.md"].count("+experiment=") == 2, "for users of Hydra, and among its rules"


ANSWERS = " ".join((ROOT / "docs/faq.md").read_text(encoding="utf-8").split())
_SETTING = r"[\w.+]+=[^\s`…]+"


# The answer names an extra of these.
@pytest.mark.addon("text")
def test_the_answer_about_extras_names_each() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    answer = ANSWERS.split("**Which extras are there?**")[1].split(" A config that")[0]
    assert {*re.findall(r"`([a-z0-9-]+)`", answer)} == {*extras} - {"dev"}


@pytest.mark.parametrize("settings", sorted({*re.findall(rf"`({_SETTING}(?: {_SETTING})*)`", ANSWERS)}))
def test_the_settings_of_an_answer_compose(settings: str) -> None:
    compose(["experiment=digits", *shlex.split(settings)])


@pytest.mark.parametrize("command", sorted({*re.findall(r"`train ([^`]+)`", ANSWERS)}))
def test_a_command_of_an_answer_exists(command: str) -> None:
    verb, *words = shlex.split(command)
    parsed = main._parse(main.parser_of(verb, main.listed_verbs()[verb]), verb, words)
    if verb in ("fit", "plan", "config") and "resume=runs/" not in command and parsed.overrides:
        compose(parsed.overrides)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_figures_at_the_head_of_a_page_are_the_published_ones(page: str) -> None:
    (head,) = re.findall(r"^\|.* trials passed \|.*\n\|.*\n\|.*$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    (trials,) = re.findall(
        r"^\| \*\*all\*\* \| \*\*([\d,]+)\*\* \|", (ROOT / "RELIABILITY.md").read_text("utf-8"), re.MULTILINE
    )
    (row,) = re.findall(
        r"^\| Step of a tiny MLP \| (.*) \|$", (ROOT / "BENCHMARKS.md").read_text("utf-8"), re.MULTILINE
    )
    figures = re.findall(r"[\d,]+(?= µs)", head)
    assert f"{trials} of {trials} trials passed" in head
    assert figures == re.findall(r"(?:^|plain loop |Lightning )([\d,]+) µs", row)


def test_the_measurements_in_the_comparison_are_the_published_ones() -> None:
    published, compared = (
        re.findall(
            r"^\| \w.*\|$", (ROOT / page).read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0], re.MULTILINE
        )
        for page, title in (("BENCHMARKS.md", "In short"), ("docs/comparison.md", "Measured"))
    )
    assert compared == published
    assert len(compared) == 5


def test_every_page_is_in_the_index() -> None:
    menu = (ROOT / "docs/index.md").read_text(encoding="utf-8").partition("\n## ")[2]
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", menu)
    assert sorted(f"docs/{page}" for page in linked) == [page for page in DOCS if page != "docs/index.md"]


def test_the_paths_and_names_of_the_architecture_exist() -> None:
    paths = set(re.findall(r"`((?:trainer_cli/|core/|checkpoint/|config/|runs/|trainer/)[\w/.]*)`", ARCHITECTURE))
    assert len(paths) > 20
    found = {path: ROOT / path if (ROOT / path).exists() else ROOT / "trainer_cli" / path for path in paths}
    assert not [path for path, file in found.items() if not file.exists()]
    named = re.findall(r"`((?:trainer_cli|checkpoint)/[\w/]+\.py)`\s+`([\w.]+)`", ARCHITECTURE)
    assert len(named) > 15
    for path, name in named:
        text = found[path].read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(class|def) {part}\b", text, re.MULTILINE), f"{path} has no {part}"


def test_each_claim_of_another_suite_names_a_test_of_this_one() -> None:
    """The tables of tests/peers: no row twice, a reason where something differs, and no test there without a row."""
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    names = {path: set(re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)) for path, text in tests.items()}
    known, tried, claims = set().union(*names.values()), set(), []
    for table in sorted((ROOT / "tests/peers").glob("*.md")):
        for row in re.findall(r"^\| (`.*) \|$", table.read_text(encoding="utf-8"), re.MULTILINE):
            source, claim, test, here = row.split(" | ")
            assert test.strip("`") in known, f"{table.name}: no test is called {test}: {source}, {claim}"
            # What differs and why takes a sentence.
            assert here == "holds" or len(here.split()) > 5, f"{table.name}: {claim!r} needs a reason"
            claims.append((table, source, claim))
            tried.add(test.strip("`"))
    assert len(claims) > 1100
    assert len(claims) == len(set(claims))
    assert not [name for path, own in names.items() if path.parent.name == "peers" for name in own - tried]


def test_a_step_and_a_save_pass_at_most_eight_modules() -> None:
    for title in ("One training step", "One save"):
        section = ARCHITECTURE.split(f"## {title}\n")[1].split("\n## ")[0]
        assert 5 <= len(re.findall(r"^\d+\. ", section, re.MULTILINE)) <= 8


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"(?<!`:\n\n)^```python\n(.*?)^```$", OWN_PARTS, re.MULTILINE | re.DOTALL):
        exec(block, names)
    callback, logger = names["PrintStep"](), names["PrintLoss"]()
    assert isinstance(callback, Callback)
    assert isinstance(logger, Logger)

    class Squares(torch.nn.Linear):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch).square().mean()

    Trainer(
        model=lambda: Squares(2, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_duration=2, log_interval=1),
        callbacks=[callback],
        loggers=[logger],
    ).fit([torch.ones(2, 2), torch.ones(2, 2)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0::2] == ["step 0", "step 1"], "the hook runs before the step is counted"
    assert [line.split()[0] for line in printed[1::2]] == ["1", "2"]
    assert "None" not in printed[1]


def test_the_scripts_can_be_executed() -> None:
    for name in ("install", "test", "lint", "check", "docs", "faults", "newcomer", "quickstart"):
        assert os.access(ROOT / "scripts" / name, os.X_OK)


NAMED_BY_USERS = [
    *(path for folder in ("configs", "examples") for path in sorted((ROOT / folder).rglob("*")) if path.is_file()),
    *sorted((ROOT / "trainer_cli/addons").glob("*/configs/*/*.yaml")),
    *(ROOT / page for page in PAGES if page not in ("docs/architecture.md", "CONTRIBUTING.md")),
    ROOT / "trainer_cli/commands/new.py",
]


@pytest.mark.parametrize("path", NAMED_BY_USERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_users_name_only_public_names(path: Path) -> None:
    """A config or program of theirs then outlives every move of a file."""
    text = path.read_text(encoding="utf-8", errors="ignore") if path.suffix in (".yaml", ".md", ".py", ".json") else ""
    if path.parent.name == "commands":
        text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(from|import) trainer_cli", line))
    names = set(re.findall(r"(?<![\w./-])trainer_cli\.([A-Za-z_][\w.]*\w)", text))
    names |= {f"{module}.{name}" for module, name in re.findall(r"from trainer_cli\.([\w.]+) import (\w+)", text)}
    of_addons = {"addon", "addons", "addon.AddOn", "StopAtRise"}
    assert sorted(names - {*trainer_cli.__all__, "__version__"} - of_addons) == []
