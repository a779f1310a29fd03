"""The pages build as a site without a warning, and its reference has every key, command, hook and public name.

In a browser, text and code have room, and the search finds every key.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import Page, needs_chromium, page as browser_page

import trainer_cli
from trainer_cli.commands.command_line import listed_verbs
from trainer_cli.keys.config_keys import list_keys
from trainer_cli.trainer.hooks import VOCABULARY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `scripts/docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    script = (ROOT / "scripts/docs").read_text(encoding="utf-8")
    (options,) = re.findall(r"-m sphinx (.*) docs ", script)
    command = [sys.executable, "-m", "sphinx", *options.split(), "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Callable[[str], str]:
    """Page -> its text."""
    return lambda page: html.unescape(re.sub(r"<[^>]+>", "", (folder / page).read_text(encoding="utf-8")))


def test_every_page_is_in_the_menu(site: Callable[[str], str]) -> None:
    """Those of a folder stand below the page of that name."""
    menus = site("index.html") + site("moving.html")
    for page in (ROOT / "docs").rglob("*.md"):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert title.replace("`", "") in menus


def test_every_config_key_is_explained(site: Callable[[str], str]) -> None:
    text = site("reference/config.html")
    keys = [one for one in list_keys() if not one.is_section]
    assert len(keys) > 60
    assert [one.key for one in keys if not re.search(rf"^{re.escape(one.key)}#$", text, re.MULTILINE)] == []
    assert "Batches whose gradients are accumulated into one optimizer step." in text


def test_every_command_shows_its_help(site: Callable[[str], str]) -> None:
    text = site("reference/commands.html")
    assert [verb for verb in listed_verbs() if f"usage: train {verb} " not in text] == []
    assert "usage: train ckpt export " in text


def test_every_hook_is_described(site: Callable[[str], str]) -> None:
    text = site("reference/hooks.html")
    assert [name for name in VOCABULARY if f"Callback.{name}(" not in text] == []
    assert "The loop in pseudo-code" in text


def test_every_public_name_and_shipped_component_is_described(site: Callable[[str], str]) -> None:
    text = site("reference/python.html")
    assert [name for name in trainer_cli.__all__ if not re.search(rf"trainer_cli\.{name}\b", text)] == []
    assert "trainer_cli.Digits(" in text
    assert ("trainer_cli.GPT(" in text) is ("GPT" in trainer_cli.__all__)


def test_every_package_is_described(site: Callable[[str], str]) -> None:
    text = site("reference/packages.html")
    folders = [path.parent for path in (ROOT / "trainer_cli").rglob("__init__.py")]
    packages = [f"trainer_cli/{path.relative_to(ROOT / 'trainer_cli')}" for path in folders if path.name != "addons"]
    assert [name for name in packages if name.count("/") < 3 and f"{name}#" not in text] == ["trainer_cli/."]
    assert "Begin with intervals.py" in text


def test_llms_txt_has_the_address_and_a_sentence_of_every_page(site: Callable[[str], str]) -> None:
    lines = site("llms.txt").splitlines()
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    addresses = [f"]({page.as_posix()}.html): " for page in pages if page.name != "index"]
    assert [address for address in addresses if sum(address in line for line in lines) != 1] == []
    assert [line for line in lines if line.endswith(": ")] == []
    assert lines[2].startswith("> `train` trains PyTorch models")


def test_benchmarks_and_examples_are_pages_of_the_site(site: Callable[[str], str]) -> None:
    assert "A step of a tiny MLP" in site("reference/benchmarks.html")
    examples = site("reference/examples.html")
    titles = [path.read_text("utf-8").splitlines()[0].lstrip("# ") for path in ROOT.glob("examples/*/README.md")]
    assert [title for title in titles if title not in examples] == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@needs_chromium
def test_text_has_room_and_code_is_not_cut(folder: Path, browser: Page) -> None:
    """On a phone the columns of printed text scroll; everything else fits."""
    cut = """[...document.querySelectorAll("pre")].filter((pre) => pre.scrollWidth > pre.clientWidth
        && !(innerWidth < 1280 && pre.closest(".highlight-text"))).map((pre) => pre.textContent)"""
    for page in (ROOT / "docs").rglob("*.md"):
        file = (folder / page.relative_to(ROOT / "docs")).with_suffix(".html")
        browser.open(file.as_uri(), width=1280)
        assert browser.run("document.querySelector('article p').clientWidth") >= 720, file.name
        for width in (1280, 400):
            browser.resize(width)
            assert browser.run(cut) == [], (file.name, width)
            assert browser.run("document.documentElement.scrollWidth") <= width, file.name


@needs_chromium
@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("checkpoint.keep_best.metric", "checkpoint.keep_best.metric"),
        ("loop.max_duration", "loop.max_duration"),
        ("patience", "callbacks.early_stopping.patience"),
        ("pct_start", "scheduler.pct_start"),
        ("grad_accum_steps", "loop.grad_accum_steps"),
        ("mixed_precision", "parallel.mixed_precision"),
    ],
)
def test_the_search_finds_a_key_first(folder: Path, browser: Page, words: str, first: str) -> None:
    browser.open(f"{(folder / 'search.html').as_uri()}?q={words}")
    browser.wait_for("document.querySelector('ul.search li a')")
    assert browser.run("document.querySelector('ul.search li a').textContent") == first
