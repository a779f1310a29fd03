"""docs/moving: every argument of other trainers has a row, and what a row says of ours is a key, hook or command.

tests/peers/arguments.json has the names of the arguments, by the page that describes them, with version and date.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer_cli
from trainer_cli import Trainer
from trainer_cli.commands.command_line import listed_verbs
from trainer_cli.config.composing import compose
from trainer_cli.keys.config_keys import DATA_KEYS, OPEN, list_keys
from trainer_cli.trainer.hooks import VOCABULARY

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/moving").glob("*.md"))}
PEERS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/peers/arguments.json").read_text(encoding="utf-8"))
CALLABLES = [(page, name) for page, peer in PEERS.items() for name in peer["callables"]]
SITE = Path(sysconfig.get_path("purelib"))
SOURCES = {
    "lightning": ["lightning/pytorch/**/*.py"],
    "huggingface": [f"transformers/{name}.py" for name in ("trainer*", "training_args", "modeling_utils")],
}
"""Where the names in all tables of a page are found, for packages that the tests install."""


def rows(page: str, title: str | None = None) -> list[tuple[str, str]]:
    """The two cells of each row of a page, or of its section with this title."""
    text = PAGES[page] if title is None else PAGES[page].split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (?!---)(.*?) \| (.*) \|$", text, re.MULTILINE)


def names_of(page: str, name: str) -> list[str]:
    return " ".join(PEERS[page]["callables"][name]["names"]).split()


def read_arguments(source: str, name: str) -> list[str]:
    """The arguments of a function, of a class's constructor, or the public fields of a dataclass, without import."""
    class_name, _, method = name.partition(".")
    (node,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == (method or "__init__"):
            return [argument.arg for argument in (*inner.args.args[1:], *inner.args.kwonlyargs)]
    targets = [inner.target for inner in node.body if isinstance(inner, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]


@pytest.mark.parametrize(("page", "name"), CALLABLES)
def test_every_argument_of_another_trainer_has_one_row(page: str, name: str) -> None:
    table = rows(page, f"Arguments of `{name}`")[1:]
    assert sorted(re.findall(r"`(\w+)`", " ".join(theirs for theirs, _ in table))) == sorted(names_of(page, name))


@pytest.mark.parametrize(("page", "name"), CALLABLES)
def test_the_listed_arguments_are_those_of_the_installed_package(page: str, name: str) -> None:
    peer = PEERS[page]
    file = SITE / peer["callables"][name]["file"]
    if not file.exists():
        pytest.skip(f"{peer['package']} {peer['version']} is not installed")
    assert sorted(read_arguments(file.read_text(encoding="utf-8"), name)) == sorted(names_of(page, name))


@pytest.mark.parametrize("page", PEERS)
def test_a_page_names_the_version_whose_arguments_are_listed(page: str) -> None:
    assert PEERS[page]["version"] in PAGES[page].split("\n## ")[0]


@pytest.mark.parametrize("page", SOURCES)
def test_the_names_in_all_tables_are_those_of_the_installed_package(page: str) -> None:
    files = [file for pattern in SOURCES[page] for file in SITE.glob(pattern)]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    names = {
        name for theirs, _ in rows(page) for name in re.findall(r"`(?:trainer\.|self\.|Trainer\.)?(\w+)[^`]*`", theirs)
    }
    assert len(names) > 40
    assert sorted(names - words) == []


OTHER_NAMES = {
    "forward", "fit", "train", "val", "interval", "patience", "_target_", "targets", "r", "alpha", "weight", "tokens",
    "collate_fn", "set_epoch", "auto", "DataLoader", "nn.Module", "exception", "train/lr", "train/samples_per_s",
    "train/NAME", "ep", "sp", "tok", "RUN@best", "debug", "name", "metrics.jsonl", "checkpoints/exception",
    "--allow-pickle", "torch.no_grad", "torch.cuda.empty_cache", "hf",
}  # fmt: skip
"""Of arguments of components, of what a model returns, of metrics, files and torch: no keys, but right in a cell."""
KNOWN = {
    *(field.key for field in list_keys()), *(f"data.{key}" for key in (*DATA_KEYS, "train", "val")), *VOCABULARY,
    *trainer_cli.__all__, *OTHER_NAMES,
}  # fmt: skip
OPEN_SECTIONS = set(OPEN) - {"data"}


def _is_ours(name: str) -> bool:
    if name.startswith("trainer."):
        return hasattr(Trainer, name.removeprefix("trainer."))
    if name.startswith("trainer_cli."):
        return pkgutil.resolve_name(name) is not None
    return name in KNOWN or name.split(".")[0] in OPEN_SECTIONS


def _names(span: str) -> list[str]:
    """The keys, hooks, classes and commands that a span of code names; values are left out."""
    if re.match(r"train [a-z]|\"", span):
        return []
    return [re.split(r"[=\s]", word.lstrip("+"))[0] for word in re.split(r" (?=\+?[\w.]+=)", span)]


@pytest.mark.parametrize("page", PAGES)
def test_the_equivalents_are_keys_hooks_and_commands(page: str) -> None:
    cells = [ours for _, ours in rows(page)]
    spans = [span for ours in cells for span in re.findall(r"`([^`]+)`", ours)]
    assert [span for span in spans for name in _names(span) if not _is_ours(name)] == []
    assert {verb for span in spans for verb in re.findall(r"^train ([a-z]+)", span)} <= set(listed_verbs())
    # A reason takes a sentence.
    assert [ours for ours in cells if ours.startswith(("no:", "nothing:")) and len(ours.split()) < 5] == []


def _overrides() -> Iterator[tuple[str, ...]]:
    """The overrides of each span that a command line could have, without a placeholder such as PATH."""
    for page in PAGES:
        for _, ours in rows(page):
            for span in re.findall(r"`([^`]+)`", ours):
                if (
                    re.search(r"=\S", span)
                    and not re.match(r"train |\"", span)
                    and not re.search(r"\b[A-Z]{3,}\b", span)
                ):
                    yield tuple(re.split(r" (?=\+?[\w.]+=)", span))


def test_the_overrides_in_the_tables_can_be_composed() -> None:
    """Those with other keys in one composition: the fewest that have all of them."""
    compositions: list[dict[str, str]] = []
    for overrides in dict.fromkeys(_overrides()):
        keyed = {override.split("=")[0].lstrip("+"): override for override in overrides}
        free = (composition for composition in compositions if not keyed.keys() & composition.keys())
        if (composition := next(free, None)) is None:
            compositions.append(composition := {})
        composition.update(keyed)
    assert sum(map(len, compositions)) > 120
    for composition in compositions:
        compose(["+experiment=digits_mlp", *composition.values()])
