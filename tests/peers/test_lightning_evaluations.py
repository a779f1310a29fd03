"""The claims of Lightning's tests about when a training evaluates, and what it tries before its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Evaluated, Script, fit, make_trainer, rows

from trainer_cli import Callback, EarlyStopping, ValidationLoop

LIMITS = "test_limit_batches: "
INTERVAL = "test_val_check_interval: "
EPOCHS = "test_check_val_every_n_epoch: "
TRAINER = "test_trainer: "


def check_evaluation_of_trainer(folder: Path, steps: int, batches: int) -> None:
    counted = Evaluated()
    trainer = make_trainer(callbacks=[counted])
    trainer.validate(rows(batches), loop=ValidationLoop(eval_steps=steps))
    assert counted.batches == [min(steps, batches)]


def check_evaluations(folder: Path, interval: int | str, epochs: int, count: int) -> None:
    run = fit(batches=12, loop={"max_duration": f"{epochs}ep", "eval_interval": interval})
    assert len(run.evaluated.steps) == count
    assert run.trainer.progress.epoch == epochs


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(number), 0.5]), torch.tensor(1.0)) for number in range(100))


def check_evaluated_at(folder: Path, endless: bool, accumulate: int, loop: Mapping[str, Any], steps: Any) -> None:
    train = torch.utils.data.DataLoader(Stream(), batch_size=1) if endless else rows(4)
    run = fit(train=train, loop={"grad_accum_steps": accumulate, **loop})
    assert run.evaluated.steps == steps


def check_evaluated_by_time(folder: Path, interval: str, least: int, most: int) -> None:
    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.01)

    run = fit(loop={"max_duration": 8, "eval_interval": interval}, callbacks=[Slow()])
    assert least <= len(run.evaluated.steps) <= most
    assert run.evaluated.steps[-1] == 8


def check_sanity_batches(folder: Path, steps: int | None, limit: int | None, val: int, batches: int) -> None:
    loop = {"eval_sanity_steps": steps, "eval_steps": limit, "eval_interval": None}
    run = fit(val={"one": rows(val), "other": rows(val)}, loop=loop)
    assert run.evaluated.sanity_batches == 2 * batches


def check_sanity_leaves_nothing(folder: Path) -> None:
    stopper = EarlyStopping("val/score", patience=9)
    run = fit(loop={"eval_sanity_steps": 2, "eval_interval": 2}, callbacks=[Script([5, 4]), stopper])
    assert run.log.values("val/score") == {2: 5, 4: 4}
    assert stopper.best == 4


def check_seed_after_sanity(folder: Path) -> None:
    runs = [fit(train=rows(4, shuffle=True), loop={"eval_sanity_steps": steps}) for steps in (None, 2)]
    assert torch.equal(*(torch.cat(run.trained.data) for run in runs))
    assert torch.equal(*(run.trainer.model.layer.weight for run in runs))


def check_short_trial(folder: Path, batches: int) -> None:
    loop = {"max_duration": batches, "eval_steps": batches, "eval_interval": None}
    run = fit(folder, val=9, loop=loop, save={"enabled": False})
    assert len(run.trained.batches) == batches
    assert run.evaluated.batches == [batches]
    assert not list(folder.rglob("step*"))


def check_gradients_off(folder: Path, inference: bool) -> None:
    found: list[bool] = []

    class See(Callback):
        def on_validate_start(self, *_: Any) -> None:
            found.append(torch.is_inference_mode_enabled() if inference else torch.is_grad_enabled())

    make_trainer(callbacks=[See()]).validate(rows(1))
    assert found == [False]


def check_epochs_of_sampler(folder: Path, batch_sampler: bool) -> None:
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


def check_loader_names(folder: Path, loaders: Any, names: Sequence[str]) -> None:
    run = fit(val=loaders(), loop={"eval_interval": 4})
    assert [key for key in run.log.records[-1].metrics if key.endswith("/loss") and "train" not in key] == names


CLAIMS: list[Claim] = [
    *claims(
        f"{LIMITS}test_eval_limit_batches",
        check_evaluation_of_trainer,
        {"an evaluation may have a limit of its own": (3, 8), "a limit above what there is takes all": (10, 8)},
    ),
    *claims(
        f"{INTERVAL}test_val_check_interval",
        check_evaluations,
        {
            f"{epochs} epochs with an evaluation every {interval} have {count}": (interval, epochs, count)
            for epochs in (1, 2, 3)
            for interval, count in (("1ep", epochs), (4, 3 * epochs), ("0.25ep", 4 * epochs))
        },
    ),
    *claims(
        f"{INTERVAL}test_validation_check_interval_exceed_data_length_correct",
        check_evaluated_at,
        {
            "an interval runs over the ends of epochs": (
                False,
                1,
                {"max_duration": 12, "eval_interval": 3},
                [3, 6, 9, 12],
            ),
            "it does on data without a length": (True, 1, {"max_duration": 12, "eval_interval": 3}, [3, 6, 9, 12]),
        },
    ),
    *claims(
        f"{INTERVAL}test_validation_check_interval_exceed_data_length_correct",
        check_evaluated_at,
        {
            "an interval under accumulation": (False, 2, {"max_duration": 6, "eval_interval": 3}, [3, 6]),
            "an interval under accumulation without a length": (
                True,
                2,
                {"max_duration": 6, "eval_interval": 3},
                [3, 6],
            ),
        },
        difference="Lightning counts batches; here every interval counts optimizer steps, and nothing is evaluated in "
        "the middle of one.",
    ),
    *claims(
        f"{INTERVAL}test_validation_check_interval_exceed_data_length_wrong",
        check_evaluated_at,
        {"an interval above an epoch's length": (False, 1, {"max_duration": "2ep", "eval_interval": 100}, [8])},
        difference="Lightning refuses it; here intervals count from the run's beginning, and its end is always "
        "evaluated.",
    ),
    *claims(
        f"{INTERVAL}test_time_based_val_check_interval",
        check_evaluated_by_time,
        {"an interval may be a time": ("0.02s", 2, 8), "a long time leaves the evaluation of the end": ("1h", 1, 1)},
    ),
    *claims(
        f"{EPOCHS}test_check_val_every_n_epoch",
        check_evaluated_at,
        {"of four epochs two are evaluated": (False, 1, {"max_duration": "4ep", "eval_interval": "2ep"}, [8, 16])},
    ),
    *claims(
        f"{EPOCHS}test_check_val_every_n_epoch",
        check_evaluated_at,
        {
            "one epoch alone": (False, 1, {"max_duration": "1ep", "eval_interval": "2ep"}, [4]),
            "the fifth of five epochs": (False, 1, {"max_duration": "5ep", "eval_interval": "2ep"}, [8, 16, 20]),
        },
        difference="It is evaluated, too: the end of a run always is, so that its last checkpoint has metrics.",
    ),
    *claims(
        f"{EPOCHS}test_check_val_every_n_epoch_with_max_steps",
        check_evaluated_at,
        {
            "every third epoch of four, given as steps": (
                False,
                1,
                {"max_duration": 16, "eval_interval": "3ep"},
                [12, 16],
            )
        },
        difference="Lightning evaluates the third alone; here the end of the run as well.",
    ),
    *claims(
        f"{TRAINER}test_check_val_every_n_epoch_exception",
        check_evaluated_at,
        {"an interval of 1.25 epochs": (False, 1, {"max_duration": "3ep", "eval_interval": "1.25ep"}, [5, 10, 12])},
        difference="Lightning's interval is a whole number of epochs; here parts of epochs are the steps they "
        "amount to.",
    ),
    *claims(
        f"{TRAINER}test_num_sanity_val_steps",
        check_sanity_batches,
        {
            "four batches of each loader are tried before": (4, None, 8, 4),
            "at most as many as there are": (4, None, 2, 2),
            "at most one, where an evaluation has one": (4, 1, 8, 1),
            "four, where an evaluation has five": (4, 5, 8, 4),
            "none, where no metric is needed": (None, None, 8, 0),
        },
    ),
    *claims(
        f"{TRAINER}test_num_sanity_val_steps_neg_one",
        check_sanity_batches,
        {"all may be tried before": (99, None, 8, 8), "all that an evaluation has": (99, 3, 8, 3)},
    ),
    *claims(
        "test_train_loop_logging: test_sanity_metrics_are_reset",
        check_sanity_leaves_nothing,
        {"what is tried before leaves no metric": ()},
    ),
    *claims(
        "test_training_loop: test_training_starts_with_seed",
        check_seed_after_sanity,
        {"and no trace in the random numbers": ()},
    ),
    *claims(
        "test_fast_dev_run: test_callbacks_and_logger_not_called_with_fastdevrun",
        check_short_trial,
        {f"a trial run of {batches} batches": (batches,) for batches in (1, 4)},
        difference="There is no flag that changes many others: max_duration, eval_steps and checkpoint.enabled make a "
        "trial, and what is left on runs as in the real training.",
    ),
    *claims(
        "test_inference_mode: test_eval_inference_mode", check_gradients_off, {"no evaluation has gradients": (False,)}
    ),
    *claims(
        "test_inference_mode: test_eval_inference_mode",
        check_gradients_off,
        {"inference mode": (True,)},
        difference="Evaluations run under no_grad alone: tensors of inference mode could not be trained on "
        "if a user's callback kept them.",
    ),
    *claims(
        "test_evaluation_loop: test_evaluation_loop_sampler_set_epoch_called",
        check_epochs_of_sampler,
        {"a sampler is told its epoch": (False,), "a batch sampler is told its epoch": (True,)},
    ),
    *claims(
        "test_eval_loop_logging: test_multi_dataloaders_add_suffix_properly",
        check_loader_names,
        {
            "one loader has a name of its own": (lambda: rows(1), ["val/loss"]),
            "two in a list are numbered": (lambda: [rows(1), rows(1)], ["validate_0/loss", "validate_1/loss"]),
            "two in a mapping keep their names": (lambda: {"a": rows(1), "b": rows(1)}, ["a/loss", "b/loss"]),
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
