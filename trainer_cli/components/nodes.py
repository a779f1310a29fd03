"""Read the nodes of a config: mappings with `_target_`, each of which describes an object to make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer_cli.errors import Code, ConfigError
from trainer_cli.metric_names import TRAIN_PREFIX
from trainer_cli.schema import SchedulerInterval
from trainer_cli.values import MISSING, kind_of

SECTIONS = ("model", "data", "optimizer", "scheduler", "step", "sparsity", "callbacks", "loggers")
"""Sections that hold components."""
EVALUATED = ("model", "data", "step", "callbacks")
"""Sections that are built for evaluation without training."""
SPECIAL = ("_target_", "_partial_", "_args_")
"""Keys of a node that are no arguments."""
SCHEDULER_KEYS = ("interval", "metric", "groups")
"""Keys of a schedule's node that the trainer reads and the constructor does not get."""
FROM_DATA = "from_data"
SAVER = "checkpoint"
"""Name of the callback that saves, which a config may replace by a subclass."""
_SPECIAL_KINDS = {"_partial_": (bool, ""), "_args_": (list, "")}


def check_keys(node: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    """Refuse unknown keys of the form `_key_`, and special keys with values of the wrong type."""
    for key in map(str, node):
        if key.startswith("_") and key.endswith("_") and key not in SPECIAL:
            yield ConfigError(
                f"{where}.{key} is not known", location=where, code=Code.argument, hint=f"Known: {', '.join(SPECIAL)}."
            )
    yield from check_kinds(node, where, _SPECIAL_KINDS)


def check_kinds(node: Mapping[str, Any], where: str, kinds: Mapping[str, tuple[Any, str]]) -> Iterator[ConfigError]:
    """Check the types of values that no constructor gets. `kinds`: key -> its annotation, and a hint if it is wrong."""
    for key, (annotation, hint) in kinds.items():
        value, kind = node.get(key), kind_of(annotation)
        assert kind is not None
        if value is not None and value != MISSING:
            for error in kind.mistakes(value, f"{where}.{key}"):
                error.cure = error.cure or hint or None
                yield error


def as_node(value: Any, where: str) -> Mapping[str, Any]:
    """The node that a component must be.

    Raises:
        ConfigError: it is something else.
    """
    if is_node(value):
        node: Mapping[str, Any] = value
        return node
    message = f"{where} is {value!r}, but it must be a node with `_target_`"
    hint = f"Choose one with {where.split('.', 1)[0]}=NAME; `train list` shows them."
    raise ConfigError(message, location=where, code=Code.target, hint=hint)


def list_optimizers(optimizer: Any) -> dict[str, Any]:
    """Key and node of each optimizer: `optimizer` is null, a node, or a mapping of names to nodes."""
    if optimizer is None:
        return {}
    # `optimizer: {optimizer: {_target_: …}}` is a misplaced node, and reported as such.
    is_mapping = isinstance(optimizer, Mapping) and not is_node(optimizer) and not is_node(optimizer.get("optimizer"))
    has_names = is_mapping and any(map(is_node, optimizer.values()))
    if not has_names:
        return {"optimizer": optimizer}
    return {f"optimizer.{name}": node for name, node in optimizer.items() if node is not None}


def list_schedules(scheduler: Any) -> list[tuple[str, Any]]:
    """Key and node of each schedule: `scheduler` is null, a node, or a mapping of names to nodes or such mappings."""
    return list(_walk_schedules("scheduler", scheduler))


def _walk_schedules(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Key and node of each schedule in the value of the key `where`."""
    is_mapping = isinstance(value, Mapping) and not is_node(value)
    if is_mapping and (where == "scheduler" or any(map(is_node, value.values()))):
        for name, node in value.items():
            yield from _walk_schedules(f"{where}.{name}", node)
    elif value is not None:
        yield where, value


def list_metric_intervals(scheduler: Any) -> Iterator[SchedulerInterval]:
    """What the schedules that follow a metric wait for: an evaluation, or a record of training."""
    for _, node in list_schedules(scheduler):
        if not isinstance(node, Mapping):
            continue
        is_plateau = str(node.get("_target_")).endswith(".ReduceLROnPlateau")
        if str(node.get("metric")).startswith(TRAIN_PREFIX):
            yield SchedulerInterval.log
        elif is_plateau or node.get("interval") == SchedulerInterval.evaluation:
            yield SchedulerInterval.evaluation


def needs_data(model: Any) -> bool:
    """Whether a key of a model's node, at any depth, has the value `from_data`."""
    if isinstance(model, list):
        return any(map(needs_data, model))
    return isinstance(model, Mapping) and any(value == FROM_DATA or needs_data(value) for value in model.values())


def fill_from_data(node: Any, source: Any, where: str) -> Any:
    """The node of a model, or a value in it, with attributes of the data object, `source`, in place of `from_data`.

    Raises:
        ConfigError: the data object has no such attribute.
    """
    if isinstance(node, list):
        return [fill_from_data(item, source, f"{where}.{index}") for index, item in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    filled = {}
    for key, value in node.items():
        if value != FROM_DATA:
            filled[key] = fill_from_data(value, source, f"{where}.{key}")
        elif hasattr(source, key):
            filled[key] = getattr(source, key)
        else:
            raise ConfigError(
                f"{where}.{key} is to come from the data, but {type(source).__name__} has no '{key}'",
                location=f"{where}.{key}",
            )
    return filled


def is_node(value: Any) -> bool:
    """Whether a value describes an object to make."""
    return isinstance(value, Mapping) and "_target_" in value
