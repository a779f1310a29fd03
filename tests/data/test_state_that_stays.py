"""A state that does not say where a loader stands is a warning before it can cost a resume its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from trainer_cli.data.adapt import as_loader


class Counting(IterableDataset[Any]):
    """Four samples; its state moves."""

    def __init__(self, samples: int = 4) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.at = self.at, 0
        for number in range(first + 1, self.samples + 1):
            self.at = number
            yield torch.tensor(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "other": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Resets(Counting):
    """Counts, and forgets."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}


class Lambdas(Counting):
    """A state that no checkpoint can hold, which is reported elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": lambda: self.at}


class Own:
    """A loader that a user made, of batches."""

    def __init__(self, dataset: Counting) -> None:
        self.dataset = dataset
        self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return (value[None] for value in self.dataset)


CASES = {
    "moves": (Counting, False),
    "resets": (Resets, True),
    "one batch an epoch": (lambda: Resets(1), False),
    "cannot be copied": (Lambdas, False),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    # Such a dataset, given itself, is refused when its state is copied.
    [
        (kind, case)
        for kind in ("loader", "dataset")
        for case in CASES
        if (kind, case) != ("dataset", "cannot be copied")
    ],
)
def test_a_state_that_never_moves_is_a_warning_after_two_batches(
    kind: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, warned = CASES[case]
    settings: dict[str, Any] = {"shuffle": False, "seed": 0}
    loader = as_loader(Own(make()), **settings) if kind == "loader" else as_loader(make(), batch_size=1, **settings)
    for epoch in (0, 1):
        for _ in loader.iterate(epoch):
            pass
    assert caplog.text.count("is the same after two batches") == int(warned)


def test_the_state_of_a_worker_is_watched_too(caplog: pytest.LogCaptureFixture) -> None:
    loader = as_loader(Resets(), shuffle=False, seed=0, batch_size=1, num_workers=2)
    for _ in loader.iterate(0):
        pass
    loader.close()
    assert caplog.text.count("is the same after two batches") == 1
