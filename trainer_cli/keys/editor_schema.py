"""The config's tree as JSON Schema (draft 2020-12), so that editors complete, explain and check YAML.

The document itself describes a primary config and an experiment; `#/$defs/GROUP.yaml` describes an option of a group.
Written to configs/train.schema.json by `train config --schema > configs/train.schema.json`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin

from trainer_cli.keys.config_keys import ConfigKey, list_keys
from trainer_cli.loads import OPTIONAL_STATES, STATES
from trainer_cli.steps import Unit

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
INTERPOLATION: Schema = {"$ref": "#/$defs/interpolation"}
NODE: Schema = {"$ref": "#/$defs/node"}
NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, NULL]}


def _whole(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


def _matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _mapping_to(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": {"anyOf": [*schema.get("anyOf", [schema]), INTERPOLATION]}}


_FOLDER_OR_URL = _matching(r"^(?!~).*\S")
_FOLDER = _matching(r"^(?!~|.*://).*\S")
_MAPPING_OF_NODES = _mapping_to(_or_null(NODE))
_FRACTION: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_SCHEMAS_OF_ANY: Mapping[str, Schema] = {
    **dict.fromkeys(("model", "data", "step", "sparsity", "predict.writer"), _or_null(NODE)),
    **dict.fromkeys(("optimizer", "scheduler"), _or_null(NODE, _MAPPING_OF_NODES)),
    "ckpt": _or_null(_TEXT, {"type": "array", "items": _TEXT}),
    "loop.microbatch": _or_null({"const": "auto"}, _whole(1)),
    "loop.limit_train_batches": _or_null(_whole(1), _FRACTION),
    "precision.loss_scale": {"anyOf": [{"const": "dynamic"}, {"type": "number", "exclusiveMinimum": 0}]},
}
"""Schemas of keys whose annotation is `Any`."""
_STATE = {"anyOf": [{"enum": list(STATES)}, _matching(r"^callbacks\..")]}
_NARROWER_SCHEMAS: Mapping[str, Schema] = {
    "name": _or_null(_matching(r"^(?![-/.\s])(?!.*/[/.\s])(?!.*[/\s]$)(?!.*\s/).*\S")),
    "run_dir": _FOLDER,
    "checkpoint.leave_out": {
        "type": "array",
        "items": {
            "anyOf": [{"enum": list(OPTIONAL_STATES)}, {"pattern": r"^(callbacks\.|re:)|[*?\[{]"}],
            "type": "string",
        },
    },
    "load.states": {"anyOf": [{"const": ["all"]}, {"type": "array", "minItems": 1, "items": _STATE}]},
    "checkpoint.fixed_steps": {"type": "array", "items": {"anyOf": [_whole(0), INTERPOLATION]}},
    "checkpoint.budget": _FRACTION,
    "checkpoint.keep_by_age": _mapping_to(_whole(1)),
    "checkpoint.name": _matching(r"\{(step|samples|tokens|epoch|batch)[}:]"),
    "checkpoint.suffix": _or_null(_matching("^[A-Za-z0-9_.+-]*$")),
    **dict.fromkeys(("checkpoint.folder", "checkpoint.copy_to.folder"), _or_null(_FOLDER_OR_URL)),
    **dict.fromkeys(("validate.folder", "predict.folder"), _or_null(_FOLDER)),
    "param_groups": {"type": "object", "additionalProperties": {"type": "object"}},
    **dict.fromkeys(("callbacks", "loggers"), _MAPPING_OF_NODES),
}
"""Schemas of keys that accept less than their annotation."""
_WHOLE = r"\d+(e\+?\d{1,3})?"
_PART = r"\d+(\.\d+)?"
_UNITS: Mapping[Unit, str] = {
    Unit.STEP: rf"{_WHOLE} *(st|steps?)",
    Unit.EPOCH: rf"{_PART}(e\+?\d{{1,3}})? *(ep|epochs?)",
    Unit.SAMPLE: rf"{_WHOLE} *(sp|samples?)",
    Unit.TOKEN: rf"{_WHOLE} *(tok|tokens?)",
    Unit.SECOND: rf"({_PART} *(d|h|min|m|sec|s) *)+",
    Unit.RUN: r"(0(\.\d+)?|1(\.0+)?) *dur",
}


def json_schema() -> Schema:
    """The whole document."""
    all_fields = list_keys()
    top_fields = [field for field in all_fields if len(field.path) == 1]
    properties = {field.key: _with_description(field, _describe_key(field)) for field in top_fields}
    lists = {key: {"$ref": f"#/$defs/{key}"} for key in ("defaults", "hydra")}
    return {
        "$schema": DIALECT,
        "$comment": "Made by `train config --schema`.",
        "type": "object",
        "properties": {**lists, **properties},
        "additionalProperties": False,
        "$defs": {
            "defaults": {"type": "array", "description": "What is merged into this file: options of groups."},
            "hydra": {"type": "object", "description": "Hydra's own settings; `searchpath` counts."},
            "interpolation": {"type": "string", "pattern": r"\$\{|^\?\?\?$"},
            "node": {
                "type": "object",
                "description": "A class or function, and its arguments.",
                "properties": {"_target_": {"type": "string", "description": "Dotted path of a class or function."}},
            },
            **{field.key: _describe_section(all_fields, field.path) for field in all_fields if field.is_section},
            **{f"{field.key}.yaml": _describe_file(field) for field in top_fields if _is_group(field)},
        },
    }


def _is_group(field: ConfigKey) -> bool:
    """Whether the key can be a group: a section, a component, or a mapping of components."""
    takes_node = NODE in _SCHEMAS_OF_ANY.get(field.key, {}).get("anyOf", ())
    return field.is_section or takes_node or get_origin(field.kind) is dict


def _describe_file(field: ConfigKey) -> Schema:
    """The schema of a group's option: the keys of its section, and a defaults list."""
    content: Schema = {"properties": {}, "additionalProperties": True}
    if field.is_section:
        names = [below.path[1] for below in list_keys() if below.path[:1] == field.path and len(below.path) == 2]
        references = {name: {"$ref": f"#/$defs/{field.key}/properties/{name}"} for name in names}
        content = {"properties": references, "additionalProperties": False}
    elif field.key in _NARROWER_SCHEMAS:
        content = {**_NARROWER_SCHEMAS[field.key], "properties": {}}
    else:
        content["properties"] = {"_target_": {"$ref": "#/$defs/node/properties/_target_"}}
    defaults = {"defaults": {"$ref": "#/$defs/defaults"}}
    return {
        "type": "object",
        "description": field.meaning,
        **content,
        "properties": {**defaults, **content["properties"]},
    }


def _describe_section(all_fields: Iterable[ConfigKey], path: tuple[str, ...]) -> Schema:
    """The schema of the section at `path`."""
    inside = [field for field in all_fields if field.path[:-1] == path]
    return {
        "type": "object",
        "properties": {field.path[-1]: _with_description(field, _describe_key(field)) for field in inside},
        "additionalProperties": False,
    }


def _describe_key(field: ConfigKey) -> Schema:
    """The schema of a key's value."""
    if field.is_section:
        return {"$ref": f"#/$defs/{field.key}"}
    if "units" in field.rules:
        schema = _describe_duration(field.rules["units"], null=field.rules["null"], words=field.rules["words"])
    elif field.key == "sweep.rungs":
        schema = {"type": "array", "items": _describe_duration(Unit, null=False)}
    elif field.key == "freeze":
        schema = _describe_freeze()
    elif field.key in _SCHEMAS_OF_ANY:
        schema = _SCHEMAS_OF_ANY[field.key]
    elif field.key in _NARROWER_SCHEMAS:
        schema = _NARROWER_SCHEMAS[field.key]
    else:
        schema = _describe_type(field.kind, field.rules.get("at_least"))
    return _or_interpolation(schema)


def _or_interpolation(schema: Schema) -> Schema:
    """A schema that also admits an interpolation."""
    # A schema that admits any text, or anything, admits interpolations already.
    alternatives = schema.get("anyOf", [schema])
    return schema if _TEXT in alternatives or not schema else {"anyOf": [*alternatives, INTERPOLATION]}


def _describe_type(kind: Any, least: float | None) -> Schema:
    """The schema of an annotation; `least` is the smallest number that it admits."""
    bound = {} if least is None else {"minimum": least}
    if get_origin(kind) in (Union, types.UnionType):
        return {"anyOf": [NULL if member is type(None) else _describe_type(member, least) for member in get_args(kind)]}
    if get_origin(kind) is list:
        return {"type": "array", "items": _or_interpolation(_describe_type(get_args(kind)[0], least))}
    if get_origin(kind) is dict:
        return {"type": "object"}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[kind], **bound}


def _describe_duration(units: Iterable[Unit], *, null: bool, words: Iterable[str] = ()) -> Schema:
    """The schema of a duration in these units, of null, and of words that stand for a duration."""
    allowed = tuple(units)
    pattern = "|".join(_UNITS[unit] for unit in allowed)
    steps = [_whole(1)] if Unit.STEP in allowed else []
    # At least one digit that is not 0: no duration is empty.
    text = _matching(f"^(?=.*[1-9]) *({pattern}) *$")
    choices = [{"enum": list(words)}] if words else []
    return {"anyOf": [*steps, text, *choices, *([NULL] if null else [])]}


def _describe_freeze() -> Schema:
    """A list of patterns, or a mapping of them to durations."""
    until = _describe_duration((unit for unit in Unit if unit is not Unit.SECOND), null=True)
    return _or_null({"type": "array", "items": _TEXT}, _mapping_to(until))


def _with_description(field: ConfigKey, schema: Schema) -> Schema:
    """The schema of a key with its meaning and default, which editors show."""
    description = f"{field.meaning} May change on a resume." if field.may_change else field.meaning
    described = {"description": description} | schema
    return described if field.is_section else described | {"default": field.default}
