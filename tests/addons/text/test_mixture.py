"""Several sources: proportions to the sample, and an order that can be taken up anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_cli.addons.text.mixture import BLOCK, MixedDataset, Mixture, quotas
from trainer_cli.addons.text.text import Documents, Packing
from trainer_cli.data.loader import Loader
from trainer_cli.errors import UserError


class Numbers:
    """Numbers from `first` on, each with a random one."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length
        self.fingerprint = f"{first} {length}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        assert 0 <= index < self.length
        return torch.tensor([self.first + index, torch.rand(()).item()], dtype=torch.float64)


def source(first: int, length: int, val: Any = None, **more: Any) -> Any:
    return SimpleNamespace(train=Numbers(first, length), val=val, **more)


def mixed(weights: Mapping[str, float] | None = None, epoch_samples: int | None = None) -> Mixture:
    sources = {"small": source(0, 30), "large": source(1000, 700), "middle": source(5000, 200)}
    return Mixture(sources, weights or {"small": 1, "large": 2.5, "middle": 1.5}, epoch_samples)


def test_every_block_holds_its_proportions_exactly() -> None:
    data = mixed(epoch_samples=7 * BLOCK).train
    for block in range(7):
        keys = data.sample_keys(3, 0, block * BLOCK, (block + 1) * BLOCK)
        assert Counter(number for number, _ in keys) == {0: 200, 1: 500, 2: 300}
        assert [number for number, _ in keys] != sorted(number for number, _ in keys)


def test_each_source_is_walked_without_replacement_across_epochs() -> None:
    data = mixed(epoch_samples=517).train
    keys = [key for epoch in range(9) for key in data.sample_keys(3, epoch, 0, 517)]
    for number, length in enumerate(data.lengths):
        own = [index for which, index in keys if which == number]
        rounds = [own[start : start + length] for start in range(0, len(own), length)]
        assert len(rounds) > 1
        for one in rounds[:-1]:
            assert sorted(one) == list(range(length))
        assert len(set(rounds[-1])) == len(rounds[-1])
        assert rounds[0] != rounds[1]


def test_what_stands_at_a_position_does_not_depend_on_how_it_is_reached() -> None:
    data = mixed(epoch_samples=2300).train
    for epoch in (0, 4):
        whole = data.sample_keys(3, epoch, 0, 2300)
        for start in (0, 1, 699, 700, 999, 1000, 2299, 2300):
            assert data.sample_keys(3, epoch, start, 2300) == whole[start:]
        assert [data.sample_keys(3, epoch, place, place + 1)[0] for place in range(0, 2300, 97)] == whole[::97]
    assert data.sample_keys(3, 0, 0, 100) != data.sample_keys(4, 0, 0, 100)
    assert data.sample_keys(3, 0, 0, 100) != data.sample_keys(3, 1, 0, 100)
    # Far inside costs no more: nothing before it is counted.
    assert len(data.sample_keys(3, 10**9, 0, 5)) == 5


def test_an_epoch_is_as_long_as_all_sources_unless_said() -> None:
    assert len(mixed().train) == 930
    assert len(mixed(epoch_samples=50).train) == 50


def test_every_validation_part_keeps_its_name() -> None:
    sources = {"a": source(0, 5, val="one"), "b": source(0, 5, val={"x": "two", "y": "three"}), "c": source(0, 5)}
    assert Mixture(sources, {"a": 1, "b": 1, "c": 1}).val == {"a": "one", "b_x": "two", "b_y": "three"}


def test_attributes_are_those_on_which_all_agree() -> None:
    data = Mixture({"a": source(0, 5, vocab_size=7, x=1), "b": source(0, 5, vocab_size=7, x=2)}, {"a": 1, "b": 1})
    assert data.vocab_size == 7
    with pytest.raises(AttributeError, match="differ in 'x'"):
        data.x  # noqa: B018
    assert not hasattr(data, "y")


def test_the_fingerprint_is_that_of_all_parts() -> None:
    parts = {"a": Numbers(0, 5), "b": Numbers(9, 5)}
    prints = {
        MixedDataset(parts, [1, 1]).fingerprint,
        MixedDataset(parts, [2, 2]).fingerprint,
        MixedDataset(parts, [1, 2]).fingerprint,
        MixedDataset({"a": Numbers(0, 5), "b": Numbers(9, 6)}, [1, 1]).fingerprint,
        MixedDataset({"a": Numbers(0, 5), "c": Numbers(9, 5)}, [1, 1]).fingerprint,
        MixedDataset({"a": Numbers(0, 5), "b": Numbers(8, 5)}, [1, 1]).fingerprint,
    }
    assert len(prints) == 5, "equal proportions are the same data, all else is other data"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 1}, [1000]),
        ({"a": 1, "b": 1, "c": 1}, [334, 333, 333]),
        ({"a": 0.7, "b": 0.3}, [700, 300]),
        ({"a": 1, "b": 999}, [1, 999]),
        ({"a": 0.6, "b": 1000}, [1, 999]),
        ({"a": 2, "b": 1}, [667, 333]),
    ],
)
def test_weights_become_whole_numbers_by_the_largest_remainder(weights: dict[str, float], shares: list[int]) -> None:
    assert quotas(weights, 1000) == shares


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"small": 1, "large": 1}, "data.sources has small, large, middle, but data.weights has small, large"),
        ({"small": 1, "large": 1, "middle": 0}, "data.weights.middle is 0"),
        ({"small": 1, "large": 1, "middle": -1}, "data.weights.middle is -1"),
        ({"small": 1, "large": 1, "middle": float("nan")}, "data.weights.middle is nan"),
        ({"small": 1, "large": 1, "middle": True}, "data.weights.middle is True"),
        ({"small": 1, "large": 1, "middle": "1"}, "data.weights.middle is '1'"),
        ({"small": 1e-4, "large": 1, "middle": 1}, "less than one in 1,000"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixed(weights)


def test_other_mistakes_are_refused_too() -> None:
    with pytest.raises(UserError, match="epoch_samples is 0"):
        mixed(epoch_samples=0)
    with pytest.raises(UserError, match="not a dataset with a length"):
        Mixture({"a": SimpleNamespace(train=iter([]))}, {"a": 1})
    with pytest.raises(UserError, match="is empty"):
        Mixture({"a": source(0, 0)}, {"a": 1})
    with pytest.raises(UserError, match="mappings"):
        Mixture({}, {})


def test_mixtures_mix_mixtures_and_packed_rows() -> None:
    inner = mixed()
    outer = Mixture({"inner": inner, "plain": source(90000, 40)}, {"inner": 1, "plain": 1}).train
    keys = outer.sample_keys(0, 0, 0, 970)
    own = [key for number, key in keys if number == 0]
    assert Counter(number for number, _ in own).keys() == {0, 1, 2}
    assert outer[keys[0]].shape == (2,)

    packs = {name: Packing(Documents(document=name), 64) for name in ("line", "file")}
    both = Mixture(packs, {"line": 1, "file": 3})
    assert both.vocab_size == 256
    assert both.context == 64
    batch = next(Loader(both.train, 4, shuffle=True, seed=0).iterate(0))
    assert batch["tokens"].shape == (4, 64)
    assert isinstance(batch["count"], int)
    with pytest.raises(UserError, match="batches in different ways"):
        Mixture({"a": packs["line"], "b": source(0, 5)}, {"a": 1, "b": 1})


class Collates(Numbers):
    def collate(self, samples: list[Any]) -> list[Any]:
        return samples


def test_two_datasets_of_a_class_that_makes_its_own_batches_are_mixed() -> None:
    parts = {name: SimpleNamespace(train=Collates(0, 5)) for name in ("a", "b")}
    assert Mixture(parts, {"a": 1, "b": 1}).train.collate([1, 2]) == [1, 2]
