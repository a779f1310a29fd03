"""What is composed is what Hydra itself makes of the same files and command lines: its grammar is kept whole.

TRAIN_COMPOSITIONS=5000 tries so many random command lines."""

from __future__ import annotations

import copy
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hydra import compose as hydra_compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException
from random_project import COMPONENTS, RandomProject

from trainer_cli.config import files, override_values, overrides, search_path
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.config.file_merge import merge
from trainer_cli.config.files import ConfigFiles
from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.overrides import path_of, read_overrides
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import ConfigTree, MergeError, Node, merge as merge_trees
from trainer_cli.errors import ConfigError, raise_all
from trainer_cli.keys import config_keys as fields

COMPOSITIONS = int(os.environ.get("TRAIN_COMPOSITIONS", "40"))
"""Random command lines, four for each random project."""
SHIPPED = search_path.shipped_folder("configs")
FILES = {
    "config.yaml": """
        defaults:
          - whole
          - _self_
        hydra:
          searchpath: [shared]
        name: ${oc.env:WHO,nobody}
        """,
    "whole.yaml": """
        defaults:
          - train_schema
          - model: net
          - data: digits
          - optimizer: adamw
          - scheduler: null
          - loop: default
          - precision: fp32
          - checkpoint: default
          - callbacks: default
          - loggers: default
          - optional model/part@model.third: not_there
          - _self_
        seed: 3
        """,
    "before.yaml": """
        defaults:
          - _self_
          - whole
        seed: 9
        loop: {log_interval: 77}
        """,
    "after.yaml": """
        defaults:
          - whole
          - optimizer@model.inner: sgd
          - /scheduler@_here_: warmup_cosine
          - override data: characters
        seed: 9
        """,
    "model/net.yaml": """
        defaults:
          - head: wide
          - part@left: small
          - part@right: large
          - _self_
        _target_: mine.Net
        width: 8
        total: ${model.head.width}
        """,
    "model/plain.yaml": "_target_: mine.Net\nwidth: 4\nkind: ${oc.select:model.kind_of_it,${name}}\n",
    "model/head/wide.yaml": "width: 64\n",
    "model/head/thin.yaml": "width: 2\nmore: [1, 2]\n",
    "model/part/small.yaml": "size: 1\n",
    "model/part/large.yaml": "size: 100\ndeep: {er: true}\n",
    "model/part/moved.yaml": "# @package model.elsewhere\nsize: 5\n",
    "model/family/base.yaml": "_target_: mine.Net\nwidth: 1\ndepth: 2\n",
    "model/family/child.yaml": "defaults:\n  - family/base\n  - _self_\nwidth: 5\n",
    "callbacks/both.yaml": "defaults: [default, ema]\n",
    "loop/short.yaml": "max_duration: 2ep\nlog_interval: 1\n",
    "experiment/one.yaml": """
        # @package _global_
        defaults:
          - override /model: plain
          - override /loggers: jsonl
        loop: {max_duration: 4ep}
        optimizer: {lr: 0.25}
        """,
    "experiment/two.yaml": """
        # @package _global_
        defaults:
          - one
          - override /optimizer: sgd
        seed: 11
        model: {width: 12}
        """,
    "experiment/deep/three.yaml": """
        # @package _global_
        defaults:
          - /experiment/one
          - override /model/head: thin
          - override /model: net
          - override /callbacks: [default, ema]
        """,
    "../shared/optimizer/slow.yaml": "_target_: torch.optim.SGD\nlr: 1e-9\n",
    "../shared/optimizer/sgd.yaml": "_target_: never.seen\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("as_hydra")
    for name, text in FILES.items():
        file = root / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        indent = " " * 8
        file.write_text("\n".join(line.removeprefix(indent) for line in text.lstrip("\n").split("\n")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("WHO", "somebody")
        yield root


def compose_plainly(search: SearchPath, lines: Sequence[str]) -> dict[str, Any]:
    """The values that we make of the files and overrides, before the schema's defaults and checks."""
    given = overrides.read_overrides(lines).overrides
    choices = [one for one in given if search.is_choice(one)]
    files = ConfigFiles(search)
    tree = ConfigTree(merge(search, choices, files)[0])
    mistakes = override_values.apply(tree, [one for one in given if one not in choices], search)
    raise_all([*files.mistakes, *mistakes])
    values: dict[str, Any] = tree.root.plain()
    return values


def hydras(folder: Path, lines: Sequence[str], primary: str = "config") -> dict[str, Any]:
    """What Hydra's own `compose` makes of it."""
    with warnings.catch_warnings(), initialize_config_dir(str(folder), version_base="1.3"):
        warnings.simplefilter("ignore")
        return cast("dict[str, Any]", OmegaConf.to_container(hydra_compose(primary, list(lines))))


def ours(project: Path, primary: str, *lines: str) -> dict[str, Any]:
    """What we make of a command line in the project."""
    return compose_plainly(SearchPath.of(None, primary, project), lines)


def theirs(project: Path, primary: str, *lines: str) -> dict[str, Any]:
    """What Hydra makes of it."""
    ConfigStore.instance().store(SCHEMA, fields.defaults())
    places = [f"file://{folder}" for folder in (SHIPPED, *search_path.addon_folders(), project / "shared")]
    return hydras(project / "configs", [f"hydra.searchpath=[{','.join(places)}]", *lines], primary)


LINES: list[tuple[str, ...]] = [
    (),
    # Overrides that have nothing to do with one another
    (
        "seed=4", "optimizer=slow", "callbacks=both", "loop=short", "loop.max_duration=5", "precision=bf16",
        "precision.clip_norm=2", "scheduler=warmup_cosine", "scheduler.min_ratio=0.5", "~loggers.console",
    ),
    (
        "optimizer=sgd", "callbacks=[default,early_stopping,ema]", "+model.more={a:1,b:[2,{c:null}]}",
        "loop={log_interval:3,max_duration:9}", "load.states=[all]",
    ),
    (
        "callbacks=ema", "loggers=none", "optimizer.betas=[0.5,0.6]", "param_groups={}", "+param_groups.bias={lr:0.1}",
        "++model.width=3", "++model.new.deep.key=3",
    ),
    ("~optimizer", "~model.width", "+model.s=[3,1,2]", "model.left.size=7"),
    ("~optimizer=adamw", "~model.width=8", "model.head.width=5", "model.head.width=6"),
    # One at a time
    ("+experiment=one",),
    ("+experiment=two",),
    ("+experiment=deep/three",),
    ("+experiment=[one,two]",),
    ("+experiment=two", "model=net", "optimizer=adam"),
    ("model=plain",),
    ("model/head=thin",),
    ("model/head=thin", "model.head.width=3"),
    ("model/part@model.left=large",),
    ("model/part@model.left=large", "~model/part@model.right"),
    ("model/part@model.third=small", "+model.third.more=4"),
    ("+model/part@spare=small",),
    ("+model/part=moved",),
    ("model=family/base",),
    ("model=family/child", "++model.depth=9", "+model.name=x"),
    ("~model.head", "model.total=1"),
    ("++model={a:1}",),
    ("name='a, b = {c}'", 'run_dir="it\\"s"', "model.width=null", "trust=[]"),
    ("model.width=1e3", "model.total=-.5", "+model.a=0x1", "+model.b=1_000", "+model.c=true"),
    ("model.width=int(3.0)", "model.total=str(3)", "+model.f=float(1)", "+model.g=bool(1)"),
    ("name=${oc.env:WHO}", "run_dir=${oc.select:nope,runs/x}", "seed=${loop.log_interval}"),
    ("+model.empty=", "+model.dollar=a$b", "+model.path=a/b:c@d"),
]  # fmt: skip


@pytest.mark.parametrize("lines", LINES, ids=" ".join)
def test_a_command_line_gives_what_hydra_makes_of_it(project: Path, lines: tuple[str, ...]) -> None:
    assert ours(project, "config", *lines) == theirs(project, "config", *lines)


@pytest.mark.parametrize("primary", ["before", "after"])
@pytest.mark.parametrize("lines", [(), ("+experiment=two",), ("model=plain", "loop=short")], ids=" ".join)
def test_a_users_primary_config_gives_what_hydra_makes_of_it(
    project: Path, primary: str, lines: tuple[str, ...]
) -> None:
    assert ours(project, primary, *lines) == theirs(project, primary, *lines)


def test_interpolations_resolve_as_in_hydra(project: Path) -> None:
    lines = ("+experiment=one", "name=${oc.env:WHO}", "run_dir=${oc.select:nope,runs/x}", "seed=${loop.log_interval}")
    resolved = [OmegaConf.create(made(project, "config", *lines)) for made in (ours, theirs)]
    assert OmegaConf.to_container(resolved[0], resolve=True) == OmegaConf.to_container(resolved[1], resolve=True)


RULES = (
    r"is a list, whose items are not set singly",
    r"is \$\{.*\}, and what it names has that key",
    r"exists already",
)
"""Refusals of ours where Hydra makes a config: the rules of docs/configuration.md."""


def without_shared_nodes(root: Path, lines: list[str]) -> Any:
    """What Hydra makes of it where each use of a file has nodes of its own.

    Hydra merges the cached nodes of a file themselves: what is merged over them in one place shows in the next place
    that the same file is merged into.
    """
    load = CachingConfigRepository.load_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CachingConfigRepository, "load_config", lambda self, config_path: copy.deepcopy(load(self, config_path))
        )
        return hydras(root, lines)


def hydras_lines(project: RandomProject, lines: list[str]) -> list[str]:
    """The command line that says to Hydra what the rules of docs/configuration.md say of components."""
    bare = [line for line in lines if line.startswith("~") and line[1:] in COMPONENTS]
    experiments = re.findall(r"first|second", next((line for line in lines if "experiment=" in line), ""))
    defaults = yaml.safe_load(project.files["config.yaml"])["defaults"]
    chosen = {group: option for entry in defaults if entry != "_self_" for group, option in entry.items()}
    own = {group for name in experiments for group in project.written_out[name]}
    documents = [yaml.safe_load(project.files[f"experiment/{name}.yaml"]) for name in experiments]
    kept = {str(key).rpartition("/")[2] for each in documents for entry in each.get("defaults", ()) for key in entry}
    kept |= {line.lstrip("+~").partition("=")[0] for line in lines if "={" not in line}
    replaced = [f"~{group}" for group in sorted(own - kept) if chosen.get(group) is not None]
    off = [f"+off=[{','.join(line[1:] for line in bare)}]"] if bare else []
    return [*lines, *replaced, *off]


def composed(project: RandomProject, root: Path, lines: list[str]) -> tuple[Any, Any]:
    """What we and Hydra make of a random command line: a tree, or the reason for none."""
    try:
        ours: Any = compose_plainly(SearchPath([root], root, root, "config"), lines)
    except (HydraException, OmegaConfBaseException, ConfigError, ValueError, RecursionError) as error:
        ours = str(error)
    # A mapping without keys takes new ones without `+`.
    added = [f"+{line}" if re.match(r"[\w.]+=\{", line) else line for line in lines]
    for line in (lines, added):
        try:
            return ours, hydras(root, hydras_lines(project, line))
        except Exception as error:  # Hydra's own errors, and those of Python that it lets pass.
            theirs = f"{error} {error.__cause__ or ''}"
        if isinstance(ours, str) or "is not in struct" not in theirs:
            break
    return ours, theirs


def test_random_configs_give_what_hydra_makes_of_them(tmp_path: Path) -> None:
    trees = 0
    for seed in range(COMPOSITIONS // 4):
        project, root = RandomProject(seed), tmp_path / str(seed)
        project.write(root)
        for lines in [project.command_line() for _ in range(4)]:
            ours, theirs = composed(project, root, lines)
            shown = f"seed {seed}: {' '.join(lines)}\nours: {ours}\nHydra's: {theirs}"
            if isinstance(ours, str):
                assert isinstance(theirs, str) or any(re.search(rule, ours) for rule in RULES), shown
            else:
                if ours != theirs and not isinstance(theirs, str):
                    theirs = without_shared_nodes(root, hydras_lines(project, lines))
                assert ours == theirs, shown
                trees += 1
    assert trees > COMPOSITIONS // 3


@pytest.mark.parametrize(
    ("group", "header", "entry", "cure"),
    [
        ("model", "_group_", "override model: old", "remove the line"),
        ("callbacks", "_group_._name_", "callbacks: [old]", "write '# @package callbacks.old'"),
        ("callbacks", "callbacks._name_", "callbacks: [old]", "write '# @package callbacks.old'"),
        ("model/part", "_group_", "model/part: old", "remove the line"),
        ("model/part", "_group_", "model/part@model.third: old", "remove the line"),
        ("model/part", "_global_.model._name_", "model/part: old", "write '# @package _global_.model.old'"),
    ],
)
def test_deprecated_words_of_a_header_mean_what_they_mean_in_hydra_and_are_named(
    group: str, header: str, entry: str, cure: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "configs"
    for name in ("config.yaml", f"{group}/old.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    defaults = "".join(f"  - {line}\n" for line in ("train_schema", "model: mlp", entry, "_self_"))
    (folder / "config.yaml").write_text(f"defaults:\n{defaults}")
    (folder / group / "old.yaml").write_text(f"# @package {header}\nold: {{_target_: mine.Net}}\n")
    ConfigStore.instance().store(SCHEMA, fields.defaults())
    # Hydra 1.1 is the last one that replaces these words.
    with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(folder), version_base="1.1"):
        expected = OmegaConf.to_container(hydra_compose("config", [f"hydra.searchpath=[file://{SHIPPED}]"]))
    assert compose_plainly(SearchPath.of(None, "config", tmp_path), []) == expected
    assert "mine.Net" in str(expected)
    (line,) = [line for line in caplog.messages if "deprecated" in line]
    assert line.endswith(f"{group}/old.yaml:1: Hydra has deprecated '# @package {header}': {cure}")


def calls_to_compose(items: int) -> int:
    """Number of calls of Python functions, with a list of so many steps in a file."""
    text, calls = f"checkpoint:\n  fixed_steps: {list(range(1, items + 1))}", 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        written = from_yaml(text, missing_ok=True).to_yaml()
    finally:
        sys.setprofile(before)
    assert written.count("\n  - ") >= items
    return calls


def test_a_long_list_takes_a_fixed_number_of_calls_for_each_item() -> None:
    calls_to_compose(1)
    few, more, most = (calls_to_compose(items) for items in (200, 400, 600))
    assert most - more < 1.2 * (more - few)


# What files and overrides make of a config is what OmegaConf and Hydra make of it; counts of what that takes.


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
            merge_trees(root, Node.of(new))
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
    merge_trees(root, given)
    merge_trees(root, Node.of({"x": {"v": 2, "w": {"u": 3}}}))
    root.put(("x", "v"), Node(7))
    assert given.plain() == before
    assert root.plain() == {"x": {"y": [{"z": 1}], "v": 7, "w": {"u": 3}}}


OVERRIDES = (
    "a=1", "a=null", "a=???", "a=text", "a='${b}'", "a=${b}", "a=[1,{x:2}]", "a={c:7}", "a.c=1", "a.c=null", "a.c.d=2",
    "+a=1", "+a.c=1", "++a.c=2", "++a.x.y=2", "~a", "~a.c", "b.c.d=5", "b.c=5", "list=6", "nope=1", "b.nope=1",
    "list.0=2", "x/y=1",
)  # fmt: skip


@pytest.mark.parametrize("line", OVERRIDES)
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
