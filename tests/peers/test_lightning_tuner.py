"""The claims of Lightning's tests about its tuner: a search for a learning rate, and for a batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, Rows, make_trainer, rows, two_optimizers

from trainer_cli import (
    Trainer,
    UserError,
    find_batch_size,
    find_learning_rate,
)


def trainer_state(trainer: Trainer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


@pytest.mark.parametrize("what", ["model", "trainer", "range", "suggestion", "again", "fit"])
def test_a_search_finds_a_rate(what: str) -> None:
    trainer = make_trainer(loop={"max_duration": 3})
    before = trainer_state(trainer)
    found = find_learning_rate(trainer, rows(8), min_lr=1e-5, max_lr=1.0, steps=40)
    if what == "model":
        assert all(map(torch.equal, before, trainer_state(trainer)))
    elif what == "trainer":
        assert trainer.optimizer is not None
        assert (trainer.progress.step, trainer.optimizer.param_groups[0]["lr"]) == (0, 0.1)
        assert not trainer.optimizer.state_dict()["state"]
    elif what == "range":
        assert all(1e-5 <= rate <= 1.0 for rate in found.rates)
        assert found.rates == sorted(found.rates)
    elif what == "suggestion":
        assert found.suggestion in found.rates
        assert len(found.rates) == len(found.losses) <= 40
    elif what == "again":
        assert find_learning_rate(trainer, rows(8), min_lr=1e-5, max_lr=1.0, steps=40) == found
    else:
        trainer.fit(rows(8))
        plain = make_trainer(loop={"max_duration": 3})
        plain.fit(rows(8))
        assert all(map(torch.equal, trainer_state(trainer), trainer_state(plain)))


@pytest.mark.parametrize("case", ["not finite", "few points", "range", "error"])
def test_a_search_that_finds_no_rate(folder: Path, case: str) -> None:
    class Broken(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)["loss"] * math.nan

    class Failing(Net):
        def forward(self, batch: Any) -> Any:
            raise RuntimeError("Trouble")

    if case == "not finite":
        found = find_learning_rate(make_trainer(model=Broken), rows(8), steps=20)
        assert (found.suggestion, found.rates) == (None, [])
    elif case == "few points":
        assert find_learning_rate(make_trainer(), rows(8), steps=5).suggestion is None
    elif case == "range":
        with pytest.raises(UserError, match="which is no range"):
            find_learning_rate(make_trainer(), rows(8), min_lr=1.0, max_lr=0.1)
    else:
        with pytest.raises(RuntimeError, match="Trouble"):
            find_learning_rate(make_trainer(model=Failing), rows(8))
        assert not list(folder.iterdir())


def test_all_rates_rise_together() -> None:
    """With several groups all rates rise, in their ratio."""
    trainer = make_trainer(optimizer=two_optimizers())
    assert find_learning_rate(trainer, rows(8), steps=30).suggestion is not None
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers.values()] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("fits", "start", "most", "samples", "expected"),
    [(9, 2, 64, 64, 8), (99, 2, 16, 64, 16), (99, 2, 99, 12, 8), (2, 2, 64, 64, 2), (1, 2, 64, 64, None)],
)
def test_a_search_finds_a_batch_size(fits: int, start: int, most: int, samples: int, expected: int | None) -> None:
    class Bounded(Net):
        def forward(self, batch: Any) -> Any:
            if len(batch[0]) > fits:
                raise torch.OutOfMemoryError("full")
            return super().forward(batch)

    trainer = make_trainer(model=Bounded)
    before = trainer_state(trainer)
    if expected is None:
        with pytest.raises(UserError, match="no batch of"):
            find_batch_size(trainer, Rows(samples), start=start, max_size=most)
    else:
        assert find_batch_size(trainer, Rows(samples), start=start, max_size=most) == expected
    assert all(map(torch.equal, before, trainer_state(trainer)))
    assert trainer.progress.step == 0


def test_a_loader_whose_batches_are_made_already() -> None:
    with pytest.raises(UserError, match="map-style dataset"):
        find_batch_size(make_trainer(), torch.utils.data.DataLoader([1, 2, 3]))  # type: ignore[arg-type]
