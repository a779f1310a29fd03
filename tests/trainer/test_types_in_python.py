"""Constructors refuse in Python what a config file refuses, by the same rules and in the same words."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from enum import EnumMeta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Line

import trainer_cli
from trainer_cli import (
    EMA,
    Callback,
    CheckpointerCallback,
    ConfigError,
    EarlyStopping,
    JsonlLogger,
    Logger,
    Logging,
    Precision,
    Trainer,
    TrainingLoop,
)
from trainer_cli.config.check import validate
from trainer_cli.config.tree import ConfigTree, Node
from trainer_cli.metric_names import Mode
from trainer_cli.schema import sections as schema
from trainer_cli.schema.checkpoint_config import CheckpointConfig, KeepBestConfig, Removal

WRONG: tuple[Any, ...] = ("no", "3", 1.5, True, -1, 0, float("nan"), [1.5], ["3"], {"zzz": 1})
CONSTRUCTORS: dict[str, tuple[type, Callable[..., Any]]] = {
    "loop": (schema.LoopConfig, TrainingLoop),
    "precision": (schema.PrecisionConfig, Precision),
    "checkpoint": (CheckpointConfig, CheckpointerCallback),
    "checkpoint.keep_best": (KeepBestConfig, lambda **best: CheckpointerCallback(keep_best=best)),
    "logging": (schema.LoggingConfig, Logging),
    "": (schema.TrainConfig, lambda **own: Trainer(model=Line, device="cpu", **own)),
}
ONLY_OF_A_CONFIG = ("checkpoint.folder", "checkpoint.keep_best", "logging.rank_files")
OF_THE_TRAINER = ("name", "seed", "deterministic", "model_call", "freeze")


def fields() -> list[tuple[str, str]]:
    """Section and name of every field that is an argument of a constructor, too."""
    found = [(section, one.name) for section, (kind, _) in CONSTRUCTORS.items() for one in dataclasses.fields(kind)]
    return [
        (section, name)
        for section, name in found
        if (name in OF_THE_TRAINER if not section else f"{section}.{name}" not in ONLY_OF_A_CONFIG)
    ]


def refused_in_a_config(section: str, name: str, value: Any) -> str | None:
    nested: Any = {name: value}
    for key in reversed(section.split(".") if section else []):
        nested = {key: nested}
    _, mistakes = validate(ConfigTree(Node.of(nested)), missing_ok=True)
    key = f"{section}.{name}".lstrip(".")
    return next((one.message for one in mistakes if (one.location or "").startswith(key)), None)


def refused_in_python(section: str, name: str, value: Any) -> str | None:
    try:
        CONSTRUCTORS[section][1](**{name: value})
    except ConfigError as error:
        return error.message
    return None


@pytest.mark.parametrize(("section", "name"), fields())
def test_a_value_that_a_config_refuses_is_refused_in_python(
    section: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_: None)
    field = next(one for one in dataclasses.fields(CONSTRUCTORS[section][0]) if one.name == name)
    refused = 0
    for value in WRONG:
        expected, message = (ask(section, name, value) for ask in (refused_in_a_config, refused_in_python))
        refused += message is not None
        texts = "str" in str(field.type)
        if value != value or (texts and type(value) is int):
            # A config says first that a number must be finite, and takes one for a string as it is written.
            assert message is not None
            continue
        if (texts or name == "freeze") and expected is None:
            continue  # A pattern may still match nothing.
        assert message == expected, f"{name}={value!r}"
    assert refused >= 4


@pytest.mark.parametrize("kind", [TrainingLoop, Precision, CheckpointerCallback])
def test_an_object_is_no_value(kind: type, tmp_path: Path) -> None:
    for name in inspect.signature(kind).parameters:
        if name not in ("folder", "identity", "thread"):
            with pytest.raises(ConfigError, match=name):
                kind(**{name: object()})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_checkpoints": np.int64(2)}, 2),
        ({"enabled": np.bool_(False)}, False),
        ({"fixed_steps": range(2, 7, 2)}, [2, 4, 6]),
        ({"fixed_steps": np.array([2, 4])}, [2, 4]),
        ({"fixed_steps": (2,)}, [2]),
        ({"save_interval": np.int32(3)}, 3),
        ({"remove": "never"}, Removal.never),
        ({"keep_best": {"metric": "f1", "mode": "max"}}, KeepBestConfig(metric="f1", mode=Mode.max)),
        ({"keep_best": None}, KeepBestConfig()),
    ],
)  # fmt: skip
def test_what_python_and_numpy_call_a_value_is_one(settings: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    ((name, _),) = settings.items()
    value = getattr(CheckpointerCallback(tmp_path, **settings).settings, name)
    assert (value, type(value)) == (expected, type(expected))


def constructors() -> list[tuple[type, str, type]]:
    """Every public callback and logger with its arguments that are numbers or switches."""
    public = [getattr(trainer_cli, name) for name in trainer_cli.__all__]
    return [
        (one, parameter.name, kind)
        for one in public
        if inspect.isclass(one) and issubclass(one, Callback | Logger) and one is not CheckpointerCallback
        for parameter in inspect.signature(one).parameters.values()
        for kind in (bool, int, float)
        if str(parameter.annotation) in (kind.__name__, f"{kind.__name__} | None")
    ]


@pytest.mark.parametrize(("component", "name", "kind"), constructors())
def test_callbacks_and_loggers_refuse_another_type(component: type, name: str, kind: type) -> None:
    needed = {
        one.name: 0.5 if "float" in str(one.annotation) else "val/loss"
        for one in inspect.signature(component).parameters.values()
        if one.default is inspect.Parameter.empty and one.name != name
    }
    for value in ("0.9", [1], *([1.5] if kind is int else [])):
        with pytest.raises(ConfigError, match=rf"{component.__name__}: {name} is .*, but it must be"):
            component(**{**needed, name: value})


def test_positions_count_too_and_what_python_refuses_stays_its_own() -> None:
    with pytest.raises(ConfigError, match=r"EMA: decay is '0\.9', but it must be a number"):
        EMA("0.9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"EMA takes no argument 'dekay'\. Did you mean 'decay'\?"):
        EMA(dekay=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no arguments"):
        Callback(3)
    assert copy.deepcopy(EarlyStopping("val/acc", min_delta=1)).metric == "val/acc"
    assert isinstance(JsonlLogger("x.jsonl"), Logger)


class Own(EMA):
    def __init__(self, decay: int) -> None:
        super().__init__(decay / 10)


def test_a_users_own_constructor_takes_what_it_takes() -> None:
    assert Own(9.5).decay == 0.95  # type: ignore[arg-type]


def test_choices_of_the_schema_are_enumerations() -> None:
    assert {one.name for one in dataclasses.fields(CheckpointConfig) if isinstance(one.type, EnumMeta)} >= {
        "remove", "newer", "format", "compression", "digest", "on_save_error",
    }  # fmt: skip
