"""What of the command line is ours to parse: `ckpt`, `key+=value`, and what is wrong in an unreadable argument."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.commands.fit import describe_replaced_options
from trainer_cli.config import override_values
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.config.overrides import (
    Append,
    closes_at_end,
    hint_on_syntax,
    parse_overrides,
    read_overrides,
)
from trainer_cli.config.tree import Node
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import DATA_KEYS

STEPS = "checkpoint.fixed_steps"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ckpt=runs/x/step*"], "runs/x/step*"),
        (["ckpt=runs/x/step?[0-9]*"], "runs/x/step?[0-9]*"),
        (["ckpt=[ab]*[cd]"], "[ab]*[cd]"),
        (["ckpt=runs/{a,b}/checkpoints/*"], "runs/{a,b}/checkpoints/*"),
        (["ckpt=a, b = c/step 1"], "a, b = c/step 1"),
        (["ckpt=epoch=1.ckpt"], "epoch=1.ckpt"),
        (["ckpt=12"], "12"),
        (["ckpt=none"], "none"),
        (["ckpt=null"], None),
        (["+ckpt='a=b'"], "a=b"),
        (["ckpt=runs/x@best"], "runs/x@best"),
        (["ckpt=[a,b]"], ["a", "b"]),
        (["ckpt=[a]"], ["a"]),
        (["ckpt=[runs/{a,b}/x, 'runs/step[0-9]*']"], ["runs/{a,b}/x", "runs/step[0-9]*"]),
        (["ckpt=a", "ckpt=b"], ["a", "b"]),
    ],
)
def test_ckpt_takes_globs_and_lists_as_they_are_written(arguments: list[str], expected: str | list[str] | None) -> None:
    line = read_overrides([*arguments, "seed=1"])
    assert line.ckpt == expected
    assert line.ckpt_given
    assert [override.input_line for override in line.overrides] == ["seed=1"]


def test_without_ckpt_none_is_given() -> None:
    assert not read_overrides(["seed=1"]).ckpt_given


@pytest.mark.parametrize("argument", ["ckpt=", "ckpt=[]", "ckpt=[a,]"])
def test_an_empty_ckpt_is_an_error(argument: str) -> None:
    with pytest.raises(ConfigError, match="command line"):
        read_overrides([argument])


def test_experiment_is_appended_to_the_defaults() -> None:
    overrides = read_overrides(["experiment=x", "+experiment=y"]).overrides
    assert [override.input_line for override in overrides] == ["+experiment=x", "+experiment=y"]


@pytest.mark.parametrize("key", DATA_KEYS)
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_what_every_data_takes_needs_no_sign(key: str, sign: str, tmp_path: Path) -> None:
    """The experiment's own data names no key of the loader."""
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nmodel: {_target_: parts.Net}\ndata: {_target_: parts.Data}\n"
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    value = {"collate_fn": "parts.collate", "persistent_workers": "true", "drop_last": "true"}.get(key, "2")
    raw = compose(["experiment=mine", f"{sign}data.{key}={value}"], cwd=tmp_path, sections=()).raw
    assert str(raw["data"][key]).lower() == value


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([f"{STEPS}+=2"], [f"{STEPS}+=2"]),
        ([f"{STEPS}=[1]", f"{STEPS}+=2"], [f"{STEPS}+=2"]),
        ([f"{STEPS}+=2", f"{STEPS}=[1]"], []),
        ([f"{STEPS}+=2", f"{STEPS}=[1]", f"{STEPS}+=3"], [f"{STEPS}+=3"]),
        ([f"{STEPS}+=2", "checkpoint={fixed_steps:[1]}"], []),
        ([f"{STEPS}+=2", "checkpoint={max_checkpoints:1}"], [f"{STEPS}+=2"]),
        ([f"{STEPS}+=2", f"~{STEPS}"], []),
        ([f"{STEPS}+=2", "checkpoint.max_checkpoints=1"], [f"{STEPS}+=2"]),
    ],
)
def test_what_is_set_later_takes_the_place_of_what_was_added(arguments: list[str], kept: list[str]) -> None:
    assert [append.line for append in parse_overrides(arguments).appends] == kept


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.list+=3", [1, 2, 3]),
        ("a.list+=[3,4]", [1, 2, 3, 4]),
        ("a.list+=[[3]]", [1, 2, [3]]),
        ("a.list+={x: 1}", [1, 2, {"x": 1}]),
        ("a.list+='3'", [1, 2, "3"]),
        ("a.list+=null", [1, 2, None]),
    ],
)
def test_a_value_goes_to_the_end_and_a_list_item_by_item(argument: str, expected: list[Any]) -> None:
    root = Node.of({"a": {"list": [1, 2]}})
    (append,) = parse_overrides([argument]).appends
    assert override_values.append(root, append) is None
    assert root.plain() == {"a": {"list": expected}}


def test_null_begins_a_list_and_a_list_in_a_list_is_found_by_its_number() -> None:
    root = Node.of({"none": None, "deep": [{"inner": [1]}, [2]]})
    for path in (("none",), ("deep", "0", "inner"), ("deep", "1")):
        assert override_values.append(root, Append(path, [9], "")) is None
    assert root.plain() == {"none": [9], "deep": [{"inner": [1, 9]}, [2, 9]]}


def test_lists_of_sections_and_of_components_grow(project: Path) -> None:
    composed = compose([f"{STEPS}=[1]", f"{STEPS}+=2", f"{STEPS}+=[3]", "model.hidden+=32", "trust+=json"])
    assert composed.config.checkpoint.fixed_steps == [1, 2, 3]
    assert composed.config.model["hidden"] == [64, 32]
    assert composed.config.trust == ["json"]
    assert composed.where(STEPS) == composed.where("model.hidden") == "command line"


def test_a_recovered_list_grows(project: Path) -> None:
    text = compose([f"{STEPS}=[1]"]).to_yaml()
    assert from_yaml(text, [f"{STEPS}+=2"]).config.checkpoint.fixed_steps == [1, 2]
    assert from_yaml(text, ["model=mlp", "model.hidden+=8", f"{STEPS}=[5]"]).config.model["hidden"] == [64, 8]


def test_an_experiments_list_grows(project: Path, write: Callable[[str, str], Path]) -> None:
    write("experiment/listed.yaml", "# @package _global_\ncheckpoint:\n  fixed_steps: [10]\n")
    assert compose(["experiment=listed", f"{STEPS}+=20"]).config.checkpoint.fixed_steps == [10, 20]


@pytest.mark.parametrize("argument", ['run_dir="runs/\udce9"', "name=\udce9", "ckpt=runs/\udce9/*", "tags+=\udce9"])
def test_bytes_that_are_no_characters_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"\\udce9.* holds bytes that are not characters of utf-8") as caught:
        read_overrides([argument])
    assert "UTF-8" in (caught.value.cure or "")


def test_checkpoints_add_up() -> None:
    line = parse_overrides(["ckpt=a", "ckpt+=b*"])
    assert line.ckpt == ["a", "b*"]


@pytest.mark.parametrize(
    ("line", "section", "expected"),
    [
        ("scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}", "scheduler",
         {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}),
        ("data={batch_size: 7}", "data", {"_target_": "mine.Digits", "batch_size": 7}),
        ("callbacks={es: {_target_: mine.Net}}", "callbacks",
         {"system": {"_target_": "trainer_cli.SystemMonitor"}, "es": {"_target_": "mine.Net"}}),
    ],
)  # fmt: skip
def test_a_mapping_for_a_group_sets_its_values(
    line: str, section: str, expected: dict[str, Any], project: Path
) -> None:
    raw = compose([line, "data=digits"] if section != "data" else ["data=digits", line]).raw
    assert raw[section] == expected


WITHIN_BRACKETS = (
    "Within brackets a string with letters beyond a-z or any of , : = ( ) [ ] { } # & needs quotes of its own, as in "
    "'+x=[\"a=b\"]'. Within { } a key is a word, and each key has its value, as in {KEY: VALUE}; for another key, "
    "say it in a YAML file."
)


@pytest.mark.parametrize(
    ("argument", "cure"),
    [
        ('loop={"max_duration": 5}', "Keys within { } take no quotes: 'loop={max_duration: 5}'."),
        (
            'param_groups={"*.bias":{weight_decay:0}}',
            "Keys within { } take no quotes: 'param_groups={*.bias:{weight_decay:0}}'.",
        ),
        ("+x={'a': 'b'}", "Keys within { } take no quotes: \"+x={a: 'b'}\"."),
        ('+x={"a b": "c=d,,e"}', "Keys within { } take no quotes: '+x={a b: \"c=d,,e\"}'."),
        ('+x=["a", {"b":[{"c":1}]}]', "Keys within { } take no quotes: '+x=[\"a\", {b:[{c:1}]}]'."),
        ('+x={"a":1,}', "Keys within { } take no quotes. A value is missing beside a comma: '+x={a:1}', or as a string "
         "'+x=\"{\\\"a\\\":1,}\"'."),
        ('+x={"a:b":1}', WITHIN_BRACKETS),
        ("model.hidden=[64,,64]",
         "A value is missing beside a comma: 'model.hidden=[64,64]', or as a string 'model.hidden=\"[64,,64]\"'."),
        ("+x=[,64]", "A value is missing beside a comma: '+x=[64]', or as a string '+x=\"[,64]\"'."),
        ("+x={a: 1, }", "A value is missing beside a comma: '+x={a: 1 }', or as a string '+x=\"{a: 1, }\"'."),
        ("+x={a=1, b=[2]}", "Within { } a key and its value are joined by a colon: '+x={a: 1, b: [2]}'."),
        ("+x={a:[(1,2),(3,4)]}", "A list is written in [ ]: '+x={a:[[1,2],[3,4]]}'."),
        ("+x={a, b}", WITHIN_BRACKETS),
        ("+x=[{a: [1], b:}]", WITHIN_BRACKETS),
        ('+x=["a,,b",c=d]', WITHIN_BRACKETS),
        ("+x.*b={\"lr\":0}", "A name with * is written in braces: '+x={*b:{lr:0}}'."),
    ],
)  # fmt: skip
def test_what_is_wrong_in_brackets_is_reported_and_no_quotes_around_the_whole(argument: str, cure: str) -> None:
    (mistake,) = parse_overrides([argument]).mistakes
    assert mistake.cure == cure
    if cure != WITHIN_BRACKETS:
        suggested = shlex.split(cure.partition(": ")[2])[0].rstrip(".,")
        assert parse_overrides([suggested]).mistakes == []


@pytest.mark.parametrize("value", ["{a}{b}", "[ab]c,d", "[ab](c)"])
def test_a_text_that_only_begins_with_a_bracket_needs_both_pairs_of_quotes(value: str) -> None:
    cure = hint_on_syntax(f"name={value}")
    assert cure.endswith(f"needs two pairs of quotes: 'name=\"{value}\"'.")
    assert read_overrides([f'name="{value}"']).overrides[0].value() == value


@pytest.mark.parametrize(
    ("text", "closes"),
    [("[a,b]", True), ("[ab]*[cd]", False), ("[[a],[b]]", True), ("{a:[b]}", True), ("{a}{b}", False)],
)
def test_the_bracket_that_opens_a_text_is_the_one_that_ends_it(text: str, closes: bool) -> None:
    assert closes_at_end(text) is closes


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            "callbacks=ema callbacks=early_stopping",
            ["callbacks=ema has no effect: callbacks=early_stopping replaces it; for all write "
             "'callbacks=[ema,early_stopping]'"],
        ),
        (
            "callbacks=[ema,swa] seed=1 callbacks=[swa,norms]",
            ["callbacks=[ema,swa] has no effect: callbacks=[swa,norms] replaces it; for all write "
             "'callbacks=[ema,swa,norms]'"],
        ),
        ("optimizer=sgd optimizer=adamw", ["optimizer=sgd has no effect: optimizer=adamw replaces it"]),
        ("callbacks=ema callbacks=[ema,swa]", []),
        ("callbacks=ema callbacks=ema", []),
        ("callbacks=ema callbacks.ema.decay=0.5", []),
        ("model=null model={_target_: mine.Net}", []),
        ("model=cnn model=null", []),
        ("seed=1 seed=2", []),
    ],
)  # fmt: skip
def test_a_choice_that_a_later_one_replaces_is_named(words: str, sentences: list[str]) -> None:
    arguments = words.replace(": ", ":").split()
    assert list(describe_replaced_options(arguments)) == sentences
