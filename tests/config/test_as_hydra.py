"""What is composed is what Hydra itself makes of the same files and command lines: its grammar is kept whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import trainer_cli
from trainer_cli.config import fields, override_values, overrides, search_path
from trainer_cli.config.config_files import ConfigFiles
from trainer_cli.config.file_merge import merge
from trainer_cli.config.hydra_compat import SCHEMA
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.validation import contents

SHIPPED = search_path.shipped_configs(Path(trainer_cli.__file__).parent)
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


def ours(project: Path, primary: str, *lines: str) -> dict[str, Any]:
    """What we make of it."""
    search = SearchPath.of(None, primary, project)
    given = overrides.read(lines).overrides
    choices = [one for one in given if search.is_group(one.key_or_group) and not isinstance(one.value(), dict)]
    files = ConfigFiles(search)
    merged = merge(search, choices, files)
    values, mistakes = override_values.apply(merged.values, [one for one in given if one not in choices], search)
    assert [*mistakes, *files.mistakes] == []
    return values


def theirs(project: Path, primary: str, *lines: str) -> dict[str, Any]:
    """What Hydra's own `compose` makes of it."""
    ConfigStore.instance().store(SCHEMA, fields.defaults())
    places = [f"file://{SHIPPED}", f"file://{project / 'shared'}"]
    with warnings.catch_warnings(), initialize_config_dir(str(project / "configs"), version_base="1.3"):
        warnings.simplefilter("ignore")
        config = hydra_compose(primary, [f"hydra.searchpath=[{','.join(places)}]", *lines])
    return contents(config)


LINES: list[tuple[str, ...]] = [
    (),
    ("seed=4",),
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
    ("optimizer=slow",),
    ("optimizer=sgd",),
    ("callbacks=both",),
    ("callbacks=[default,early_stopping,ema]",),
    ("callbacks=ema", "loggers=none"),
    ("loop=short", "loop.max_duration=5"),
    ("precision=bf16", "precision.clip_norm=2"),
    ("scheduler=warmup_cosine",),
    ("scheduler=warmup_cosine", "scheduler.min_ratio=0.5"),
    ("~optimizer",),
    ("~optimizer=adamw",),
    ("~model.width",),
    ("~model.width=8",),
    ("~loggers.console",),
    ("~model.head", "model.total=1"),
    ("+model.more={a:1,b:[2,{c:null}]}",),
    ("++model={a:1}",),
    ("++model.width=3", "++model.new.deep.key=3"),
    ("optimizer.betas=[0.5,0.6]",),
    ("param_groups={}", "+param_groups.bias={lr:0.1}"),
    ("name='a, b = {c}'", 'run_dir="it\\"s"', "model.width=null", "trust=[]"),
    ("model.width=1e3", "model.total=-.5", "+model.a=0x1", "+model.b=1_000", "+model.c=true"),
    ("model.width=int(3.0)", "model.total=str(3)", "+model.f=float(1)", "+model.g=bool(1)"),
    ("name=${oc.env:WHO}", "run_dir=${oc.select:nope,runs/x}", "seed=${loop.log_interval}"),
    ("+model.s=[3,1,2]",),
    ("loop={log_interval:3,max_duration:9}", "load.states=[all]"),
    ("+model.empty=", "+model.dollar=a$b", "+model.path=a/b:c@d"),
    ("model.head.width=5", "model.head.width=6"),
    ("model.left.size=7",),
]


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
