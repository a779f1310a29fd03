"""Batches: the same from any sample on, with any number of workers, and nothing else disturbed."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

from trainer_cli.core.order import ORDER_VERSION, sample_indices, sample_seed
from trainer_cli.data.adapt import as_loader
from trainer_cli.data.datasets import Digits
from trainer_cli.data.loader import Loader, PaddingBatch
from trainer_cli.data.position import STATE_VERSION, kept_random_state, seed_random, timeout_seconds
from trainer_cli.data.stream import StreamLoader
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.errors import UserError


class Drawing(Dataset[torch.Tensor]):
    """Each sample: its index, and a number from each of the three generators."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand()), float(np.random.randn())]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Plain:
    """Samples without random numbers, given by list."""

    deterministic = True
    fingerprint = "plain-1"

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a deterministic dataset with __getitems__ is read by list")

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        self.asked.append(list(indices))
        return list(indices)


class Failing(Drawing):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise FileNotFoundError("no such picture")
        return super().__getitem__(index)


def shaken(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws too, as mixing samples does."""
    return torch.stack(samples) + torch.rand(()) + random.random() + np.random.rand()


def random_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:])  # type: ignore[index,union-attr]


def batches(loader: Loader | StreamLoader | UserLoader, epoch: int, **position: int) -> list[Any]:
    return [[] if isinstance(one, PaddingBatch) else one.tolist() for one in loader.iterate(epoch, **position)]


def samples(loader: Loader, epoch: int, start: int = 0) -> list[Any]:
    return [sample for batch in batches(loader, epoch, samples=start) for sample in batch]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resume_at_any_sample_gives_what_going_on_would_have_given(shuffle: bool) -> None:
    loader = Loader(Drawing(), 4, shuffle=shuffle, seed=3)
    for epoch in (0, 7):
        whole = batches(loader, epoch)
        for done in range(len(whole) + 1):
            assert batches(loader, epoch, samples=4 * done) == whole[done:]
        flat = [sample for batch in whole for sample in batch]
        for start in range(24):
            assert samples(loader, epoch, start) == flat[start:]


def test_workers_change_nothing() -> None:
    here = Loader(Drawing(), 4, shuffle=True, seed=3)
    elsewhere = Loader(Drawing(), 4, shuffle=True, seed=3, num_workers=2)
    for start in (0, 4, 9, 20, 22, 23):
        assert samples(elsewhere, 1, start) == samples(here, 1, start)
    assert batches(elsewhere, 2) == batches(here, 2)


def test_real_augmentation_is_resumed_exactly_with_and_without_workers() -> None:
    digits = Digits(val_fraction=0.95).train
    here = Loader(digits, 16, shuffle=True, seed=1)
    workers = Loader(digits, 16, shuffle=True, seed=1, num_workers=2)
    whole = list(here.iterate(4))
    for loader, done in ((here, 0), (here, 3), (workers, 0), (workers, 3)):
        for (images, labels), (other_images, other_labels) in zip(
            loader.iterate(4, samples=16 * done), whole[done:], strict=True
        ):
            assert torch.equal(images, other_images)
            assert torch.equal(labels, other_labels)
    assert not torch.equal(whole[0][0], next(here.iterate(5))[0])


def test_random_collating_is_resumed_exactly_with_and_without_workers() -> None:
    for dataset in (Drawing(), Constant()):
        whole = batches(Loader(dataset, 4, shuffle=True, seed=0, collate_fn=shaken), 0)
        for workers in (0, 2):
            loader = Loader(dataset, 4, shuffle=True, seed=0, collate_fn=shaken, num_workers=workers)
            assert batches(loader, 0, samples=8) == whole[2:]
        assert len({str(batch) for batch in whole}) == len(whole)


class Constant:
    deterministic = True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.float64)


def test_the_order_is_the_published_function_and_the_seeds_too() -> None:
    drawn = samples(Loader(Drawing(), 5, shuffle=True, seed=9), 2)
    assert [int(sample[0]) for sample in drawn] == sample_indices(9, 2, 0, 23, 23)
    for index, tensor, python, numpy, gauss in drawn:
        seed = sample_seed(9, 2, int(index))
        with kept_random_state():
            seed_random(seed)
            assert (tensor, python) == (torch.rand(()).item(), random.random())
            assert (numpy, gauss) == (np.random.rand(), np.random.randn())


def test_another_batch_size_goes_on_in_the_same_order() -> None:
    before = Loader(Drawing(), 4, shuffle=True, seed=3)
    after = Loader(Drawing(), 7, shuffle=True, seed=3)
    assert samples(after, 0, 8) == samples(before, 0)[8:]


def test_epochs_and_seeds_differ() -> None:
    orders = [samples(Loader(Drawing(), 4, shuffle=True, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Drawing(), Plain(24), Failing()])
def test_the_random_state_of_the_training_is_not_touched(dataset: Any, workers: int) -> None:
    loader = Loader(dataset, 4, shuffle=True, seed=3, num_workers=workers)
    np.random.randn()  # leaves a second normal number in store, which is part of the state
    before = random_states()
    iterator = loader.iterate(0)
    try:
        for _ in range(len(loader)):
            next(iterator)
            assert random_states() == before
    except FileNotFoundError:
        assert isinstance(dataset, Failing)
    iterator.close()
    assert random_states() == before


def test_a_deterministic_dataset_is_read_by_list_and_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr("trainer_cli.data.loader.seed_random", refuse)
    dataset = Plain()
    assert batches(Loader(dataset, 4, shuffle=False, seed=0), 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Reading(Drawing):
    """Read by list, as a dataset of Hugging Face; samples from `random_from` on draw random numbers."""

    def __init__(self, random_from: int) -> None:
        super().__init__()
        self.random_from = random_from
        self.single = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.single += 1
        return self.read(index)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert type(indices) is list
        return [self.read(index) for index in indices]

    def read(self, index: int) -> torch.Tensor:
        if index < self.random_from:
            return torch.tensor([index, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
        return Drawing.__getitem__(self, index)


class Single(Reading):
    """The same samples, read one by one."""

    __getitems__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("collate", [None, shaken])
@pytest.mark.parametrize("random_from", [0, 15, 99], ids=["random", "some of them random", "not random"])
def test_samples_read_by_list_are_those_read_one_by_one(random_from: int, collate: Any) -> None:
    def read(dataset: Any, size: int, start: int = 0) -> list[Any]:
        return samples(Loader(dataset, size, shuffle=True, seed=3, collate_fn=collate), 1, start)

    expected = read(Single(random_from), 4)
    assert read(Reading(random_from), 4) == expected
    assert read(Reading(random_from), 4, start=8) == expected[8:]
    assert read(Subset(Reading(random_from), range(23)), 4) == expected
    if collate is None:
        assert read(Reading(random_from), 7) == expected, "whatever the batch"


def test_a_dataset_that_draws_no_random_numbers_is_read_by_list_alone() -> None:
    dataset = Reading(random_from=99)
    samples(Loader(dataset, 4, shuffle=True, seed=3), 0)
    assert dataset.single == 0
    drawing = Reading(random_from=0)
    samples(Loader(drawing, 4, shuffle=True, seed=3), 0)
    assert drawing.single == 23


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_length_and_drop_last(drop_last: bool, sizes: list[int]) -> None:
    loader = Loader(Plain(), 4, shuffle=True, seed=0, drop_last=drop_last)
    assert [len(batch) for batch in batches(loader, 0)] == sizes
    assert len(loader) == len(sizes)
    assert batches(loader, 0, samples=sum(sizes)) == []
    assert batches(loader, 0, samples=1000) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0}, {"batch_size": True}, {"batch_size": 2.5}, {"num_workers": -1},
        {"batch_size": 11, "drop_last": True},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_the_users_mistake(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Loader(Plain(), **{"shuffle": True, "seed": 0, **settings})


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="there are 0 samples"):
        Loader(Plain(0), shuffle=True, seed=0)


def test_an_epoch_is_not_entered_before_its_start() -> None:
    with pytest.raises(ValueError, match="before its start"):
        Loader(Plain(), shuffle=True, seed=0).iterate(0, samples=-1)
    with pytest.raises(ValueError, match="before its start"):
        UserLoader([1], seed=0).iterate(0, batch=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_dataset_keeps_its_type_and_names_the_sample(workers: int) -> None:
    loader = Loader(Failing(), 4, shuffle=True, seed=3, num_workers=workers)
    with pytest.raises(FileNotFoundError, match="no such picture") as caught:
        list(loader.iterate(6))
    message = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while loading sample 5 of epoch 6" in message


def test_an_error_in_collating_names_the_samples() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise TypeError("cannot be stacked")

    with pytest.raises(TypeError) as caught:
        next(Loader(Plain(), 2, shuffle=False, seed=0, collate_fn=refuse).iterate(1))
    assert caught.value.__notes__ == ["while collating samples [0, 1] of epoch 1"]


def test_the_state_says_where_and_of_what() -> None:
    state = Loader(Plain(), shuffle=True, seed=5).state_dict(2, 64)
    assert state == {
        "version": STATE_VERSION, "order": ORDER_VERSION, "seed": 5, "epoch": 2, "sample_offset": 64, "length": 10,
        "fingerprint": "plain-1",
    }  # fmt: skip


def test_a_position_is_taken_up_with_another_batch_size_and_other_workers() -> None:
    state = Loader(Plain(), 4, shuffle=True, seed=5).state_dict(2, 4)
    Loader(Plain(), 3, shuffle=True, seed=5, num_workers=2).check_state(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 6}, "seed was 6 and is 5"),
        ({"length": 11}, "length was 11 and is 10"),
        ({"fingerprint": "other"}, "fingerprint was 'other' and is 'plain-1'"),
        ({"order": "feistel-0"}, "order was 'feistel-0'"),
        ({"order": "sequential"}, "order was 'sequential'"),
        ({"version": 1, "length": 9}, "version was 1 and is 3; length was 9 and is 10"),
    ],
)
def test_a_position_in_other_data_is_refused(changed: dict[str, Any], message: str) -> None:
    loader = Loader(Plain(), shuffle=True, seed=5)
    with pytest.raises(UserError, match=message):
        loader.check_state(loader.state_dict(2, 4) | changed)


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(UserError):
        Loader(Plain(), shuffle=True, seed=0).check_state(UserLoader([1], seed=0).state_dict(0))
    with pytest.raises(UserError):
        UserLoader([1], seed=0).check_state(Loader(Plain(), shuffle=True, seed=0).state_dict(0))


# Ranks


def on_ranks(world_size: int, epoch: int, start: int, batch_size: int = 4, **settings: Any) -> list[list[Any]]:
    """For each rank, its batches from a sample of all on."""
    return [
        batches(
            Loader(Drawing(), batch_size, shuffle=True, seed=3, rank=rank, world_size=world_size, **settings),
            epoch,
            samples=start,
        )
        for rank in range(world_size)
    ]


def joined(ranks: list[list[Any]]) -> list[Any]:
    """The samples in the order of the whole: each global batch is the ranks' batches, in the order of ranks."""
    return [sample for turn in zip(*ranks, strict=True) for batch in turn for sample in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_ranks_share_one_order_and_have_equally_many_batches(world_size: int, batch_size: int) -> None:
    whole = samples(Loader(Drawing(), 4, shuffle=True, seed=3), 1)
    for start in range(23):
        ranks = on_ranks(world_size, 1, start, batch_size)
        assert joined(ranks) == whole[start:]
        sizes = {len(batch) for own in ranks for batch in own[:-1]}
        assert sizes <= {batch_size}
        last = [len(own[-1]) for own in ranks]
        assert max(last) - min(last) <= 1
        assert last[0] > 0


def test_a_run_goes_on_with_another_number_of_ranks_in_the_same_order() -> None:
    whole = samples(Loader(Drawing(), 2, shuffle=True, seed=3), 5)
    for first in range(0, 12, 2):
        for turns in range(1, 3):
            begun = samples(Loader(Drawing(), 2, shuffle=True, seed=3), 5)[:first]
            middle = [own[:turns] for own in on_ranks(2, 5, first, 2)]
            seen = begun + joined(middle)
            rest = samples(Loader(Drawing(), 2, shuffle=True, seed=3), 5, len(seen))
            assert seen + rest == whole


@pytest.mark.parametrize(
    ("length", "drop_last", "sizes"),
    [
        (23, False, [[4, 4, 4], [4, 4, 3]]),
        (17, False, [[4, 4, 1], [4, 4, 0]]),
        (16, False, [[4, 4], [4, 4]]),
        (17, True, [[4, 4], [4, 4]]),
        (23, True, [[4, 4], [4, 4]]),
        (3, False, [[2], [1]]),
        (1, False, [[1], [0]]),
    ],
)
def test_what_is_left_over_is_cut_evenly(length: int, drop_last: bool, sizes: list[list[int]]) -> None:
    for rank, own in enumerate(sizes):
        loader = Loader(
            Plain(length), 4, shuffle=True, seed=0, drop_last=drop_last, rank=rank, world_size=2, num_workers=0
        )
        assert [len(batch) for batch in batches(loader, 0)] == own
        assert len(loader) == loader.batches_after(0) == len(own)
        assert loader.batches_after(8) == len(own) - 1


def test_too_few_samples_and_wrong_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="there are 2 samples, not enough for one batch of 12"):
        Loader(Plain(2), 4, shuffle=True, seed=0, world_size=3, drop_last=True)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Loader(Plain(), shuffle=True, seed=0, rank=2, world_size=2)


@pytest.mark.parametrize("length", [8, 9, 10, 11])
@pytest.mark.parametrize("kind", ["loader", "stream", "user", "unsized"])
def test_ranks_share_any_loader_without_losing_or_doubling_a_batch(length: int, kind: str) -> None:
    data: Any = {
        "loader": lambda: Loader(Plain(length), 1, shuffle=True, seed=3),
        "stream": lambda: StreamLoader(Stream(length), 1, seed=3),
        "user": lambda: DataLoader(Plain(length), 1),
        "unsized": lambda: Unsized(length),
    }[kind]
    whole = batches(as_loader(data(), shuffle=True, seed=3), 1)
    ranks = [as_loader(data(), shuffle=True, seed=3, rank=rank, world_size=3) for rank in range(3)]
    found = [batches(one, 1) for one in ranks]
    assert [batch for turn in zip(*found, strict=True) for batch in turn if batch] == whole
    with contextlib.suppress(TypeError):
        assert {len(one) for one in ranks} == {len(found[0])}
    # From the second batch of each rank on, also where the loader walks or replays.
    assert [batch for batch in batches(ranks[1], 1, batch=1, samples=3) if batch] == whole[4::3]


def test_a_distributed_sampler_has_shared_the_samples_already() -> None:
    loader = DataLoader(Plain(8), 2, sampler=DistributedSampler(Plain(8), num_replicas=2, rank=1, shuffle=False))
    found = as_loader(loader, shuffle=True, seed=0, rank=1, world_size=2)
    assert [batch.tolist() for batch in found.iterate(0)] == [[1, 3], [5, 7]]
    assert as_loader(found, shuffle=True, seed=0, rank=1, world_size=2) is found


def test_an_iterable_that_every_rank_reads_is_said_to_be_so_unless_it_has_per_rank() -> None:
    class Mine(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(6))

    data = Mine()
    for made in (data, DataLoader(data, 1)):
        shared = as_loader(made, shuffle=False, seed=0, rank=1, world_size=2)
        assert shared.promise.startswith("Each of 2 ranks reads all batches, and trains on one in 2.")
        assert "has no position of its own" in shared.promise
    data.per_rank = True  # type: ignore[attr-defined]
    for made in (data, DataLoader(data, 1)):
        own = as_loader(made, shuffle=False, seed=0, rank=1, world_size=2)
        assert "ranks" not in own.promise
        assert sum(len(batch) for batch in own.iterate(0)) == 6


# An order that the dataset brings


class Backwards(Drawing):
    """Its own order: from the end, with words for keys."""

    order_version = "backwards-1"

    def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> list[str]:
        return [str(self.length - 1 - position) for position in range(start, stop)]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(int(index))


def test_a_dataset_may_bring_its_own_order() -> None:
    loader = Loader(Backwards(), 4, shuffle=True, seed=3)
    whole = samples(loader, 1)
    assert [sample[0] for sample in whole] == list(range(22, -1, -1))
    assert samples(loader, 1, 9) == whole[9:]
    assert samples(Loader(Backwards(), 5, shuffle=True, seed=3, num_workers=2), 1, 9) == whole[9:]
    assert loader.state_dict(0)["order"] == "backwards-1"
    # Its random numbers belong to the position.
    with kept_random_state():
        seed_random(sample_seed(3, 1, 4))
        assert whole[4][1] == torch.rand(()).item()


# A loader that the user brings


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_dataloader_is_replayed_exactly_whatever_the_training_draws(workers: int) -> None:
    def made() -> UserLoader:
        return UserLoader(DataLoader(Drawing(), 4, shuffle=True, num_workers=workers), seed=3)

    through = []
    for epoch in (0, 1):
        for batch in made().iterate(epoch):
            through.append(batch.tolist())
            torch.rand(3), random.random(), np.random.rand()
    assert len({str(batch) for batch in through}) == 12
    for done in (0, 1, 5, 6):
        torch.manual_seed(done)
        assert batches(made(), 1, batch=done, samples=4 * done) == through[6 + done :]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("of", ["loader", "sampler", "both"])
def test_a_users_own_torch_generator_goes_on_where_it_was(of: str, workers: int) -> None:
    def made() -> UserLoader:
        generator = torch.Generator().manual_seed(7)
        choices: dict[str, dict[str, Any]] = {
            "loader": {"shuffle": True, "generator": generator},
            "sampler": {"sampler": RandomSampler(Drawing(), generator=generator)},
            "both": {"sampler": RandomSampler(Drawing(), generator=generator), "generator": generator},
        }
        return UserLoader(DataLoader(Drawing(), 4, num_workers=workers, **choices[of]), seed=3)

    through: list[Any] = []
    states: list[tuple[dict[str, Any], int]] = []
    loader = made()
    for epoch in (0, 1):
        states.append((loader.state_dict(epoch), len(through)))
        for number, batch in enumerate(loader.iterate(epoch), start=1):
            through.append(batch.tolist())
            if number in (1, 5):
                states.append((loader.state_dict(epoch, batch=number, samples=4 * number), len(through)))
    assert sorted(row[0] for batch in through[:6] for row in batch) == list(range(23))
    assert [row[0] for row in through[0]] != [row[0] for row in through[6]]
    for state, done in states:
        later = made()
        later.check_state(state)
        place = {"batch": state["batch"], "samples": state["sample_offset"]}
        assert batches(later, state["epoch"], **place) == through[done : done + 6 - state["batch"]]
        if state["epoch"] == 0:
            assert batches(later, 1) == through[6:]


def test_evaluations_of_a_users_loader_see_the_same_samples_whatever_its_generator() -> None:
    loader = UserLoader(DataLoader(Drawing(), 4, shuffle=True, generator=torch.Generator()), seed=3)
    assert batches(loader, 0) == batches(loader, 0)


def test_a_position_with_other_generators_is_refused() -> None:
    own = UserLoader(DataLoader(Drawing(), 4, shuffle=True, generator=torch.Generator()), seed=3)
    without = UserLoader(DataLoader(Drawing(), 4, shuffle=True), seed=3)
    with pytest.raises(UserError, match="has 0 torch generators, but the checkpoint has 1"):
        without.check_state(own.state_dict(0))


@pytest.mark.parametrize("seeded", [True, False])
def test_the_order_of_a_users_loader_with_persistent_workers_goes_on_in_a_later_epoch(seeded: bool) -> None:
    def made(persistent: bool = True) -> UserLoader:
        generator = torch.Generator().manual_seed(7) if seeded else None
        own = DataLoader(Listed(), 4, shuffle=True, num_workers=1, persistent_workers=persistent, generator=generator)
        return UserLoader(own, seed=3)

    loader = made()
    first, between = batches(loader, 0), loader.state_dict(1)
    through = batches(loader, 1)
    inside = loader.state_dict(1, batch=2)
    assert first != through
    for state, done in ((between, 0), (inside, 2)):
        later = made()
        later.check_state(state)
        assert batches(later, 1, batch=done) == through[done:]
    other = made(persistent=False)
    assert (batches(other, 0), batches(other, 1)) == (first, through)


class Listed(Dataset[int]):
    """Samples are their indices."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def test_persistent_workers_of_a_users_loader_are_said_to_remember() -> None:
    def promise(persistent: bool) -> str:
        loader = DataLoader(Drawing(), 4, num_workers=1, persistent_workers=persistent)
        return UserLoader(loader, seed=0).promise

    assert "persistent workers" in promise(True)
    assert "persistent workers" not in promise(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_with_its_own_state_are_said_to_draw_anew(workers: int) -> None:
    class Knowing(DataLoader[torch.Tensor]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    promise = UserLoader(Knowing(Drawing(), 4, num_workers=workers), seed=0).promise
    assert "its own position" in promise
    assert ("draw from them" in promise) is bool(workers)


def test_a_users_plain_dataloader_is_walked_without_loading_what_was_seen() -> None:
    loaded: list[int] = []

    class Telling(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            loaded.append(index)
            return super().__getitem__(index)

    for settings in ({"shuffle": True}, {"sampler": RandomSampler(Drawing(), replacement=True)}, {"drop_last": True}):
        loader = UserLoader(DataLoader(Telling(), 4, **settings), seed=3)  # type: ignore[arg-type]
        whole = batches(loader, 2)
        loaded.clear()
        assert batches(loader, 2, batch=3, samples=12) == whole[3:]
        assert len(loaded) == sum(map(len, whole[3:]))
    own = UserLoader(DataLoader(Telling(), batch_sampler=BatchSampler(range(23), 5, False)), seed=3)
    whole = batches(own, 2)
    loaded.clear()
    assert batches(own, 2, batch=2) == whole[2:]
    assert loaded == list(range(10, 23))
    assert "without loading them" in loader.promise
    assert "replays" in UserLoader(DataLoader(Drawing(), 4, num_workers=1), seed=0).promise


def test_a_sampler_that_draws_for_each_sample_from_what_it_drew_before_is_walked_exactly() -> None:
    class Wandering(Sampler[int]):
        def __len__(self) -> int:
            return 23

        def __iter__(self) -> Iterator[int]:
            place = 0
            for _ in range(23):
                place = (place + int(torch.randint(1, 7, ()))) % 23
                yield place

    loader = UserLoader(DataLoader(Drawing(), 4, sampler=Wandering()), seed=3)
    whole = batches(loader, 1)
    for done in (1, 3, 5):
        assert batches(loader, 1, batch=done, samples=4 * done) == whole[done:]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_users_dataloader_names_the_batch(workers: int) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        batches(UserLoader(DataLoader(Failing(), 4, num_workers=workers), seed=3), 0)
    assert caught.value.__notes__ == ["while loading batch 1 of epoch 0"]


def test_a_sampler_that_draws_at_its_start_gives_the_order_that_torch_gives_it() -> None:
    class Eager(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[index] for index in torch.randperm(23).tolist()])

    found = [batch[0][0] for batch in batches(UserLoader(DataLoader(Drawing(), batch_sampler=Eager()), seed=3), 1)]
    with kept_random_state():
        seed_random(sample_seed(3, 1, 0))
        assert found == [float(batch[0, 0]) for batch in DataLoader(Drawing(), batch_sampler=Eager())]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_dataloader_leaves_the_random_state_of_the_training_alone(workers: int) -> None:
    before = random_states()
    iterator = UserLoader(DataLoader(Drawing(), 4, shuffle=True, num_workers=workers), seed=3).iterate(0, batch=2)
    next(iterator)
    assert random_states() == before
    iterator.close()
    assert random_states() == before


def test_a_distributed_sampler_hears_the_epoch() -> None:
    def made(epoch: int) -> list[Any]:
        sampler = DistributedSampler(Drawing(), num_replicas=1, rank=0, shuffle=True)
        return batches(UserLoader(DataLoader(Drawing(), 4, sampler=sampler), seed=0), epoch)

    assert [row[0] for row in made(0)[0]] != [row[0] for row in made(1)[0]]
    assert made(1) == made(1)


class KeyedSampler(Sampler[int]):
    """As a DistributedSampler: another order each epoch that it is message."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_a_sampler_inside_a_batch_sampler_hears_the_epoch() -> None:
    loader = UserLoader(DataLoader(Drawing(), batch_sampler=BatchSampler(KeyedSampler(), 4, False)), seed=0)
    assert [row[0] for row in batches(loader, 0)[0]] != [row[0] for row in batches(loader, 1)[0]]


class Stateful:
    """Counts up for ever, and knows where it stands."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.count += 1
            yield torch.tensor([self.count])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_loader_with_its_own_state_is_put_where_it_was() -> None:
    loader = UserLoader(Stateful(), seed=0)
    iterator = loader.iterate(0)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict(0, samples=3, batch=3)
    later = UserLoader(Stateful(), seed=0)
    later.check_state(state)
    again = later.iterate(0, batch=3)
    assert [next(again).tolist() for _ in range(2)] == [[4], [5]]
    assert next(later.iterate(1)).tolist() == [6]
    assert "its own position" in later.promise


def test_a_loader_without_a_state_promises_a_replay() -> None:
    loader = UserLoader([torch.tensor([1]), torch.tensor([2])], seed=0)
    assert batches(loader, 0, batch=1) == [[2]]
    assert batches(loader, 0, batch=2) == []
    assert "replays" in loader.promise
    assert len(loader) == 2


def test_a_loader_without_length_says_so() -> None:
    with pytest.raises(TypeError):
        len(UserLoader(Stateful(), seed=0))


def test_an_iterator_that_is_used_up_is_refused() -> None:
    with pytest.raises(UserError, match="only once"):
        UserLoader(iter([1, 2]), seed=0)


class Unsized:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(self.length))


class Stream(IterableDataset[int]):
    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_each_kind_of_data_gets_the_loader_that_fits() -> None:
    ours = as_loader(Plain(), shuffle=True, seed=0, batch_size=3)
    assert isinstance(ours, Loader)
    assert as_loader(ours, shuffle=True, seed=1) is ours
    assert len(as_loader(Plain(100), shuffle=True, seed=0)) == 4
    theirs = DataLoader(Drawing(), 4)
    assert isinstance(as_loader(theirs, shuffle=True, seed=0), UserLoader)
    stream = as_loader(Stream(), shuffle=True, seed=0, batch_size=2)
    assert isinstance(stream, StreamLoader)
    assert batches(stream, 0) == [[0, 1], [2, 3], [4]]


def test_settings_that_a_ready_loader_cannot_heed_are_refused() -> None:
    with pytest.raises(UserError, match="batch_size and num_workers would have no effect"):
        as_loader(DataLoader(Drawing(), 4), shuffle=True, seed=0, batch_size=8, num_workers=2)
    with pytest.raises(UserError, match="neither a dataset nor a loader"):
        as_loader(3, shuffle=True, seed=0)


@pytest.mark.parametrize(
    ("given", "seconds"), [(None, None), (5, 5.0), (0.5, 0.5), ("30s", 30.0), ("5min", 300.0), ("1h30m", 5400.0)]
)
def test_a_timeout_of_workers_is_seconds_or_a_time(given: Any, seconds: float | None) -> None:
    assert timeout_seconds(given) == seconds


@pytest.mark.parametrize("given", [0, -1, True, "3ep", "soon", float("inf"), float("nan"), [1]])
def test_any_other_timeout_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match="must be a time such as 30s"):
        as_loader(Plain(), shuffle=True, seed=0, num_workers=1, worker_timeout=given)


def test_the_random_state_is_kept_whatever_numpys_generator_is() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        first = np.random.get_state(legacy=False)
        with kept_random_state():
            np.random.rand(3)
        assert np.random.get_state(legacy=False) == first
    finally:
        np.random.set_bit_generator(before)


def drawn(seed: int) -> tuple[Any, ...]:
    seed_random(seed)
    return torch.rand(2).tolist(), [random.random(), random.gauss(), random.gauss()], np.random.randn(3).tolist()


def test_a_seed_gives_the_numbers_that_each_library_gives_for_it() -> None:
    with kept_random_state():
        tensor, python, numpy = drawn(0x0123456789ABCDEF)
    assert python[0] == random.Random(0x0123456789ABCDEF).random()
    assert numpy == np.random.RandomState(0x89ABCDEF).randn(3).tolist()
    assert tensor == torch.rand(2, generator=torch.Generator().manual_seed(0x0123456789ABCDEF)).tolist()
