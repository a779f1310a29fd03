"""What Hydra refuses in a defaults list is refused with its line, and what the message says to write composes.

The rows are the wrong compositions of Hydra's own tests of defaults lists, packages and config groups, and those
beside them.
"""

# ruff: noqa: E501
from __future__ import annotations

from pathlib import Path

import pytest
from wrong_configs import (
    OWN,
    Wrong,
    added,
    check,
    edited,
    first_line,
    left_out,
    line,
    moved_down,
    own,
    part,
    shown,
    typed,
    value,
)

from trainer_cli.errors import Code

LIST, OPTION, KEY, YAML, GIVEN = Code.defaults_list, Code.unknown_option, Code.unknown_key, Code.yaml, Code.not_given
PRIMARY = "defaults:\n  - train_schema\n  - data: digits\n"


def primary(entries: str, code: Code, number: int, says: str, cure, *words: str) -> Wrong:
    """A wrong primary config; `{}` in `entries` is its usual beginning."""
    return Wrong(words, code, f"configs/mine.yaml:{number}", says, cure, {"mine.yaml": entries.format(PRIMARY)}, "mine")


def header(text: str, code: Code, says: str, cure, number: int = 1) -> Wrong:
    """A wrong `# @package` of an experiment."""
    return Wrong(["+experiment=own"], code, f"{OWN}:{number}", says, cure, {"experiment/own.yaml": text})


INNER = "defaults:\n  - inner@_here_: a\n"
ROWS = [
    # Files and groups that are not there
    own("smal", OPTION, "no experiment called 'smal'", part("smal")),
    own("/nowhere/x", OPTION, "no group 'nowhere'", edited("Available: callbacks", "/nowhere/x", "override /model: cnn")),
    own("/parts/inner@param_groups.x: nope", OPTION, "no parts/inner called 'nope'", edited("Available: a, b", "nope", "b")),
    own("/parts@param_groups.x: [a, inner/nope]", OPTION, "no parts called 'inner/nope'", edited("inner/a", "nope", "a")),
    own("override /model: CNN", OPTION, "no model called 'CNN'", part("CNN")),
    own("override /model: cnn.yml", OPTION, "no model called 'cnn.yml'", part("cnn.yml")),
    own("override /modle: cnn", LIST, "no group 'modle'", line()),
    own("modle: cnn", LIST, "no group 'experiment/modle'", line()),
    own("/partz@param_groups.x: a", LIST, "no group 'partz'", line()),
    own("./parts@param_groups.x: a", LIST, "./parts is no group", line()),
    own("//parts@param_groups.x: a", LIST, "//parts is no group", line()),
    own("/parts", LIST, "parts is a group, and this entry names no option", line(OPTION="a", KEY="param_groups.x")),
    own("override /model", LIST, "names no option", line(OPTION="cnn")),
    primary("defaults:\n  - train_shema\n  - data: digits\n  - model: mlp\n", LIST, 2, "train_shema.yaml, which does not exist", part("train_shema")),
    primary("{}  - modle: mlp\n", LIST, 4, "no group 'modle'", line()),
    # Overrides of what is not there
    own("override /parts: a", LIST, "nothing chooses a parts that could be overridden", line(KEY="param_groups.x")),
    own("override /parts/inner: a", LIST, "nothing chooses a parts/inner", line(KEY="param_groups.x")),
    own("/parts@param_groups.x: a | override /parts@param_groups.y: b", LIST, "nothing chooses a parts for param_groups.y", line(), line=4),
    own("/parts@param_groups.x: a | override /parts: b", LIST, "nothing chooses a parts for parts", line(), line=4),
    own("/parts@param_groups.x: a | /parts@param_groups.y: a | override /parts: b", LIST, "nothing chooses a parts for parts", line(after=" or "), line=5),
    own("override model: cnn", LIST, "looked for below experiment/", line()),
    own("model: cnn", LIST, "looked for below experiment/", line()),
    own("parts@param_groups.x: a", LIST, "looked for below experiment/", line()),
    own("experiment: small", LIST, "looked for below experiment/", line()),
    own("override /experiment: small", LIST, "an experiment lists another one", line()),
    own("/experiment: small", LIST, "an experiment lists another one", line()),
    primary("{}  - override model: mlp\n", LIST, 4, "nothing chooses a model that could be overridden", line()),
    Wrong(["+experiment=own"], LIST, "configs/parts/c.yaml:2", "nothing chooses a model for param_groups.x.model", line(),
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - /parts@param_groups.x: c\n", "parts/c.yaml": "defaults:\n  - override /model: cnn\nlr: 1.0\n"}),
    Wrong(["+experiment=own"], LIST, "configs/parts/c.yaml:2", "nothing chooses a parts/inner", edited("without override", "override ", ""),
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - /parts@param_groups.x: c\n", "parts/c.yaml": "defaults:\n  - override inner@_here_: b\nlr: 1.0\n"}),
    # The order
    own("override /model: cnn | /parts@param_groups.x: a", LIST, "an override of model comes before", moved_down),
    own("override /model: cnn | /parts@param_groups.x: [a]", LIST, "comes before 'parts@param_groups.x'", moved_down),
    own("override /model: cnn | small", LIST, "comes before 'small'", moved_down),
    # Chosen twice
    own("/model: cnn", LIST, "model is chosen already, in configs/config.yaml", line()),
    own("/parts@param_groups.x: a | /parts@param_groups.x: b", LIST, "parts@param_groups.x is chosen twice", left_out, line=4),
    own("/parts@param_groups.x: c | /parts/inner@param_groups.x: b", LIST, "chosen already, in configs/parts/c.yaml", line(), line=4, parts__c=INNER),
    Wrong(["+experiment=own"], LIST, "configs/parts/c.yaml:3", "parts/inner@param_groups.x is chosen twice", left_out,
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - /parts@param_groups.x: c\n", "parts/c.yaml": f"{INNER}  - inner@_here_: b\n"}),
    primary("{}  - model: mlp\n  - model: cnn\n", LIST, 5, "model is chosen twice", left_out),
    primary("{}  - model: mlp\n  - experiment: small\n", LIST, 5, "experiment is chosen already", left_out, "+experiment=small"),
    # _self_
    own("_self_ | /parts@param_groups.x: a | _self_", LIST, "_self_ is given twice, first in line 3", left_out, line=5),
    own("_self_@seed", LIST, "'_self_@seed' is not an entry", line()),
    own("/_self_", LIST, "'/_self_' is not an entry", line()),
    own("_self_: x", LIST, "'_self_' is not an entry", line()),
    # What is not an entry
    *[own(entry, LIST, "is not a choice", edited("'- override /group: option'", entry, "override /model: cnn")) for entry in ("3", "true", "null", "[a, b]", "{}", '""', "{override /model: cnn, optional: true}", "{override /model: cnn, override /data: text}")],
    *[own(entry, LIST, "names no group", edited("'- override /group: option'", entry, "override /model: cnn")) for entry in ('"": a', '" ": a', '"override ": a', '"/": a', '"@param_groups.x": a')],
    own("overide /model: cnn", LIST, "'overide' before /model is not known", edited("Known: override", "overide", "override")),
    own("Override /model: cnn", LIST, "'Override' before /model is not known", edited("Known: override", "Override", "override")),
    own("optioal /parts@param_groups.x: a", LIST, "'optioal' before /parts is not known", edited("optional", "optioal", "optional")),
    *[own(f"override /model: {option}", LIST, "must be a name, a list of names, or null", value(option, "cnn")) for option in ("3", "true", "{a: b}", "[cnn, 3]", "[[cnn]]")],
    own("override /model: ''", LIST, "the option of /model is empty", edited("/model: OPTION", "''", "cnn")),
    # Paths
    own("../small", LIST, "../small leads out of its folder", edited("from the top", "../small", "/parts@param_groups.x: a")),
    own("../parts@param_groups.x: a", LIST, "leads out of its folder", edited("from the top", "../parts", "/parts")),
    own("/parts/../model: cnn", LIST, "leads out of its folder", edited("from the top", "/parts/../model", "override /model")),
    own("/parts@param_groups.x: ../a", LIST, "an option of /parts leads out", edited("an option of the group", "../a", "a")),
    own("/parts@param_groups.x: [a, ../b]", LIST, "an option of /parts leads out", edited("an option of the group", "../b", "b")),
    own("/parts\\inner@param_groups.x: a", LIST, "has a backslash", part("/parts\\inner@param_groups.x")),
    own("/parts@param_groups.x: inner\\a", LIST, "option inner\\a has a backslash", part("inner\\a")),
    own("..\\small", LIST, "has a backslash", edited("'../small'", "..\\small", "small")),
    # Choices that are left open
    own("/parts@param_groups.x: ???", GIVEN, "parts@param_groups.x must be chosen", added(NAME="b")),
    own("override /data: ???", GIVEN, "data must be chosen", added(NAME="digits")),
    primary("{}  - model: ???\n", GIVEN, 4, "model must be chosen", added(NAME="cnn")),
    Wrong(["+experiment=own"], GIVEN, "configs/parts/c.yaml:2", "parts/inner@param_groups.x must be chosen", added(NAME="b"),
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - /parts@param_groups.x: c\n", "parts/c.yaml": INNER.replace(": a", ": ???")}),
    Wrong(["+experiment=own"], GIVEN, "configs/parts/c.yaml:2", "parts/inner@param_groups.x.more must be chosen", added(NAME="b"),
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - /parts@param_groups.x: c\n", "parts/c.yaml": "defaults:\n  - inner@more: ???\n"}),
    own("/parts@param_groups.x: [a, ???]", YAML, "found '?'", edited("Inside { } and [ ]", "???", "b")),
    # Interpolations
    own("/parts@param_groups.x: ${nope}", LIST, "cannot resolve ${nope}", edited("Write the option itself: a, b", "${nope}", "a")),
    own("/parts@param_groups.x: ${model}", LIST, "cannot resolve ${model}", edited("Write the option itself: a, b", "${model}", "a")),
    own("/parts@param_groups.x: '${foo:a}'", LIST, "cannot resolve ${foo:a}", edited("Write the option itself", "'${foo:a}'", "a")),
    own("/parts@param_groups.x: '${oc.env:NOPE_9}'", LIST, "cannot resolve ${oc.env:NOPE_9}", edited("Write the option itself", "'${oc.env:NOPE_9}'", "a")),
    Wrong([], LIST, "configs/mine.yaml:4", "cannot resolve ${model}", edited("Write the option itself: characters, digits", "${model}", "digits"),
          {"mine.yaml": "defaults:\n  - train_schema\n  - model: ${data}\n  - data: ${model}\n", "model/digits.yaml": "_target_: mine.Net\n"}, "mine"),
    own("/${nope}", LIST, "cannot resolve ${nope}", edited("Write the name itself", "/${nope}", "small")),
    own("/parts@param_groups.x: [a, '${model}']", LIST, "cannot be resolved", edited("Write its name", "${model}", "b")),
    own("/parts@param_groups.x: '${defaults.0.model}'", LIST, "counts the entries", edited("Name a group", "'${defaults.0.model}'", "a")),
    own("/parts@param_groups.x: '${model'", YAML, "is not an interpolation", edited("Write ${key}", "'${model'", "a")),
    # Packages
    own("/parts@optimzer: a", KEY, "no key 'optimzer'", part("optimzer")),
    own("/parts@checkpoint.keep_bst: a", KEY, "no key 'checkpoint.keep_bst'", edited("checkpoint.keep_best", "checkpoint.keep_bst", "param_groups.x")),
    *[own(f"/parts{package}: a", LIST, "names no place in the config", part(package, **fill)) for package, fill in (
        ("@", {"KEY": "param_groups.x"}), ("@param_groups@x", {}), ("@param_groups..x", {}), ("@param_groups/x", {}))],
    own("'/parts@model:optimizer': a", LIST, "names no place in the config", part("@model:optimizer")),
    own("/parts@param groups: a", LIST, "before groups is not known", edited("Known: override", "param groups", "param_groups.x")),
    own("/parts: a", KEY, "there is no key 'parts'", line(KEY="param_groups.x")),
    own("/parts@_group_: a", KEY, "there is no key 'parts'", line(KEY="param_groups.x")),
    own("override /hydra/launcher: x", Code.defaults_list, "hydra/launcher has no effect", edited("only composes", "override /hydra/launcher: x", "_self_")),
    header("# @package _globl_\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package _global_ seed\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package: _global_\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @packge _global_\nseed: 3\n", YAML, "does not say a package", line()),
    header('# @package "_global_"\nseed: 3\n', YAML, "does not say a package", line()),
    header("# @package _here_\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package a..b\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package .\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package a:b\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package _group_._here_\nseed: 3\n", YAML, "does not say a package", line()),
    header("# @package optimzer\nlr: 3.0\n", KEY, "there is no key 'optimzer'", part("optimzer")),
    header("seed: 3\n", YAML, "does not say '# @package _global_'", edited("its first line", "seed", "# @package _global_\nseed")),
    header("seed: 3\n# @package _global_\n", YAML, "counts only at the top", first_line, 2),
    header("# @package _global_\n# @package model\nseed: 3\n", YAML, "says '# @package' twice", left_out, 2),
    primary("# @package model\n{}  - model: mlp\n", YAML, 1, "the primary config cannot go to 'model'", left_out),
    # Lists that are none
    header("# @package _global_\ndefaults:\n  override /model: cnn\n", LIST, "'defaults' must be a list", edited("'- override /group: option'", "override", "- override"), 3),
    *[header(f"# @package _global_\ndefaults: {text}\nseed: 1\n", LIST, "'defaults' must be a list", edited("An entry is", text, "[_self_]"), 2) for text in ("model", "3", "${x}")],
    header("# @package _global_\ndefaults:\nseed: 1\n", LIST, "'defaults' must be a list", edited("remove the line", "defaults:", "name: x"), 2),
    header("# @package _global_\ndefualts:\n  - override /model: cnn\n", KEY, "no key 'defualts'", part("defualts"), 2),
    # Files that lead back to themselves
    own("own | override /model: cnn", LIST, "leads back to its own file", left_out),
    Wrong(["+experiment=own"], LIST, "configs/experiment/two.yaml:3", "leads back to its own file", left_out,
          {"experiment/own.yaml": "# @package _global_\ndefaults:\n  - two\n", "experiment/two.yaml": "# @package _global_\ndefaults:\n  - own\n  - override /model: cnn\n"}),
    primary("{}  - model: mlp\n  - mine\n", LIST, 5, "leads back to its own file", left_out),
    # The primary config and its search path
    Wrong([], OPTION, "--config-name", "there is no confg.yaml", part("confg"), {}, "confg"),
    primary("{}  - override model: cnn\n  - model: mlp\n", LIST, 4, "an override of model comes before", moved_down),
    primary("- a\n", YAML, 1, "the file is a list", value("- a", "defaults: [train_schema, model: mlp, data: digits]")),
    primary("{}  - model: mlp\nhydra:\n  searchpath: 42\n", YAML, 6, "hydra.searchpath must be a list", edited("[FOLDER]", "42", "[configs]")),
    primary("{}  - model: mlp\nhydra:\n  searchpath: [42]\n", YAML, 6, "names 42, which is not a folder", edited("A path counts from the current folder", "42", "configs")),
    primary("{}  - model: mlp\nhydra:\n  searchpath: [pkg://nope.conf]\n", YAML, 6, "which is not a folder", edited("is an installed package", "pkg://nope.conf", "pkg://trainer_cli")),
    # Choices on the command line
    typed("model=nope", OPTION, "no model called 'nope'", edited("Available: cnn", "nope", "cnn")),
    typed("model=CNN", OPTION, "no model called 'CNN'", shown()),
    typed("model=../model/cnn", OPTION, "no model called", shown()),
    typed("+parts@param_groups.x=[a,../b]", OPTION, "no parts called '../b'", shown()),
    typed("+parts@param_groups.x=inner\\a", OPTION, "no parts called", shown()),
    typed("+experiment=[small,nope]", OPTION, "no experiment called 'nope'", edited("small", ",nope", "")),
    typed("+modle=cnn", KEY, "no key 'modle'", edited("'model'", "+modle", "model")),
    typed("Model=cnn", KEY, "no key 'Model'", part("Model")),
    typed("foo@model=cnn", OPTION, "no group 'foo'", edited("model", "foo@model", "model")),
    typed("parts=a", LIST, "parts is not in the defaults list", shown(KEY="param_groups.x")),
    typed("parts@param_groups.x=a", LIST, "is not in the defaults list", shown()),
    typed("parts/inner=a", LIST, "is not in the defaults list", shown(KEY="param_groups.x")),
    typed("+parts=a", KEY, "there is no key 'parts'", shown(KEY="param_groups.x")),
    typed("model@foo=cnn", LIST, "model@foo is not in the defaults list", shown()),
    typed("model@=cnn", LIST, "model@ is not in the defaults list", shown()),
    typed("+parts@model@param_groups.x=a", Code.override, "takes one package", shown()),
    typed("experiment@foo=small", Code.override, "experiment is merged into the root", shown()),
    typed("+parts@optimzer=a", KEY, "no key 'optimzer'", part("optimzer")),
    typed("parts@param_groups.y=b", LIST, "is not in the defaults list", shown(), "+parts@param_groups.x=a"),
    typed("parts=b", LIST, "parts is not in the defaults list", shown(), "+parts@param_groups.x=a", "+parts@param_groups.y=a"),
    typed("+parts@param_groups.x=b", LIST, "parts@param_groups.x is chosen twice", left_out, "+parts@param_groups.x=a"),
    typed("+model=cnn", LIST, "+model=cnn: model is chosen already", edited("Leave out the '+'", "+", "")),
    typed("++model=cnn", Code.override, "model is a group", shown()),
    typed("++parts@param_groups.x=a", Code.override, "parts is a group", shown(after=" or ")),
    typed("~parts", LIST, "so it cannot be removed", left_out),
    typed("~parts@param_groups.x=a", LIST, "so it cannot be removed", left_out),
    typed("~optimizer=nope", LIST, "optimizer=nope is not in the defaults list", shown()),
    typed("~optimizer@foo", LIST, "so it cannot be removed", shown()),
    typed("~modle", KEY, "no key 'modle'", edited("'model'", "~modle", "~optimizer")),
    typed("hydra/launcher=x", Code.no_effect, "has no effect", left_out),
    typed("hydra.searchpath=42", Code.no_effect, "has no effect", edited("only composes", "hydra.searchpath=42", "seed=1")),
]  # fmt: skip


@pytest.mark.parametrize("wrong", ROWS, ids=str)
def test_a_wrong_choice_names_its_place_and_a_cure_that_composes(small_project: Path, wrong: Wrong) -> None:
    check(wrong)
