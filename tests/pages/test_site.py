"""The pages build as a site without a warning, and its reference has every key, command, hook and public name."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer_cli
from trainer_cli.commands.main import VERBS
from trainer_cli.config.fields import fields
from trainer_cli.trainer.hooks import VOCABULARY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Page -> its text, as `scripts/docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    script = (ROOT / "scripts/docs").read_text(encoding="utf-8")
    (options,) = re.findall(r"-m sphinx (.*) docs ", script)
    command = [sys.executable, "-m", "sphinx", *options.split(), "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return lambda page: html.unescape(re.sub(r"<[^>]+>", "", (folder / page).read_text(encoding="utf-8")))


def test_every_page_is_in_the_menu(site: Callable[[str], str]) -> None:
    index = site("index.html")
    for page in (ROOT / "docs").rglob("*.md"):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert title.replace("`", "") in index


def test_every_config_key_is_explained(site: Callable[[str], str]) -> None:
    text = site("reference/config.html")
    keys = [one for one in fields() if not one.is_section]
    assert len(keys) > 60
    assert [one.key for one in keys if not re.search(rf"^{re.escape(one.key)}$", text, re.MULTILINE)] == []
    assert "Batches whose gradients are accumulated into one optimizer step." in text


def test_every_command_shows_its_help(site: Callable[[str], str]) -> None:
    text = site("reference/commands.html")
    assert [verb for verb in VERBS if f"usage: train {verb} " not in text] == []
    assert "usage: train ckpt export " in text


def test_every_hook_is_described(site: Callable[[str], str]) -> None:
    text = site("reference/hooks.html")
    assert [name for name in VOCABULARY if f"Callback.{name}(" not in text] == []
    assert "The loop in pseudo-code" in text


def test_every_public_name_and_shipped_component_is_described(site: Callable[[str], str]) -> None:
    text = site("reference/python.html")
    assert [name for name in trainer_cli.__all__ if not re.search(rf"trainer_cli\.{name}\b", text)] == []
    assert "trainer_cli.Digits(" in text
    assert "trainer_cli.GPT(" in text


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
