"""What Hydra refuses in an override or a defaults list is refused by name, and what the message says composes."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from wrong_configs import (
    COMMAND_LINE,
    OWN,
    Attempt,
    Cure,
    Wrong,
    added,
    body,
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

LINE, KEY, TYPE, VALUE, LOST = Code.override, Code.unknown_key, Code.wrong_type, Code.wrong_value, Code.unresolved


def swept(line: str, says: str, cure: Cure | str, code: Code = LINE) -> Wrong:
    """A wrong sweep: `-m` before it."""
    return Wrong(["-m", line], code, COMMAND_LINE, says, cure)


def _in_a_file(attempt: Attempt) -> None:
    """The value stands in an experiment, as the hint says."""
    assert "in a YAML file" in attempt.hint
    attempt.typed[:] = ["+experiment=own"]


def family(rows: Iterable[Wrong]) -> list[Any]:
    """Rows that take one path: the first of them is in each run of the tests, all are in scripts/faults."""
    first, *others = rows
    return [first, *(pytest.param(row, marks=pytest.mark.campaign) for row in others)]


ROWS = [
    # Texts and quotes
    *family(typed(f"+model.x={text}", LINE, "cannot read the override", shown()) for text in (
        "[]aa", "È", "\U0001f923", "\\#", "'Hi''there'", "''a'", "'a''", '"abc\\"', '"abc\\\\"def"', "'a", '"a', "a'b", "a#b",
        "a;b", "a\nb", "a=b", "a=b=c", "a)", "(a", "a}", "]", "!x", "`x`", "<x>", "a&b", 'a"', "“a”", "'a'b", "'c:\\\\''")),
    typed("run_dir=~/x", LINE, "cannot read the override", edited("run_dir=$HOME/x", "~/x", "/home/x")),
    *family(typed(f"+model.x={text}", LINE, "cannot read the override", edited("written ${KEY}, and closed", text, "${seed}")) for text in ("'${seed", "${", "${}", '"${a b}')),
    # Brackets
    typed("model.hidden=[1,2", LINE, "A bracket is not closed", shown(after="too many is:")),
    typed("model.hidden=[1,[2", LINE, "A bracket is not closed", shown(after="too many is:")),
    typed("+model.x={a:[1,2", LINE, "A bracket is not closed", shown(after="too many is:")),
    typed("+model.x=[1,2}", LINE, "A bracket is not closed", shown(after="as a string ")),
    typed("name=[", LINE, "A bracket is not closed", shown(after="as a string ")),
    typed("model.hidden=[1,2,3]'", LINE, "One quote is too many", shown()),
    typed("model.hidden=(1,2)", LINE, "A list is written in [ ]", shown()),
    typed("model.hidden=[1,2,]", LINE, "missing beside a comma", shown()),
    typed("model.hidden=[1,,2]", LINE, "missing beside a comma", shown()),
    typed("model.hidden=[,1]", LINE, "missing beside a comma", shown()),
    typed("+model.x=[(1,2)]", LINE, "A list is written in [ ]", shown()),
    typed("+model.x=['a\\', 'b']", LINE, "A backslash before a quote", shown()),
    typed("+model.x={a: 'a\\', b: 'b'}", LINE, "A backslash before a quote", shown()),
    typed("+model.x=[a=b]", LINE, "needs quotes of its own", shown()),
    typed("+model.x={'0a': 0, \"1b\": 1}", LINE, "take no quotes", shown()),
    typed("+model.x={'nan': 0}", LINE, "say it in a YAML file", _in_a_file, experiment__own="# @package _global_\nmodel:\n  x: {'nan': 0}\n"),
    typed("+model.x={' abc ': 0}", LINE, "say it in a YAML file", _in_a_file,
          experiment__own="# @package _global_\nmodel:\n  x: {' abc ': 0}\n"),
    typed("+model.x={[0]: 1}", LINE, "a key is a word", edited("{KEY: VALUE}", "[0]", "a")),
    typed("+model.x={a=1}", LINE, "joined by a colon", shown()),
    typed("+model.x={a}", LINE, "each key has its value", edited("{KEY: VALUE}", "{a}", "{a: 1}")),
    typed("+model.x={null: 1}", TYPE, "has the key null", value("null", "nil")),
    typed("+model.x={true: 1}", TYPE, "has the key true", edited("YAML file", "true", "yes_")),
    typed("+model.x={nan: 1}", TYPE, "has the key nan", edited("in a YAML file: 'nan'", "nan", "not_a_number")),
    typed("trust=[mine,1.5]", TYPE, "trust.1 is 1.5", edited("Put it in quotes", "1.5", "'1.5'")),
    typed("load.key_mapping={a: 1.5}", TYPE, "load.key_mapping.a is 1.5", edited("Put it in quotes", "1.5", "'1.5'")),
    typed("freeze={net: 3epo}", VALUE, "freeze.net: '3epo'", edited("Did you mean '3ep'?", "3epo", "3ep")),
    # Commas
    typed("seed=1,", LINE, "A value is missing beside a comma", shown(after="comma:")),
    typed("seed=,1", LINE, "A value is missing beside a comma", shown(after="comma:")),
    typed("name=a,=b", LINE, "needs two pairs of quotes", shown()),
    typed("seed=1,000", LINE, "gives several values", shown(after="For a number write ")),
    typed("optimizer.lr=0,01", LINE, "gives several values", shown(after="For a number write ")),
    typed("model.hidden=1,2", LINE, "gives several values", shown(after="For a list write ")),
    typed("name=a, b", LINE, "gives several values", shown(after="For a string write ")),
    typed("name=it,x", LINE, "gives several values", shown(after="For a string write ")),
    typed("model=cnn,mlp", LINE, "gives several values", lambda attempt: attempt.typed.insert(0, "-m")),
    *family(typed(f"seed={text}", LINE, "gives several values", lambda attempt: attempt.typed.insert(0, "-m")) for text in ("range(3)", "1,2", "choice(1,2)", "shuffle(1,2)", "int(1,2)", "sort(2,1)")),
    typed("seed=interval(1,2)", LINE, "gives several values", lambda attempt: attempt.typed.__setitem__(slice(None), ["-m", "seed=1,2"])),
    typed("+model.x=[1,choice(2,3)]", LINE, "has values to sweep inside of another", lambda attempt: attempt.typed.__setitem__(slice(None), ["-m", "+model.x=[1,2],[1,3]"])),
    # Functions
    *family(typed(f"seed={wrong}", LINE, "It is written", edited(says, wrong, right)) for wrong, says, right in (
        ("int(a)", "int(NUMBER)", "int(2)"), ("int('')", "int(NUMBER)", "int(2)"), ("int('10.0')", "int(NUMBER)", "int('10')"), ("int([a,1])", "int(NUMBER)", "int(1)"),
        ("float({a:xyz})", "float(NUMBER)", "int(1)"), ("int(value=1,no=2)", "int(NUMBER)", "int(value=1)"))),
    typed("deterministic=bool('10')", LINE, "It is written bool(true)", edited("bool(true)", "bool('10')", "bool(true)")),
    *family(swept(f"seed={wrong}", "It is written", edited(says, wrong, right)) for wrong, says, right in (
        ("range(a)", "range(START,STOP,STEP)", "range(0,2,1)"), ("range(start=10,20,1)", "range(START,STOP,STEP)", "range(10,20,5)"),
        ("range(1,2,3,4)", "range(START,STOP,STEP)", "range(1,4,2)"), ("range(stop=3,x=1)", "range(START,STOP,STEP)", "range(0,3,1)"),
        ("choice()", "choice(A,B)", "choice(1,2)"), ("choice(choice(1,2))", "choice(A,B)", "choice(1,2)"), ("sort()", "sort(A,B)", "sort(2,1)"),
        ("sort(3,2,str(1))", "sort(A,B), of one type", "sort(3,2,1)"), ("shuffle(range(1,3),x)", "shuffle(A,B)", "shuffle(range(1,3))"),
        ("tag(a,1)", "tag(NAME,VALUES)", "tag(a,choice(1,2))"))),
    swept("model=glob()", "It is written glob(PATTERN)", edited("glob(PATTERN)", "glob()", "glob(c*)")),
    typed("+model.x=foo(1)", LINE, "needs two pairs of quotes", shown()),
    typed("+load.states=extend_list(optimizer)", LINE, "To add to the end of a list", shown()),
    typed("model.hidden=extend_list(1,2)", LINE, "To add to the end of a list", shown()),
    # Sweeps
    swept("seed=interval(1,2)", "an interval has no end", edited("seed=1,2", "interval(1,2)", "1,2")),
    swept("seed=glob(*)", "glob() chooses among the options", edited("a,b,c", "glob(*)", "1,2")),
    swept("model=glob(x*)", "fits nothing", edited("Available: cnn", "x*", "c*")),
    swept("model=glob([x*,3])", "fits nothing", edited("Available: cnn", "x*", "c*")),
    swept("seed=1,1", "gives 1 twice", edited("each value once", "1,1", "1,2")),
    swept("seed=range(0,10,0)", "has no end", edited("range(START,STOP,STEP)", ",0)", ",5)")),
    swept("seed=range(0,inf)", "has no end", edited("range(START,STOP,STEP)", "inf", "2")),
    swept("seed=range(0,1e9)", "1,000,000,000 values", edited("At most", "1e9", "2")),
    swept("seed=range(5,1)", "gives no value at all", value("5,1", "1,3")),
    swept("seed=1,,2", "A value is missing beside a comma", shown(after="comma:")),
    swept("seed=choice(1,", "A bracket is not closed", shown(after="too many is:")),
    swept("model=cnn,nope", "no model called 'nope'", edited("Available: cnn", "nope", "mlp"), Code.unknown_option),
    swept("~seed=1,2", "a removal takes no values", value("~seed=1,2", "seed=1,2")),
    swept("model.hidden+=1,2", "what is added to a list is not swept", shown(after="lists:", **{"[a],[a,b]": "[1],[2]"})),
    swept("run_dir=a,b", "each job of a sweep has a directory", edited("name=NAME", "run_dir=a,b", "name=a,b")),
    swept("seed=3", "nothing is swept", edited("seed=range(3)", "seed=3", "seed=range(3)")),
    Wrong(["-m", "seed=1,2", "seed=3"], LINE, COMMAND_LINE, "seed is swept, and given again", left_out),
    # Keys
    *family(typed(line, LINE, "is not a key: keys are words", shown()) for line in (
        ".seed=1", "seed.=1", "model..hidden=[1]", "+model..x=1", "model[hidden]=[1]", "seed =1", "'seed'=1", '"seed"=1', "model.'hidden'=[1]", "-seed=1", "--seed=1")),
    typed("$seed=1", KEY, "no key '$seed'", shown()),
    typed("seed==1", LINE, "cannot read", shown()),
    typed("seed:1", LINE, "is not an override", shown()),
    typed("seed: 1", LINE, "is not an override", shown()),
    *family(typed(line, LINE, "is not an override", edited("key=value, group=option, +key=value", line, right)) for line, right in (
        ("seed", "seed=1"), ("+seed", "+model.x=1"), ("~", "~model.hidden"), ("+", "+model.x=1"), ("+~model", "~optimizer"), ("=3", "seed=3"))),
    typed("model.hidden[0]=3", LINE, "A single item cannot be set", edited("model.hidden=[...]", "hidden[0]=3", "hidden=[3]")),
    typed("model.hidden.0=3", LINE, "not set singly", edited("model.hidden+=ITEM", "hidden.0=3", "hidden+=3")),
    typed("+model.*bias.x=1", LINE, "is written in braces", shown()),
    typed("SEED=1", KEY, "no key 'SEED'", shown()),
    typed("loop.max_step=1", KEY, "no key 'loop.max_step'", shown()),
    typed("loop-max_duration=1", KEY, "no key 'loop-max_duration'", shown()),
    typed("loop_max_duration=1", KEY, "no key 'loop_max_duration'", shown()),
    typed("loop/max_duration=1", Code.unknown_option, "no group 'loop/max_duration'", shown()),
    typed("optimizer.nope=1", KEY, "no key 'optimizer.nope'", shown(after="To add it, write ")),
    typed("model.x.y=1", KEY, "no key 'model.x.y'", shown()),
    typed("callbacks.x.y=1", KEY, "no key 'callbacks.x.y'", shown(TARGET="mine.Net")),
    typed("param_groups.x.lr=1", KEY, "no key 'param_groups.x.lr'", shown()),
    typed("scheduler.x=1", LINE, "scheduler is null", shown(NAME="warmup_cosine")),
    typed("loop.max_duration.x=1", LINE, "loop.max_duration is not a mapping", shown(VALUE="5")),
    typed("seed.x=1", LINE, "seed is not a mapping", shown(VALUE="1")),
    typed("+seed=1", LINE, "seed exists already", edited("Leave out the '+'", "+", "")),
    typed("model={a: 1}", KEY, "no key 'model.a'", shown(after="To add it, write ")),
    typed("model.hidden={a: 1}", TYPE, "does not merge", shown("~model.hidden", after="'~model.hidden' ")),
    typed("seed+=1", LINE, "seed is 0, and no list", shown()),
    typed("+model.hidden+=1", LINE, "cannot read", shown()),
    typed("~model.hidden+=1", LINE, "cannot read", shown()),
    typed("model.nope+=1", KEY, "no key 'model.nope'", shown(after="To make the list, write ")),
    typed("model+=cnn", LINE, "model is a group", shown(after="with ", NAME="cnn")),
    typed("hydra.run.dir=x", Code.no_effect, "has no effect", shown()),
    typed("hydra.output_subdir=x", Code.no_effect, "has no effect", edited("only composes", "hydra.output_subdir=x", "seed=1")),
    # Removals
    typed("~model.hiden", LINE, "there is no 'model.hiden' to remove", part("model.hiden")),
    typed("~model.zzz", LINE, "there is no 'model.zzz' to remove", left_out),
    typed("~seed=5", LINE, "seed is 0, and not 5", shown()),
    typed("~seed=null", LINE, "seed is 0, and not null", shown()),
    typed("~seed=", LINE, "seed is 0, and not ''", shown()),
    typed("~model.hidden=[1]", LINE, "model.hidden is [64], and not [1]", shown()),
    # Values that must be given
    Wrong(["data=text"], Code.not_given, "configs/data/text.yaml:2", "data.path must be given", added(VALUE="x")),
    *family(typed(f"{key}=???", Code.not_given, f"{key} must be given", added(VALUE="1")) for key in ("seed", "model.hidden", "optimizer.lr")),
    # Interpolations
    *[body(f"name: '{text}'", LOST, says, edited(hint, text, right)) for text, says, hint, right in (
        ("${missing}", "names a key that does not exist: missing", "", "${seed}"), ("x_${missing}", "does not exist: missing", "", "x_${seed}"),
        ("${.missing}", "does not exist", "", "${.seed}"), ("${..missing}", "does not exist: ..missing", "", "${.seed}"), ("${seed.x}", "does not exist: seed.x", "", "${seed}"),
        ("${missing[a].b[c]}", "does not exist: missing[a].b[c]", "", "${seed}"), ("${model.hidden.9}", "does not exist: model.hidden.9", "", "${model.hidden.0}"),
        ("${Seed}", "does not exist: Seed", "Did you mean 'seed'", "${seed}"), ("${loop.maxduration}", "does not exist: loop.maxduration", "'loop.max_duration'", "${loop.max_duration}"),
        ("${loop.total_steps}", "does not exist: loop.total_steps", "of a schedule write 1dur", "x"), ("${run_dir}", "leads back to itself", "Write the value", "x"), ("${name}", "leads back to itself", "Write the value", "x"),
        ("${nope:x}", "which is not a resolver", "Known: ${key}", "${oc.env:NOPE_2,x}"), ("${oc.env:NOPE_1}", "NOPE_1 is not set", "${oc.env:NOPE_1,DEFAULT}", "${oc.env:NOPE_1,x}"),
        ("${oc.env}", "a resolver without its colon", "${oc.env:ARGUMENT}", "${oc.env:NOPE_2,x}"), ("${now}", "a resolver without its colon", "${now:ARGUMENT}", "${now:%Y}"),
        ("${oc.env:}", "fails: TypeError", "", "${oc.env:NOPE_2,x}"), ("${oc.env:A,B,C}", "fails: TypeError", "", "${oc.env:A,B}"),
        ("${oc.decode:${seed}}", "fails: TypeError", "", "${seed}"), ("${oc.dict.keys:seed}", "fails: TypeError", "", "x"), ("${mul:2}", "fails: TypeError", "", "${mul:2,3}"),
        ("${fails:1}", "fails: RuntimeError: no luck", "", "${mul:2,3}"), ("${hydra:job.num}", "asks for Hydra's own settings", "only composes", "x"))],
    *family(body(f"name: '{text}'", Code.yaml, "is not an interpolation", edited("Write ${key}", text, "${seed}")) for text in (
        "${", "${}", "${a b}", "${te st:foo}", "${y@z:}", "${0:1}", "${some_${seed}:a}", "${oc.env:${name}", "${..}", "${seed.}", "${[a}", "${seed]}")),
    body("name: ${model}", TYPE, "it must be a string or null", value("${model}", "x")),
    body("name: ${loop}", TYPE, "it must be a string or null", value("${loop}", "x")),
    body("checkpoint.fixed_steps: ['${model}']", TYPE, "must be a whole number", value("'${model}'", "3")),
    body("seed: ${name}", VALUE, "resolves to 'own', but it must be a whole number", value("${name}", "3")),
    body("seed: ${loop.hard_stop}", TYPE, "seed is null", value("${loop.hard_stop}", "3")),
    body("device: ${name}", VALUE, "one of auto, cpu, cuda, mps", value("${name}", "cpu")),
    body("model.x: ${model}", LOST, "leads back to itself", value("${model}", "${seed}")),
    body("model: ${nope}", LOST, "does not exist: nope", value("${nope}", "${data}")),
    body("param_groups.x.lr: ${nope}", LOST, "does not exist: nope", value("${nope}", "${optimizer.lr}")),
    Wrong(["+experiment=own"], LOST, f"{OWN}:3", "leads back to itself", edited("Write the value", "${loop.max_time}", "500s"),
          {"experiment/own.yaml": "# @package _global_\nloop:\n  hard_stop: ${loop.max_time}\n  max_time: ${loop.hard_stop}\n"}),
    body("model: {a: ${seed}}", Code.yaml, "got '{'", edited("in quotes", "${seed}", "'${seed}'")),
    typed("name=${missing}", LOST, "does not exist: missing", value("missing", "seed")),
    typed("seed=${name}", VALUE, "resolves to 'default'", value("${name}", "3")),
    # Types
    *family(body(f"seed: {wrong}", TYPE, "it must be a whole number", value(wrong, "7")) for wrong in ("hello", "null", "[1, 2]", "{a: 1}", "true", "1.5", "'3'", "~")),
    *family(typed(f"seed={wrong}", TYPE, "it must be a whole number", value(wrong, "7")) for wrong in ("hello", "null", "[1]", "{a:1}", "true", "1.5", "'3'", "''", "1 2", "0x10")),
    body("seed: 1e3", TYPE, "it must be a whole number", part("1e3", after="Write ")),
    body("seed: -1", VALUE, "of at least 0", value("-1", "1")),
    body("seed: 99999999999999999999999", VALUE, "fit into 64 bits", value("99999999999999999999999", "9")),
    *family(body(f"deterministic: {wrong}", TYPE, "it must be true or false", value(wrong, "true")) for wrong in ("hello", "null", "[]", "2", "{a: 1}")),
    body("deterministic: 1", TYPE, "it must be true or false", part("1", after="Write ")),
    body("deterministic: yes", Code.yaml, "read by YAML as true", part("yes", after="Write ")),
    *family(body(f"name: {wrong}", TYPE, "it must be a string or null", value(wrong, "x")) for wrong in ("[a]", "{a: b}", "true")),
    body("name: 1.5", TYPE, "it must be a string or null", edited("Put it in quotes", "1.5", "'1.5'")),
    typed("load.key_mapping={a: 1.5}", TYPE, "load.key_mapping.a is 1.5", edited("Put it in quotes", "1.5", "'1.5'")),
    typed("freeze={net: 3epo}", VALUE, "freeze.net: '3epo'", edited("Did you mean '3ep'?", "3epo", "3ep")),
    typed("name=1.5", TYPE, "it must be a string or null", shown()),
    body("device: gpu", TYPE, "one of auto, cpu, cuda, mps", part("gpu")),
    *family(body(f"device: {wrong}", TYPE, "one of auto, cpu, cuda, mps", value(wrong, "cpu")) for wrong in ("1", "null", "[cpu]", "{a: 1}")),
    *family(body(f"loop.max_duration: {wrong}", VALUE, "duration", value(wrong, "3ep")) for wrong in ("soon", "[1]", "{a: 1}", "true", "0", "-1", "1.5", "null", "''")),
    body("checkpoint.fixed_steps: 3", TYPE, "a list of whole numbers", part("3", after="Write ")),
    *family(body(f"checkpoint.fixed_steps: {wrong}", TYPE, "whole number", value(wrong, "[3]")) for wrong in ("[a]", "[1.5]", "[[1]]", "[null]", "null")),
    body("checkpoint.fixed_steps: {a: 1}", Code.yaml, "it must be a list", value("{a: 1}", "[1]")),
    *family(body(f"precision.clip_norm: {wrong}", TYPE, "a number or null", value(wrong, "1.0")) for wrong in ("fast", "[1]", "true", "{a: 1}")),
    body("precision.clip_norm: .nan", VALUE, "it must be finite", value(".nan", "1.0")),
    *family(body(f"loop: {wrong}", TYPE, "must be a section", edited("loop.max_duration", wrong, "{max_duration: 3}")) for wrong in ("3", "null", "text", "true")),
    body("loop: [1]", Code.yaml, "a mapping of keys to values", value("[1]", "{max_duration: 3}")),
    *family(body(f"model: {wrong}", TYPE, "a node with `_target_`", value(wrong, "{_target_: mine.Net}")) for wrong in ("3", "text", "true")),
    *family(body(f"callbacks: {wrong}", TYPE, "it must be a mapping", value(wrong, "{}")) for wrong in ("3", "text", "null")),
    body("callbacks: {x: 3}", TYPE, "a node with `_target_`, or null", value("3", "null")),
    body("callbacks: {x: {y: 1}}", Code.target, "has no _target_", edited("_target_: package.module.Class", "y: 1", "_target_: mine.Net")),
    body("param_groups: {x: 3}", TYPE, "a mapping of settings", value("3", "{lr: 0.1}")),
    body("freeze: a", TYPE, "a list of patterns", edited("[a]", ": a", ": [a]")),
    body("ckpt: 3", TYPE, "a path, a glob or a list of them", value("3", "x")),
    body("optimizer.lr: 0,1", Code.yaml, "not as a number", part("0,1", after="Write ")),
    body("optimizer.lr: .inf", VALUE, "it must be finite", value(".inf", "0.5")),
    body("loop.nope: 1", KEY, "no key 'loop.nope'", edited("Known here: max_duration, ", "nope", "hard_stop")),
    body("checkpoint.keep_best.moode: min", KEY, "no key 'checkpoint.keep_best.moode'", edited("checkpoint.keep_best.mode", "moode", "mode")),
    # What Hydra's instantiate refuses
    *family(body(f"model._target_: {wrong}", Code.target, "is not a dotted name", edited("package.module.Name", wrong, "mine.Net")) for wrong in ("3", "null", "''", "nope", ".mine", "mine..Net", "[a]", "mine.Net()")),
    body("model._target_: mine.Nett", Code.target, "has no 'Nett'", edited("'Net'", "Nett", "Net")),
    body("model._target_: os.system", Code.target, "is blocked", value("os.system", "mine.Net")),
    *family(body(f"model._args_: {wrong}", TYPE, "it must be a list", value(wrong, "[]")) for wrong in ("3", "{a: 1}")),
    *family(body(f"model._partial_: {wrong}", TYPE, "it must be true or false", value(wrong, "false")) for wrong in ("3", "x")),
]  # fmt: skip


@pytest.mark.parametrize("wrong", ROWS, ids=str)
def test_a_wrong_value_is_refused_where_it_stands_with_a_cure_that_composes(small_project: Path, wrong: Wrong) -> None:
    check(wrong)


# What Hydra refuses in a defaults list is refused with its line, and what the message says to write composes. The
# rows are the wrong compositions of Hydra's own tests of defaults lists, packages and config groups, and those
# beside them.


LIST, OPTION, YAML, GIVEN = Code.defaults_list, Code.unknown_option, Code.yaml, Code.not_given
PRIMARY = "defaults:\n  - train_schema\n  - data: digits\n"


def primary(entries: str, code: Code, number: int, says: str, cure: Cure | str, *words: str) -> Wrong:
    """A wrong primary config; `{}` in `entries` is its usual beginning."""
    return Wrong(words, code, f"configs/mine.yaml:{number}", says, cure, {"mine.yaml": entries.format(PRIMARY)}, "mine")


def header(text: str, code: Code, says: str, cure: Cure | str, number: int = 1) -> Wrong:
    """A wrong `# @package` of an experiment."""
    return Wrong(["+experiment=own"], code, f"{OWN}:{number}", says, cure, {"experiment/own.yaml": text})


INNER = "defaults:\n  - inner@_here_: a\n"
LIST_ROWS = [
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
    typed("+modle=cnn", KEY, "no key 'modle'", shown()),
    typed("Model=cnn", KEY, "no key 'Model'", shown()),
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


@pytest.mark.parametrize("wrong", LIST_ROWS, ids=str)
def test_a_wrong_choice_names_its_place_and_a_cure_that_composes(small_project: Path, wrong: Wrong) -> None:
    check(wrong)
