"""How long a training is, how much data it takes, and when it evaluates and saves."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import data_loader
from small_runs import Script, StopAt, fit, make_trainer, rows, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointerCallback,
    CheckpointError,
    ConfigError,
    EarlyStopping,
    LoadOptions,
    SaveCheckpointState,
    Trainer,
    TrainingLoop,
    UserError,
    latest_checkpoint,
    make_sync_checkpointer,
)


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
def test_a_stop_waits_for_min_duration(minimum: int | str, step: int) -> None:
    loop = {"max_duration": "7ep", "min_duration": minimum, "eval_interval": 2}
    run = fit(batches=4, loop=loop, callbacks=[StopAfter(1)])
    assert run.trainer.progress.step == step
    assert run.result.reason == "enough"


@pytest.mark.parametrize(("minimum", "evaluations"), [("3ep", 3), (3, 2)])
def test_a_held_stop_makes_no_evaluation(minimum: int | str, evaluations: int) -> None:
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


def test_batches_tried_before_leave_no_metric() -> None:
    stopper = EarlyStopping("val/score", "min", patience=9)
    run = fit(loop={"eval_sanity_steps": 2, "eval_interval": 2}, callbacks=[Script([5, 4]), stopper])
    assert run.log.values("val/score") == {2: 5, 4: 4}
    assert stopper.best == 4


def test_batches_tried_before_draw_no_random_number_of_the_run() -> None:
    runs = [fit(train=rows(4, shuffle=True), loop={"eval_sanity_steps": steps}) for steps in (None, 2)]
    assert torch.equal(*(torch.cat(run.trained.data) for run in runs))
    assert torch.equal(*(run.trainer.model.get_parameter("layer.weight") for run in runs))


@pytest.mark.parametrize("batches", [1, 4])
def test_a_trial_run_saves_nothing(folder: Path, batches: int) -> None:
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
    """A sampler of the user's gets each epoch."""
    epochs: list[int] = []

    class Sampler(torch.utils.data.Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([[0], [1]] if batch_sampler else [0, 1])

        def __len__(self) -> int:
            return 2

        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = [(torch.ones(2), torch.tensor(1.0)) for _ in range(2)]
    settings: dict[str, Any] = {"batch_sampler" if batch_sampler else "sampler": Sampler()}
    fit(train=data_loader(data, **settings), loop={"max_duration": "2ep"})
    assert sorted(set(epochs)) == [0, 1]


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


def weights(model: nn.Module) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def test_a_string_needs_its_unit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="save_interval"):
        CheckpointerCallback(folder / "checkpoints", save_interval="3")
    fit(folder, loop={"max_duration": 7}, save={"save_interval": "3st"}, val=None)
    assert saved(folder) == [3, 6, 7]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize("state", ["model", "optimizer"])
def test_one_state_of_another_run_is_loaded_alone(folder: Path, state: str) -> None:
    """Of another run's checkpoint only the chosen state is loaded, and the training starts at step 0."""
    first = fit(folder, loop={"max_duration": 2}, save={}, val=None, optimizer=adam).trainer
    second = make_trainer(optimizer=adam, seed=7)
    before = weights(second.model)
    second.load_checkpoint(folder / "checkpoints" / "step2", LoadOptions(states=[state]))
    (optimizer,) = second.optimizers.values()
    assert weights(second.model) == (weights(first.model) if state == "model" else before)
    assert bool(optimizer.state) == (state == "optimizer")
    assert second.progress.step == 0


@pytest.mark.parametrize(("every", "copies"), [(2, [2, 4, 6]), (4, [4, 6])])
def test_states_are_copied_into_a_folder_of_their_own(folder: Path, every: int, copies: list[int]) -> None:
    saver = SaveCheckpointState(every=every)
    fit(folder, loop={"max_duration": 6}, save={"save_interval": 2}, callbacks=[saver], val=None, run_dir=folder)
    assert saved(folder, "states") == copies
    assert "optimizer" not in make_sync_checkpointer().load(folder / "states" / f"step{copies[0]}")


def test_a_training_starts_at_step_0_and_not_over_what_is_there(folder: Path) -> None:
    """A new start does not write over the checkpoints that are there; in a folder of its own it begins at step 0."""
    fit(folder, loop={"max_duration": 2}, save={}, val=None)
    with pytest.raises(UserError, match="does not continue from them"):
        fit(folder, loop={"max_duration": 3}, save={}, val=None, fit_arguments={"ckpt_path": None})
    assert saved(folder) == [2]
    new = {"folder": folder / "new"}
    run = fit(folder, loop={"max_duration": 3}, save=new, val=None, fit_arguments={"ckpt_path": None})
    assert run.trained.batches[0][0] == 0


def test_a_name_with_an_ending_is_used(folder: Path) -> None:
    fit(folder, loop={"max_duration": 2}, save={"name": "checkpoint_{step}.mdl", "save_interval": 1}, val=None)
    assert latest_checkpoint(folder / "checkpoints").name == "checkpoint_2.mdl"


def test_a_newer_version_of_the_format_is_refused(folder: Path) -> None:
    fit(folder, loop={"max_duration": 1}, save={}, val=None)
    path = folder / "checkpoints" / "step1"
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99"):
        make_trainer().load_checkpoint(path)


@pytest.mark.parametrize(
    ("interval", "duration", "steps"),
    [
        (1, 3, [1, 2, 3]),
        (20, 10, [10]),
        (3, 10, [3, 6, 9, 10]),
        (5, 10, [5, 10]),
        ("0.2ep", 10, list(range(1, 11))),
        ("0.5ep", 10, [3, 5, 8, 10]),
        ("1ep", 10, [5, 10]),
        (None, 10, [10]),
    ],
)
def test_steps_of_evaluations(interval: int | str | None, duration: int, steps: list[int]) -> None:
    run = fit(loop={"max_duration": duration, "eval_interval": interval}, batches=5)
    assert run.evaluated.steps == steps


def test_a_resumed_run_evaluates_at_the_same_steps(folder: Path) -> None:
    straight = fit(loop={"max_duration": 10, "eval_interval": 3}).evaluated.steps
    for stop in (4, 5, 6, 7):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        attempts = [
            fit(folder, loop={"max_duration": 10, "eval_interval": 3}, save={}, callbacks=callbacks).evaluated.steps
            for callbacks in ([StopAt(stop)], [])
        ]
        assert [*itertools.chain(*attempts)] == straight == [3, 6, 9, 10]
