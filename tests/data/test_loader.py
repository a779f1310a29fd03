"""Batches: the same from any sample on, with any number of workers, and nothing else disturbed."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

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
    TensorDataset,
)

from trainer_cli.data.adapt import as_loader
from trainer_cli.data.loader import Loader, PaddingBatch, SharedLoader
from trainer_cli.data.order import ORDER_VERSION, sample_indices, sample_seed
from trainer_cli.data.position import STATE_VERSION, timeout_seconds
from trainer_cli.data.random_state import kept_random_state, seed_random
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


class Plain(Dataset[Any]):
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


def batches(loader: Any, epoch: int, **position: int) -> list[Any]:
    return [[] if isinstance(one, PaddingBatch) else one.tolist() for one in loader.iterate(epoch, **position)]


def samples(loader: Loader, epoch: int, start: int = 0) -> list[Any]:
    return [sample for batch in batches(loader, epoch, samples=start) for sample in batch]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resume_at_any_sample_gives_what_going_on_would_have_given(shuffle: bool) -> None:
    loader = Loader(Drawing(), 4, shuffle=shuffle, seed=3)
    for epoch in (0, 7):
        whole = samples(loader, epoch)
        for start in range(24):
            assert samples(loader, epoch, start) == whole[start:]


def test_the_order_is_the_published_function_and_the_seeds_too() -> None:
    drawn = samples(Loader(Drawing(), 5, shuffle=True, seed=9), 2)
    assert [int(sample[0]) for sample in drawn] == sample_indices(9, 2, 0, 23, 23)
    for index, tensor, python, numpy, gauss in drawn:
        seed = sample_seed(9, 2, int(index))
        with kept_random_state():
            seed_random(seed)
            assert (tensor, python) == (torch.rand(()).item(), random.random())
            assert (numpy, gauss) == (np.random.rand(), np.random.randn())


def test_epochs_and_seeds_differ() -> None:
    orders = [samples(Loader(Drawing(), 4, shuffle=True, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_dataset_keeps_its_type_names_the_sample_and_leaves_the_random_state_alone(
    workers: int,
) -> None:
    loader = Loader(Failing(), 4, shuffle=True, seed=3, num_workers=workers)
    before = torch.get_rng_state().tolist(), random.getstate()
    with pytest.raises(FileNotFoundError, match="no such picture") as caught:
        list(loader.iterate(6))
    message = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while loading sample 5 of epoch 6" in message
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_a_deterministic_dataset_is_read_by_list_and_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr("trainer_cli.data.loader.seed_random", refuse)
    dataset = Plain()
    assert batches(Loader(dataset, 4, shuffle=False, seed=0), 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class OwnTensors(TensorDataset):
    """A subclass may draw random numbers."""


class OwnIndices(list[int]):
    """Indices of a class that may draw random numbers."""


X = torch.arange(23.0)


def _with_collate(dataset: Any) -> Any:
    dataset.collate = list
    return dataset


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "is_seeded"),
    [
        (TensorDataset(X), None, False),
        (Subset(Subset(TensorDataset(X, X), range(20)), [*range(19)]), None, False),
        (TensorDataset(X), list, True),
        (_with_collate(TensorDataset(X)), None, True),
        (_with_collate(Subset(TensorDataset(X), range(20))), None, True),
        (OwnTensors(X), None, True),
        (TensorDataset(torch.nn.Parameter(X)), None, True),
        (Subset(TensorDataset(X), OwnIndices(range(20))), None, True),
        (Subset(OwnTensors(X), range(20)), None, True),
    ],
    ids=[
        "tensors",
        "subset",
        "collate_fn",
        "collate",
        "collate of subset",
        "subclass",
        "parameter",
        "indices",
        "subset of subclass",
    ],
)
def test_tensors_of_torchs_own_datasets_are_not_seeded(
    monkeypatch: pytest.MonkeyPatch, dataset: Any, collate_fn: Any, is_seeded: bool
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("trainer_cli.data.loader.seed_torch", seeds.append)
    list(Loader(dataset, 5, shuffle=True, seed=0, collate_fn=collate_fn).iterate(0))
    assert len(seeds) == (len(dataset) if is_seeded else 0)


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
    # The first batch is loaded again when it has drawn.
    assert drawing.single == 4 + 23


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_length_and_drop_last(drop_last: bool, sizes: list[int]) -> None:
    loader = Loader(Plain(), 4, shuffle=True, seed=0, drop_last=drop_last)
    assert [len(batch) for batch in batches(loader, 0)] == sizes
    assert len(loader) == len(sizes)
    assert batches(loader, 0, samples=sum(sizes)) == []
    assert batches(loader, 0, samples=1000) == []


@pytest.mark.parametrize(
    ("length", "settings", "message"),
    [
        (10, {"batch_size": 0}, "batch_size"),
        (10, {"batch_size": True}, "batch_size"),
        (10, {"batch_size": 2.5}, "batch_size"),
        (10, {"num_workers": -1}, "num_workers"),
        (10, {"batch_size": 11, "drop_last": True}, "not enough for one batch of 11"),
        (0, {}, "the data has 0 samples"),
        (2, {"batch_size": 4, "world_size": 3, "drop_last": True}, "2 samples, not enough for one batch of 12"),
    ],
)
def test_settings_that_make_no_sense_are_the_users_mistake(length: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Loader(Plain(length), **{"shuffle": True, "seed": 0, **settings})


def test_a_rank_that_is_not_one_of_the_run_is_a_mistake_of_the_code() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Loader(Plain(), shuffle=True, seed=0, rank=2, world_size=2)


def test_an_epoch_is_not_entered_before_its_start() -> None:
    with pytest.raises(ValueError, match="before its start"):
        Loader(Plain(), shuffle=True, seed=0).iterate(0, samples=-1)
    with pytest.raises(ValueError, match="before its start"):
        UserLoader([1], seed=0).iterate(0, batch=-1)


def test_an_error_in_collating_names_the_samples() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise TypeError("cannot be stacked")

    with pytest.raises(TypeError) as caught:
        next(Loader(Plain(), 2, shuffle=False, seed=0, collate_fn=refuse).iterate(1))
    assert caught.value.__notes__ == ["while collating samples [0, 1] of epoch 1"]


def test_samples_that_torch_cannot_collate_are_an_error_with_the_key_to_set() -> None:
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="equal size") as caught:
        next(Loader(ragged, 2, shuffle=False, seed=0).iterate(1))
    assert caught.value.__notes__[-1].startswith("help: data.collate_fn=MODULE.FUNCTION makes a batch")


def test_the_state_says_where_and_of_what_and_may_be_taken_up_with_other_batches_and_workers() -> None:
    state = Loader(Plain(), 4, shuffle=True, seed=5).state_dict(2, 64)
    assert state == {
        "version": STATE_VERSION, "order": ORDER_VERSION, "seed": 5, "epoch": 2, "sample_offset": 64, "length": 10,
        "fingerprint": "plain-1",
    }  # fmt: skip
    Loader(Plain(), 3, shuffle=True, seed=5, num_workers=2).check_state(state)
    before, after = (Loader(Drawing(), size, shuffle=True, seed=3) for size in (4, 7))
    assert samples(after, 0, 8) == samples(before, 0)[8:]


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
    ours, theirs = Loader(Plain(), shuffle=True, seed=0), UserLoader([1], seed=0)
    for loader, state in ((ours, theirs.state_dict(0)), (theirs, ours.state_dict(0))):
        with pytest.raises(UserError):
            loader.check_state(state)


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
    class Mine(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(6))

    data = Mine()
    for made in (data, DataLoader(data, 1)):
        shared: Any = as_loader(made, shuffle=False, seed=0, rank=1, world_size=2)
        assert shared.promise.startswith("Each of 2 ranks reads all batches, and trains on one in 2.")
        assert "does not save its position" in shared.promise
    cast("Any", data).per_rank = True
    for made in (data, DataLoader(data, 1)):
        own: Any = as_loader(made, shuffle=False, seed=0, rank=1, world_size=2)
        assert "ranks" not in own.promise
        assert sum(len(batch) for batch in own.iterate(0)) == 6


def test_a_dataset_may_bring_its_own_order() -> None:
    class Backwards(Drawing):
        """Its own order: from the end, with words for keys."""

        order_version = "backwards-1"

        def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> list[str]:
            return [str(self.length - 1 - position) for position in range(start, stop)]

        def __getitem__(self, index: Any) -> torch.Tensor:
            return super().__getitem__(int(index))

    loader = Loader(Backwards(), 4, shuffle=True, seed=3)
    whole = samples(loader, 1)
    assert [sample[0] for sample in whole] == list(range(22, -1, -1))
    assert samples(loader, 1, 9) == whole[9:]
    assert loader.state_dict(0)["order"] == "backwards-1"
    # Its random numbers belong to the position.
    with kept_random_state():
        seed_random(sample_seed(3, 1, 4))
        assert whole[4][1] == torch.rand(()).item()


def test_evaluations_of_a_users_loader_see_the_same_samples_whatever_its_generator() -> None:
    loader = UserLoader(DataLoader(Drawing(), 4, shuffle=True, generator=torch.Generator()), seed=3)
    assert batches(loader, 0) == batches(loader, 0)


def test_a_position_with_other_generators_is_refused() -> None:
    own = UserLoader(DataLoader(Drawing(), 4, shuffle=True, generator=torch.Generator()), seed=3)
    without = UserLoader(DataLoader(Drawing(), 4, shuffle=True), seed=3)
    with pytest.raises(UserError, match="has 0 torch generators, but the checkpoint has 1"):
        without.check_state(own.state_dict(0))


def test_a_users_plain_dataloader_is_walked_without_loading_what_was_seen() -> None:
    loaded: list[int] = []

    class Telling(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            loaded.append(index)
            return super().__getitem__(index)

    kinds: tuple[dict[str, Any], ...] = (
        {"batch_size": 4, "shuffle": True}, {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "sampler": RandomSampler(Drawing(), replacement=True)},
        {"batch_sampler": BatchSampler(range(23), 5, False)},
    )  # fmt: skip
    for settings in kinds:
        loader = UserLoader(DataLoader(Telling(), **settings), seed=3)
        whole = batches(loader, 2)
        loaded.clear()
        assert batches(loader, 2, batch=3, samples=sum(map(len, whole[:3]))) == whole[3:]
        assert len(loaded) == sum(map(len, whole[3:]))


class Shuffling(Sampler[Any]):
    """Draws its order when it is started, then a number for each entry; from one of three generators."""

    def __init__(self, kind: str, size: int = 1) -> None:
        self.kind, self.size = kind, size

    def __len__(self) -> int:
        return 20 // self.size

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        entries = [order[first : first + self.size] for first in range(0, 20, self.size)]
        return (self._turn(entry) if self.size > 1 else self._turn(entry)[0] for entry in entries)

    def _order(self) -> list[int]:
        if self.kind == "python":
            return random.sample(range(20), 20)
        return np.random.permutation(20).tolist() if self.kind == "numpy" else torch.randperm(20).tolist()

    def _turn(self, entry: list[int]) -> list[int]:
        draws = {"python": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(()))}
        return [(index + int(20 * draws[self.kind]())) % 20 for index in entry]


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
@pytest.mark.parametrize(
    "settings",
    [
        lambda sampler: {"batch_size": 4, "sampler": sampler(1)},
        lambda sampler: {"batch_size": 3, "sampler": sampler(1), "drop_last": True},
        lambda sampler: {"batch_sampler": sampler(4)},
        lambda sampler: {"batch_size": None, "sampler": sampler(1)},
        lambda sampler: {"batch_size": None, "sampler": sampler(4)},
        lambda sampler: {"batch_sampler": BatchSampler(sampler(1), 4, drop_last=False)},
    ],
    ids=["samples", "dropping the last", "batches", "no batches", "lists of samples", "a BatchSampler of it"],
)
def test_a_sampler_may_draw_when_it_is_started_and_at_each_entry(kind: str, settings: Any) -> None:
    made = settings(lambda size: Shuffling(kind, size))
    if made.get("batch_size", 1) is None:
        made["collate_fn"] = lambda sample: torch.as_tensor(sample)
    loader = UserLoader(DataLoader(Numbered(), **made), seed=3)
    whole = batches(loader, 1)
    sizes = [len(batch) if isinstance(batch, list) else 1 for batch in whole]
    for seen in (1, 3):
        assert batches(loader, 1, batch=seen, samples=sum(sizes[:seen])) == whole[seen:]


class Numbered(Dataset[Any]):
    """Samples that are their index; lists of them are read at once."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: Any) -> Any:
        return index


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


def test_a_distributed_sampler_hears_the_epoch() -> None:
    def made(epoch: int) -> list[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Drawing(), num_replicas=1, rank=0, shuffle=True)
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


class Knowing(DataLoader[torch.Tensor]):
    """A loader with a position."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("loader", "words", "absent"),
    [
        (DataLoader(Drawing(), 4), "without loading them", "replays"),
        (DataLoader(Drawing(), 4, num_workers=1, persistent_workers=True), "persistent workers", "its own position"),
        (DataLoader(Drawing(), 4, num_workers=1), "replays", "persistent workers"),
        (Knowing(Drawing(), 4), "its own position", "draw from them"),
        (Knowing(Drawing(), 4, num_workers=2), "draw from them", "replays"),
        ([torch.tensor([1])], "replays", "its own position"),
    ],
    ids=["sampler walked", "persistent workers", "workers", "a position", "a position and workers", "a list"],
)
def test_a_users_loader_says_how_it_is_resumed(loader: Any, words: str, absent: str) -> None:
    promise = UserLoader(loader, seed=0).promise
    assert words in promise
    assert absent not in promise


def test_a_users_loader_has_a_length_where_it_says_one() -> None:
    assert len(UserLoader([1, 2], seed=0)) == 2
    assert batches(UserLoader([torch.tensor([1])], seed=0), 0, batch=1) == []
    with pytest.raises(TypeError):
        len(UserLoader(Unsized(3), seed=0))


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
    assert isinstance(as_loader(DataLoader(Drawing(), 4), shuffle=True, seed=0), UserLoader)
    stream = as_loader(Stream(), shuffle=True, seed=0, batch_size=2)
    assert isinstance(stream, StreamLoader)
    assert batches(stream, 0) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (DataLoader(Drawing(), 4), {"batch_size": 8, "num_workers": 2}, "batch_size and num_workers would have no"),
        (DataLoader(Drawing(), 4), {"drop_last": True}, "its own batches, so drop_last would have no effect"),
        (3, {}, "neither a dataset nor a loader"),
        ("digits", {}, "there is the text 'digits' where a loader or dataset is expected"),
        (iter([1, 2]), {}, "only once"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_so_is_refused(data: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_loader(data, shuffle=True, seed=0, **settings)


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
    before = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(5))
        first = np.random.get_state(legacy=False)
        with kept_random_state():
            np.random.rand(3)
        assert np.random.get_state(legacy=False) == first
    finally:
        np.random.mtrand.set_bit_generator(before)


def drawn(seed: int) -> tuple[Any, ...]:
    seed_random(seed)
    return torch.rand(2).tolist(), [random.random(), random.gauss(), random.gauss()], np.random.randn(3).tolist()


def test_a_seed_gives_the_numbers_that_each_library_gives_for_it() -> None:
    with kept_random_state():
        tensor, python, numpy = drawn(0x0123456789ABCDEF)
    assert python[0] == random.Random(0x0123456789ABCDEF).random()
    assert numpy == np.random.RandomState(0x89ABCDEF).randn(3).tolist()
    assert tensor == torch.rand(2, generator=torch.Generator().manual_seed(0x0123456789ABCDEF)).tolist()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_collate_function_draws_from_the_seed_of_one_sample(deterministic: bool) -> None:
    """Other numbers would make a resume of an old checkpoint another training; see `STATE_VERSION`."""
    dataset = Plain(10)
    dataset.deterministic = deterministic
    loader = Loader(dataset, 4, shuffle=True, seed=3, collate_fn=lambda samples: [*samples, torch.rand(()).item()])
    for *keys, drawn in loader.iterate(2):
        with kept_random_state():
            torch.manual_seed(sample_seed(3, 2, keys[0] if deterministic else keys[-1]))
            assert drawn == torch.rand(()).item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_samples_of_a_batch_are_those_of_this_rank_when_it_is_used(world_size: int) -> None:
    for rank in range(world_size):
        loader = Loader(Plain(10), 2, shuffle=True, seed=3, rank=rank, world_size=world_size)
        counts = [
            (loader.batch_samples, 0 if isinstance(batch, PaddingBatch) else len(batch)) for batch in loader.iterate(0)
        ]
        assert counts
        assert all(told == held for told, held in counts)


class Uneven:
    """A loader of the user's, with batches of 1, 2, 3 … samples, that keeps its position."""

    batch_samples: int | None = None

    def __len__(self) -> int:
        return 7

    def batches_after(self, samples: int) -> int:
        return 7 - samples

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Iterator[list[int]]:
        for number in range(batch, 7):
            self.batch_samples = number + 1
            yield [number] * (number + 1)

    def state_dict(self, epoch: int, samples: int = 0, batch: int = 0) -> dict[str, int]:
        return {"epoch": epoch, "batch": batch}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shared_loader_counts_the_batches_of_all_ranks(rank: int) -> None:
    loader = SharedLoader(Uneven(), rank=rank, world_size=3)
    assert (len(loader), loader.batches_after(0), loader.batches_after(3), loader.batches_after(6)) == (3, 3, 2, 1)
    assert loader.state_dict(2, batch=2) == {"epoch": 2, "batch": 6}
    counts = [(loader.batch_samples, len(batch)) for batch in loader.iterate(0) if not isinstance(batch, PaddingBatch)]
    assert counts == [(number + 1, number + 1) for number in range(rank, 7, 3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_stream_has_a_state_after_fewer_last_batches_than_ranks(rank: int) -> None:
    class Counting(IterableDataset[int]):
        next = 0

        def __iter__(self) -> Iterator[int]:
            while self.next < 5:
                self.next += 1
                yield self.next

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    loader = SharedLoader(StreamLoader(Counting(), 1, seed=3), rank=rank, world_size=2)
    states = [loader.state_dict(0, batch=number) for number, _ in enumerate(loader.iterate(0), 1)]
    assert [state["batch"] for state in states] == [2, 4, 5]
