"""A command line with several values becomes jobs, and each job has a KEY that no other has."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from trainer_cli.addons.jobs.sweep_jobs import LONGEST_KEY, key_of, read_swept
from trainer_cli.config.overrides import read_overrides
from trainer_cli.errors import ConfigError
from trainer_cli.processes import text_of

GROUPS = {"model": ["cnn", "gpt/large", "gpt/small", "mlp"], "experiment": ["digits", "digits_mlp", "text"]}


def swept(*arguments: str) -> list[dict[str, str]]:
    return [dict(job.swept) for job in read_swept(arguments, GROUPS.get).list_grid()]


def values(argument: str) -> list[str]:
    return [text for one in swept(argument) for text in one.values()]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("seed=1,2,3", ["1", "2", "3"]),
        ("seed=3,1,2", ["3", "1", "2"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=range(1,8,3)", ["1", "4", "7"]),
        ("seed=range(3,0,-1)", ["3", "2", "1"]),
        ("optimizer.lr=range(0.1,0.45,0.1)", ["0.1", "0.2", "0.3", "0.4"]),
        ("optimizer.lr=1e-3,3e-4,1e20", ["0.001", "0.0003", "1e20"]),
        ("seed=choice(7)", ["7"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("seed=sort(range(3),reverse=true)", ["2", "1", "0"]),
        ("seed=tag(mine,choice(1,2))", ["1", "2"]),
        ("deterministic=true,False", ["true", "false"]),
        ("scheduler=null,cosine", ["null", "cosine"]),
        ("loop.max_duration=3ep,0.25ep,10", ["3ep", "0.25ep", "10"]),
        ("checkpoint.fixed_steps=[1,2],[]", ["[1,2]", "[]"]),
        ("model.extra={a:1,b:x y},{}", ["{a:1,b:'x y'}", "{}"]),
        ("name=choice('1',1,'a,b')", ["'1'", "1", "'a,b'"]),
        ("name='a b',c", ["'a b'", "c"]),
        ("model=glob(*)", ["cnn", "mlp"]),
        ("model=glob([c*,m*],exclude=mlp)", ["cnn"]),
        ("model=glob(gpt/*)", ["gpt/large", "gpt/small"]),
        ("+experiment=glob(digits*)", ["digits", "digits_mlp"]),
        ("experiment=digits,text", ["digits", "text"]),
    ],
)
def test_values_are_taken_in_the_order_written(argument: str, expected: list[str]) -> None:
    assert values(argument) == expected


def test_shuffle_takes_all_values_in_the_same_order_each_time() -> None:
    order = values("seed=shuffle(range(20))")
    assert order == values("seed=shuffle(range(20))")
    assert order != sorted(order, key=int)
    assert sorted(map(int, order)) == list(range(20))


def test_several_keys_give_their_product_with_the_last_one_varying_fastest() -> None:
    found = read_swept(["model=mlp,cnn", "name=x", "seed=1,2", "ckpt=a,b"], GROUPS.get).list_grid()
    assert [job.overrides for job in found] == [
        ("model=mlp", "name=x", "seed=1", "ckpt=a,b"),
        ("model=mlp", "name=x", "seed=2", "ckpt=a,b"),
        ("model=cnn", "name=x", "seed=1", "ckpt=a,b"),
        ("model=cnn", "name=x", "seed=2", "ckpt=a,b"),
    ]
    assert [job.key for job in found] == [f"model={model},seed={seed}" for model in ("mlp", "cnn") for seed in (1, 2)]


def test_prefixes_and_packages_stay_with_their_keys() -> None:
    (first, _) = read_swept(
        ["+experiment=text,digits", "++model.width=choice(8)", "model@other=choice(mlp)"], GROUPS.get
    ).list_grid()
    assert first.overrides == ("+experiment=text", "++model.width=8", "model@other=mlp")
    assert list(first.swept) == ["experiment", "model.width", "model@other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "leave -m out"),
        (["seed=[1,2]"], "nothing is swept"),
        (["optimizer.lr=1e-3,0.001"], "0.001 twice"),
        (["+seed=1,2", "seed=3,4"], "seed is swept, and given again"),
        (["seed=1,2", "run_dir=x"], "name=NAME chooses where"),
        (["seed=range(200)", "model.width=range(200)"], "a sweep of 40,000 jobs"),
        (["seed=rang(1,2)"], "cannot read the override"),
    ],
)
def test_what_cannot_be_swept_is_reported_with_a_cure(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_swept(arguments, GROUPS.get).list_grid()
    assert message in str(caught.value)


def test_independent_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read_swept(["seed=range(0)", "model=glob(x*)"], GROUPS.get).list_grid()
    assert "2 mistakes" in str(caught.value)


@pytest.mark.parametrize(
    ("swept", "key"),
    [
        ({"seed": 1}, "seed=1"),
        ({"optimizer.lr": 0.001, "model": "mlp"}, "model=mlp,optimizer.lr=0.001"),
        ({"optimizer.lr": 1e-05}, "optimizer.lr=1e-05"),
        ({"optimizer.lr": 1e20}, "optimizer.lr=1e20"),
        ({"model.shift": -1}, "model.shift=-1"),
        ({"deterministic": True, "scheduler": None}, "deterministic=true,scheduler=null"),
        ({"loop.max_duration": "0.25ep"}, "loop.max_duration=0.25ep"),
    ],
)
def test_a_key_reads_as_the_overrides_do(swept: dict[str, Any], key: str) -> None:
    assert key_of(swept) == key


@pytest.mark.parametrize(
    ("swept", "begins"),
    [
        ({"experiment": "text/small"}, "experiment=text-small-"),
        ({"name": "a b"}, "name=-a-b--"),
        ({"name": "1"}, "name=-1--"),
        ({"optimizer._target_": "torch.optim.SGD"}, "optimizer._target_=torch.optim.sgd-"),
        ({"checkpoint.fixed_steps": [1, 2]}, "checkpoint.fixed_steps=-1-2--"),
        ({"model@other": "mlp"}, "model-other=mlp-"),
        ({"name": "x-0123456789ab"}, "name=x-0123456789ab-"),
        ({"data.path": "x" * 300}, "data.path=xxx"),
    ],
)
def test_what_cannot_be_written_plainly_ends_in_a_digest(swept: dict[str, Any], begins: str) -> None:
    key = key_of(swept)
    assert key.startswith(begins)
    assert re.search(r"-[0-9a-f]{12}$", key)
    assert len(key) <= LONGEST_KEY


def test_the_order_on_the_command_line_does_not_change_the_key() -> None:
    assert key_of({"seed": 1, "model": "mlp"}) == key_of({"model": "mlp", "seed": 1})


ALIKE: list[dict[str, Any]] = [
    *({"a": value} for value in (1, 1.0, "1", True, "true", "True", None, "null", "x", "X", "x/y", "x-y", "x:y")),
    *({"a": value} for value in ([1, 2], ["1", 2], "[1,2]", {"b": 1}, {"b": "1"}, "1,b=2", "é", "e\u0301", "")),
    {"A": "x"}, {"a": "x y"}, {"a": 1, "b": 2}, {"a": "x" * 200}, {"a": "x" * 199 + "y"},
    {"a": key_of({"a": "x/y"}).removeprefix("a=")},
]  # fmt: skip


def test_different_values_never_share_a_key_even_where_upper_and_lower_case_are_one() -> None:
    keys = [key_of(one).casefold() for one in ALIKE]
    assert len(set(keys)) == len(ALIKE), [pair for pair in itertools.combinations(zip(keys, ALIKE, strict=True), 2)
                                          if pair[0][0] == pair[1][0]]  # fmt: skip


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "bc"]), inner),
    max_leaves=4,
)


@given(VALUES)
@example("${seed}")
@example("a\\")
@example("it's")
def test_a_key_is_a_safe_file_name_and_its_override_reads_back_as_the_value(value: Any) -> None:
    key = key_of({"model.x": value})
    assert re.fullmatch(r"[a-z0-9=_.,-]{1,120}", key)
    assert read_overrides([f"model.x={text_of(value)}"]).overrides[0].value() == value
