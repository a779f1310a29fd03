"""A resume check finds each planted fault, and names the first step, the state, the likely cause and the cure."""

from __future__ import annotations

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
    "a callback that clears the momentum at each start": Fault(
        """
class Cold(Callback):
    def on_train_start(self, trainer, model, *_):
        if trainer.is_first_iteration or trainer.step.step_idx < 0:
            for state in trainer.optimizer.state.values():
                state["momentum_buffer"] = None
""",
        (
            "+callbacks.cold._target_=parts.Cold",
            "optimizer=null",
            "optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 0.9}",
        ),
        "optimizer.state.hidden.weight.momentum_buffer",
        "changed before the first step, in which callbacks.cold.on_train_start is called",
        "trainer.progress.step == 0",
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
        "Ahead gives other samples when it continues from its state_dict()",
        "Give it in state_dict() of the dataset",
    ),
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
        "the persistent workers of DataLoader keep their random generators",
        "Give it persistent_workers=False",
    ),
}


CAMPAIGN = (
    "a callback that clears the momentum at each start",
    "a callback whose counter acts at the step that is saved",
    "a dataset that is random at construction, unseeded",
    "an augmentation that depends on the worker",
    "an optimizer with a counter that counts at some steps",
    "numbers that follow the order of a set",
    "persistent workers of a loader that the user brings",
)
"""Each fault is a check of about nine processes. Which cause is named for which evidence: test_causes.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if name in CAMPAIGN else []) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_named(name: str, check: Check) -> None:
    fault = FAULTS[name]
    two = name == "numbers that follow the order of a set"
    report = check(fault.code, *fault.overrides, steps=12, two_hash_seeds=two)
    assert not report.exact
    assert report.finding is not None
    assert fault.state in report.finding.cause.state
    assert fault.cause in report.finding.cause.cause
    assert fault.cure in report.finding.cause.cure
