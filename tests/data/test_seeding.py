"""Seeds of samples: as if python, numpy and torch were seeded for each, also where python and numpy are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, default_collate

from trainer_cli.data.loader import Loader
from trainer_cli.data.order import sample_indices, sample_seed, sample_seeds
from trainer_cli.data.random_state import (
    is_random_state,
    is_random_state_without_torch,
    kept_random_state,
    random_state,
    restore_random_state,
    seed_random,
)
from trainer_cli.data.sample_order import BLOCK, OrderInBlocks
from trainer_cli.data.user_loader import UserLoader

LENGTH, SEED, EPOCH = 23, 3, 1


class Samples:
    """Each sample: its index, and what `draw` returns for it."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw
        self.calls = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[float]:
        self.calls += 1
        return [float(index), float(self.draw(index))]


class Epochal(Samples):
    """A dataset that draws in `set_epoch`."""

    offset = 0.0

    def set_epoch(self, epoch: int) -> None:
        self.offset = epoch + random.random() + np.random.rand() + torch.rand(()).item()

    def __getitem__(self, index: int) -> list[float]:
        return [self.offset + value for value in super().__getitem__(index)]


def strict(index: int) -> float:
    """An augmentation that fails for numbers other than those of the seed of the sample."""
    number = random.random()
    if number != random.Random(sample_seed(SEED, EPOCH, index)).random():
        raise ValueError("not seeded")
    return number


def mixed(samples: list[Any], draw: Callable[[], float]) -> Any:
    return default_collate(samples)[0] + draw()


def mix_python(samples: list[Any]) -> Any:
    return mixed(samples, random.random)


def mix_numpy(samples: list[Any]) -> Any:
    return mixed(samples, np.random.randn)


def mix_torch(samples: list[Any]) -> Any:
    return mixed(samples, lambda: torch.rand(()).item())


DRAWS: dict[str, Callable[[int], Any]] = {
    "draws nothing": lambda index: 0,
    "torch": lambda index: torch.rand(()),
    "python": lambda index: random.random(),
    "python, gauss": lambda index: random.gauss(),
    "numpy": lambda index: np.random.rand(),
    "numpy, gauss": lambda index: np.random.randn(),
    "python at some indices": lambda index: random.random() if index % 7 == 0 else 0,
    "numpy at one index": lambda index: np.random.randn() if index == 11 else 0,
    "all three": lambda index: random.random() + np.random.randn() + torch.randn(()),
    "torch, python at some indices": lambda index: torch.rand(()) + (random.random() if index % 7 == 0 else 0),
    # As albumentations, which derives the seed of its own generators from it.
    "reads the seed": lambda index: torch.initial_seed() % 1_000_003,
    "fails unless it is seeded": strict,
}


def expected(dataset: Samples, collate: Any, size: int, start: int = 0) -> list[Any]:
    """The batches with all generators seeded for each sample."""
    order = sample_indices(SEED, EPOCH, 0, LENGTH, LENGTH)
    batches = []
    with kept_random_state():
        if isinstance(dataset, Epochal):
            seed_random(sample_seed(SEED, EPOCH, 0))
            dataset.set_epoch(EPOCH)
        for first in range(start, LENGTH, size):
            samples = []
            for index in order[first : first + size]:
                seed_random(sample_seed(SEED, EPOCH, index))
                samples.append(dataset[index])
            batches.append(collate(samples))
    return batches


def plain_states() -> tuple[Any, ...]:
    """The states of the generators, as their libraries return them."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return torch.get_rng_state().tolist(), random.getstate(), numpy


@pytest.fixture(autouse=True)
def training_state() -> Any:
    """Generators of a training that has drawn the first of a pair of normal numbers."""
    with kept_random_state():
        seed_random(17)
        np.random.randn(), random.gauss(), torch.randn(())
        yield


CASES: list[Any] = [pytest.param(Samples, draw, None, 0, id=name) for name, draw in DRAWS.items()]
CASES += [
    pytest.param(Samples, DRAWS[draw], collate, 0, id=f"{draw}, {collate.__name__}")
    for draw in ("draws nothing", "torch", "python at some indices")
    for collate in (mix_python, mix_numpy, mix_torch)
]
CASES += [
    pytest.param(kind, DRAWS[draw], collate, 2, id=f"{draw}, two workers, {kind.__name__}")
    for kind, draw, collate in (
        (Samples, "all three", None), (Samples, "python at some indices", None), (Samples, "numpy at one index", None),
        (Samples, "reads the seed", None), (Samples, "torch", mix_numpy), (Epochal, "python", None),
    )
]  # fmt: skip
CASES += [pytest.param(Epochal, DRAWS[draw], None, 0, id=f"set_epoch, {draw}") for draw in ("draws nothing", "python")]


@pytest.mark.parametrize(("kind", "draw", "collate", "workers"), CASES)
def test_samples_are_those_of_generators_that_are_seeded_for_each_sample(
    kind: type[Samples], draw: Any, collate: Any, workers: int
) -> None:
    def read(start: int) -> list[Any]:
        loader = Loader(
            kind(draw), 4, shuffle=True, seed=SEED, num_workers=workers, collate_fn=collate, persistent_workers=False
        )
        return list(loader.iterate(EPOCH, samples=start))

    before = plain_states()
    whole, resumed = read(0), read(8)
    assert plain_states() == before
    reference = expected(kind(draw), collate or default_collate, 4)
    assert str(whole) == str(reference)
    assert str(resumed) == str(reference[2:])


@pytest.mark.parametrize(("name", "calls"), [("draws nothing", 23), ("torch", 23), ("python", 27), ("numpy", 27)])
def test_only_the_first_batch_that_draws_from_python_or_numpy_is_loaded_twice(name: str, calls: int) -> None:
    dataset = Samples(DRAWS[name])
    list(Loader(dataset, 4, shuffle=True, seed=SEED).iterate(EPOCH))
    assert dataset.calls == calls


@pytest.mark.parametrize("name", [*DRAWS][:-1])
def test_an_interrupt_while_a_sample_is_loaded_leaves_the_generators_as_they_were(name: str) -> None:
    def draw(index: int) -> Any:
        DRAWS[name](index)
        raise KeyboardInterrupt

    before = plain_states()
    with pytest.raises(KeyboardInterrupt):
        list(Loader(Samples(draw), 4, shuffle=True, seed=SEED).iterate(EPOCH))
    assert plain_states() == before


@pytest.mark.parametrize("name", [*DRAWS][:-1])
def test_a_users_loader_leaves_the_generators_as_they_were(name: str) -> None:
    class Drawing:
        def __iter__(self) -> Any:
            return (float(DRAWS[name](index)) for index in range(13))

    before = plain_states()
    batches = list(UserLoader(Drawing(), seed=SEED).iterate(EPOCH))
    assert plain_states() == before
    assert list(UserLoader(Drawing(), seed=SEED).iterate(EPOCH, batch=5)) == batches[5:]


class PythonSampler(Sampler[int]):
    """A sampler that draws from python's and numpy's generators, one number at a time."""

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield random.randrange(LENGTH // 2) + np.random.randint(LENGTH // 2)


BATCH_NUMBERS = {
    generator.random()
    for number in range(7)
    for generator in [random.Random(sample_seed(SEED, EPOCH, number))]
    for _ in range(4)
}


def strict_in_batch(index: int) -> float:
    """An augmentation that fails for numbers other than those of the seeds of the batches."""
    number = random.random()
    if number not in BATCH_NUMBERS:
        raise ValueError("not seeded")
    return number


USERS_DRAWS = {**DRAWS, "fails unless it is seeded": strict_in_batch}
LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda data: {"batch_size": 4},
    "shuffled": lambda data: {"batch_size": 4, "shuffle": True},
    "shuffled by a generator": lambda data: {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    "single samples": lambda data: {"batch_size": None},
    "single samples, a sampler that draws from python": lambda data: {
        "batch_size": None, "sampler": PythonSampler(data),
    },
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data, replacement=True), 4, True)},
    "nested batch sampler": lambda data: {
        "batch_sampler": BatchSampler(cast(Any, BatchSampler(PythonSampler(data), 1, False)), 4, False),
        "collate_fn": str,
    },
    "a sampler that draws from python": lambda data: {"batch_size": 4, "sampler": PythonSampler(data)},
    "two workers": lambda data: {"batch_size": 4, "shuffle": True, "num_workers": 2},
    "two workers, a sampler that draws from python": lambda data: {
        "batch_size": 4, "sampler": PythonSampler(data), "num_workers": 2,
    },
}  # fmt: skip


class Listed(Samples):
    """Its samples are read a batch at a time."""

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0] if isinstance(index, int) else self.__getitems__(index)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        flat = [index if isinstance(index, int) else index[0] for index in indices]
        return [[float(index), float(self.draw(index))] for index in flat]


@pytest.mark.parametrize(
    ("name", "settings", "collate"),
    [
        *((name, "shuffled", None) for name in USERS_DRAWS),
        *(("draws nothing", "shuffled", collate) for collate in (mix_python, mix_numpy, mix_torch)),
        *(("python at some indices", settings, None) for settings in LOADERS),
        *(("torch", settings, None) for settings in LOADERS if "two" not in settings),
    ],
)
def test_batches_of_a_users_loader_are_those_of_generators_that_are_seeded_for_each_batch(
    name: str, settings: str, collate: Any
) -> None:
    def made() -> Any:
        dataset: Any = Listed(USERS_DRAWS[name])
        return DataLoader(dataset, **({"collate_fn": collate} | LOADERS[settings](dataset)))

    before = plain_states()
    batches = list(UserLoader(made(), seed=SEED).iterate(EPOCH))
    resumed = list(UserLoader(made(), seed=SEED).iterate(EPOCH, batch=2, samples=2 if "single" in settings else 8))
    assert plain_states() == before
    seed_random(sample_seed(SEED, EPOCH, 0))
    iterator = iter(made())
    reference = []
    for number in range(len(made())):
        seed_random(sample_seed(SEED, EPOCH, number + 1))
        reference.append(next(iterator))
    assert str(batches) == str(reference)
    assert str(resumed) == str(reference[2:])


def test_a_profiler_sees_the_batches_of_a_users_loader() -> None:
    dataset: Any = Samples(DRAWS["python"])
    batches = UserLoader(DataLoader(dataset, 4), seed=SEED).iterate(EPOCH)
    next(batches)
    with torch.autograd.profiler.profile() as profile:
        profiled = [next(batches) for _ in range(2)]
    assert sum("DataLoader" in event.key for event in profile.key_averages()) == 1
    alone = list(UserLoader(DataLoader(dataset, 4), seed=SEED).iterate(EPOCH))
    assert str(profiled) == str(alone[1:3])


@pytest.mark.parametrize(("name", "calls"), [("draws nothing", 23), ("torch", 23), ("python", 27), ("numpy", 27)])
def test_a_users_loader_loads_only_the_first_batch_that_draws_from_python_or_numpy_twice(name: str, calls: int) -> None:
    dataset: Any = Samples(DRAWS[name])
    list(UserLoader(DataLoader(dataset, 4), seed=SEED).iterate(EPOCH))
    assert dataset.calls == calls


TOUCHES: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, as many draws as words": lambda: [random.getrandbits(32) for _ in range(624)],
    "python, second of a pair": random.gauss,
    "python, seed": lambda: random.seed(1),
    "numpy": np.random.rand,
    "numpy, as many draws as words": lambda: np.random.bytes(4 * 624),
    "numpy, second of a pair": np.random.randn,
    "numpy, two pairs": lambda: np.random.randn(4),
    "numpy, binomial": lambda: np.random.binomial(10, 0.3),
    "numpy, seed": lambda: np.random.seed(1),
    "torch": lambda: torch.rand(()),
    "torch, normal": lambda: torch.randn(3),
    "torch, double": lambda: torch.randn(1, dtype=torch.float64),
}


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_draw_is_noticed_and_undone(touch: str, bits: Any) -> None:
    generator = np.random.mtrand.get_bit_generator()
    try:
        if bits is not np.random.MT19937:
            if touch == "numpy, seed":
                pytest.skip("PCG64 has no legacy seed")
            np.random.mtrand.set_bit_generator(bits(5))
            np.random.randn()
        for _ in range(2):
            before, state = plain_states_of(bits), random_state()
            assert is_random_state(state)
            TOUCHES[touch]()
            assert not is_random_state(state)
            assert is_random_state_without_torch(state) == touch.startswith("torch")
            restore_random_state(state)
            # Numpy keeps constants of the last binomial distribution beside the state.
            assert is_random_state(state) or "binomial" in touch
            assert plain_states_of(bits) == before
    finally:
        np.random.mtrand.set_bit_generator(generator)


def plain_states_of(bits: Any) -> Any:
    if bits is np.random.MT19937:
        return plain_states()
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)


def test_a_state_is_read_again_after_a_draw_of_the_training() -> None:
    for draw in (random.random, random.gauss, np.random.rand, np.random.randn, lambda: torch.rand(())):
        for _ in range(3):
            draw()
            before, state = plain_states(), random_state()
            seed_random(5)
            np.random.randn()
            restore_random_state(state)
            assert plain_states() == before


# Blocks of the order: the same numbers as those of `core.order`, computed one by one.


@pytest.mark.parametrize("length", [1, 2, 23, 1023, 1024, 1025, 5000, 1_000_003, 10**12 + 7])
def test_blocks_hold_the_published_order_and_seeds(length: int) -> None:
    order = OrderInBlocks(seed := 7, length, shuffle=True)
    starts = {0, length // 2, max(0, length - 40), min(length, BLOCK - 5), max(0, length // BLOCK * BLOCK - 5)}
    for epoch in (0, 3):
        for start in starts:
            stop = min(start + 40, length)
            indices = sample_indices(seed, epoch, start, stop, length)
            assert order.read(epoch, start, stop) == (indices, sample_seeds(seed, epoch, indices))


def test_a_batch_may_be_larger_than_a_block() -> None:
    assert OrderInBlocks(-1, 5000, shuffle=True).read(2, 700, 4000)[0] == sample_indices(-1, 2, 700, 4000, 5000)


def test_without_shuffle_the_order_is_that_of_the_positions() -> None:
    numbers = list(range(1000, 1050))
    assert OrderInBlocks(7, 5000, shuffle=False).read(1, 1000, 1050) == (numbers, sample_seeds(7, 1, numbers))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (8, 11)])
def test_a_position_beyond_the_length_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="do not lie within 10 samples"):
        OrderInBlocks(0, 10, shuffle=True).read(0, start, stop)
