"""Digests of samples: other samples have others, the same samples the same, and reading them changes nothing."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from trainer_cli.data import digest
from trainer_cli.data.adapt import as_loader
from trainer_cli.data.digest import digest_of, other_samples, sample_digests
from trainer_cli.origin.compare import count_samples

NUMBERS = np.random.default_rng(0).normal(size=(3, 32, 32))


class Colour(Enum):
    red = 1
    blue = 2


@dataclasses.dataclass
class Boxed:
    image: Any
    name: str


class Opaque:
    """Has an address in its text."""


def _images(scale: float = 1.0) -> Image.Image:
    return Image.fromarray((np.clip(np.abs(NUMBERS[0]) * scale, 0, 1) * 255).astype(np.uint8))


OTHER: list[tuple[Any, Any]] = [
    (1, 2),
    (1, True),
    (1.0, 1.1),
    ("a cat", "a dog"),
    (b"a", b"b"),
    (None, 0),
    (Colour.red, Colour.blue),
    ([1, 2], [2, 1]),
    ((1, 2), (1, 2, 3)),
    ({"x": 1}, {"x": 2}),
    ({"x": 1}, {"y": 1}),
    ({1, 2}, {1, 3}),
    (torch.arange(4), torch.arange(4).flip(0)),
    (torch.arange(4), torch.arange(4, dtype=torch.int32)),
    (torch.ones(2, 3), torch.ones(3, 2)),
    (torch.tensor(float("nan")), torch.tensor(0.0)),
    (torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
    (torch.ones(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64)),
    (torch.from_numpy(NUMBERS), torch.from_numpy(NUMBERS).flip(-1)),
    (NUMBERS, -NUMBERS),
    (_images(), _images(0.98)),
    (Boxed(NUMBERS, "a"), Boxed(NUMBERS, "b")),
    (np.array(["a", "b"]), np.array(["a", "c"])),
    (np.float32(1), np.float32(2)),
]


@pytest.mark.parametrize("number", range(len(OTHER)))
def test_other_samples_have_other_digests(number: int) -> None:
    one, other = OTHER[number]
    digests = [{"train": {"0": digest_of(sample)}} for sample in (one, other, one)]
    assert other_samples(digests[0], digests[1]) == ["sample 0 of train"]
    assert other_samples(digests[0], digests[2]) == []


SAME: dict[str, tuple[Any, Any]] = {
    "the last digits of a float": (NUMBERS, NUMBERS * (1 + 1e-6)),
    "a number of another computation": (0.1 + 0.2, 0.3),
    "the same set in another order": ({"a", "b", "c"}, {"c", "b", "a"}),
    "a mapping in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "a file in another folder": ("/home/me/images/1.png", "/scratch/images/1.png"),
    "a path in another folder": (Path("/home/me/1.png"), Path("/scratch/1.png")),
    "objects of an unknown class": (Opaque(), Opaque()),
    "a pixel of a resized image": (_images(), Image.fromarray(np.asarray(_images()) ^ np.eye(32, dtype=np.uint8))),
    "nothing": ([], []),
    "an empty tensor": (torch.empty(0, 3), torch.empty(0, 3)),
    "sparse tensors": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("what", SAME)
def test_what_another_machine_computes_otherwise_has_the_same_digest(what: str) -> None:
    one, other = ({"val": {"3": digest_of(sample)}} for sample in SAME[what])
    assert other_samples(one, other) == []


class Samples(Dataset[Any]):
    """Ten samples that a function makes."""

    def __init__(self, make: Callable[[int], Any], length: int = 10) -> None:
        self.make, self.length, self.reads = make, length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.reads += 1
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def _digests(dataset: Any, **settings: Any) -> Mapping[str, str]:
    return sample_digests({"train": as_loader(dataset, shuffle=True, seed=1, **settings)}).get("train", {})


def test_samples_of_random_numbers_have_the_same_digest_whatever_was_drawn_before() -> None:
    augmented = Samples(lambda index: (index, torch.rand(3), np.random.rand(), random.random()))
    first = _digests(augmented)
    torch.rand(5), np.random.rand(), random.random()
    assert other_samples({"train": _digests(augmented)}, {"train": first}) == []
    assert list(first) == ["0", "1", "2", "3", "5", "6", "7", "9"]
    other_seed = sample_digests({"train": as_loader(augmented, shuffle=True, seed=2)})
    assert other_samples(other_seed, {"train": first}) == ["sample 0 of train"]


def test_reading_samples_changes_neither_random_state_nor_the_dataset() -> None:
    dataset = Samples(lambda index: torch.rand(2))
    before = torch.get_rng_state(), random.getstate(), cast("Any", np.random.get_state())[1].tolist()
    assert _digests(dataset)
    after = torch.get_rng_state(), random.getstate(), cast("Any", np.random.get_state())[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert dataset.reads == 0


def _fail(index: int) -> Any:
    raise ZeroDivisionError(index)


def _take_long(index: int) -> int:
    time.sleep(0.1 * index)
    return index


def _end(index: int) -> Any:
    raise SystemExit(index)


def _private() -> Any:
    generator = np.random.default_rng()
    return Samples(lambda index: generator.random())


def _fingerprinted() -> Any:
    dataset = Samples(lambda index: index)
    cast("Any", dataset).fingerprint = "abc"
    return dataset


class PerRank(Samples):
    per_rank = True


LEFT_OUT: dict[str, Callable[[], Any]] = {
    "a generator of its own": _private,
    "a clock": lambda: Samples(lambda index: time.perf_counter_ns()),
    "an error": lambda: Samples(_fail),
    "the end of the process": lambda: Samples(_end),
    "a sample that does not come": lambda: Samples(lambda index: time.sleep(3600)),
    "a stream": Stream,
    "a list of batches": lambda: DataLoader(Stream(), 2),
    "a loader without a dataset": lambda: type("Batches", (), {"__iter__": lambda self: iter([1])})(),
    "a fingerprint": _fingerprinted,
    "a fingerprint behind a DataLoader": lambda: DataLoader(_fingerprinted(), 2),
    "samples of each rank": lambda: DataLoader(PerRank(lambda index: index), 2),
    "a DistributedSampler": lambda: DataLoader(
        Samples(lambda index: index),
        sampler=DistributedSampler(cast("Any", range(4)), 2, 0),
    ),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_cannot_be_compared_has_no_digest(what: str) -> None:
    assert sample_digests({"train": as_loader(LEFT_OUT[what](), shuffle=False, seed=0)}, limit_s=0.5) == {}


def test_a_slow_dataset_has_digests_of_the_samples_that_were_read_in_time() -> None:
    slow = as_loader(Samples(_take_long), shuffle=False, seed=0)
    digests = sample_digests({"train": slow}, limit_s=0.5)["train"]
    assert 0 < len(digests) < digest.SAMPLES


def test_other_systems_read_samples_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = {"train": as_loader(Samples(lambda index: torch.rand(2)), shuffle=False, seed=0)}
    forked, before = sample_digests(loaders), torch.get_rng_state()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sample_digests(loaders) == forked
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_of_a_dataloader_and_of_an_own_order_are_digested() -> None:
    data = TensorDataset(torch.arange(20))
    assert len(_digests(DataLoader(data, 4, num_workers=1))) == digest.SAMPLES

    class Ordered(Samples):
        def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> list[int]:
            return [9 - position for position in range(start, stop)]

    assert _digests(Ordered(lambda index: index))["0"] == digest_of(9)


def test_only_samples_that_both_have_are_compared() -> None:
    now, before = {"train": {"0": "a", "5": "b"}}, {"train": {"5": "c", "7": "d"}, "val": {"0": "a"}}
    assert other_samples(now, before) == ["sample 5 of train"]
    assert other_samples({}, before) == []
    fingerprints = {"val": {"fingerprint": "of one"}}, {"val": {"fingerprint": "of two"}}
    assert other_samples(*fingerprints) == ["fingerprint of val"]
    assert other_samples(fingerprints[0], fingerprints[0]) == []


@pytest.mark.parametrize(
    ("data", "length"), [(Samples(int, 7), 7), (DataLoader(Samples(int, 9), 2), 9), (Stream(), None), ([1, 2], 2)]
)
def test_the_number_of_samples_is_that_of_the_dataset(data: Any, length: int | None) -> None:
    assert count_samples(as_loader(data, shuffle=False, seed=0)) == length
