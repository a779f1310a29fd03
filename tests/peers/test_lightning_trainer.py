"""The claims of Lightning's tests about how long a training is, and how much data it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from small_runs import fit, make_trainer, rows
from torch import nn

from trainer_cli import Callback, ConfigError, Trainer, TrainingLoop


@pytest.mark.parametrize(
    ("loop", "batches", "trained", "evaluated"),
    [
        ({"limit_train_batches": 100, "eval_steps": 100}, 8, 8, 8),
        ({"limit_train_batches": 7, "eval_steps": 7}, 8, 7, 7),
        ({"limit_train_batches": 1}, 8, 1, 8),
        ({"limit_train_batches": 1.0}, 8, 8, 8),
        ({"limit_train_batches": 0.5}, 8, 4, 8),
    ],
)
def test_limits_of_batches(loop: Mapping[str, Any], batches: int, trained: int, evaluated: int) -> None:
    """Batches of an epoch that are trained on, and of an evaluation."""
    run = fit(batches=batches, val=batches, loop={"max_duration": "1ep", "eval_interval": "1ep", **loop})
    assert len(run.trained.batches) == trained
    assert run.evaluated.batches == [evaluated]


@pytest.mark.parametrize(
    ("loop", "match"),
    [
        ({"eval_steps": 0.1}, "eval_steps"),
        ({"limit_train_batches": 0}, "at least 1"),
        ({"max_duration": "-100ep"}, "max_duration"),
        ({"max_duration": -2}, "max_duration"),
        ({"max_duration": 1.5}, "max_duration"),
        ({"max_duration": 0}, "max_duration"),
        ({"max_duration": "0ep"}, "max_duration"),
    ],
)
def test_wrong_lengths_and_limits_are_refused(loop: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TrainingLoop(**loop)


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (2, 2), (0.1, 2), (0.25, 5), (1.0, 20)])
def test_a_limit_trains_on_the_same_batches(limit: float, batches: int) -> None:
    """Each epoch has the same first batches, if nothing shuffles them."""
    run = fit(batches=20, loop={"max_duration": "2ep", "limit_train_batches": limit})
    assert len(run.trained.data) == 2 * batches
    assert all(map(torch.equal, run.trained.data[:batches], run.trained.data[batches:]))


def test_a_limit_leaves_shuffling_on() -> None:
    run = fit(train=rows(20, shuffle=True), loop={"max_duration": "2ep", "limit_train_batches": 2})
    first, second = torch.cat(run.trained.data[:2]), torch.cat(run.trained.data[2:])
    assert not torch.equal(first, second)


def test_training_and_evaluation_on_one_batch() -> None:
    seen: list[torch.Tensor] = []

    class See(Callback):
        def on_validate_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0])

    data = rows(20)
    loop = {"max_duration": "2ep", "limit_train_batches": 1, "eval_steps": 1, "eval_interval": "1ep"}
    run = fit(train=data, val=data, loop=loop, callbacks=[See()])
    assert torch.equal(run.trained.data[0], seen[0])


@pytest.mark.parametrize(
    ("loop", "step", "epoch"),
    [
        ({"max_duration": "3ep"}, 30, 3),
        ({"max_duration": 20}, 20, 2),
        ({"max_duration": "3ep", "hard_stop": 20}, 20, 2),
        ({"max_duration": 20, "min_duration": 10}, 20, 2),
        ({"max_duration": "3ep", "min_duration": "1ep"}, 30, 3),
        ({"max_duration": "3ep", "hard_stop": 15, "limit_train_batches": 0.5}, 15, 3),
        ({"max_duration": "2ep", "hard_stop": 30, "limit_train_batches": 0.5}, 10, 2),
        ({"max_duration": 3}, 3, 0),
    ],
)
def test_the_earlier_length_ends_the_run(loop: Mapping[str, Any], step: int, epoch: int) -> None:
    run = fit(batches=10, loop=loop)
    assert (run.trainer.progress.step, run.trainer.progress.epoch) == (step, epoch)
    assert run.result.finished


def test_the_default_length_is_ten_epochs() -> None:
    trainer = make_trainer()
    trainer.loop = TrainingLoop(log_interval=None, eval_interval=None)
    assert trainer.fit(rows(1)).reason == "max_duration of 10 epochs reached"


class StopAfter(Callback):
    """Requests the end of the run at each step from one on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step >= self.step:
            trainer.stop("enough")


@pytest.mark.parametrize(("minimum", "step"), [("1ep", 4), (6, 6), ("3ep", 12), ("5ep", 20)])
def test_a_stop_waits(minimum: int | str, step: int) -> None:
    loop = {"max_duration": "7ep", "min_duration": minimum, "eval_interval": 2}
    run = fit(batches=4, loop=loop, callbacks=[StopAfter(1)])
    assert run.trainer.progress.step == step
    assert run.result.reason == "enough"


@pytest.mark.parametrize(("minimum", "evaluations"), [("3ep", 3), (3, 2)])
def test_evaluations_wait(minimum: int | str, evaluations: int) -> None:
    """A held stop makes no evaluation of its own until it is allowed."""
    loop = {"max_duration": "3ep", "min_duration": minimum, "eval_interval": "1ep"}
    run = fit(batches=2, loop=loop, callbacks=[StopAfter(1)])
    assert len(run.evaluated.steps) == evaluations


def test_a_stop_in_an_epoch_ends_the_run_after_an_evaluation() -> None:
    run = fit(batches=10, loop={"max_duration": "1ep", "eval_interval": "1ep"}, callbacks=[StopAfter(5)])
    assert run.trainer.progress.step == 5
    assert run.evaluated.steps == [5]
    assert run.result.finished


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        ({"max_duration": 2}, "max_duration of 2 steps reached"),
        ({"max_duration": "1ep"}, "max_duration of 1 epoch reached"),
        ({"hard_stop": 2}, "hard_stop at 2 steps"),
    ],
)
def test_the_result_has_the_reason_of_the_end(loop: Mapping[str, Any], reason: str) -> None:
    assert fit(loop=loop).result.reason == reason


@pytest.mark.parametrize(("accumulate", "steps"), [(4, 6)])
def test_steps_are_those_of_the_optimizer_not_batches(accumulate: int, steps: int) -> None:
    run = fit(batches=8, loop={"max_duration": steps, "grad_accum_steps": accumulate})
    assert run.trainer.progress.step == steps
    assert len(run.trained.batches) == steps * accumulate


def test_a_training_needs_no_validation() -> None:
    run = fit(val=0, loop={"eval_interval": 1})
    assert not run.evaluated.steps
    assert run.trainer.progress.step == 4
