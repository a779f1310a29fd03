"""An argument that cannot be read is reported with what is wrong in it, and what is suggested can be read."""

from __future__ import annotations

import shlex

import pytest

from trainer_cli.config import overrides
from trainer_cli.config.overrides import closes_at_end, hint_on_syntax


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
        ('+x={"a":1,}', "Keys within { } take no quotes."),
        (
            '+x={"a:b":1}',
            "Within { } a key takes no quotes, and so 'a:b' cannot be one: say it in a YAML file.",
        ),
        ("model.hidden=[64,,64]", "An element is missing between two commas."),
        ("+x=[,64]", "An element is missing between [ and the comma after it."),
        ("+x=[64, 64,]", "An element is missing between the last comma and ]: '+x=[64, 64]'."),
        ("+x={a: 1, }", "An element is missing between the last comma and }: '+x={a: 1 }'."),
        ("+x={a=1, b=[2]}", "Within { } a key and its value are joined by a colon: '+x={a: 1, b: [2]}'."),
        ("+x={a:[(1,2),(3,4)]}", "A list stands in [ ]: '+x={a:[[1,2],[3,4]]}'."),
        ("+x={a, b}", "Within { } each key has its value, as in {KEY: VALUE}; a list stands in [ ]."),
        ("+x=[{a: [1], b:}]", "Within { } each key has its value, as in {KEY: VALUE}; a list stands in [ ]."),
        (
            '+x=["a,,b",c=d]',
            "Within brackets a text with letters beyond a-z or any of , : = ( ) [ ] { } # & needs quotes of its own, "
            "as in '+x=[\"a=b\"]'.",
        ),
        ("+x.*b={\"lr\":0}", "A name with * stands in braces: '+x={*b:{lr:0}}'."),
    ],
)  # fmt: skip
def test_what_is_wrong_in_brackets_is_reported_and_no_quotes_around_the_whole(argument: str, cure: str) -> None:
    (mistake,) = overrides.parse_overrides([argument]).mistakes
    assert mistake.cure == cure
    if ": '" in cure or ': "' in cure:
        (suggested,) = shlex.split(cure.partition(": ")[2].removesuffix("."))
        assert overrides.parse_overrides([suggested]).mistakes == []


@pytest.mark.parametrize("value", ["{a}{b}", "[ab]c,d", "[ab](c)"])
def test_a_text_that_only_begins_with_a_bracket_needs_both_pairs_of_quotes(value: str) -> None:
    cure = hint_on_syntax(f"name={value}")
    assert cure.endswith(f"needs two pairs of quotes: 'name=\"{value}\"'.")
    assert overrides.read_overrides([f'name="{value}"']).overrides[0].value() == value


@pytest.mark.parametrize(
    ("text", "closes"),
    [("[a,b]", True), ("[ab]*[cd]", False), ("[[a],[b]]", True), ("{a:[b]}", True), ("{a}{b}", False)],
)
def test_the_bracket_that_opens_a_text_is_the_one_that_ends_it(text: str, closes: bool) -> None:
    assert closes_at_end(text) is closes
