"""Configs by the thousand, right and wrong by construction: a wrong one is refused by name, a right one is what it says.

What is right stands here once more, in a table of its own (`KEYS`), and knows nothing of the checks that are tested.
TRAIN_FUZZ=50000 tries so many in all.
"""

# ruff: noqa: E501, PT017
from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from omegaconf import OmegaConf

from trainer_cli.config import overrides, search_path, yaml as yaml_reader
from trainer_cli.config.check import validate
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.config.tree import ConfigTree, Node
from trainer_cli.errors import ConfigError, raise_all
from trainer_cli.keys.config_keys import list_keys
from trainer_cli.schema.sections import SourceOf, TrainConfig

IN_ALL = int(os.environ.get("TRAIN_FUZZ", "1000"))
TEXTS = {
    file.relative_to(folder).as_posix(): file.read_text("utf-8")
    for folder in [search_path.shipped_folder("configs") or Path(), *search_path.addon_folders()]
    for file in sorted(folder.rglob("*.yaml"))
}


def fuzz(share: float) -> Callable[[Any], Any]:
    """So many examples of all, the same at every run."""
    return settings(
        max_examples=max(1, int(IN_ALL * share)),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes, and an example here is small already
        suppress_health_check=list(HealthCheck),
    )


def is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def is_number(value: Any) -> bool:
    return (is_whole(value) or type(value) is float) and math.isfinite(value)


def duration(units: str = "st|ep|sp|tok|s", null: bool = True, words: tuple[str, ...] = ()) -> Kind:
    """A length of training in one of the units, said as this test reads it: a number and a unit, or steps."""

    def holds(value: Any) -> bool:
        if value is None:
            return null
        if value in words:
            return True
        if is_whole(value):
            return value > 0 and "st" in units.split("|")
        if not isinstance(value, str):
            return False
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)(st|ep|sp|tok)", value):
            number = float(found[1])
            return number > 0 and found[2] in units.split("|") and (found[2] == "ep" or number == int(number))
        clock = re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", value)
        return bool(clock and value and int(re.sub(r"\D", "", value)) > 0) and "s" in units.split("|")

    good: list[Any] = [
        text for text in (1, 7, 500, "1ep", "0.25ep", "300st", "64sp", "1000tok", "90s", "1h30m", "2h") if holds(text)
    ]
    bad: list[Any] = [0, -3, 1.5, True, "soon", "3days", "1.5st", "0ep", "-1ep", "", math.nan, math.inf, [3], {"a": 1}]
    bad += [text for text in (7, "1ep", "300st", "64sp", "90s") if not holds(text)]
    return Kind(holds, [*good, *words, *([None] if null else [])], [*bad, *([] if null else [None])])


@dataclass(frozen=True)
class Kind:
    """What a value must be, with values that are and values that are not."""

    holds: Callable[[Any], bool]
    good: list[Any]
    bad: list[Any]


ODD = [True, False, "x", "3", "", 1.5, math.nan, math.inf, -math.inf, 2**63, 10**30, [1], [], {"a": 1}, {}]


def whole(least: int, null: bool) -> Kind:
    def holds(value: Any) -> bool:
        return null if value is None else is_whole(value) and value >= least

    return Kind(
        holds,
        [least, least + 1, 10**6, *([None] if null else [])],
        [least - 1, -(10**6), *ODD, *([] if null else [None])],
    )


def choice(*names: str) -> Kind:
    return Kind(
        lambda value: value in names, list(names), ["", names[0] + "x", names[0].upper(), 0, True, None, [names[0]]]
    )


SHARE = Kind(
    lambda value: is_number(value) and 0 < value <= 1,
    [0.02, 1, 0.5, 1.0],
    [0, -0.1, 1.5, math.nan, math.inf, True, None, "x", [1]],
)
AGES = Kind(
    lambda value: isinstance(value, dict) and all(is_whole(count) and count >= 1 for count in value.values()),
    [{}, {"1h": 24, "1d": 7}, {"90s": 1}],
    [None, 3, "1h", [1], {"1h": 0}, {"1h": None}, {"1h": 1.5}, {"1h": True}],
)
TRUTH = Kind(lambda value: type(value) is bool, [True, False], ["no", "yes", "true", 1, 0, 2, None, 1.0, [True]])
CLIP = Kind(
    lambda value: value is None or (is_number(value) and value >= 1e-12),
    [None, 1, 0.5, 1e-3, 1e12],
    [0, -1, -0.5, math.nan, math.inf, True, "1.0", "x", [1.0], {"a": 1}],
)
# Not NaN, which a file may have as the text `.nan`.
TEXT = Kind(lambda value: isinstance(value, str), ["x", "a b", "none", 7], [None, True, 1.5, ["x"], {"a": "b"}])
TEXT_OR_NULL = Kind(lambda value: value is None or isinstance(value, str), ["x", None], [True, 1.5, ["x"]])
TEXTS_OF = Kind(
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    [[], ["a"], ["a.*", "b"]],
    [None, "a", 3, True, {"a": 1}, [None], [True], [["a"]], [1.5]],
)
KEYS_OF = Kind(TEXTS_OF.holds, [[], ["seed"], ["model.*", "loop"]], TEXTS_OF.bad)
STEPS = Kind(
    lambda value: isinstance(value, list) and all(is_whole(item) and item >= 0 for item in value),
    [[], [0], [1, 10, 1000]],
    [None, 3, "3", {"a": 1}, [1.5], [True], ["3"], [None], [-1], [math.nan], [2**70]],
)
STATES = Kind(
    lambda value: value in (["model"], ["all"], ["model", "optimizer"]),
    [["model"], ["all"], ["model", "optimizer"]],
    [[], ["x"], ["model", "all"], "model", None],
)
LEFT_OUT = Kind(
    lambda value: value in ([], ["optimizer"], ["*"], ["rng", "schedulers"]),
    [[], ["optimizer"], ["*"], ["rng", "schedulers"]],
    [["x"], ["model"], "optimizer", None],
)
MAPPING = Kind(
    lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
    [{}, {"a.*": "b.*"}, {"a": "b"}],
    [None, "a", 3, [], ["a"], {"a": 1}, {"a": None}, {"a": "b.*"}],
)
WRITER = Kind(
    lambda value: value is None or (isinstance(value, dict) and "_target_" in value),
    [None, {"_target_": "a.B", "x": 1.5}],
    [3, "jsonl", [1], True, {}, {"x": 1}],
)
FREEZE = Kind(
    lambda value: value is None or isinstance(value, dict) or TEXTS_OF.holds(value),
    [None, {}, [], ["a.*", "re:b"], {"a.*": "3ep", "b": None}, {"a": 10, "b": "0.5dur"}],
    ["a", 3, True, [None], [True], [["a"]], ["re:("], {"a": "90s"}, {"a": 0}, {"a": "soon"}, {"a": True}, {"re:(": 3}],
)
PART = Kind(
    lambda value: value is None or (is_whole(value) and value >= 1) or (type(value) is float and 0 < value <= 1),
    [None, 1, 100, 0.5, 1.0],
    [0, -1, 0.0, 1.5, -0.5, math.nan, True, "3", [1]],
)
NODE = Kind(
    lambda value: value is None or isinstance(value, dict),
    [None, {"_target_": "a.B", "x": 1.5}, {"_target_": "a.B", "deep": [{"y": [1, None, "z"]}]}],
    [3, "mlp", [1], True, {"_target_": "a.B", "x": math.nan}, {"_target_": "a.B", "deep": [{"y": -math.inf}]},
     {"_target_": "a.B", "x": 2**64}, {True: 1}, {"x": {1.5: 2}}],
)  # fmt: skip
NODES = Kind(
    lambda value: isinstance(value, dict) and all(item is None or isinstance(item, dict) for item in value.values()),
    [{}, {"a": None}, {"a": {"_target_": "a.B"}, "b": {"_target_": "a.B", "x": 3}}],
    [None, 3, "x", [1], {"a": 3}, {"a": "x"}, {"a": [1]}, {"a": {"_target_": "a.B", "x": math.inf}}],
)  # fmt: skip
GROUPS = Kind(
    lambda value: isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()),
    [{}, {"*bias*": {"weight_decay": 0.0}}],
    [None, 3, [1], {"a": None}, {"a": 0.1}, {"a": {"lr": math.nan}}, {"a": {"lr": [math.inf]}}],
)
SCALE = Kind(
    lambda value: value == "dynamic" or (is_number(value) and value > 0),
    ["dynamic", 1, 1024, 0.5],
    [None, 0, -1, math.nan, math.inf, True, "static", [1]],
)
SCHEDULER = Kind(
    lambda value: value is None or isinstance(value, dict),
    [None, {"_target_": "a.B", "warmup": "1ep"}, {"first": {"_target_": "a.B"}, "second": None}],
    [3, "cosine", [1], True, {"first": 3}, {"first": {"_target_": "a.B", "x": math.nan}},
     {"_target_": "a.B", "x": -math.inf}],
)  # fmt: skip
NAME = Kind(
    lambda value: isinstance(value, str) and "{" in value,
    ["step{step}", "e{epoch}-b{batch}", "{tokens}"],
    [None, True, 1.5, ["x"], {"a": "b"}, "x", "{stepp}", "{epoch}", "{step", "{samples}/x"],
)
PATHS = Kind(
    lambda value: value is None or isinstance(value, str) or all(isinstance(item, str) for item in value),
    [None, "runs/x", ["a", "b*"]],
    [3, 1.5, True, {"a": 1}, [1], [None], math.nan],
)
OWN_VALUES = Kind(lambda value: isinstance(value, dict), [{}, {"a": 1, "b": {"c": [None]}}], [None, 3, "x", [1], True])
KEYS: dict[str, Kind] = {
    "name": TEXT_OR_NULL, "run_dir": TEXT, "seed": whole(0, null=False), "deterministic": TRUTH,
    "device": choice("auto", "cpu", "cuda", "mps"), "model_call": choice("batch", "args", "kwargs"), "resume": TEXT, "source": choice("run", "project"), "resume_allow": KEYS_OF, "ckpt": PATHS,
    "parallel.strategy": choice("single", "ddp", "fsdp"), "parallel.find_unused_parameters": TRUTH,
    "parallel.processes_per_node": whole(1, null=True), "logging.rank_files": TRUTH,
    "parallel.shard_size": whole(1, null=True), "parallel.tensor_size": whole(1, null=False), "parallel.wrap": TEXTS_OF,
    "parallel.wrap_min_parameters": whole(1, null=True), "parallel.mixed_precision": TRUTH,
    "parallel.cpu_offload": TRUTH, "parallel.activation_checkpointing": TRUTH,
    "model": NODE, "data": NODE, "optimizer": NODE, "step": NODE, "sparsity": NODE, "param_groups": GROUPS,
    "loop.max_duration": duration(null=False), "loop.hard_stop": duration(), "loop.max_time": duration("s"),
    "loop.steps_per_epoch": whole(1, null=True), "loop.grad_accum_steps": whole(1, null=False),
    "loop.eval_interval": duration(), "loop.eval_steps": whole(1, null=True), "loop.eval_at_start": TRUTH,
    "loop.log_interval": duration(), "loop.limit_train_batches": PART,
    "precision.dtype": choice("fp32", "bf16", "fp16"), "precision.loss_scale": SCALE, "scheduler": SCHEDULER,
    "checkpoint.pre_train_checkpoint": Kind(lambda value: value is None or type(value) is bool, [None, True, False], TRUTH.bad[:4]),
    "checkpoint.save_async": Kind(lambda value: value is None or type(value) is bool, [None, True, False], TRUTH.bad[:4]),
    "precision.clip_norm": CLIP, "precision.clip_value": CLIP,
    "checkpoint.enabled": TRUTH, "checkpoint.save_interval": duration(),
    "checkpoint.ephemeral_save_interval": duration(words=("auto",)), "checkpoint.ephemeral_cooldown": duration("st"),
    "checkpoint.fixed_steps": STEPS, "checkpoint.save_final": TRUTH, "checkpoint.save_on_stop": TRUTH,
    "checkpoint.remove": choice("ephemeral_only", "all_without_rule", "never"),
    "checkpoint.max_checkpoints": whole(1, null=True), "checkpoint.digest": choice("xxh3_128", "sha256"),
    "checkpoint.keep_every": duration(), "checkpoint.keep_by_age": AGES, "checkpoint.budget": SHARE,
    "checkpoint.keep_best.metric": TEXT_OR_NULL,
    "checkpoint.keep_best.mode": choice("auto", "min", "max"),
    "checkpoint.keep_best.count": whole(1, null=False),
    "checkpoint.newer": choice("refuse", "trash"),
    "checkpoint.folder": TEXT_OR_NULL, "checkpoint.latest_link": TRUTH,
    "checkpoint.link_frozen": TRUTH,
    "checkpoint.leave_out": LEFT_OUT,
    "checkpoint.copy_to.folder": TEXT_OR_NULL, "checkpoint.copy_to.every": whole(1, null=False),
    "checkpoint.name": NAME,
    "checkpoint.suffix": TEXT_OR_NULL,
    "checkpoint.on_save_error": choice("raise", "warn"),
    "checkpoint.max_save_errors": whole(0, null=False),
    "checkpoint.format": choice("tensors", "torch_file", "archive", "huggingface"),
    "checkpoint.compression": choice("none", "gz", "bz2", "xz", "lzma"),
    "loop.min_duration": duration(), "load.average": TRUTH, "load.chunk_size": whole(65536, null=True), "load.progress": TRUTH, "load.states": STATES, "load.strict": TRUTH, "load.ignore_keys": TEXTS_OF, "load.key_mapping": MAPPING,
    "validate.folder": TEXT_OR_NULL, "validate.watch": TRUTH,
    "predict.folder": TEXT_OR_NULL, "predict.loader": TEXT_OR_NULL, "predict.outputs": TEXTS_OF, "predict.writer": WRITER,
    "logging.level": choice("debug", "info", "warning", "error"),
    "logging.console": choice("auto", "rich", "plain", "off"),
    "callbacks": NODES, "loggers": NODES, "trust": TEXTS_OF, "vars": OWN_VALUES, "notes": TEXT_OR_NULL, "tags": TEXTS_OF, "report": TRUTH,
    "freeze": FREEZE, "eval_modules": TEXTS_OF, "compile.enabled": TRUTH, "compile.fullgraph": TRUTH, "compile.backend": TEXT,
    "compile.mode": choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "compile.dynamic": Kind(lambda value: value is None or type(value) is bool, [None, True, False], TRUTH.bad[:4]),
    "loop.microbatch": Kind(
        lambda value: value in (None, "auto") or (is_whole(value) and value >= 1),
        [None, "auto", 1, 64],
        [0, -1, 1.5, math.nan, True, "half", [1]],
    ),
    "loop.eval_sanity_steps": whole(1, null=True),
    "loop.eval_loaders": Kind(
        lambda value: isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()),
        [{}, {"probe": {"interval": "1ep", "steps": 3}}, {"probe": {"interval": None, "hook": "probe"}}],
        [None, 3, [1], {"a": 3}, {"a": {"every": 2}}, {"a": {"steps": 0}}, {"a": {"interval": "x"}}],
    ),
    "precision.min_loss_scale": CLIP, "precision.max_loss_scale": CLIP, "precision.init_scale": CLIP,
    "precision.growth_interval": whole(1, null=True),
    "restarts.max": whole(0, null=False), "restarts.backoff": duration("s"),
    "parallel.timeout": duration("s", null=False),
    "sweep.search": choice("grid", "random", "optuna"), "sweep.trials": whole(1, null=True), "sweep.seed": whole(0, null=False),
    "sweep.metric": TEXT_OR_NULL,
    "sweep.prune": choice("none", "asha", "median"), "sweep.eta": whole(2, null=False),
    "sweep.rungs": Kind(
        lambda value: value in ([], ["0.1dur", "0.3dur"], ["1ep"], ["5st", "20st", "1000st"]),
        [[], ["0.1dur", "0.3dur"], ["1ep"], ["5st", "20st", "1000st"]],
        [None, "1ep", 3, ["1ep", "3st"], ["2ep", "1ep"], ["1ep", "1ep"], ["x"], {"1ep": 1}],
    ),
    "notify.command": TEXT_OR_NULL, "notify.url": TEXT_OR_NULL, "notify.stall": duration("s"),
    "notify.events": Kind(
        lambda value: isinstance(value, list) and set(map(str, value)) <= {"end", "failure", "killed", "stall", "best"},
        [[], ["end"], ["best", "stall"]],
        [None, "end", 3, True, {"end": 1}, [None], ["ends"], [["end"]]],
    ),
}  # fmt: skip
UNKNOWN = [
    "sed",
    "loop.max_step",
    "loop.eval",
    "precision.clip",
    "checkpoint.keep",
    "validate.fold",
    "modell",
    "load.x",
]
SECTIONS = [
    "compile",
    "restarts",
    "notify",
    "sweep",
    "loop",
    "precision",
    "checkpoint",
    "load",
    "validate",
    "predict",
    "logging",
]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[dict[str, Any], set[str]]:
    """Dotted keys with values, and those of them that are wrong."""
    chosen = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=8, unique=True))
    values, wrong = {}, set()
    for key in chosen:
        if draw(st.integers(0, 3)):
            values[key] = draw(st.sampled_from(KEYS[key].good))
        else:
            values[key] = draw(st.sampled_from(KEYS[key].bad))
            wrong.add(key)
    if not draw(st.integers(0, 3)):
        key = draw(st.sampled_from(UNKNOWN))
        values[key] = 3
        wrong.add(key)
    if not draw(st.integers(0, 7)):
        section = draw(st.sampled_from(SECTIONS))
        if not any(key.startswith(f"{section}.") for key in values):
            values[section] = draw(st.sampled_from([None, 3, "x", [1]]))
            wrong.add(section)
    return values, wrong


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *above, name = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def at(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def has(key: str, *wanted: Any) -> Callable[[dict[str, Any]], bool]:
    """Whether a key has one of these values; without any, whether it is set."""
    return lambda values: values.get(key) in wanted if wanted else bool(values.get(key))


def is_dynamic(values: dict[str, Any]) -> bool:
    return values.get("precision.loss_scale", "dynamic") == "dynamic" and values.get("precision.dtype") == "fp16"


def runs_layers_again(values: dict[str, Any]) -> bool:
    return FSDP(values) or bool(values.get("parallel.activation_checkpointing"))


FSDP, COMPILED = has("parallel.strategy", "fsdp"), has("compile.enabled")
NEEDS: list[tuple[str, Any, Callable[[dict[str, Any]], bool]]] = [
    *((f"compile.{key}", usual, COMPILED) for key, usual in (
        ("mode", "default"), ("dynamic", None), ("fullgraph", False), ("backend", "inductor"))),
    ("precision.loss_scale", "dynamic", has("precision.dtype", "fp16")),
    *((f"precision.{key}", None, is_dynamic) for key in (
        "min_loss_scale", "init_scale", "max_loss_scale", "growth_interval")),
    ("checkpoint.compression", "none", has("checkpoint.format", "archive")),
    ("checkpoint.keep_best.mode", "auto", lambda values: (
        values["checkpoint.keep_best.mode"] == "min" or bool(values.get("checkpoint.keep_best.metric")))),
    ("checkpoint.keep_best.count", 1, has("checkpoint.keep_best.metric")),
    ("checkpoint.copy_to.every", 1, has("checkpoint.copy_to.folder")),
    ("checkpoint.max_save_errors", 3, has("checkpoint.on_save_error", "warn")),
    ("checkpoint.ephemeral_cooldown", None, has("checkpoint.ephemeral_save_interval")),
    ("checkpoint.budget", 0.02, has("checkpoint.ephemeral_save_interval", "auto")),
    ("checkpoint.keep_by_age", {}, lambda values: bool(
        values.get("checkpoint.max_checkpoints") or values.get("checkpoint.remove") == "all_without_rule")),
    ("restarts.backoff", "10s", has("restarts.max")),
    ("notify.events", ["end", "failure", "killed", "stall"], lambda values: bool(
        values.get("notify.command") or values.get("notify.url"))),
    ("sweep.trials", None, has("sweep.search", "random", "optuna")), ("sweep.seed", 0, has("sweep.search", "random", "optuna")),
    ("sweep.eta", 3, has("sweep.prune", "asha")),
    ("sweep.rungs", ["0.1dur", "0.3dur"], has("sweep.prune", "asha", "median")),
    *((f"parallel.{key}", usual, FSDP) for key, usual in (
        ("shard_size", None), ("cpu_offload", False), ("mixed_precision", False))),
    ("parallel.find_unused_parameters", False, has("parallel.strategy", "ddp")),
    ("parallel.wrap", [], runs_layers_again), ("parallel.wrap_min_parameters", None, runs_layers_again),
]  # fmt: skip
"""Key, its default, and what must hold for another value to have an effect."""


def quarrel(values: dict[str, Any]) -> bool:
    """Whether values that are right alone do not go together."""
    if any(values.get(key, usual) != usual and not holds(values) for key, usual, holds in NEEDS):
        return True
    if values.get("checkpoint.keep_best.metric") and values.get("checkpoint.keep_best.mode", "auto") == "auto":
        return True
    if None not in (values.get("precision.clip_norm"), values.get("precision.clip_value")):
        return True
    scales = [values.get(f"precision.{key}") for key in ("min_loss_scale", "init_scale", "max_loss_scale")]
    known = [scale for scale in scales if scale is not None]
    if known != sorted(known):
        return True
    if values.get("checkpoint.ephemeral_save_interval") == "auto" and values.get("checkpoint.remove") == "never":
        return True
    if values.get("loop.microbatch") == "auto" and values.get("loop.grad_accum_steps", 1) != 1:
        return True
    save = values.get("checkpoint.save_interval", "1ep")
    often = values.get("checkpoint.ephemeral_save_interval")
    steps = [length if type(length) is int else 300 if length == "300st" else None for length in (save, often)]
    epochs = [{"1ep": 1.0, "0.25ep": 0.25}.get(str(length)) for length in (save, often)]
    seconds = [{"90s": 90, "1h30m": 5400, "2h": 7200}.get(str(length)) for length in (save, often)]
    same = save == often and save is not None
    return same or any(None not in (a, b) and b >= a for a, b in (steps, epochs, seconds))  # type: ignore[operator]


def assert_right(config: TrainConfig) -> None:
    for key, kind in KEYS.items():
        assert kind.holds(at(config, key)), (key, at(config, key))
    for value in leaves([config.model, config.data, config.optimizer, config.callbacks, config.loggers]):
        assert not isinstance(value, float) or math.isfinite(value)


def leaves(value: Any) -> Iterator[Any]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(item)
    if not isinstance(value, dict | list):
        yield value


def assert_named(message: str, wrong: set[str]) -> None:
    for key in wrong:
        assert key in message, (key, message)


def test_every_key_of_the_schema_is_tried() -> None:
    assert {one.key for one in list_keys() if not one.is_section} == set(KEYS)


@fuzz(0.25)
@given(drawn())
def test_a_config_is_accepted_exactly_where_every_value_is_right(example: tuple[dict[str, Any], set[str]]) -> None:
    values, wrong = example
    config, mistakes = validate(ConfigTree(Node.of(nested(values))), missing_ok=True)
    try:
        raise_all(mistakes)
    except ConfigError as error:
        assert wrong or quarrel(values), f"{values} was refused: {error}"
        assert_named(str(error), wrong)
        return
    assert not wrong, f"{values} was accepted"
    assert not quarrel(values)
    assert_right(config)


INSERTS = ["\t", " ", "  ", "\n", ":", "-", "- ", "'", '"', "#", "&a ", "*a", "!x ", "{", "}", "[", "]", "|", ">", "%", "@", "`",
           "\u00e9", "\u2028", "\u0085", "\ufeff", "\x00", "\U0001f600", "? ", "<<: ", "${", "}", "???", "null", ".nan", "1e999",
           "\r", "---\n", "...\n", "no", "0o7", "12:30"]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A shipped config after a few accidents."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS)))]
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        place, line = draw(st.integers(0, len(text))), draw(st.integers(0, len(lines) - 1))
        accident = draw(st.sampled_from(["insert", "delete", "double", "indent", "swap", "colon"]))
        if accident == "insert":
            text = text[:place] + draw(st.sampled_from(INSERTS)) + text[place:]
        elif accident == "delete":
            text = text[:place] + text[place + draw(st.integers(1, 5)) :]
        elif accident == "double":
            text = "\n".join([*lines[: line + 1], *lines[line:]])
        elif accident == "indent":
            text = "\n".join([*lines[:line], " " * draw(st.integers(1, 3)) + lines[line], *lines[line + 1 :]])
        elif accident == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[line], lines[other] = lines[other], lines[line]
            text = "\n".join(lines)
        else:
            text = text.replace(":", "", 1) if place % 2 else text.replace(": ", ":", 1)
    return text


@fuzz(0.478)
@given(mutated())
def test_a_file_is_read_as_its_library_reads_it_or_refused_with_its_line(text: str) -> None:
    read = yaml_reader.read_text(text, "some.yaml")
    for mistake in read.mistakes:
        assert "some.yaml" in str(mistake)
        assert "Traceback" not in str(mistake)
    assert read.mistakes or not read.broken
    if read.mistakes:
        return
    yaml.compose(text, Loader=yaml.SafeLoader)  # as the search for a value's line does
    expected = OmegaConf.create(text) if text.strip() else OmegaConf.create()
    assert repr(read.values) == repr(OmegaConf.to_container(expected, resolve=False))
    for key, value in pairs(read.values):
        assert isinstance(key, str | int)
        assert not isinstance(key, bool)
        assert type(value) in (str, int, float, bool, type(None), list, dict)


def pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield key, item
        yield from pairs(item)


TRAPS = ["12:30:45", "1:30", "014", "-07", "no", "Yes", "ON", "off", "08", "0o14", "1,000", "-.5", "inf", ".5e3", "!x 1",
         "None", "=", "*gone", "'${'", "@x", "`x", "%x", "[1", "{a", "'x", "a: b", "<<"]  # fmt: skip
FINE = ["12", "-3", "0.5", "1e3", "1e-3", "1_000", "0x10", "true", "null", "'no'", '"014"', "'12:30'", "2024-01-02", "a b",
        "x:y", "[1, 2]", "{a: 1}", "${oc.env:HOME}", "'08'", "nothing", "1.0.0", "~", "y", "n", "'None'", "none"]  # fmt: skip


@fuzz(0.1)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), min_size=1, max_size=6))
def test_a_value_is_refused_exactly_where_it_is_a_trap(picks: list[tuple[bool, int]]) -> None:
    values = [(TRAPS[n % len(TRAPS)] if trap else FINE[n % len(FINE)]) for trap, n in picks]
    lines = [f"key{index}: {value}" for index, value in enumerate(values)]
    read = yaml_reader.read_text("\n".join(lines) + "\n", "some.yaml")
    assert bool(read.mistakes) == any(trap for trap, _ in picks), (lines, read.mistakes)


LETTERS = st.text("abc.=+~[]{}()'\"$,:@/ \\\u00e9\n0129-_*?#!%&|<>", max_size=12)


@fuzz(0.16)
@given(st.lists(st.one_of(LETTERS, st.text(max_size=8), st.builds("{}={}".format, LETTERS, LETTERS),
                          st.builds("seed{}{}".format, st.sampled_from(["=", "+=", "+", "=="]), LETTERS)), max_size=4))  # fmt: skip
def test_every_argument_is_an_override_or_a_mistake(arguments: list[str]) -> None:
    line = overrides.parse_overrides(arguments)
    ckpt = [one for one in arguments if re.match(r"\+*ckpt\+*=", one)]
    assert len(line.overrides) + len(line.mistakes) <= len(arguments)
    assert all(isinstance(mistake, ConfigError) for mistake in line.mistakes)
    if not ckpt and not line.appends and not any("+=" in one for one in arguments):
        assert len(line.overrides) + len(line.mistakes) == len(arguments)


def said(value: Any) -> str:
    """A value as the command line's grammar writes it; there are no quotes around its keys."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(said, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{str(key).lower()}:{said(item)}' for key, item in value.items())}}}"
    return "'{}'".format(value.replace("'", "\\'")) if isinstance(value, str) else str(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose experiment is written anew for each example."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "configs/experiment").mkdir(parents=True)
    return folder


GROUP_KEYS = {"model", "data", "optimizer", "scheduler", "step", "sparsity", "callbacks", "loggers", "ckpt"}
"""Left out where targets are looked up; `ckpt=` is not of the grammar."""


@fuzz(0.012)
@given(drawn(), drawn())
def test_file_and_command_line_are_judged_alike_and_together(
    folder: Path, in_file: tuple[dict[str, Any], set[str]], on_line: tuple[dict[str, Any], set[str]]
) -> None:
    inside = {key: value for key, value in in_file[0].items() if key not in GROUP_KEYS}
    typed = {key: value for key, value in on_line[0].items() if key not in GROUP_KEYS and key not in SECTIONS}
    # A mapping is merged with the one below it, and one mistake may stand before another.
    typed = {
        key: value for key, value in typed.items() if key.split(".")[0] not in {one.split(".")[0] for one in inside}
    }
    text = "# @package _global_\n" + (yaml.safe_dump(nested(inside)) if inside else "")
    (folder / "configs/experiment/x.yaml").write_text(text, "utf-8")
    wrong = (in_file[1] & inside.keys()) | (on_line[1] & typed.keys())
    both = inside | typed
    try:
        composed = compose(["experiment=x", *(f"{key}={said(value)}" for key, value in typed.items())], cwd=folder)
    except ConfigError as error:
        assert wrong or quarrel(both), f"{text}\n{typed}\nwas refused: {error}"
        # A file with a list where a mapping is merged is not checked further.
        assert_named(str(error), wrong & typed.keys() if "do not merge" in str(error) else wrong)
        return
    assert not wrong, f"{text}\n{typed}\nwas accepted"
    assert_right(composed.config)
    again = from_yaml(composed.to_yaml(), trusted=True, cwd=folder)
    assert again.config == replace(composed.config, resume="auto", resume_allow=[], source=SourceOf.run, trust=[])
