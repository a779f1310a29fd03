"""What of the command line is ours to parse, and what Hydra's."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.config import overrides
from trainer_cli.config.compose import compose
from trainer_cli.config.fields import DATA_KEYS
from trainer_cli.errors import ConfigError


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
    line = overrides.read_overrides([*arguments, "seed=1"])
    assert line.ckpt == expected
    assert line.ckpt_given
    assert line.lines == ["seed=1"]


def test_without_ckpt_none_is_given() -> None:
    assert not overrides.read_overrides(["seed=1"]).ckpt_given


@pytest.mark.parametrize("argument", ["ckpt=", "ckpt=[]", "ckpt=[a,]"])
def test_an_empty_ckpt_is_an_error(argument: str) -> None:
    with pytest.raises(ConfigError, match="command line"):
        overrides.read_overrides([argument])


def test_experiment_is_appended_to_the_defaults() -> None:
    assert overrides.read_overrides(["experiment=x", "+experiment=y"]).lines == ["+experiment=x", "+experiment=y"]


def test_every_unreadable_override_is_reported_with_a_hint_on_quoting() -> None:
    with pytest.raises(ConfigError) as caught:
        overrides.read_overrides(["name=a=b", "seed=1", "digits"])
    message = str(caught.value)
    assert "2 mistakes" in message
    assert """'name="a=b"'""" in message
    assert "'digits' is no override" in message


def test_the_quoting_that_is_suggested_can_be_read() -> None:
    assert overrides.read_overrides(['name="a=b"']).overrides[0].value() == "a=b"


def test_several_values_for_one_run_are_refused_with_both_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        overrides.read_overrides(["optimizer.lr=1,2"])
    assert "optimizer.lr=[1,2]" in str(caught.value)


@pytest.mark.parametrize("key", DATA_KEYS)
@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_what_every_data_takes_needs_no_sign(key: str, sign: str, tmp_path: Path) -> None:
    """The experiment's own data names no key of the loader."""
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nmodel: {_target_: parts.Net}\ndata: {_target_: parts.Data}\n"
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(text)
    value = {"collate_fn": "parts.collate", "persistent_workers": "true"}.get(key, "2")
    raw = compose(["experiment=mine", f"{sign}data.{key}={value}"], cwd=tmp_path, sections=()).raw
    assert str(raw.data[key]).lower() == value
