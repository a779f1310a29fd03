"""Values from environment variables: a change is seen, and no value is message."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from trainer_cli.config.diff import changed_env_values, line_of_digests

CONFIG = {
    "model": {
        "dropout": "${oc.decode:${oc.env:DROPOUT}}",
        "widths": [1, "${oc.env:WIDTH,2}"],
        "by_depth": {3: "${oc.env:WIDTH,2}"},
        "twice": "${model.dropout}",
    },
    "data": {"path": "${oc.env:DATA_PATH}/texts"},
    "loggers": {"key": "${oc.env:DROPOUT}"},
    "seed": 3,
}  # fmt: skip


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    monkeypatch.setenv("DROPOUT", "0.25")
    monkeypatch.setenv("DATA_PATH", "/secret")
    return OmegaConf.create(CONFIG)


def test_only_values_that_matter_are_remembered_and_none_is_reported(raw: DictConfig) -> None:
    line = line_of_digests(raw, "run")
    assert [key in line for key in ("model.dropout", "model.widths", "data.path")] == [True] * 3
    assert not [message for message in ("0.25", "secret", "loggers", "seed", "twice") if message in line]
    assert line.startswith("# ")
    assert OmegaConf.create(OmegaConf.to_yaml(raw) + line) == raw
    assert line != line_of_digests(raw, "another run")


@pytest.mark.parametrize(
    ("variable", "value", "changed"),
    [
        ("DROPOUT", "0.25", []),
        ("DROPOUT", "0.5", ["model.dropout"]),
        ("WIDTH", "2", []),
        ("WIDTH", "3", ["model.widths", "model.by_depth.3"]),
        ("DATA_PATH", "/other", ["data.path"]),
    ],
)
def test_another_value_is_a_change(
    raw: DictConfig, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, changed: list[str]
) -> None:
    frozen = OmegaConf.to_yaml(raw) + line_of_digests(raw, "run")
    monkeypatch.setenv(variable, value)
    assert [one.key for one in changed_env_values(frozen, raw, "run")] == changed


def test_what_was_not_remembered_is_no_change(raw: DictConfig) -> None:
    assert changed_env_values(OmegaConf.to_yaml(raw), raw, "run") == []
    assert line_of_digests(OmegaConf.create({"seed": "${oc.decode:7}"}), "run") == ""
