"""Private names of Hydra and OmegaConf stay in one module, and each is still needed."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra.core.override_parser.types
import hydra.plugins.config_source
import omegaconf
import pytest
from omegaconf import OmegaConf

import trainer_cli
from trainer_cli.config import hydra_compat
from trainer_cli.config.compose import from_yaml, to_yaml

PACKAGE = Path(trainer_cli.__file__).parent
OWNERS = (omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.OmegaConf, omegaconf.AnyNode, omegaconf.StringNode,
          hydra.core.override_parser.types.Override, hydra.plugins.config_source.ConfigSource)  # fmt: skip
PRIVATE = {name for owner in OWNERS for name in (*dir(owner), *getattr(owner, "__annotations__", ()))}
PRIVATE = {name for name in PRIVATE if name.startswith("_") and not name.startswith("__")}
ALLOWED = {
    "hydra._internal.config_repository.ConfigRepository",
    "hydra._internal.defaults_list.create_defaults_list",
    "hydra._internal.target_policy._authorize_target_name",
    "hydra._internal.target_policy._get_resolved_target_name_for_check",
    "omegaconf._utils.get_yaml_loader",
    "BaseContainer._resolvers",
    "override._value",
    "node._metadata",
    "node._value",
}


def private_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hydra", "omegaconf"):
            for alias in node.names:
                if "._" in (name := f"{node.module}.{alias.name}"):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith(("hydra._", "omegaconf._")))
        elif (
            isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) not in ("self", "cls")
        ):
            yield ast.unparse(node)


def test_private_names_of_hydra_and_omegaconf_are_used_in_one_module_only() -> None:
    assert "_value" in PRIVATE
    found = {path.relative_to(PACKAGE).as_posix(): set(private_names(path)) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {"config/hydra_compat.py": ALLOWED}


def test_each_is_named_with_its_reason() -> None:
    for name in ALLOWED:
        assert name.rpartition(".")[2] in (hydra_compat.__doc__ or ""), name


def as_plain(node: Any) -> Any:
    """Everything that OmegaConf keeps of a node."""
    if isinstance(node, omegaconf.DictConfig | omegaconf.ListConfig):
        content = node.__dict__["_content"]
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return vars(node)["_metadata"], {key: (child._get_parent() is node, as_plain(child)) for key, child in items}
    return type(node), vars(node)["_metadata"], vars(node)["_val"]


LONG = list(range(300))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"a": {"b": LONG}, "c": 1}, id="numbers"),
        pytest.param({"a": [*LONG, 0.5, float("inf")]}, id="floats"),
        pytest.param({"a": LONG, "b": {"c": "${a.299}", "d": "${a}"}}, id="interpolated"),
        pytest.param({"a": [*LONG, "${b}"], "b": 1}, id="with an interpolation"),
        pytest.param({"a": [*LONG, True, None, "???", [1]]}, id="other items"),
        pytest.param({"a": [[*LONG], {"b": LONG}]}, id="within a list"),
        pytest.param({"a.b": {1: LONG}}, id="odd keys"),
        pytest.param({1: {True: 1, 0.5: None, b"x": []}}, id="keys that are not strings"),
        pytest.param({"a": {}, "b": [], "c": [[], {}], "d": "???", "e": None, "f": {"g": "${..e}"}}, id="empty"),
        pytest.param({"a": b"x", "b": 1e999, "c": -1, "d": "a: ${b} ${oc.env:X,'y'}", "e": "\\${a}"}, id="scalars"),
    ],
)
def test_a_tree_is_the_tree_that_omegaconf_makes(values: dict[str, Any]) -> None:
    config, expected = hydra_compat.create(values), OmegaConf.create(values)
    assert as_plain(config) == as_plain(expected)
    assert hydra_compat.read_values(config) == OmegaConf.to_container(expected, resolve=False)
    assert OmegaConf.to_container(config, resolve=True) == OmegaConf.to_container(expected, resolve=True)


@pytest.mark.parametrize(
    "values",
    [
        {None: 1},
        {(1, 2): 1},
        {"a": {None: 1}},
        {"a": object()},
        {"a": [{"b": {1, 2}}]},
        {"a": "${b"},
        {"a": [1, "${b}}${"]},
    ],
    ids=["None", "tuple", "None below", "object", "set", "interpolation", "interpolation in a list"],
)
def test_what_omegaconf_refuses_is_refused_for_its_reason(values: dict[Any, Any]) -> None:
    errors = []
    for create in (hydra_compat.create, OmegaConf.create):
        with pytest.raises(omegaconf.errors.OmegaConfBaseException) as refusal:
            create(values)
        errors.append((type(refusal.value), str(refusal.value).splitlines()[0]))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("content", [None, "???", "${x}", {}], ids=str)
@pytest.mark.parametrize("kind", [omegaconf.DictConfig, omegaconf.ListConfig])
def test_a_container_without_items_is_read_as_what_it_is(kind: Any, content: Any) -> None:
    node = kind([] if content == {} and kind is omegaconf.ListConfig else content)
    assert hydra_compat.read_values(node) == OmegaConf.to_container(node, resolve=False)


def test_omegaconf_does_not_check_the_items_of_long_lists_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    appended = []
    append = omegaconf.ListConfig.append
    monkeypatch.setattr(omegaconf.ListConfig, "append", lambda *args: (appended.append(args), append(*args)))
    composed = from_yaml(f"checkpoint:\n  fixed_steps: {list(range(1, 5001))}", missing_ok=True)
    assert composed.config.checkpoint.fixed_steps == list(range(1, 5001))
    assert len(appended) < 1000


@pytest.mark.parametrize("value", [0, -7, 2**60, 1.5, math.inf, True, None, "", "a", "???", "$a", "${b}"])
def test_the_node_of_a_value_is_that_of_omegaconf(value: Any) -> None:
    parent = OmegaConf.create([])
    node, expected = hydra_compat._make_node(value, 3, parent), omegaconf.AnyNode(value, 3, parent)
    assert (type(node), node._metadata, node._val) == (omegaconf.AnyNode, expected._metadata, value)
    assert node._get_parent() is parent
    assert vars(node).keys() == vars(expected).keys()
    node._set_value("text")
    assert node._val == "text"


def calls_to_compose(items: int) -> int:
    """Number of calls of Python functions, with a list of so many steps in a file."""
    text, calls = f"checkpoint:\n  fixed_steps: {list(range(1, items + 1))}", 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        written = to_yaml(from_yaml(text, missing_ok=True))
    finally:
        sys.setprofile(before)
    assert written.count("\n  - ") >= items
    return calls


def test_a_long_list_takes_a_fixed_number_of_calls_for_each_item() -> None:
    calls_to_compose(1)
    few, more, most = (calls_to_compose(items) for items in (200, 400, 600))
    assert most - more < 1.2 * (more - few)
