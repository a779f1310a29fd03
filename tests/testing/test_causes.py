"""Evidence of a difference, and the cause and cure that are named for it."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_cli.addons.exact.causes import Evidence, explain
from trainer_cli.addons.exact.digests import Asks, Call
from trainer_cli.addons.exact.trace import TraceDifference, TraceKind, Value

CHANCE = Call(Asks.chance, "torch.Generator.seed()", "parts.py:3")
CLOCK = Call(Asks.clock, "time.time()", "parts.py:5")
WORKER = Call(Asks.worker, "torch.utils.data.get_worker_info()", "parts.py:7")
SEEDED = {"loader": None, "persistent": False, "stream": None, "stateful": False}
STREAM = {**SEEDED, "stream": "Stream", "stateful": True}


def hidden(name: str, straight: str = "1", other: str = "0") -> tuple[Value, ...]:
    return (Value(name, straight, other),)


def evidence(
    kind: TraceKind,
    name: str,
    hidden: tuple[Value, ...] = (),
    *,
    restored: bool = False,
    came_back: bool = False,
    **known: Any,
) -> Evidence:
    """A difference in one value after a resume, unless `known` says otherwise."""
    difference = TraceDifference(kind, 4, 1, restored, (Value(name, "1.0", "2.0"),), hidden, came_back)
    return Evidence(difference=difference, **{"repeats": False, "facts": SEEDED, **known})


CASES = {
    "an unseeded generator": (
        evidence(TraceKind.loss, "loss", hidden("model.rng", "generator a", "generator b"), repeats=True,
                 calls=[CHANCE]),
        ("model.rng (a random generator)", "not seeded, torch.Generator.seed() at parts.py:3", "Seed it"),
    ),
    "chance before the clock": (
        evidence(TraceKind.loss, "loss", repeats=True, calls=[CLOCK, CHANCE]),
        ("loss", "a generator is not seeded", "Seed it"),
    ),
    "the clock": (
        evidence(TraceKind.loss, "loss", repeats=True, calls=[CLOCK]),
        ("loss", "depends on the clock, time.time() at parts.py:5", "Count steps"),
    ),
    "a kernel without an order": (
        evidence(TraceKind.loss, "loss", repeats=True, exact_if_deterministic=True),
        ("loss", "a kernel sums in no fixed order", "deterministic=true"),
    ),
    "the order of a set": (
        evidence(TraceKind.batch, "batch[1]", hidden("data.train.numbers"), repeats=True, exact_if_deterministic=False),
        ("data.train.numbers (an attribute of the data)", "from one process to the next", "the seed and the config"),
    ),
    "nothing seen in any run": (
        evidence(TraceKind.loss, "loss", repeats=True),
        ("loss", "perhaps the order of a set, a file that changes, or a library", "did not help"),
    ),
    "a save that changes the state": (
        evidence(TraceKind.state, "random.torch", resumed=False),
        ("random.torch", "it changes when a checkpoint is saved", "change nothing"),
    ),
    "a buffer that is not saved": (
        evidence(TraceKind.state, "model.seen (not persistent)", restored=True),
        ("model.seen", "persistent=False", "Register it with persistent=True"),
    ),
    "a weight that is not loaded": (
        evidence(TraceKind.state, "model.weight", restored=True),
        ("model.weight", "loading did not bring it back", "Look at load_state_dict"),
    ),
    "a momentum cleared at each start": (
        evidence(TraceKind.state, "optimizer.state.weight.momentum_buffer", hidden("callbacks.reset.done"),
                 restored=True, came_back=True, facts={**SEEDED, "starts": ["callbacks.reset.on_fit_start"]}),
        ("optimizer.state.weight.momentum_buffer", "changed before the first step, in which "
         "callbacks.reset.on_fit_start is called", "trainer.progress.step == 0"),
    ),
    "numbers drawn at each start": (
        evidence(TraceKind.state, "random.numpy", restored=True),
        ("random.numpy", "once more after each start", "Draw them in __init__ or setup"),
    ),
    "a state_dict that brings nothing back": (
        evidence(TraceKind.state, "callbacks.count.total", restored=True),
        ("callbacks.count.total", "state_dict() of callbacks.count", "take all of it back in load_state_dict()"),
    ),
    "samples of a worker": (
        evidence(TraceKind.batch, "batch[0]", calls=[WORKER], workers=2, exact_without_workers=True),
        ("batch[0]", "with data.num_workers=0 all is exact, torch.utils.data.get_worker_info()", "of its index"),
    ),
    "persistent workers": (
        evidence(TraceKind.batch, "batch[0]", facts={**SEEDED, "loader": "DataLoader", "persistent": True}),
        ("batch[0]", "the persistent workers of DataLoader", "persistent_workers=False"),
    ),
    "a python attribute": (
        evidence(TraceKind.loss, "loss", hidden("model.calls")),
        ("model.calls (a python attribute): 1 in the straight run, 0 here", "no checkpoint holds", "register_buffer"),
    ),
    "a parameter frozen on the way": (
        evidence(TraceKind.gradients, "gradient of a", hidden("model.a.requires_grad", "True", "False")),
        ("model.a.requires_grad", "a resume does not have it as it was saved", "when a process starts"),
    ),
    "a generator of the model": (
        evidence(TraceKind.loss, "loss", hidden("model.rng", "generator a", "generator b")),
        ("model.rng (a random generator)", "no checkpoint holds it", "get_extra_state"),
    ),
    "an attribute of the optimizer": (
        evidence(TraceKind.state, "model.weight", hidden("optimizer.velocity")),
        ("optimizer.velocity (an attribute of the optimizer)", "no checkpoint", "self.state[parameter]"),
    ),
    "an attribute of a callback": (
        evidence(TraceKind.state, "optimizer.lr", hidden("callbacks.cooling.steps")),
        ("callbacks.cooling.steps (an attribute of a callback)", "no checkpoint", "callback's state_dict()"),
    ),
    "a global variable": (
        evidence(TraceKind.loss, "loss", hidden("parts.calls")),
        ("parts.calls (a global variable)", "no checkpoint holds it", "Keep it in a module"),
    ),
    "a generator of a loader": (
        evidence(TraceKind.batch, "batch[0]", hidden("data.train.rng", "generator a", "generator b"),
                 facts={**SEEDED, "loader": "Shuffled"}),
        ("data.train.rng (a random generator)", "no checkpoint holds it", "dataset instead of the loader"),
    ),
    "a generator of a stream without state": (
        evidence(TraceKind.batch, "batch[0]", hidden("data.train.rng", "generator a", "generator b"),
                 facts={**STREAM, "stateful": False}),
        ("data.train.rng", "no checkpoint holds it", "or give it state_dict() and load_state_dict()"),
    ),
    "a position that does not come back": (
        evidence(TraceKind.batch, "batch[0]", hidden("data.train.at"), facts=STREAM),
        ("data.train.at", "state_dict() of the dataset does not bring it back", "Give it in state_dict() of"),
    ),
    "a stream that forgets": (
        evidence(TraceKind.batch, "batch[0]", facts=STREAM),
        ("batch[0]", "gives other samples when it continues from its state_dict()", "Give it in state_dict() of"),
    ),
    "a stream from its beginning": (
        evidence(TraceKind.batch, "batch[0]", facts={**STREAM, "stateful": False}),
        ("batch[0]", "Stream gives other samples when it continues from its beginning", "each time it is iterated"),
    ),
    "a loader with a memory": (
        evidence(TraceKind.evaluation, "batch of val[0]", facts={**SEEDED, "loader": "Shuffled"}),
        ("batch of val[0]", "Shuffled gives other batches when it is started anew", "dataset instead of the loader"),
    ),
    "a call that may matter": (
        evidence(TraceKind.loss, "loss", calls=[CLOCK, WORKER]),
        ("loss", "may depend on time.time() at parts.py:5", "Seed it, or count steps"),
    ),
    "nothing seen after a resume": (
        evidence(TraceKind.loss, "loss"),
        ("loss", "perhaps a variable in a closure", "into a buffer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_named_with_its_cure(case: str) -> None:
    known, (state, cause, cure) = CASES[case]
    explained = explain(known)
    assert state in explained.state
    assert cause in explained.cause
    assert cure in explained.cure


@pytest.mark.parametrize("came_back", [False, True])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("optimizer.state.weight.momentum_buffer", "optimizer"),
        ("optimizers.critic.state.weight.exp_avg", "optimizers.critic"),
        ("model.norm.running_mean", "model"),
        ("schedulers.warmup.state.last_epoch", "schedulers.warmup"),
        ("callbacks.ema.average.weight", "callbacks.ema"),
        ("scaler.scale", "scaler"),
        ("step.count", "step"),
        ("loop.meter.sums.loss", "loop"),
        ("progress.samples", "progress"),
    ],
)
def test_each_kind_of_state_is_reported_by_its_own_name(name: str, part: str, came_back: bool) -> None:
    explained = explain(evidence(TraceKind.state, name, restored=True, came_back=came_back))
    assert explained.state == name
    if came_back:
        assert "loaded as it had been saved, and changed before the first step" in explained.cause
    elif part == "model":
        assert "loading did not bring it back" in explained.cause
    else:
        assert f"what state_dict() of {part} gives does not bring back" in explained.cause


@pytest.mark.parametrize(
    ("kind", "name", "best"),
    [(TraceKind.batch, "batch[0]", "data.train.at"), (TraceKind.loss, "loss", "model.calls"),
     (TraceKind.state, "a", "optimizer.calls"), (TraceKind.evaluation, "val.loss", "model.calls"),
     (TraceKind.evaluation, "batch of val[0]", "data.train.at")],
)  # fmt: skip
def test_of_several_hidden_things_the_nearest_is_named(kind: TraceKind, name: str, best: str) -> None:
    several = (*hidden("callbacks.a.b"), *hidden("optimizer.calls"), *hidden("data.train.at"), *hidden("model.calls"))
    assert explain(evidence(kind, name, several)).state.startswith(f"{best} ")
