"""Constructors take a section of the config whole, or its fields by name, and declare these fields nowhere else."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from trainer_cli import (
    CheckpointConfig,
    CheckpointerCallback,
    ConfigError,
    LoopConfig,
    Precision,
    PrecisionConfig,
    TrainingLoop,
)
from trainer_cli.trainer.hooks import CheckpointSaver

TAKERS: dict[type, tuple[Any, str, dict[str, Any]]] = {
    CheckpointerCallback: (
        CheckpointConfig,
        "save_interval",
        {"save_interval": 3, "keep_best": {"metric": "val/loss"}},
    ),
    TrainingLoop: (LoopConfig, "max_duration", {"max_duration": "3ep", "eval_loaders": {"val": {"interval": 2}}}),
    Precision: (PrecisionConfig, "clip_norm", {"dtype": "fp16", "clip_norm": 1.0}),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_section_is_taken_whole_or_by_its_fields(taker: Any) -> None:
    section, _, fields = TAKERS[taker]
    whole = taker(config=section(**fields)).settings
    assert whole == taker(**fields).settings == section(**fields)
    assert taker().settings == section()


@pytest.mark.parametrize("taker", TAKERS)
def test_the_signature_has_the_fields_with_their_defaults(taker: Any) -> None:
    section = TAKERS[taker][0]
    parameters = inspect.signature(taker).parameters
    for field in dataclasses.fields(section):
        if field.name not in ("folder", "dtype"):  # These may be given by position, and their default is the config's.
            assert parameters[field.name].default == getattr(section(), field.name)
    own = {"folder", "dtype", "config", "identity", "thread"}
    assert set(parameters) - own == {field.name for field in dataclasses.fields(section)} - own


@pytest.mark.parametrize("taker", TAKERS)
def test_the_class_its_constructor_and_sphinx_have_the_same_arguments(taker: Any) -> None:
    _, *parameters = inspect.signature(taker.__init__).parameters.values()
    assert [*inspect.signature(taker).parameters.values()] == parameters
    # Where sphinx looks first. It would compare the signature of the function with its source, and fail.
    assert [*taker.__signature__.parameters.values()] == parameters


@pytest.mark.parametrize("taker", TAKERS)
def test_a_subclass_has_the_arguments_of_its_own_constructor(taker: Any) -> None:
    class Subclass(taker):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__()

    class Heir(taker):  # type: ignore[misc]
        pass

    assert [*inspect.signature(Subclass).parameters] == [*Subclass.__signature__.parameters] == ["size"]
    assert inspect.signature(Heir) == inspect.signature(taker)


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("arguments", "place", "words"),
    [
        (lambda section, field: {f"{field}l": 3}, "{field}l", "takes no argument '{field}l'. Did you mean"),
        (lambda section, field: {"zzz": 3}, "zzz", "takes no argument 'zzz'. It takes: "),
        (lambda section, field: {"config": section(), field: 1}, "{field}", "is given config and also {field}"),
        (lambda section, field: {"config": {field: 1}}, "config", "{{{field}: 1}}, but it must be a {section}"),
        (lambda section, field: {field: [1]}, None, ".{field}"),
    ],
    ids=["a near name", "no name near", "a config beside fields", "a mapping for the config", "a wrong type"],
)  # fmt: skip
def test_a_mistake_in_the_arguments_is_named(taker: Any, arguments: Any, place: str | None, words: str) -> None:
    section, field, _ = TAKERS[taker]
    with pytest.raises(ConfigError) as caught:
        taker(**arguments(section, field))
    assert words.format(field=field, section=section.__name__) in str(caught.value)
    assert place is None or caught.value.where == place.format(field=field)


def test_a_dtype_by_position_is_a_field_beside_a_config() -> None:
    with pytest.raises(ConfigError, match="is given config and also dtype"):
        Precision("bf16", config=PrecisionConfig())


@pytest.mark.parametrize(
    ("folder", "settings", "expected"),
    [(None, {}, "checkpoints"), (None, {"folder": "of_config"}, "of_config"), ("first", {"folder": "second"}, "first")],
)
def test_a_folder_by_position_stands_over_that_of_the_config(
    folder: str | None, settings: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saver = CheckpointerCallback(folder, config=CheckpointConfig(**settings))
    assert saver.folder == Path(expected)
    assert isinstance(saver, CheckpointSaver)


def test_a_link_in_an_object_store_is_refused_by_either_folder() -> None:
    with pytest.raises(ConfigError, match="can hold no link"):
        CheckpointerCallback("s3://bucket/run", config=CheckpointConfig(latest_link=True))
