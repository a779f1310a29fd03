"""What to load of a checkpoint, and under which names."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_cli.errors import ConfigError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.loads.report import LoadReport


@pytest.mark.parametrize(
    ("mapping", "name", "new"),
    [
        ({}, "a.b", "a.b"),
        ({"model.*": "*"}, "model.fc.weight", "fc.weight"),
        ({"*": "backbone.*"}, "fc.weight", "backbone.fc.weight"),
        ({"fc.weight": "head.weight"}, "fc.weight", "head.weight"),
        ({"fc.weight": "head.weight"}, "fc.weights", "fc.weights"),
        ({"h.*.attn.*": "layers.*.self.*"}, "h.11.attn.q.bias", "layers.11.self.q.bias"),
        ({"a.*": "x.*", "*": "y.*"}, "a.b", "x.b"),
        ({"enc*": "*"}, "encoder.w", "oder.w"),
        ({"a?b": "c"}, "axb", "axb"),
    ],
)
def test_a_name_is_mapped_by_the_first_glob_that_matches(mapping: dict[str, str], name: str, new: str) -> None:
    assert LoadOptions(key_mapping=mapping).renamed([name]) == {name: new}


@pytest.mark.parametrize(
    ("patterns", "ignored"),
    [
        (["head.*", "*.bias"], ["head.weight", "fc.bias"]),
        (["?c.weight"], ["fc.weight"]),
        (["h[ae]ad.weight"], ["head.weight"]),
        (["[!fh]*"], ["ahead.x"]),
        (["{fc,head}.weight"], ["fc.weight", "head.weight"]),
        (["re:(fc|head)\\.w.*"], ["fc.weight", "head.weight"]),
        (["re:head"], []),
    ],
)
def test_ignored_names_match_a_glob_or_a_regular_expression(patterns: list[str], ignored: list[str]) -> None:
    names = ["head.weight", "fc.bias", "fc.weight", "ahead.x"]
    assert LoadOptions(ignore_keys=patterns).ignored(names) == set(ignored)


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"load\.ignore_keys: 're:\(a' is not a regular expression"):
        LoadOptions(ignore_keys=["re:(a"])


def test_a_glob_that_matches_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = LoadOptions(ignore_keys=["head.*", "fc.*"], key_mapping={"model.*": "*", "fc.*": "*"})
    options.warn_unmatched(["fc.a"], ["fc.a"])
    assert [record.getMessage() for record in caplog.records] == [
        "load.key_mapping: 'model.*' matches nothing",
        "load.ignore_keys: 'head.*' matches nothing",
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"states": []}, "it must be a list of states"),
        ({"states": "model"}, r"Write load\.states=\[model\]"),
        ({"states": ["modl"]}, "there is no state 'modl', only all, model.*Did you mean 'model'"),
        ({"states": ["all", "model"]}, "all has the others in it"),
        ({"key_mapping": {"fc": "*"}}, r"'\*' has more \* than 'fc'"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoadOptions(**wrong)


@pytest.mark.parametrize(
    ("states", "keys"),
    [
        (["all"], None),
        (["model"], ["progress", "model", "model_versions"]),
        (
            ["model", "progress"],
            ["progress", "model", "model_versions", "loop", "data", "modes", "requires_grad", "log_marks"],
        ),
        (["optimizer"], ["progress", "optimizer", "optimizers", "scaler", "step"]),
    ],
)
def test_only_the_keys_of_the_chosen_states_are_read(states: list[str], keys: list[str] | None) -> None:
    assert LoadOptions(states=states).keys() == keys


@pytest.mark.parametrize(
    ("missing", "extra", "reshaped", "said"),
    [
        ([], [], [], "The model must have the layers"),
        (["fc.w"], ["model.fc.w"], [], "load.key_mapping={model.*: *}"),
        (["net.fc.w", "net.fc.b"], ["fc.w", "fc.b"], [], "load.key_mapping={*: net.*}"),
        (["a.w", "head.w", "b.w"], ["m.a.w", "m.b.w", "m.fc.w"], [], "load.key_mapping={m.*: *}"),
        (["fc.w"], ["other.w"], [], "load.strict=false"),
        (["fc.w"], [], ["head.w", "head.b", "scale"], r"'load.ignore_keys=[head.*,scale]'"),
        (["net.block.fc.w"], [], ["net.positions"], r"'load.ignore_keys=[net.positions]' load.strict=false."),
        (["net.w"], [], ["net.positions"], r"'load.ignore_keys=[net.*]'."),
        (["network.fc.w"], [], ["net.positions"], r"'load.ignore_keys=[net.*]' load.strict=false."),
        (["layers.6.w", "layers.2.w"], ["layers.1.w"], ["layers.4.w"], "The model must have the layers"),
        ([], ["layers.4.w"], ["layers.0.w"], r"'load.ignore_keys=[layers.0.*]' load.strict=false."),
    ],
)
def test_the_advice_names_the_setting(missing: list[str], extra: list[str], reshaped: list[str], said: str) -> None:
    assert said in LoadReport(missing=missing, unexpected=extra, reshaped=reshaped).advice
