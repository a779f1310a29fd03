"""A resume check finds each planted fault, and names the first step, the state, the likely cause and the cure."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from exact_project import Check


@dataclass(frozen=True)
class Fault:
    """A user's code with a fault in it, and what must be said of it."""

    code: str
    overrides: tuple[str, ...]
    state: str
    cause: str
    cure: str


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.at = self.begin = 0

    def __iter__(self):
        points = Points()
        self.at, self.begin = self.begin, 0
        while self.at < 40:
            self.at += 1
            yield points[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.begin = state["at"]
"""
FAULTS = {
    "a dataset that is random at construction, unseeded": Fault(
        """
class Noisy(Points):
    def __init__(self):
        self.noise = np.random.default_rng().normal(size=40)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + float(self.noise[index])


class Random(Data):
    def __init__(self):
        self.train, self.val = Noisy(), Points()
""",
        ("data._target_=parts.Random",),
        "batch[1]",
        "not seeded, numpy.random.default_rng() at parts.py:",
        "Seed it",
    ),
    "a module with a python counter": Fault(
        """
class Counting(Line):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def guess(self, x):
        self.calls += self.training
        return super().guess(x) * (1 + self.calls / 100)
""",
        ("model._target_=parts.Counting",),
        "model.calls (a python attribute): 1 in the straight run, 0 here",
        "no checkpoint holds it",
        "register_buffer",
    ),
    "a callback without state": Fault(
        """
class Cooling(Callback):
    def __init__(self):
        self.steps = 0

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / self.steps
""",
        ("+callbacks.cooling._target_=parts.Cooling",),
        "callbacks.cooling.steps (an attribute of a callback)",
        "no checkpoint holds it",
        "state_dict()",
    ),
    "an optimizer with hidden state": Fault(
        """
class Heavy(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.velocity = {}

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.velocity[p] = p.grad = p.grad + 0.5 * self.velocity.get(p, 0)
        return super().step(closure)
""",
        ("optimizer._target_=parts.Heavy",),
        "optimizer.velocity (an attribute of the optimizer)",
        "no checkpoint holds it",
        "self.state[parameter]",
    ),
    "a tensor that is made anew at each step, and no buffer": Fault(
        """
class Drifting(Line):
    def __init__(self):
        super().__init__()
        self.offset = torch.zeros(3)

    def guess(self, x):
        if self.training:
            self.offset = self.offset + 0.01
        return super().guess(x) + self.offset.sum()
""",
        ("model._target_=parts.Drifting",),
        "model.offset (a python attribute)",
        "no checkpoint holds it",
        "register_buffer",
    ),
    "an optimizer with a counter that counts at some steps": Fault(
        """
class Resting(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + self.calls // 3)
        return super().step(closure)
""",
        ("optimizer._target_=parts.Resting",),
        "optimizer.calls (an attribute of the optimizer)",
        "no checkpoint holds it",
        "self.state[parameter]",
    ),
    "a callback whose counter acts at the step that is saved": Fault(
        """
class Shrinking(Callback):
    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.calls += 1
        if self.calls % 2 == 0:
            with torch.no_grad():
                model.out.bias.mul_(0.5)
""",
        ("+callbacks.shrinking._target_=parts.Shrinking",),
        "callbacks.shrinking.calls (an attribute of a callback)",
        "no checkpoint holds it",
        "state_dict()",
    ),
    "a generator that the class keeps": Fault(
        """
class Shared(Line):
    noise = torch.Generator().manual_seed(1)

    def guess(self, x):
        return super().guess(x + torch.rand(x.shape, generator=self.noise) / 10 * self.training)
""",
        ("model._target_=parts.Shared",),
        "model.noise (a random generator)",
        "no checkpoint holds it",
        "torch's own generator",
    ),
    "a generator in a closure": Fault(
        """
def noisy():
    generator = torch.Generator().manual_seed(1)

    def add(x):
        return x + torch.rand(x.shape, generator=generator) / 10

    return add


class Closed(Line):
    def __init__(self):
        super().__init__()
        self.add = noisy()

    def guess(self, x):
        return super().guess(self.add(x) if self.training else x)
""",
        ("model._target_=parts.Closed",),
        "model.add.generator (a random generator)",
        "no checkpoint holds it",
        "torch's own generator",
    ),
    "a slot of an object in a list": Fault(
        """
class Warm:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def factor(self, training):
        self.calls += training
        return 1 + self.calls / 100


class Listed(Line):
    def __init__(self):
        super().__init__()
        self.parts = [Warm(), Warm()]

    def guess(self, x):
        return super().guess(x) * self.parts[1].factor(self.training)
""",
        ("model._target_=parts.Listed",),
        "model.parts[1].calls (a python attribute)",
        "no checkpoint holds it",
        "register_buffer",
    ),
    "an augmentation that depends on the worker": Fault(
        """
class Sharded(Points):
    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        x, y = super().__getitem__(index)
        return (x, y) if info is None else (x * (1 + info.id), y)


class ByWorker(Data):
    def __init__(self):
        self.train, self.val = Sharded(), Points()
""",
        ("data._target_=parts.ByWorker", "data.num_workers=2"),
        "batch[0]",
        "with data.num_workers=0 all is exact, torch.utils.data.get_worker_info() at parts.py:",
        "function of its index",
    ),
    "dropout from a generator that is not saved": Fault(
        """
class OwnDropout(Line):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(1)

    def guess(self, x):
        keep = torch.rand(x.shape, generator=self.rng) > 0.2
        return super().guess(x * keep if self.training else x)
""",
        ("model._target_=parts.OwnDropout",),
        "model.rng (a random generator)",
        "no checkpoint holds it",
        "get_extra_state",
    ),
    "dropout from a generator that is not seeded": Fault(
        """
class OwnDropout(Line):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator()
        self.rng.seed()

    def guess(self, x):
        keep = torch.rand(x.shape, generator=self.rng) > 0.2
        return super().guess(x * keep if self.training else x)
""",
        ("model._target_=parts.OwnDropout",),
        "model.rng (a random generator)",
        "not seeded, torch.Generator.seed() at parts.py:",
        "Seed it",
    ),
    "code that depends on the clock": Fault(
        """
class Hurried(Line):
    def guess(self, x):
        return super().guess(x) * (1 + time.perf_counter() % 1)
""",
        ("model._target_=parts.Hurried",),
        "loss",
        "depends on the clock, time.perf_counter() at parts.py:",
        "Count steps",
    ),
    "numbers that follow the order of a set": Fault(
        """
class Vocabulary(Points):
    def __init__(self):
        self.numbers = {word: n for n, word in enumerate({f"word{n}" for n in range(40)})}

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + self.numbers[f"word{index}"]


class Worded(Data):
    def __init__(self):
        self.train, self.val = Vocabulary(), Points()
""",
        ("data._target_=parts.Worded",),
        "data.train.numbers (an attribute of the data)",
        "differs from one process to the next",
        "from the seed and the config alone",
    ),
    "a loader that shuffles by itself": Fault(
        """
class Shuffled:
    def __init__(self):
        self.points, self.rng = Points(), random.Random(0)

    def __len__(self):
        return 10

    def __iter__(self):
        order = list(range(40))
        self.rng.shuffle(order)
        for start in range(0, 40, 4):
            yield torch.utils.data.default_collate([self.points[i] for i in order[start : start + 4]])


class ByItself(Data):
    def __init__(self):
        self.train, self.val = Shuffled(), Points()
""",
        ("data._target_=parts.ByItself", "~data.batch_size"),
        "data.train.rng (a random generator)",
        "no checkpoint holds it",
        "dataset instead of the loader",
    ),
    "an iterable dataset that forgets what it read ahead": Fault(
        STREAM
        + """
class Ahead(Stream):
    def __init__(self):
        super().__init__()
        self.last = 0.0

    def __iter__(self):
        for x, y in super().__iter__():
            x, self.last = x + self.last, float(x[0])
            yield x, y


class AheadData(Data):
    def __init__(self):
        self.train, self.val = Ahead(), Points()
""",
        ("data._target_=parts.AheadData",),
        "batch[0]",
        "Ahead gives other samples when it goes on where state_dict() of it says that it stood",
        "Give it in state_dict() of the dataset",
    ),
    "an iterable dataset whose state_dict gives another position": Fault(
        STREAM
        + """
class Behind(Stream):
    def state_dict(self):
        return {"at": max(0, self.at - 1)}


class BehindData(Data):
    def __init__(self):
        self.train, self.val = Behind(), Points()
""",
        ("data._target_=parts.BehindData",),
        "data.train.at (an attribute of the data)",
        "state_dict() of the dataset does not bring it back",
        "Give it in state_dict() of the dataset",
    ),
    "an iterable dataset with an order of its own, and no state": Fault(
        """

class Wandering(torch.utils.data.IterableDataset):
    def __init__(self):
        self.rng = random.Random(0)

    def __iter__(self):
        points = Points()
        for index in self.rng.sample(range(40), 40):
            yield points[index]


class WanderingData(Data):
    def __init__(self):
        self.train, self.val = Wandering(), Points()
""",
        ("data._target_=parts.WanderingData",),
        "data.train.rng (a random generator)",
        "no checkpoint holds it",
        "or give it state_dict() and load_state_dict()",
    ),
    "persistent workers of a loader that the user brings": Fault(
        """
class Kept(Data):
    def __init__(self):
        super().__init__()
        self.train = torch.utils.data.DataLoader(
            Points(), 4, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
""",
        ("data._target_=parts.Kept", "~data.batch_size"),
        "batch[0]",
        "the persistent workers of DataLoader go on with their random numbers",
        "Give it persistent_workers=False",
    ),
}


ALWAYS = (
    "a module with a python counter",
    "a callback without state",
    "an optimizer with hidden state",
    "a tensor that is made anew at each step, and no buffer",
    "an optimizer with a counter that counts at some steps",
    "a callback whose counter acts at the step that is saved",
    "a generator that the class keeps",
    "a generator in a closure",
    "a slot of an object in a list",
    "code that depends on the clock",
    "a loader that shuffles by itself",
    "an iterable dataset that forgets what it read ahead",
)
PLANTED = list(FAULTS) if os.environ.get("TRAIN_PLANTED") == "all" else list(ALWAYS)
"""Each is a check of about nine processes: scripts/faults plants all."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str, check: Check) -> None:
    fault = FAULTS[name]
    report = check(fault.code, *fault.overrides)
    assert not report.exact
    assert report.finding is not None
    assert fault.state in report.finding.cause.state
    assert fault.cause in report.finding.cause.cause
    assert fault.cure in report.finding.cause.cure
