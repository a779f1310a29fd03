"""What to load from a checkpoint of another run and under which names, and the report on what was loaded."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer_cli.errors import ConfigError
from trainer_cli.patterns import did_you_mean, matches, why_no_pattern
from trainer_cli.signatures import checks_argument_names
from trainer_cli.terminal import format_count

logger = logging.getLogger(__name__)

ALL = "all"
LOG_MARKS = "log_marks"
"""The key of the loggers' states in a checkpoint's."""
VERSIONS = "model_versions"
"""The key of the versions of a model's modules in a checkpoint's state."""
STATES: Mapping[str, tuple[str, ...]] = {
    "model": ("model", VERSIONS),
    "optimizer": ("optimizer", "optimizers", "scaler", "step"),
    "schedulers": ("schedulers",),
    "progress": ("progress", "loop", "data", "modes", "requires_grad", LOG_MARKS),
    "callbacks": ("callbacks",),
    "rng": ("rng",),
}
"""State of a training, as `load.states` names it -> the top-level keys of a checkpoint that hold it."""
ONE_CALLBACK = "callbacks."
"""Before the name of a callback, for the state of this one."""


@checks_argument_names("LoadOptions")
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which states of a checkpoint to load, and how its names are mapped to those of the model.

    The names of parameters in the optimizer's state follow the same rules as those of the model.
    """

    states: Sequence[str] = (ALL,)
    """`all`, or any of `STATES` and `callbacks.NAME`. Without `progress` a training starts at step 0."""
    strict: bool = True
    """Refuse parameters that only the model or only the checkpoint has."""
    ignore_keys: Sequence[str] = ()
    """Globs of parameter names of the model, or `re:` and a regular expression: these are not loaded."""
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    """Glob of names in the checkpoint -> name in the model; each `*` of the name stands for what that `*` matched."""
    average: bool = True
    """Load the average of EMA or SWA if evaluations of the checkpoint saw it, not the trained weights: of `states`
    [model] in a fit, and in evaluations and predictions."""
    allow_pickle: bool = False
    """Read files of other programs that can run any code when they are loaded."""

    def __post_init__(self) -> None:
        check_states("load.states", self.states)
        check_mapping("load.key_mapping", self.key_mapping)
        for pattern in self.ignore_keys:
            if (fault := why_no_pattern(pattern)) is not None:
                raise ConfigError(f"load.ignore_keys: {fault}", location="load.ignore_keys")

    @property
    def whole(self) -> bool:
        """Whether everything is loaded."""
        return ALL in self.states

    @property
    def weights_alone(self) -> bool:
        """Whether nothing but the model is loaded."""
        return list(self.states) == ["model"]

    @property
    def resumes(self) -> bool:
        """Whether the training continues at the checkpoint's step."""
        return self.whole or "progress" in self.states

    def takes(self, state: str) -> bool:
        """Whether one of `STATES`, or of the callbacks a part of them, is loaded."""
        return self.whole or any(_state_of(name) == state for name in self.states)

    def takes_callback(self, name: str) -> bool:
        """Whether the state of this callback is loaded."""
        return self.whole or not {"callbacks", ONE_CALLBACK + name}.isdisjoint(self.states)

    @property
    def named_callbacks(self) -> list[str]:
        """The callbacks that are named one by one."""
        return [name.removeprefix(ONE_CALLBACK) for name in self.states if name.startswith(ONE_CALLBACK)]

    def keys(self) -> list[str] | None:
        """The top-level keys of a checkpoint to read; None: all."""
        if self.whole:
            return None
        return list(dict.fromkeys(["progress", *(key for state in self.states for key in STATES[_state_of(state)])]))

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Name in the checkpoint -> name in the model, by the first glob that matches."""
        rules = [(_pattern(glob), target) for glob, target in self.key_mapping.items()]

        def new_name(name: str) -> str:
            matches = ((pattern.fullmatch(name), target) for pattern, target in rules)
            return next((_fill_stars(target, match.groups()) for match, target in matches if match is not None), name)

        return {name: new_name(name) for name in names}

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Which of these names are not loaded, by `ignore_keys`."""
        return {name for name in names if any(matches(name, pattern) for pattern in self.ignore_keys)}

    def warn_unmatched(self, saved: Iterable[str], names: Iterable[str]) -> None:
        """Warn of each glob of `key_mapping` that matches no name of the checkpoint, and of `ignore_keys` that matches
        none of `names`."""
        saved, names = list(saved), list(names)
        unmatched = [
            ("key_mapping", glob)
            for glob in self.key_mapping
            if not any(_pattern(glob).fullmatch(name) for name in saved)
        ]
        unmatched += [
            ("ignore_keys", pattern)
            for pattern in self.ignore_keys
            if not any(matches(name, pattern) for name in names)
        ]
        for key, pattern in unmatched:
            logger.warning("load.%s: %r matches nothing", key, pattern)


def _state_of(name: str) -> str:
    """The one of `STATES` that a name is of: of `callbacks.NAME`, `callbacks`."""
    return "callbacks" if name.startswith(ONE_CALLBACK) else name


def check_states(key: str, states: Sequence[str]) -> None:
    """Raise ConfigError unless `states` is a list of `STATES` and `callbacks.NAME`, or of `all` alone."""
    choices = (ALL, *STATES, f"{ONE_CALLBACK}NAME")
    if isinstance(states, str) or not states:
        example = f"{key}=[{states or 'model'}]"
        raise ConfigError(
            f"{key} is {states!r}, but it must be a list of states", location=key, hint=f"Write {example}."
        )
    for state in states:
        is_callback = isinstance(state, str) and state.startswith(ONE_CALLBACK) and state != ONE_CALLBACK
        if state not in choices and not is_callback:
            hint = did_you_mean(state, choices).strip() or None
            raise ConfigError(f"{key}: there is no state {state!r}, only {', '.join(choices)}", location=key, hint=hint)
    if ALL in states and len(states) > 1:
        raise ConfigError(f"{key} is {list(states)}, but all has the others in it", location=key)


def check_mapping(key: str, mapping: Mapping[str, str]) -> None:
    """Refuse a new name that has more `*` than its glob."""
    for glob, target in mapping.items():
        if isinstance(target, str) and target.count("*") > str(glob).count("*"):
            message = f"{key}: {target!r} has more * than {glob!r}, so nothing can replace them"
            raise ConfigError(message, location=key, hint=f"For example '{key}={{model.*: *}}'.")


def _pattern(glob: str) -> re.Pattern[str]:
    # Not fnmatch: only `*` is special here, and each `*` must be a group.
    tokens = ("(.*)" if token == "*" else re.escape(token) for token in re.split(r"(\*)", glob))
    return re.compile("".join(tokens), re.DOTALL)


def _fill_stars(target: str, matched: Sequence[str | None]) -> str:
    first, *texts = target.split("*")
    # Not strict: the target may have fewer * than the glob.
    return first + "".join((match or "") + text for match, text in zip(matched, texts, strict=False))


WHOLE = LoadOptions()
WEIGHTS = LoadOptions(states=("model",))
OTHER_MODEL = "The model must have the layers and shapes that the checkpoint was saved with."


@dataclass(slots=True)
class LoadReport:
    """What was loaded from a checkpoint and what was not, by the names of the model."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """In the model, but not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, but not in the model."""
    ignored: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    """Of another shape in the checkpoint; refused, strict or not."""
    cast: dict[str, str] = field(default_factory=dict)
    """Name -> the element types in the checkpoint and in the model, where these differ."""

    @property
    def one_sided(self) -> list[str]:
        """A line for each tensor that only the model or only the checkpoint has."""
        rows = [f"{name}: missing in the checkpoint" for name in self.missing]
        return rows + [f"{name}: not in this model" for name in self.unexpected]

    @property
    def lines(self) -> list[str]:
        """A line for each tensor that was not loaded, or not as it was saved."""
        rows = [*self.one_sided, *(f"{name}: ignored" for name in self.ignored)]
        count = Counter(self.cast.values())
        return rows + [f"{format_count(number, 'tensor')}: cast from {how}" for how, number in count.items()]

    @property
    def globs_of_reshaped(self) -> list[str]:
        """The `ignore_keys` for tensors of another shape: a glob of the whole layer, or the tensor alone if the layer
        contains further ones, which the glob would ignore too."""
        names = [*self.loaded, *self.missing, *self.unexpected]
        globs = set()
        for name in self.reshaped:
            layer = name.rpartition(".")[0]
            inside = [other.removeprefix(f"{layer}.") for other in names if other.startswith(f"{layer}.")]
            globs.add(f"{layer}.*" if layer and not any("." in other for other in inside) else name)
        return sorted(globs)

    @property
    def needs_not_strict(self) -> bool:
        """Whether tensors of one side remain beside those that `globs_of_reshaped` ignores."""
        globs = self.globs_of_reshaped
        return any(not any(matches(name, glob) for glob in globs) for name in (*self.missing, *self.unexpected))

    def __str__(self) -> str:
        """How many tensors were loaded, and what happened to the others."""
        total = len(self.loaded) + len(self.missing) + len(self.ignored)
        count = format_count(total, "tensor")
        return f"{len(self.loaded):,} of {count}" if self.missing or self.ignored else count


def advice(report: LoadReport) -> str:
    """The cure for weights that do not fit."""
    if report.reshaped and len(report.one_sided) > len(report.loaded) + len(report.reshaped):
        # Few layers are in both: it is another model, of which hardly anything would be loaded.
        return OTHER_MODEL
    if report.reshaped:
        globs = ",".join(report.globs_of_reshaped)
        more = " load.strict=false" if report.needs_not_strict else ""
        return f"To keep the model's own values of these layers, add 'load.ignore_keys=[{globs}]'{more}."
    if (mapping := prefix_mapping(report.missing, report.unexpected)) is not None:
        ((old, new),) = mapping.items()
        return f"The names differ by a prefix: add 'load.key_mapping={{{old}: {new}}}'."
    if report.one_sided:
        return f"{OTHER_MODEL} load.strict=false loads what both have; load.key_mapping={{OLD.*: NEW.*}} renames."
    return OTHER_MODEL


def prefix_mapping(missing: list[str], extra: list[str]) -> dict[str, str] | None:
    """The `key_mapping` that adds or removes one prefix, if it maps most of the names; else None."""
    for longer, shorter in ((extra, missing), (missing, extra)):
        # A dict, not a set: with two prefixes that fit, every process suggests the same.
        prefixes = {name[: at + 1]: None for name in longer for at, char in enumerate(name) if char == "."}
        for prefix in prefixes:
            stripped = {name.removeprefix(prefix) for name in longer if name.startswith(prefix)}
            # More than half: a few layers may differ, such as a new head.
            if 2 * len(stripped.intersection(shorter)) > len(shorter):
                return {f"{prefix}*": "*"} if longer is extra else {"*": f"{prefix}*"}
    return None
