"""The claims of Lightning's tests about when a training evaluates, and what it tries before its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Evaluated, Script, fit, make_trainer, rows

from trainer_cli import Callback, EarlyStopping, ValidationLoop


@pytest.mark.parametrize(("steps", "batches"), [(3, 8), (10, 8)])
def test_an_evaluation_may_have_a_limit_of_its_own(steps: int, batches: int) -> None:
    counted = Evaluated()
    trainer = make_trainer(callbacks=[counted])
    trainer.validate(rows(batches), loop=ValidationLoop(eval_steps=steps))
    assert counted.batches == [min(steps, batches)]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(number), 0.5]), torch.tensor(1.0)) for number in range(100))


@pytest.mark.parametrize(
    ("endless", "accumulate", "loop", "steps"),
    [
        (False, 1, {"max_duration": 12, "eval_interval": 3}, [3, 6, 9, 12]),
        (True, 1, {"max_duration": 12, "eval_interval": 3}, [3, 6, 9, 12]),
        (False, 2, {"max_duration": 6, "eval_interval": 3}, [3, 6]),
        (True, 2, {"max_duration": 6, "eval_interval": 3}, [3, 6]),
        (False, 1, {"max_duration": "2ep", "eval_interval": 100}, [8]),
        (False, 1, {"max_duration": "2ep", "eval_interval": "0.5ep"}, [2, 4, 6, 8]),
        (False, 1, {"max_duration": "4ep", "eval_interval": "2ep"}, [8, 16]),
        (False, 1, {"max_duration": "1ep", "eval_interval": "2ep"}, [4]),
        (False, 1, {"max_duration": "5ep", "eval_interval": "2ep"}, [8, 16, 20]),
        (False, 1, {"max_duration": 16, "eval_interval": "3ep"}, [12, 16]),
        (False, 1, {"max_duration": "3ep", "eval_interval": "1.25ep"}, [5, 10, 12]),
    ],
)
def test_evaluations_come_at_steps(endless: bool, accumulate: int, loop: Mapping[str, Any], steps: Any) -> None:
    train = torch.utils.data.DataLoader(Stream(), batch_size=1) if endless else rows(4)
    run = fit(train=train, loop={"grad_accum_steps": accumulate, **loop})
    assert run.evaluated.steps == steps


@pytest.mark.parametrize(("interval", "least", "most"), [("0.02s", 2, 8), ("1h", 1, 1)])
def test_an_evaluation_interval_may_be_a_time(interval: str, least: int, most: int) -> None:
    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.01)

    run = fit(loop={"max_duration": 8, "eval_interval": interval}, callbacks=[Slow()])
    assert least <= len(run.evaluated.steps) <= most
    assert run.evaluated.steps[-1] == 8


@pytest.mark.parametrize(
    ("steps", "limit", "val", "batches"),
    [(4, None, 8, 4), (4, None, 2, 2), (4, 1, 8, 1), (4, 5, 8, 4), (None, None, 8, 0), (99, None, 8, 8), (99, 3, 8, 3)],
)
def test_batches_are_tried_before_the_training(steps: int | None, limit: int | None, val: int, batches: int) -> None:
    loop = {"eval_sanity_steps": steps, "eval_steps": limit, "eval_interval": None}
    run = fit(val={"one": rows(val), "other": rows(val)}, loop=loop)
    assert run.evaluated.sanity_batches == 2 * batches


def test_what_is_tried_before_leaves_no_metric() -> None:
    stopper = EarlyStopping("val/score", patience=9)
    run = fit(loop={"eval_sanity_steps": 2, "eval_interval": 2}, callbacks=[Script([5, 4]), stopper])
    assert run.log.values("val/score") == {2: 5, 4: 4}
    assert stopper.best == 4


def test_and_no_trace_in_the_random_numbers() -> None:
    runs = [fit(train=rows(4, shuffle=True), loop={"eval_sanity_steps": steps}) for steps in (None, 2)]
    assert torch.equal(*(torch.cat(run.trained.data) for run in runs))
    assert torch.equal(*(run.trainer.model.layer.weight for run in runs))


@pytest.mark.parametrize("batches", [1, 4])
def test_a_short_trial_run(folder: Path, batches: int) -> None:
    loop = {"max_duration": batches, "eval_steps": batches, "eval_interval": None}
    run = fit(folder, val=9, loop=loop, save={"enabled": False})
    assert len(run.trained.batches) == batches
    assert run.evaluated.batches == [batches]
    assert not list(folder.rglob("step*"))


@pytest.mark.parametrize("inference", [False, True])
def test_an_evaluation_has_no_gradients(inference: bool) -> None:
    found: list[bool] = []

    class See(Callback):
        def on_validate_start(self, *_: Any) -> None:
            found.append(torch.is_inference_mode_enabled() if inference else torch.is_grad_enabled())

    make_trainer(callbacks=[See()]).validate(rows(1))
    assert found == [False]


@pytest.mark.parametrize("batch_sampler", [False, True])
def test_samplers_are_told_their_epoch(batch_sampler: bool) -> None:
    """A sampler of the user's is told each epoch."""
    told: list[int] = []

    class Sampler(torch.utils.data.Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([[0], [1]] if batch_sampler else [0, 1])

        def __len__(self) -> int:
            return 2

        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    data = [(torch.ones(2), torch.tensor(1.0)) for _ in range(2)]
    settings: dict[str, Any] = {"batch_sampler" if batch_sampler else "sampler": Sampler()}
    fit(train=torch.utils.data.DataLoader(data, **settings), loop={"max_duration": "2ep"})  # type: ignore[arg-type]
    assert sorted(set(told)) == [0, 1]


@pytest.mark.parametrize(
    ("loaders", "names"),
    [
        (lambda: rows(1), ["val/loss"]),
        (lambda: [rows(1), rows(1)], ["validate_0/loss", "validate_1/loss"]),
        (lambda: {"a": rows(1), "b": rows(1)}, ["a/loss", "b/loss"]),
    ],
)
def test_loaders_have_names(loaders: Any, names: Sequence[str]) -> None:
    run = fit(val=loaders(), loop={"eval_interval": 4})
    assert [key for key in run.log.records[-1].metrics if key.endswith("/loss") and "train" not in key] == names
