"""What the how-to pages name: every config key, and in their sentences only commands and flags that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_cli.commands.command_line import actions_of, listed_verbs, parser_of
from trainer_cli.keys.config_keys import list_keys

VERBS = listed_verbs()
DOCS = Path(__file__).parents[1] / "docs"
AGENTS = DOCS.parent / "trainer_cli/scaffold/AGENTS.md.tmpl"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "architecture.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _nested_keys(node: Any, above: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{above}{key}"
            yield from _nested_keys(value, f"{above}{key}.")


OF_ADDONS = {
    "checkpoint.compression": "formats",
    "load.chunk_size": "stores",
    "load.ignore_keys": "formats",
    "load.key_mapping": "formats",
    "load.progress": "stores",
    "load.strict": "formats",
    "notes": "view",
    "notify.": "watch",
    "predict.": "predict",
    "sweep.": "search",
}
"""Beginnings of keys that only the page of an add-on names."""


@pytest.mark.parametrize(
    "begin", ["", *(pytest.param(key, marks=pytest.mark.addon(OF_ADDONS[key])) for key in OF_ADDONS)]
)
def test_every_config_key_is_named_on_a_how_to_page(begin: str) -> None:
    """By its whole name, or in a block of YAML; the reference of all keys does not count."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {name for text in texts for name in re.findall(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*", text)}
    for text in texts:
        for kind, block in FENCE.findall(text):
            if kind == "yaml":
                named |= set(_nested_keys(yaml.safe_load(block)))
    keys = {field.key for field in list_keys() if not field.is_section and field.key.startswith(begin)}
    if not begin:
        keys = {key for key in keys if not key.startswith(tuple(OF_ADDONS))}
    assert keys
    assert sorted(keys - named) == []


def _flags(verb: str, action: str) -> set[str]:
    parser = parser_of(verb, VERBS[verb])
    parsers = [parser, *(inner for name, inner in actions_of(parser).items() if name == action)]
    return {flag for one in parsers for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", one.format_help())}


@pytest.mark.parametrize("page", [*PAGES, AGENTS], ids=lambda page: page.name)
def test_commands_in_sentences_have_verbs_and_flags_that_exist(page: Path) -> None:
    """Those in blocks are run by tests/test_readme.py."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for command in re.findall(r"`train ([^`]+)`", text):
        verb, action = (*command.split(), "")[:2]
        if verb.isupper() or verb.startswith("-"):
            continue
        assert verb in VERBS, command
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", command)) <= _flags(verb, action), command
