"""The claims of Lightning's tests about its tuner: a search for a learning rate, and for a batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Net, Rows, make_trainer, rows, two_optimizers

from trainer_cli import (
    Trainer,
    UserError,
    find_batch_size,
    find_learning_rate,
)

FINDER = "test_lr_finder: "
SIZES = "test_scale_batch_size: "


def trainer_state(trainer: Trainer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


def check_rate_found(folder: Path, what: str) -> None:
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


def check_rate_not_found(folder: Path, case: str) -> None:
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


def check_rates_of_several(folder: Path) -> None:
    """With several groups all rates rise, in their ratio."""
    trainer = make_trainer(optimizer=two_optimizers())
    assert find_learning_rate(trainer, rows(8), steps=30).suggestion is not None
    assert [one.param_groups[0]["lr"] for one in trainer.optimizers.values()] == [0.1, 0.2]


def check_size_found(folder: Path, fits: int, start: int, most: int, samples: int, expected: int | None) -> None:
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


def check_size_of_stream(folder: Path) -> None:
    with pytest.raises(UserError, match="map-style dataset"):
        find_batch_size(make_trainer(), torch.utils.data.DataLoader([1, 2, 3]))  # type: ignore[arg-type]


CLAIMS: list[Claim] = [
    *claims(
        f"{FINDER}test_model_reset_correctly",
        check_rate_found,
        {"a search leaves the weights as they were": ("model",)},
    ),
    *claims(
        f"{FINDER}test_trainer_reset_correctly", check_rate_found, {"it leaves the trainer as it was": ("trainer",)}
    ),
    *claims(
        f"{FINDER}test_lr_candidates_between_min_and_max", check_rate_found, {"all rates are in the range": ("range",)}
    ),
    *claims(f"{FINDER}test_tuner_lr_find", check_rate_found, {"it suggests one of the rates": ("suggestion",)}),
    *claims(
        f"{FINDER}test_multiple_lr_find_calls_gives_same_results",
        check_rate_found,
        {"a second search is the same": ("again",)},
    ),
    *claims(
        f"{FINDER}test_lr_finder_callback_restarting",
        check_rate_found,
        {"the training after it is as without": ("fit",)},
    ),
    *claims(
        f"{FINDER}test_suggestion_with_non_finite_values",
        check_rate_not_found,
        {"losses of NaN suggest nothing": ("not finite",)},
    ),
    *claims(
        f"{FINDER}test_suggestion_not_enough_finite_points",
        check_rate_not_found,
        {"few points suggest nothing": ("few points",)},
    ),
    *claims(
        f"{FINDER}test_lr_finder_fails_fast_on_bad_config",
        check_rate_not_found,
        {"a range that is none is refused": ("range",)},
    ),
    *claims(
        f"{FINDER}test_lr_finder_checkpoint_cleanup_on_error",
        check_rate_not_found,
        {"an error leaves no file": ("error",)},
    ),
    *claims(
        f"{FINDER}test_error_with_multiple_optimizers",
        check_rates_of_several,
        {"a search with two optimizers": ()},
        difference="Lightning refuses them; here all rates rise together and keep their ratio.",
    ),
    *claims(
        f"{SIZES}test_scale_batch_size_method_with_model_or_datamodule",
        check_size_found,
        {
            "sizes are doubled up to what fits": (9, 2, 64, 64, 8),
            "at most the size that is asked for": (99, 2, 16, 64, 16),
            "at most the samples that there are": (99, 2, 99, 12, 8),
        },
    ),
    *claims(
        f"{SIZES}test_scale_batch_size_no_trials",
        check_size_found,
        {"where nothing larger fits the first stays": (2, 2, 64, 64, 2)},
    ),
    *claims(
        f"{SIZES}test_dataloader_batch_size_updated_on_failure",
        check_size_found,
        {"a first size that does not fit is an error": (1, 2, 64, 64, None)},
        difference="Lightning halves it; here start says what is surely small enough.",
    ),
    *claims(
        f"{SIZES}test_error_on_dataloader_passed_to_fit",
        check_size_of_stream,
        {"a loader, whose batches are made already": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
