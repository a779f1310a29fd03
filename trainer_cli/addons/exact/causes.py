"""The likely cause of a difference, and its cure, with names from the user's code. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_cli.addons.exact.digests import NOT_PERSISTENT, Asks, Call
from trainer_cli.addons.exact.trace import TraceDifference, TraceKind, Value
from trainer_cli.terminal import format_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a difference."""

    difference: TraceDifference
    repeats: bool
    """Two runs without a stop differ as well."""
    resumed: bool = True
    """The process with the difference had resumed a checkpoint."""
    calls: Sequence[Call] = ()
    workers: int = 0
    exact_without_workers: bool | None = None
    """The result of the same check with `data.num_workers=0`; None: not checked."""
    exact_if_deterministic: bool | None = None
    """Whether two runs are equal with `deterministic=true`; None: not checked."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the training: `loader`, the class of one that the user brought, and whether its workers are `persistent`;
    `stream`, the class of an iterable dataset, and whether it is `stateful`; `starts`, the methods of the user's
    callbacks that are called before the first batch."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The state that differs first, the likely cause, and what helps: a sentence each."""

    state: str
    cause: str
    cure: str


_ORDER = {
    TraceKind.batch: ("data", "globals", "callbacks", "model", "optimizer"),
    TraceKind.evaluation: ("model", "data", "globals", "callbacks", "optimizer"),
    TraceKind.loss: ("model", "globals", "callbacks", "data", "optimizer"),
    TraceKind.gradients: ("model", "globals", "callbacks", "optimizer", "data"),
    TraceKind.state: ("optimizer", "callbacks", "globals", "model", "data"),
    TraceKind.hidden: ("model", "optimizer", "callbacks", "data", "globals"),
}
"""Which part's hidden state most likely explains a difference of a kind, first to last."""

_SAVE = {
    "model": "Keep it in a buffer (register_buffer), or save it with get_extra_state and set_extra_state.",
    "generator of model": (
        "Draw from torch's own generator, which is saved; or save the state of this one with get_extra_state "
        "(generator.get_state()) and set it back in set_extra_state."
    ),
    "optimizer": "Keep it in self.state[parameter] or in a parameter group: state_dict() saves these.",
    "callbacks": "Return it from the callback's state_dict(), and take it back in load_state_dict().",
    "data": "Make each sample a function of its index, and draw from torch, numpy or random: they are seeded for each.",
    "loader": (
        "Let data hold the dataset instead of the loader, whose order is then ours; or give the loader state_dict() "
        "and load_state_dict()."
    ),
    "stream": "Let the dataset be the same each time it is iterated, or give it state_dict() and load_state_dict().",
    "stateful stream": (
        "Give it in state_dict() of the dataset, and take it back in load_state_dict(): where it reads, what it has "
        "read ahead, generators of its own."
    ),
    "globals": "Keep it in a module, the optimizer or a callback, and save it there.",
}
_FLAGS = (".requires_grad", ".training")
_CALLED = {
    "model": "a python attribute",
    "optimizer": "an attribute of the optimizer",
    "callbacks": "an attribute of a callback",
    "data": "an attribute of the data",
    "globals": "a global variable",
}


def explain(evidence: Evidence) -> Cause:
    """The likely cause of a difference."""
    if evidence.repeats:
        return _explain_noise(evidence)
    if not evidence.resumed:
        return Cause(
            name_values(evidence.difference.values),
            "it changes when a checkpoint is saved, so a state_dict() or a hook of saving changes the state",
            "Let state_dict(), on_save_checkpoint and get_extra_state return the state, and change nothing.",
        )
    return _explain_resumed(evidence)


def part_of(name: str) -> str:
    """The part of a training that hidden state belongs to."""
    top = name.partition(".")[0]
    return top if top in _CALLED else "globals"


def advise_saving(value: Value, facts: Mapping[str, Any]) -> str:
    """How hidden state can be saved."""
    part_name = part_of(value.name)
    if value.name.endswith(_FLAGS):
        return "Look for code that sets it when a process starts: checkpoints hold the changes of hooks and steps."
    if part_name == "model" and is_generator(value):
        return _SAVE["generator of model"]
    return _SAVE[_kind_of_data(facts) if part_name == "data" else part_name]


def _kind_of_data(facts: Mapping[str, Any]) -> str:
    """What the training data is: a map-style dataset, an iterable one, or a loader."""
    if facts.get("loader"):
        return "loader"
    if facts.get("stream"):
        return "stateful stream" if facts.get("stateful") else "stream"
    return "data"


def is_generator(value: Value) -> bool:
    """True for a random generator."""
    return any(text.startswith("generator ") for text in (value.straight, value.other))


def is_used_again(value: Value) -> bool:
    """Whether hidden state is likely used again; counts and caches of data and modules mostly are not."""
    return is_generator(value) or part_of(value.name) in ("model", "optimizer", "callbacks")


def name_values(values: Sequence[Value]) -> str:
    """The names that differ, the first few."""
    return format_first([value.name for value in values], 3)


def describe(value: Value) -> str:
    """What it is, and both its values where they are short."""
    noun = "a random generator" if is_generator(value) else _CALLED[part_of(value.name)]
    # A digest tells a reader nothing.
    if is_generator(value) or " " in value.straight + value.other:
        return f"{value.name} ({noun})"
    return f"{value.name} ({noun}): {value.straight} in the straight run, {value.other} here"


def likeliest_hidden(difference: TraceDifference) -> Value | None:
    """The hidden thing that explains the difference best."""
    order = _ORDER[difference.kind]
    if difference.kind is TraceKind.evaluation and difference.values[0].name.startswith("batch"):
        order = _ORDER[TraceKind.batch]
    # A generator first: whatever draws from it differs as well.
    ranked = sorted(difference.hidden, key=lambda value: (order.index(part_of(value.name)), not is_generator(value)))
    return ranked[0] if ranked else None


def _explain_noise(evidence: Evidence) -> Cause:
    difference = evidence.difference
    hidden = likeliest_hidden(difference)
    state = name_values(difference.values)
    chance = _select_calls(evidence.calls, Asks.chance)
    clock = _select_calls(evidence.calls, Asks.clock)
    # From the surest evidence to the least: a call in the user's file names its line.
    if chance:
        return Cause(
            f"{hidden.name} (a random generator)" if hidden is not None and is_generator(hidden) else state,
            f"two runs without a stop differ too: a generator is not seeded, {_list_calls(chance)}",
            "Seed it, for example from an argument; torch, numpy and random are seeded before data and model are made.",
        )
    if clock:
        return Cause(
            state,
            f"two runs without a stop differ too: what is computed depends on the clock, {_list_calls(clock)}",
            "Count steps (trainer.progress.step) instead of time, or save what was measured.",
        )
    if evidence.exact_if_deterministic:
        return Cause(
            state,
            "two runs without a stop differ too, but not with deterministic=true: a kernel sums in no fixed order",
            "Train with deterministic=true where you need the same bits.",
        )
    if hidden is not None:
        return Cause(
            describe(hidden),
            "two runs without a stop differ too, and this differs from one process to the next",
            "Make it from the seed and the config alone.",
        )
    return Cause(
        state,
        "two runs without a stop differ too, and no call of a clock or of an unseeded generator was seen in your "
        "files: perhaps the order of a set, a file that changes, or a library",
        "Look at what makes this value; deterministic=true did not help.",
    )


def _explain_resumed(evidence: Evidence) -> Cause:
    difference = evidence.difference
    first = difference.values[0].name
    state = name_values(difference.values)
    # Saved state that comes back different needs no evidence of what is hidden.
    if difference.restored and difference.kind is TraceKind.state:
        return _explain_not_restored(first, state, difference, evidence.facts.get("starts", ()))
    hidden = likeliest_hidden(difference)
    of_data = difference.kind is TraceKind.batch or first.startswith("batch")
    worker = _select_calls(evidence.calls, Asks.worker)
    if of_data and evidence.exact_without_workers and evidence.workers:
        calls_of_workers = f", {_list_calls(worker)}" if worker else ""
        return Cause(
            state,
            f"samples depend on the worker that makes them: with data.num_workers=0 all is exact{calls_of_workers}",
            _SAVE[_kind_of_data(evidence.facts)],
        )
    if of_data and evidence.facts.get("persistent"):
        return Cause(
            state,
            f"the persistent workers of {evidence.facts['loader']} keep their random generators from epoch to "
            "epoch, and a resume begins with new ones",
            "Give it persistent_workers=False; or let data hold the dataset instead of the loader.",
        )
    # Hidden state before calls: a call may be harmless, but this differs already.
    if hidden is not None:
        lost = "no checkpoint holds it"
        if hidden.name.endswith(_FLAGS):
            lost = "a resume does not have it as it was saved"
        if part_of(hidden.name) == "data" and _kind_of_data(evidence.facts) == "stateful stream":
            lost = "state_dict() of the dataset does not bring it back"
        return Cause(
            describe(hidden),
            f"it changes in training, and {lost}",
            advise_saving(hidden, evidence.facts),
        )
    if of_data and (stream := evidence.facts.get("stream")):
        start = "from its state_dict()" if evidence.facts["stateful"] else "from its beginning"
        return Cause(
            state,
            f"{stream} gives other samples when it continues {start}: they depend on more than that",
            _SAVE[_kind_of_data(evidence.facts)],
        )
    if of_data and (loader := evidence.facts.get("loader")):
        return Cause(
            state,
            f"{loader} gives other batches when it is started anew: it has an order or a memory of its own",
            _SAVE["loader"],
        )
    if calls := [*_select_calls(evidence.calls, Asks.chance), *_select_calls(evidence.calls, Asks.clock)]:
        return Cause(
            state,
            f"what is computed may depend on {_list_calls(calls)}",
            "Seed it, or count steps instead of time, or save it.",
        )
    return Cause(
        state,
        "nothing that a checkpoint lacks was seen to differ: perhaps a variable in a closure, a file, a library, "
        "or a kernel that sums in no fixed order (try deterministic=true)",
        "Move what changes in training into a buffer, the optimizer's state, or a callback's state_dict().",
    )


def _explain_not_restored(name: str, state: str, difference: TraceDifference, starts: Sequence[str]) -> Cause:
    section = name.partition(".")[0]
    if name.endswith(NOT_PERSISTENT):
        return Cause(
            state, "the buffer is not in the checkpoint (persistent=False), yet training changes it",
            "Register it with persistent=True.",
        )  # fmt: skip
    if section == "random":
        return Cause(
            state, "random numbers are drawn when training begins, once more after each start",
            "Draw them in __init__ or setup; what is drawn before the first step is put back.",
        )  # fmt: skip
    if difference.came_back:
        return Cause(
            state,
            "it was loaded as it had been saved, and changed before the first step"
            + (f", in which {', '.join(starts)} is called" if starts else ""),
            "Change it at the run's first start alone (trainer.progress.step == 0), or at a step of the training.",
        )
    if section == "model":
        return Cause(
            state, "it was in the checkpoint, and loading did not bring it back",
            "Look at load_state_dict, set_extra_state and _load_from_state_dict of the module.",
        )  # fmt: skip
    return Cause(
        state,
        f"what state_dict() of {_find_owner(name)} gives does not bring back what it had",
        "Give all that changes in state_dict(), and take all of it back in load_state_dict().",
    )


def _find_owner(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] in ("callbacks", "schedulers", "optimizers") else parts[0]


def _select_calls(calls: Sequence[Call], asks: Asks) -> list[Call]:
    return [call for call in calls if call.asks is asks]


def _list_calls(calls: Sequence[Call]) -> str:
    return ", ".join(f"{call.function} at {call.where}" for call in calls[:3])
