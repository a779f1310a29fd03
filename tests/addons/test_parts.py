"""The parts that add-ons bring are those that are asked for, with their signatures, and missing ones are named."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer_cli import addon as addon_module, fit_parts, parts, search_parts
from trainer_cli.addon import AddOn, each_addon, find_part
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError
from trainer_cli.parts import AddOnPart, explain_missing, list_addons

ROOT = Path(__file__).parents[2]
PARTS: Mapping[str, AddOnPart[Any]] = {
    name: value
    for name, value in (vars(parts) | vars(fit_parts) | vars(search_parts)).items()
    if isinstance(value, AddOnPart)
}
SPEC = importlib.util.spec_from_file_location("addons", ROOT / "scripts" / "addons.py")
assert SPEC is not None
assert SPEC.loader is not None
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


NAMED = ("format.", "storage.", "copies.", "search.")
"""Beginnings of the names of parts that a package asks for by itself."""


def test_every_part_that_is_brought_is_in_the_table() -> None:
    """One in the table that no add-on brings belongs to an add-on that was deleted."""
    brought = {name for _, addon in each_addon() for name in addon.parts if not name.startswith(NAMED)}
    assert brought <= {part.name for part in PARTS.values()}


PROTOCOLS = {
    # A string, since what it names is imported for type checkers alone.
    name: protocol
    for name in PARTS
    if PARTS[name].find() is not None
    for table in (parts, fit_parts, search_parts)
    if (protocol := getattr(table, table.__annotations__.get(name, "")[len("AddOnPart[") : -1], None))
}
"""Those of the parts whose type names the arguments."""


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_part_takes_the_arguments_of_its_type(name: str) -> None:
    protocol = PROTOCOLS[name]
    wanted = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    found = inspect.signature(find_part(PARTS[name].name)).parameters.values()
    assert [(each.name, each.kind) for each in found] == [(each.name, each.kind) for each in wanted]
    # An argument that has a default in the type may be left out.
    assert [each.default for each in wanted if each.default is not each.empty] == [
        other.default for each, other in zip(wanted, found, strict=True) if each.default is not each.empty
    ]


@pytest.mark.parametrize("file", script.FILES, ids=lambda file: file.name)
def test_what_add_ons_bring_is_written_down(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == script.FILES[file](), "run: python scripts/addons.py"


@pytest.fixture
def without_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: addon for name, addon in each_addon() if name != "exact"}
    monkeypatch.setattr(addon_module, "_find_shipped", lambda: others)


@pytest.mark.addon("exact")
@pytest.mark.addon("view")
@pytest.mark.usefixtures("without_exact")
def test_a_part_that_is_missing_is_none_or_an_error_that_names_its_addon() -> None:
    assert parts.FAILED_STEP.find() is None
    assert list(parts.FAILED_STEP.each()) == []
    assert fit_parts.AT_END.find() is not None
    with pytest.raises(UserError) as caught:
        parts.REPLAY_STEP.need("runs/x@step4", "ckpt")
    assert str(caught.value) == (
        "runs/x@step4 needs the add-on 'exact', which this installation lacks (ckpt). "
        "Install trainer-cli again, or do without it."
    )
    assert list_addons()["exact"] == "missing"
    assert list_addons()["view"] == "shipped"


@pytest.mark.parametrize(
    ("kind", "name", "addon"),
    [
        pytest.param("verbs", "replay", "exact", marks=pytest.mark.addon("exact")),
        pytest.param("verbs", "ckpt export", "formats", marks=pytest.mark.addon("formats")),
        ("verbs", "fit", None),
        pytest.param("names", "GPT", "text", marks=pytest.mark.addon("text")),
        ("names", "MLP", None),
        pytest.param("parts", "format.archive", "formats", marks=pytest.mark.addon("formats")),
    ],
)
def test_what_a_missing_addon_would_bring_is_known(
    kind: str, name: str, addon: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain_missing("what", kind, name) is None, "the add-on is there"
    monkeypatch.setattr(parts, "each_addon", lambda: ())
    error = explain_missing("what", kind, name)
    assert (None if error is None else error.what.split("'")[1]) == addon


@pytest.mark.addon("view")
def test_an_installed_addon_is_asked_after_those_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = AddOn(parts={fit_parts.AT_END.name: "collections:OrderedDict"})
    monkeypatch.setattr(addon_module, "_find_installed", lambda: {"mine": mine})
    hooks = [getattr(hook, "__name__", "") for hook in fit_parts.AT_END.each()]
    assert "report_at_end" in hooks[:-1]
    assert hooks[-1] == "OrderedDict"
    assert list_addons()["mine"] == "installed"


def test_an_option_that_does_not_exist_of_a_group_of_an_addon_is_refused_in_a_file(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped defaults list names the group as optional, and Hydra passes over a missing option of such a group."""
    pytest.importorskip("trainer_cli.addons.sparsity")
    file = empty_folder / "configs/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ndefaults:\n  - override /sparsity: gpm\n")
    assert main(["config", "mine"]) == 2
    assert "there is no sparsity called 'gpm'" in capsys.readouterr().err


@pytest.mark.addon("text")
def test_an_experiment_of_an_addon_that_is_there_is_no_missing_addon(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "digits", "text"]) == 2
    assert "'text' is not of the form key=value" in capsys.readouterr().err
