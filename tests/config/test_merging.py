"""What files and overrides make of a config is what OmegaConf and Hydra make of it; counts of what that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import files, override_values
from trainer_cli.config.composing import compose
from trainer_cli.config.overrides import path_of, read_overrides
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import ConfigTree, MergeError, Node, merge

NODES: tuple[Any, ...] = (
    None, 1, 0.5, True, "text", "", "???", "${b}", "${b.c}/x", "${none}", [], [1, [2]], ["${b}"], {}, {"c": 1},
    {"c": None}, {"c": "???"}, {"c": {"d": 2}}, {"c": [3]}, {"c": "${b}"}, {1: 2}, {1: {"c": 3}},
)  # fmt: skip
BELOW = {"b": {"c": {"d": 4}}, "list": [1]}


def made_by_omegaconf(values: list[dict[Any, Any]]) -> Any:
    """What OmegaConf makes of values merged one after another, or its reason."""
    try:
        config = OmegaConf.create(values[0])
        for new in values[1:]:
            config.merge_with(OmegaConf.create(new))
    except (OmegaConfBaseException, TypeError, RecursionError) as error:
        return str(getattr(error, "msg", None) or error).splitlines()[0]
    return OmegaConf.to_container(config)


def merged(values: list[dict[Any, Any]]) -> Any:
    """What is made of values merged one after another; None if one of them is refused."""
    root = Node({})
    try:
        for new in values:
            merge(root, Node.of(new))
    except MergeError:
        return None
    return root.plain()


@pytest.mark.parametrize("old", NODES, ids=repr)
def test_files_merge_as_in_omegaconf(old: Any) -> None:
    for new, last in product(NODES, (None, {"c": {"e": 6}}, {"c": "${b}"})):
        values = [{**BELOW, "a": old}, {"a": new, "z": new, "b": {"c": {"f": 5}}}, {"a": last}]
        expected = made_by_omegaconf(values)
        # Its reason is one that nobody reads: the message names both places.
        assert merged(values) == (None if isinstance(expected, str) else expected), values


def test_files_that_are_merged_are_not_changed() -> None:
    root, given = Node({}), Node.of({"x": {"y": [{"z": 1}], "v": 1}})
    before = given.plain()
    merge(root, given)
    merge(root, Node.of({"x": {"v": 2, "w": {"u": 3}}}))
    root.put(("x", "v"), Node(7))
    assert given.plain() == before
    assert root.plain() == {"x": {"y": [{"z": 1}], "v": 7, "w": {"u": 3}}}


LINES = (
    "a=1", "a=null", "a=???", "a=text", "a='${b}'", "a=${b}", "a=[1,{x:2}]", "a={c:7}", "a.c=1", "a.c=null", "a.c.d=2",
    "+a=1", "+a.c=1", "++a.c=2", "++a.x.y=2", "~a", "~a.c", "b.c.d=5", "b.c=5", "list=6", "nope=1", "b.nope=1",
    "list.0=2", "x/y=1",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_override_is_applied_as_by_hydra(line: str) -> None:
    # In struct mode a mapping is merged only by `+`, of which the command line has no need where its keys exist.
    first, mapping, last = read_overrides([f"++{line}" if line == "a={c:7}" else line, "++a={c:8}", "a=9"]).overrides
    search = SearchPath([], Path(), Path(), "config")
    for old, override in product(NODES, (mapping, last)):
        values = {**BELOW, "a": old}
        tree, expected = ConfigTree(Node.of(values)), OmegaConf.create(values)
        OmegaConf.set_struct(expected, True)
        for each in (first, override):
            if refused_by_name(tree.root, each):
                assert override_values.apply(tree, [each], search), values
                break
            refused = _is_refused(expected, each)
            assert bool(override_values.apply(tree, [each], search)) == refused, values
            if refused:
                break
            assert tree.root.plain() == OmegaConf.to_container(expected), values


def refused_by_name(root: Node, override: Any) -> bool:
    """Whether it sets a key in a list, or in what an interpolation refers to, with a surprising result in Hydra."""
    path = path_of(override)
    above = [root.at(path[:length]) for length in range(len(path) + isinstance(override.value(), dict))]
    found = [node for node in above if node is not None]
    return any(node.is_interpolation for node in found) or any(
        isinstance(node.value, list) for node in found[: len(path)]
    )


def _is_refused(config: Any, override: Any) -> bool:
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException, RecursionError):
        return True
    return False


CHOICES = ["experiment=digits_mlp", "optimizer=sgd", "scheduler=warmup_cosine"]
VALUES = ["loop.max_duration=3", "optimizer.lr=0.5", "run_dir=x", "loop.eval_interval=null", "notes='a: b'"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of merges by OmegaConf, and of files that are read."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, label: Callable[..., str] = lambda *_: "") -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[label(*args) or name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(BaseContainer, "merge_with")
    count(files, "read_file", lambda path, name: f"read {name}")
    return calls


def test_usual_files_and_overrides_are_merged_without_omegaconf(counts: Counter[str]) -> None:
    compose([*CHOICES, *VALUES])
    assert {name: number for name, number in counts.items() if name.startswith(("merge", "_apply"))} == {}
    assert {number for name, number in counts.items() if name.startswith("read ")} == {1}, "each file once"
