"""The JSON Schema for editors: it agrees with the command, and with every file that ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config.search_path import SearchPath, addon_folders
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import ConfigKey, list_keys
from trainer_cli.keys.editor_schema import DIALECT, json_schema
from trainer_cli.schema.sections import TrainConfig
from trainer_cli.steps.intervals import Duration, Unit

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = json_schema()
FILES = {
    path.relative_to(folder).as_posix(): path
    for folder in (CONFIGS, *addon_folders())
    for path in sorted(folder.rglob("*.yaml"))
}
EMPTY = ("callbacks/default.yaml", "loggers/none.yaml")
MODELINE = "# yaml-language-server: $schema="


def validator(fragment: str = "") -> Draft202012Validator:
    """Of the whole document, or of what `#/…` names in it."""
    return Draft202012Validator(
        {"$schema": DIALECT, "$ref": f"#{fragment}", "$defs": SCHEMA["$defs"]} if fragment else SCHEMA
    )


def named(file: str) -> tuple[Path, str]:
    """The schema that a shipped file asks editors to use, and the part of it."""
    lines = FILES[file].read_text().splitlines()
    (line,) = [line for line in lines[:3] if line.startswith(MODELINE)]
    path, _, fragment = line.removeprefix(MODELINE).partition("#")
    return (FILES[file].parent / path).resolve(), fragment


def loaded(file: str) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(OmegaConf.load(FILES[file]))
    assert isinstance(values, dict)
    return values


def test_it_is_json_schema_of_draft_2020_12() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(SCHEMA)


def test_the_file_that_ships_is_what_the_command_prints() -> None:
    shipped = json.loads((CONFIGS / "train.schema.json").read_text())
    assert shipped == SCHEMA, "make it anew: train config --schema > configs/train.schema.json"


@pytest.mark.parametrize("file", FILES)
def test_each_file_that_ships_names_its_part_of_the_schema_and_follows_it(file: str) -> None:
    path, fragment = named(file)
    group = file.partition("/")[0] if "/" in file else ""
    assert path == CONFIGS / "train.schema.json"
    assert fragment == ("" if group in ("", "experiment", "debug") else f"/$defs/{group}.yaml")
    assert [error.message for error in validator(fragment).iter_errors(loaded(file))] == []


@pytest.mark.parametrize("file", [file for file in FILES if file not in EMPTY])
def test_a_misspelt_key_in_a_file_that_ships_is_found(file: str) -> None:
    _, fragment = named(file)
    values = loaded(file)
    spelled = {**values, "looop": 3}
    if not validator(fragment).is_valid(spelled):
        return
    described = {one.path[0]: one for one in list_keys() if len(one.path) == 1}
    assert not described[file.partition("/")[0]].is_section, "a section takes no key that it does not know"
    values["_target_" if "_target_" in values else next(iter(values))] = 3
    assert not validator(fragment).is_valid(values)


def test_every_key_has_type_default_and_meaning() -> None:
    for one in list_keys():
        node = (
            SCHEMA["properties"][one.path[0]]
            if len(one.path) == 1
            else SCHEMA["$defs"][".".join(one.path[:-1])]["properties"][one.path[-1]]
        )
        assert one.meaning, one.key
        assert node["description"].startswith(one.meaning)
        if not one.is_section:
            assert node["default"] == one.default
            assert set(node) > {"default", "description"}, f"{one.key} has no type"


def test_sections_are_closed() -> None:
    for one in list_keys():
        if one.is_section:
            assert SCHEMA["$defs"][one.key]["additionalProperties"] is False
            if len(one.path) == 1:
                assert SCHEMA["$defs"][f"{one.key}.yaml"]["additionalProperties"] is False
    assert SCHEMA["additionalProperties"] is False


def test_a_defaults_list_stands_in_files_and_not_in_sections() -> None:
    assert validator("/$defs/loop.yaml").is_valid({"defaults": ["base"], "max_duration": 3})
    assert not validator().is_valid({"loop": {"defaults": ["base"]}})
    assert validator().is_valid({"defaults": [{"override /model": "cnn"}], "hydra": {"searchpath": []}})


VALUES = [
    None, True, False, -1, 0, 1, 7, 10**6, 0.0, 0.5, 1.0, 1.5, -0.5, "", "auto", "cpu", "bf16", "sha256", "info",
    "never", "10ep", "0.25ep", "500st", "1.5st", "2048sp", "1e9tok", "90s", "1h30m", "30min", "3days", "0st", "ten",
    "dynamic", [], [1], [-1], ["a"], ["model"], ["all"],
    " ", "~/x", "s3://a/b", "a/~b",
]  # fmt: skip


SECTIONS = {one.key: one.kind for one in list_keys() if one.is_section}
CLOSED = [one.key for one in list_keys() if one.path[0] in SECTIONS and not one.is_section]
PLAIN = ["name", "run_dir", "seed", "deterministic", "device", "resume", "resume_allow", "source", "trust"]
"""Keys that the config itself judges; the others are for who builds them."""


BESIDE: dict[str, dict[str, Any]] = {
    "name": {"run_dir": "x"},
    "precision.loss_scale": {"dtype": "fp16"},
    "parallel.mixed_precision": {"strategy": "fsdp"},
    "checkpoint.ephemeral_save_interval": {"save_interval": None},
    **{
        f"precision.{key}": {"dtype": "fp16"}
        for key in ("min_loss_scale", "max_loss_scale", "init_scale", "growth_interval")
    },
    **{f"compile.{key}": {"enabled": True} for key in ("mode", "dynamic", "fullgraph", "backend")},
    **{f"parallel.{key}": {"strategy": "fsdp"} for key in ("shard_size", "wrap", "wrap_min_parameters", "cpu_offload")},
    "parallel.find_unused_parameters": {"strategy": "ddp"},
    "checkpoint.keep_best.metric": {"mode": "min"},
    "checkpoint.keep_best.mode": {"metric": "val/loss"},
    "checkpoint.keep_best.count": {"metric": "val/loss"},
    "checkpoint.copy_to.every": {"folder": "copies"},
    "checkpoint.budget": {"ephemeral_save_interval": "auto"},
    "checkpoint.keep_by_age": {"max_checkpoints": 3},
    "checkpoint.ephemeral_cooldown": {"ephemeral_save_interval": 5, "save_interval": None},
    "checkpoint.compression": {"format": "archive"},
    "checkpoint.max_save_errors": {"on_save_error": "warn"},
    "restarts.backoff": {"max": 1},
    "sweep.trials": {"search": "random"},
    "sweep.seed": {"search": "random"},
    "sweep.eta": {"prune": "asha"},
    "sweep.rungs": {"prune": "asha"},
    "notify.events": {"command": "mail"},
}
"""What else must be set for the value of a key alone to be judged."""


def taken_by_the_command(one: ConfigKey, value: Any, schema: DictConfig) -> bool:
    try:
        schema[one.path[-1]] = value
        OmegaConf.to_object(schema)
    except (ConfigError, OmegaConfBaseException):
        return False
    return True


def is_coerced(one: ConfigKey, value: Any) -> bool:
    """What the command reads as another type, and an editor rather marks: 1 for true, 1.0 for 1, 7 for `'7'`."""
    kinds = str(one.kind)
    item = value[0] if isinstance(value, list) and value else value
    return (
        ("bool" in kinds and isinstance(item, int | float) and not isinstance(item, bool))
        or ("str" in kinds and isinstance(item, bool | int | float))
        or (("int" in kinds or "units" in one.rules) and isinstance(item, bool | float))
        or ("float" in kinds and isinstance(item, bool))
    )


def nested(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("key", [*CLOSED, *PLAIN])
def test_editor_and_command_take_the_same_values(key: str) -> None:
    (one,) = [one for one in list_keys() if one.key == key]
    schema: Any = OmegaConf.structured(SECTIONS[".".join(one.path[:-1])] if len(one.path) > 1 else TrainConfig)
    schema = OmegaConf.merge(schema, BESIDE.get(key, {}))
    for value in VALUES:
        if not is_coerced(one, value):
            in_editor = validator().is_valid(nested(key, value))
            message = f"{key}: {value!r} is {'taken' if in_editor else 'marked'} by editors, and not by the command"
            assert in_editor == taken_by_the_command(one, value, schema), message


@pytest.mark.parametrize("key", [one.key for one in list_keys() if not one.is_section])
def test_an_interpolation_may_stand_for_every_value(key: str) -> None:
    assert validator().is_valid(nested(key, "${other}"))


UNITS = {
    Unit.STEP: ["5st", "5 steps", "1step", "2e3st"],
    Unit.EPOCH: ["5ep", "0.25ep", "1.5 epochs", "1epoch", "1e1ep"],
    Unit.SAMPLE: ["2048sp", "1 sample", "5 samples"],
    Unit.TOKEN: ["1e9tok", "5 tokens", "1token", "1e+9tok"],
    Unit.SECOND: ["90s", "1h30m", "30min", "2 d", "1.5h", "5sec"],
    Unit.RUN: ["0.25dur", "1dur", "1.0 dur"],
}


@pytest.mark.parametrize("text", [text for texts in UNITS.values() for text in texts])
def test_every_way_to_write_a_duration_is_known_to_editors(text: str) -> None:
    unit = Duration.parse(text).unit
    assert validator().is_valid({"loop": {"eval_interval": text}})
    assert validator().is_valid({"loop": {"max_duration": text}}) == (unit is not Unit.RUN)
    assert validator().is_valid({"loop": {"max_time": text}}) == (unit is Unit.SECOND)
    assert validator().is_valid({"checkpoint": {"ephemeral_cooldown": text}}) == (unit is Unit.STEP)


def test_the_schema_is_no_group() -> None:
    assert "schema" not in " ".join(SearchPath([CONFIGS], CONFIGS, CONFIGS, "").groups())
    assert not SearchPath([CONFIGS], CONFIGS, CONFIGS, "").is_group("schema")


def test_the_editors_comment_is_no_description(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"# @package _global_\n{MODELINE}x.json\n# What it is.\na: 1\n")
    assert SearchPath.describe_file(file) == "What it is."
