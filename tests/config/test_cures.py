"""A wrong composition is one message with file and line, and what the message says to write composes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.config.compose import compose
from trainer_cli.errors import ConfigError

Write = Callable[[str, str], Path]
OWN = "configs/experiment/own.yaml"
FIRST, SECOND = "  - override /model: cnn\n", "  - /parts@param_groups.x: a\n"


@pytest.fixture(autouse=True)
def _parts(project: Path, write: Write) -> None:
    write("parts/a.yaml", "lr: 1.0\n")
    write("parts/b.yaml", "lr: 2.0\n")


def message(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, sections=())
    return str(caught.value)


LISTS = [
    (FIRST + SECOND, "an override of model stands before 'parts@param_groups.x'", 3, "end of the list",
     SECOND + FIRST),
    (FIRST + "  - /parts@param_groups.x: [a]\n", "an override of model stands before 'parts@param_groups.x'", 3,
     "end of the list", SECOND + FIRST),
    (SECOND + SECOND.replace(": a", ": b"), "parts@param_groups.x is chosen twice", 4, "Name it once", SECOND),
    ("  - ../../x\n", "../../x leads out of its folder", 3, "/GROUP: OPTION", SECOND),
    ("  - /parts@param_groups.x: ../a\n", "an option of /parts leads out of its folder", 3, "an option of the group",
     SECOND),
    ("  - override /parts: a\n", "nothing chooses a parts that could be overridden", 3, "without override", SECOND),
    ("  - /model: mlp\n", "model is chosen already", 3, "- override /model: mlp", "  - override /model: mlp\n"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "what", "line", "cure", "cured"), LISTS)
def test_a_wrong_defaults_list_names_its_line_and_what_composes(
    write: Write, entries: str, what: str, line: int, cure: str, cured: str
) -> None:
    write("experiment/own.yaml", f"# @package _global_\ndefaults:\n{entries}")
    said = message(["+experiment=own"])
    assert said.startswith(what)
    assert f"({OWN}:{line})" in said
    assert cure in said
    write("experiment/own.yaml", f"# @package _global_\ndefaults:\n{cured}")
    assert compose(["+experiment=own"], sections=()).config.name == "own"


@pytest.mark.parametrize(
    ("package", "what"),
    [("_globl_", "'# @package _globl_' does not say a package"), ("optimzer", "there is no key 'optimzer'")],
)
def test_a_misspelt_package_names_its_file(write: Write, package: str, what: str) -> None:
    write("experiment/own.yaml", f"# @package {package}\nlr: 3.0\n")
    said = message(["+experiment=own"])
    assert said.startswith(what)
    assert OWN in said


def test_a_packaged_group_that_must_be_chosen_is_named_with_its_package(write: Write) -> None:
    write("experiment/own.yaml", "# @package _global_\ndefaults:\n  - /parts@param_groups.x: ???\n")
    said = message(["+experiment=own"])
    assert said == (
        f"parts@param_groups.x must be chosen ({OWN}:3). Add parts@param_groups.x=NAME to the command line: a, b."
    )
    assert compose(["+experiment=own", "parts@param_groups.x=b"]).config.param_groups == {"x": {"lr": 2.0}}


@pytest.mark.parametrize("line", ['name="abc', "name='abc", 'name="a,b', "name=it's", 'name=a"b c', "name=a=b"])
def test_the_cure_for_a_text_can_be_typed_as_it_is_shown(line: str) -> None:
    typed = re.search(r"quotes?: (.*)\.$", message([line])) or re.search(r"pairs: (.*)\.$", message([line]))
    assert typed is not None
    (word,) = shlex.split(typed[1])
    text = line.partition("=")[2]
    assert compose([word]).config.name == (text[1:] if text[0] in "'\"" else text)


@pytest.mark.parametrize(
    ("wrong", "cured"),
    [
        (["optimizer={lrr: 0.1}"], ["+optimizer={lrr: 0.1}"]),
        (["+optimizer.betas={a: 1}"], ["~optimizer.betas", "+optimizer.betas={a: 1}"]),
        (["model={_target_: mine.Net, width: 3}"], ["model=null", "model={_target_: mine.Net, width: 3}"]),
    ],
)
def test_the_cure_for_a_mapping_can_be_typed(wrong: list[str], cured: list[str]) -> None:
    said = message(wrong)
    assert all(word in said for word in cured)
    assert compose(cured, sections=()).config is not None
