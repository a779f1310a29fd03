"""What to load from a checkpoint, and under which names of the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer_cli.errors import ConfigError
from trainer_cli.patterns import check_pattern, did_you_mean, matches
from trainer_cli.signatures import checks_argument_names

logger = logging.getLogger(__name__)

ALL = "all"
LOG_MARKS = "log_marks"
"""The key of the loggers' states in a checkpoint's."""
LORA_SCALING = "lora_scaling"
"""Name of a buffer of each layer that LoRA has adapted: the scaling factor, and 1 if the layer's weight is transposed,
else 0."""
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
            check_pattern(pattern, "load.ignore_keys")

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
        """Whether one of `STATES` is loaded; for `callbacks`, whether the state of at least one is."""
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
        keys = [key for state in self.states for key in STATES[_state_of(state)]]
        # The counts are always read; each key once, in order.
        return list(dict.fromkeys(["progress", *keys]))

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Name in the checkpoint -> name in the model, by the first glob that matches."""
        rules = [(_compile_glob(glob), target) for glob, target in self.key_mapping.items()]

        def new_name(name: str) -> str:
            candidates = ((pattern.fullmatch(name), target) for pattern, target in rules)
            return next(
                (_fill_stars(target, match.groups()) for match, target in candidates if match is not None), name
            )

        return {name: new_name(name) for name in names}

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Which of these names are not loaded, by `ignore_keys`."""
        return {name for name in names if any(matches(name, pattern) for pattern in self.ignore_keys)}

    def warn_unmatched(self, saved: Iterable[str], names: Iterable[str]) -> None:
        """Warn of each glob of `key_mapping` that matches no `saved` name of the checkpoint, and of each glob of
        `ignore_keys` that matches none of `names`."""
        saved, names = list(saved), list(names)
        unmatched = [
            ("key_mapping", glob)
            for glob in self.key_mapping
            if not any(_compile_glob(glob).fullmatch(name) for name in saved)
        ]
        unmatched += [
            ("ignore_keys", pattern)
            for pattern in self.ignore_keys
            if not any(matches(name, pattern) for name in names)
        ]
        for key, pattern in unmatched:
            logger.warning("load.%s: %r matches nothing", key, pattern)


def _state_of(name: str) -> str:
    """The entry of `STATES` that a name of `load.states` belongs to: `callbacks` for `callbacks.NAME`."""
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


def _compile_glob(glob: str) -> re.Pattern[str]:
    """A regular expression for a glob, with a group for each `*`."""
    # This is not fnmatch: only `*` is special here, and each `*` must be a group.
    tokens = ("(.*)" if token == "*" else re.escape(token) for token in re.split(r"(\*)", glob))
    return re.compile("".join(tokens), re.DOTALL)


def _fill_stars(target: str, matched: Sequence[str | None]) -> str:
    """The target with each `*` replaced by the text that the same `*` of the glob has matched."""
    first, *texts = target.split("*")
    # This zip is not strict: the target may have fewer * than the glob.
    return first + "".join((match or "") + text for match, text in zip(matched, texts, strict=False))


WHOLE = LoadOptions()
WEIGHTS = LoadOptions(states=("model",))
