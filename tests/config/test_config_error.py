"""A ConfigError carries its location, source, code, message and hint as fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.config.compose import compose
from trainer_cli.errors import Code, ConfigError, ConfigErrors

LINE = "command line"
FILE = "configs/experiment/odd.yaml"


@pytest.mark.parametrize(
    ("overrides", "location", "source", "code", "hint"),
    [
        (["loop.max_step=3"], "loop.max_step", LINE, Code.unknown_key, "Did you mean 'loop.max_duration'?"),
        (["model=cn"], None, LINE, Code.unknown_option, "There are: cnn, gpt, mlp. Did you mean 'cnn'?"),
        (["seed=x"], "seed", LINE, Code.wrong_type, None),
        (["data.batch_size=0"], "data.batch_size", LINE, Code.wrong_value, None),
        (["seed=-1"], "seed", LINE, Code.wrong_value, None),
        (["data=text", "data.path=???"], "data.path", LINE, Code.not_given, "Add data.path=VALUE to the command line."),
        (["name=${no}"], "name", LINE, Code.unresolved, ""),
        (["hydra.verbose=true"], None, LINE, Code.no_effect, "Hydra only composes the config here."),
        (["experiment=odd"], None, f"{FILE}:2", Code.yaml, "Write false, or 'no' in quotes."),
        (["experiment=list"], None, f"{FILE.replace('odd', 'list')}:2", Code.defaults_list, None),
        (["a b"], None, LINE, Code.override, None),
        (["+model.inner={_target_: torch.nn.Linearr}"], "model.inner._target_", LINE, Code.target, "Linear"),
        (["+model._odd_=1"], "model", LINE, Code.argument, "_target_"),
    ],
)
def test_each_kind_of_mistake_has_its_fields(
    overrides: list[str],
    location: str | None,
    source: str,
    code: Code,
    hint: str | None,
    project: Path,
    write: Callable[[str, str], Path],
) -> None:
    write("experiment/odd.yaml", "# @package _global_\ndeterministic: no\n")
    write("experiment/list.yaml", "# @package _global_\ndefaults: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    error = caught.value
    assert (error.location, error.source, error.code) == (location, source, code)
    assert error.message in str(error)
    assert error.message.rstrip(".") != str(error).rstrip(".")
    assert hint is None or hint in (error.hint or "")


def test_several_mistakes_are_one_error_that_holds_each(project: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose(["loop.max_step=3", "seed=x"])
    assert [(one.location, one.code) for one in caught.value.mistakes] == [
        ("loop.max_step", Code.unknown_key),
        ("seed", Code.wrong_type),
    ]
    assert caught.value.code is Code.several
