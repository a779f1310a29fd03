"""The claims of Lightning's tests about how long a training is, and how much data it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import fit, make_trainer, rows
from torch import nn

from trainer_cli import Callback, ConfigError, Trainer, TrainingLoop, UserError

LIMITS = "test_limit_batches: "
OVERFIT = "test_overfit_batches: "
LENGTHS = "test_min_max_epochs: "
TRAINER = "test_trainer: "


def check_batches(folder: Path, loop: Mapping[str, Any], batches: int, trained: int, evaluated: int) -> None:
    """Batches of an epoch that are trained on, and of an evaluation."""
    run = fit(batches=batches, val=batches, loop={"max_duration": "1ep", "eval_interval": "1ep", **loop})
    assert len(run.trained.batches) == trained
    assert run.evaluated.batches == [evaluated]


def check_refused(folder: Path, loop: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TrainingLoop(**loop)


def check_same_batches(folder: Path, limit: float, batches: int) -> None:
    """Each epoch has the same first batches, if nothing shuffles them."""
    run = fit(batches=20, loop={"max_duration": "2ep", "limit_train_batches": limit})
    assert len(run.trained.data) == 2 * batches
    assert all(map(torch.equal, run.trained.data[:batches], run.trained.data[batches:]))


def check_shuffled(folder: Path) -> None:
    run = fit(train=rows(20, shuffle=True), loop={"max_duration": "2ep", "limit_train_batches": 2})
    first, second = torch.cat(run.trained.data[:2]), torch.cat(run.trained.data[2:])
    assert not torch.equal(first, second)


def check_same_data_for_both(folder: Path) -> None:
    seen: list[torch.Tensor] = []

    class See(Callback):
        def on_validate_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0])

    data = rows(20)
    loop = {"max_duration": "2ep", "limit_train_batches": 1, "eval_steps": 1, "eval_interval": "1ep"}
    run = fit(train=data, val=data, loop=loop, callbacks=[See()])
    assert torch.equal(run.trained.data[0], seen[0])


def check_length(folder: Path, loop: Mapping[str, Any], step: int, epoch: int) -> None:
    run = fit(batches=10, loop=loop)
    assert (run.trainer.progress.step, run.trainer.progress.epoch) == (step, epoch)
    assert run.result.finished


def check_default_length(folder: Path) -> None:
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


def check_held(folder: Path, minimum: int | str, step: int) -> None:
    loop = {"max_duration": "7ep", "min_duration": minimum, "eval_interval": 2}
    run = fit(batches=4, loop=loop, callbacks=[StopAfter(1)])
    assert run.trainer.progress.step == step
    assert run.result.reason == "enough"


def check_held_evaluations(folder: Path, minimum: int | str, evaluations: int) -> None:
    """A held stop makes no evaluation of its own until it is allowed."""
    loop = {"max_duration": "3ep", "min_duration": minimum, "eval_interval": "1ep"}
    run = fit(batches=2, loop=loop, callbacks=[StopAfter(1)])
    assert len(run.evaluated.steps) == evaluations


def check_stop_in_epoch(folder: Path) -> None:
    run = fit(batches=10, loop={"max_duration": "1ep", "eval_interval": "1ep"}, callbacks=[StopAfter(5)])
    assert run.trainer.progress.step == 5
    assert run.evaluated.steps == [5]
    assert run.result.finished


def check_reason(folder: Path, loop: Mapping[str, Any], reason: str) -> None:
    assert fit(loop=loop).result.reason == reason


def check_accumulated_length(folder: Path, accumulate: int, steps: int) -> None:
    run = fit(batches=8, loop={"max_duration": steps, "grad_accum_steps": accumulate})
    assert run.trainer.progress.step == steps
    assert len(run.trained.batches) == steps * accumulate


def check_repeated_fits(folder: Path, first: int | str, second: int | str, steps: Sequence[int]) -> None:
    run = fit(batches=2, loop={"max_duration": first})
    after = [run.trainer.progress.step]
    run.trainer.loop = TrainingLoop(max_duration=second, log_interval=None)
    run.trainer.fit(rows(2))
    assert [*after, run.trainer.progress.step] == steps


def check_no_validation(folder: Path) -> None:
    run = fit(val=0, loop={"eval_interval": 1})
    assert not run.evaluated.steps
    assert run.trainer.progress.step == 4


def check_no_batches(folder: Path) -> None:
    with pytest.raises(UserError, match="0 samples"):
        fit(batches=0)


CLAIMS: list[Claim] = [
    *claims(
        f"{LIMITS}test_num_dataloader_batches",
        check_batches,
        {
            "a limit above what there is changes nothing": ({"limit_train_batches": 100, "eval_steps": 100}, 8, 8, 8),
            "a limit below what there is holds for both": ({"limit_train_batches": 7, "eval_steps": 7}, 8, 7, 7),
        },
    ),
    *claims(
        f"{LIMITS}test_limit_batches_info_message",
        check_batches,
        {
            "a limit of 1 is one batch": ({"limit_train_batches": 1}, 8, 1, 8),
            "a limit of 1.0 is all batches": ({"limit_train_batches": 1.0}, 8, 8, 8),
            "a limit of 0.5 is half of them": ({"limit_train_batches": 0.5}, 8, 4, 8),
        },
    ),
    *claims(
        f"{LIMITS}test_eval_limit_batches",
        check_refused,
        {"a share of the validation batches": ({"eval_steps": 0.1}, "eval_steps")},
        difference="eval_steps is a number of batches: an evaluation is compared with others of the same length.",
    ),
    *claims(
        f"{TRAINER}test_disabled_training",
        check_refused,
        {"a limit of 0 training batches": ({"limit_train_batches": 0}, "at least 1")},
        difference="A fit that trains nothing is refused; Trainer.validate evaluates without training.",
    ),
    *claims(
        f"{TRAINER}test_disabled_validation", check_no_validation, {"without validation data nothing is evaluated": ()}
    ),
    *claims(f"{TRAINER}test_no_val_module", check_no_validation, {"a training needs no validation": ()}),
    *claims(
        f"{OVERFIT}test_overfit_basic",
        check_same_batches,
        {
            f"a limit of {limit} trains on the same {batches} of 20 batches": (limit, batches)
            for limit, batches in ((1, 1), (2, 2), (0.1, 2), (0.25, 5), (1.0, 20))
        },
    ),
    *claims(
        f"{OVERFIT}test_overfit_batches_raises_warning_in_case_of_sequential_sampler",
        check_shuffled,
        {"a limit under shuffling": ()},
        difference="Lightning's overfit_batches turns shuffling off; a limit of the loop leaves it on, so each epoch "
        "has other batches. In a config data.overfit_batches=N trains on the same N batches.",
    ),
    *claims(
        f"{OVERFIT}test_overfit_batches_same_batch_for_train_and_val",
        check_same_data_for_both,
        {"training and evaluation on one batch": ()},
        difference="In a config data.overfit_batches=1 does it; the Trainer in Python takes the same data for both, "
        "each with a limit of one batch.",
    ),
    *claims(
        f"{LENGTHS}test_min_max_steps_epochs",
        check_length,
        {
            "epochs alone end it": ({"max_duration": "3ep"}, 30, 3),
            "steps alone end it": ({"max_duration": 20}, 20, 2),
            "of both the earlier one ends it": ({"max_duration": "3ep", "hard_stop": 20}, 20, 2),
            "a least number of steps does not make it longer": ({"max_duration": 20, "min_duration": 10}, 20, 2),
            "nor does a least number of epochs": ({"max_duration": "3ep", "min_duration": "1ep"}, 30, 3),
        },
    ),
    *claims(
        f"{LENGTHS}test_max_epochs_not_set_warning",
        check_default_length,
        {"a length that is not given": ()},
        difference="10 epochs, which docs and the config say, and not 1000 with a warning.",
    ),
    *claims(
        f"{TRAINER}test_trainer_max_steps_and_epochs",
        check_length,
        {
            "steps within the second of three epochs end it": (
                {"max_duration": "3ep", "hard_stop": 15, "limit_train_batches": 0.5},
                15,
                3,
            ),
            "two epochs end it before more steps": (
                {"max_duration": "2ep", "hard_stop": 30, "limit_train_batches": 0.5},
                10,
                2,
            ),
            "steps in the first epoch end it": ({"max_duration": 3}, 3, 0),
        },
    ),
    *claims(
        f"{TRAINER}test_trainer_max_steps_and_epochs_validation",
        check_refused,
        {
            "a negative number of epochs is refused": ({"max_duration": "-100ep"}, "max_duration"),
            "a negative number of steps is refused": ({"max_duration": -2}, "max_duration"),
            "half a step is refused": ({"max_duration": 1.5}, "max_duration"),
        },
    ),
    *claims(
        f"{TRAINER}test_trainer_max_steps_and_epochs_fit_loop_done",
        check_refused,
        {
            "no steps at all": ({"max_duration": 0}, "max_duration"),
            "no epochs at all": ({"max_duration": "0ep"}, "max_duration"),
        },
        difference="Lightning ends such a fit at once; here a length of zero is refused as a mistake.",
    ),
    *claims(
        f"{TRAINER}test_trainer_min_steps_and_epochs",
        check_held,
        {
            "a stop waits for the first epoch": ("1ep", 4),
            "a stop waits for six steps": (6, 6),
            "a stop waits for the third epoch": ("3ep", 12),
        },
    ),
    *claims(
        f"{TRAINER}test_trainer_min_steps_and_min_epochs_not_reached", check_held, {"it waits for five": ("5ep", 20)}
    ),
    *claims(
        "test_training_epoch_loop: test_should_stop_triggers_validation_once",
        check_held_evaluations,
        {"until the third epoch only epochs are evaluated": ("3ep", 3), "until step 3 there are two": (3, 2)},
    ),
    *claims(
        "test_training_loop: test_should_stop_mid_epoch",
        check_stop_in_epoch,
        {"a stop in an epoch ends the run after an evaluation": ()},
    ),
    *claims(
        "test_training_loop: test_fit_loop_done_log_messages",
        check_reason,
        {
            "steps are the reason": ({"max_duration": 2}, "max_duration of 2 steps reached"),
            "epochs are the reason": ({"max_duration": "1ep"}, "max_duration of 1 epoch reached"),
            "a hard stop is the reason": ({"hard_stop": 2}, "hard_stop at 2 steps"),
        },
    ),
    *claims(
        "test_training_loop: test_fit_loop_done_log_messages",
        check_no_batches,
        {"no training batch is an error": ()},
        difference="Lightning logs that there are none and ends; a training on nothing is an error here.",
    ),
    *claims(
        f"{TRAINER}test_trainer_max_steps_accumulate_batches",
        check_accumulated_length,
        {"steps are those of the optimizer, not batches": (4, 6)},
    ),
    *claims(
        f"{TRAINER}test_repeated_fit_calls_with_max_epochs_and_steps",
        check_repeated_fits,
        {
            "a second fit with more epochs makes the rest": ("1ep", "3ep", [2, 6]),
            "a second fit with more steps makes the rest": (3, 5, [3, 5]),
            "a second fit of the same length makes none": ("2ep", "2ep", [4, 4]),
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
