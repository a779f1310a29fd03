"""What a training, an evaluation or a model gets back from a checkpoint, and what a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import present
from small_runs import FailIn, Net, fit, make_trainer, rows, saved
from torch import nn

from trainer_cli import (
    AnomalyDetection,
    Callback,
    CheckpointError,
    ConfigError,
    LoadOptions,
    Trainer,
    TrainingLoop,
    UserError,
)


@pytest.mark.parametrize("same", [False, True])
def test_a_resume_leaves_the_first_folder(folder: Path, same: bool) -> None:
    save = {"save_interval": 2, "max_checkpoints": 2, "save_final": False}
    fit(folder, batches=10, save={"folder": folder / "first", **save}, loop={"max_duration": 5})
    assert saved(folder, "first") == [2, 4]
    second = "first" if same else "second"
    fit(
        folder,
        batches=10,
        save={"folder": folder / second, **save},
        loop={"max_duration": 8},
        fit_arguments={"ckpt_path": folder / "first" / "step4"},
    )
    assert saved(folder, second) == [6, 8]
    assert same or saved(folder, "first") == [2, 4]


def test_a_loader_without_a_length_is_resumed_at_an_epoch_end(folder: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (torch.full((2,), float(number)).unsqueeze(0) for number in range(10))

    class Sum(Net):
        def forward(self, batch: Any) -> Any:
            return self.layer(batch[0]).square().mean()

    settings: dict[str, Any] = {"model": Sum, "save": {"save_interval": 1}, "val": 0}
    for duration in (4, 8):
        train = torch.utils.data.DataLoader(Endless(), batch_size=1)
        run = fit(folder, train=train, loop={"max_duration": duration, "limit_train_batches": 2}, **settings)
    assert run.trained.batches[0] == (4, 2, 0)
    assert run.trainer.progress.step == 8


class Mark(Callback):
    """A callback with a state."""

    def __init__(self, value: int = 0) -> None:
        self.value, self.loaded = value, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loaded += 1


def with_schedule(**more: Any) -> dict[str, Any]:
    """Adam and a StepLR over epochs, which both have a state."""
    return {
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
        "schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        **more,
    }


def test_all_of_a_training_is_restored(folder: Path) -> None:
    """A training that goes on from a checkpoint begins with what the first one ended with."""
    first = fit(folder, batches=2, loop={"max_duration": "1ep"}, callbacks=[Mark(7)], **with_schedule()).trainer
    first.save_checkpoint(folder / "saved")
    mark = Mark()
    starts: list[Trainer] = []

    def moments(trainer: Trainer) -> Any:
        return present(trainer.optimizer).state_dict()["state"][0]["exp_avg"]

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, model: nn.Module, *_: Any) -> None:
            starts.append(trainer)
            assert (trainer.progress.epoch, trainer.progress.batch, trainer.progress.step) == (1, 0, 2)
            assert all(map(torch.equal, model.parameters(), first.model.parameters()))
            assert torch.equal(moments(trainer), moments(first))
            assert trainer.checkpoint_state()["schedulers"] == first.checkpoint_state()["schedulers"]
            assert mark.value == 7

    second = fit(
        folder, batches=2, loop={"max_duration": "3ep"}, callbacks=[mark, Start()],
        fit_arguments={"ckpt_path": folder / "saved"}, **with_schedule(seed=3),
    )  # fmt: skip
    assert starts == [second.trainer]
    assert second.trainer.progress.step == 6


@pytest.mark.parametrize("by_path", [True, False])
def test_a_new_trainer_evaluates_a_checkpoint(folder: Path, by_path: bool) -> None:
    """An evaluation of a checkpoint gives what its training reported, and counts no step."""
    run = fit(folder, save={"save_interval": 2}, loop={"eval_interval": 2})
    for step, loss in run.log.values("val/loss").items():
        trainer = make_trainer(folder, save={})
        path = folder / "checkpoints" / f"step{step}"
        if by_path or step == 4:
            metrics = trainer.validate(rows(2), path) if by_path else trainer.validate(rows(2))
            assert metrics["val"]["loss"] == loss


def test_a_loaded_model_predicts_what_the_saved_one_did(folder: Path) -> None:
    trained = fit().trainer
    trained.save_checkpoint(folder / "saved")
    other = make_trainer(seed=5)
    batch = next(iter(rows(1).iterate(0)))
    assert not torch.equal(other.model(batch)["loss"], trained.model(batch)["loss"])
    other.load_checkpoint(folder / "saved", LoadOptions(states=["model"]))
    assert torch.equal(other.model(batch)["loss"], trained.model(batch)["loss"])


@pytest.mark.parametrize(("step", "left"), [(2, 2), (4, 0)])
def test_a_resume_trains_the_epochs_that_are_left(folder: Path, step: int, left: int) -> None:
    fit(folder, batches=2, save={"save_interval": "1ep"}, loop={"max_duration": "2ep"})
    path = folder / "checkpoints" / f"step{step}"
    run = fit(batches=2, loop={"max_duration": "2ep"}, fit_arguments={"ckpt_path": path})
    assert len(run.trained.batches) == left


def test_a_file_of_weights_resumes_no_training(folder: Path) -> None:
    """A file of weights alone starts no resume, and says so."""
    torch.save(Net().state_dict(), folder / "weights.pt")
    trainer = make_trainer()
    with pytest.raises((UserError, CheckpointError), match="weights"):
        trainer.load_checkpoint(folder / "weights.pt")
    trainer.load_checkpoint(folder / "weights.pt", LoadOptions(states=["model"]))


def test_a_trainer_may_save_before_its_fit(folder: Path) -> None:
    trainer = make_trainer()
    trainer.save_checkpoint(folder / "saved")
    other = make_trainer(seed=4)
    other.load_checkpoint(folder / "saved")
    assert other.progress.step == 0
    assert all(map(torch.equal, trainer.model.parameters(), other.model.parameters()))


OF_STEP = (
    "on_train_batch_start", "on_before_forward", "on_after_forward", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_after_optimizer_step", "on_before_optimizer_zero_grad",
    "on_after_optimizer_zero_grad", "on_before_scheduler_step", "on_after_scheduler_step", "on_train_batch_end",
)  # fmt: skip
OF_EVALUATION = "on_validate_start", "on_validate_batch_start", "on_validate_batch_end", "on_validate_end"


OF_FIT = "setup", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "finalize"


class Dropping(Net):
    """Draws random numbers in its training."""

    def forward(self, batch: Any) -> Any:
        x, y = batch
        return super().forward((nn.functional.dropout(x, 0.5, self.training), y))


@pytest.mark.parametrize(
    ("step", "accumulate"), [*[(step, accumulate) for accumulate in (1, 2, 3) for step in (2, 5)], (1, 1)]
)
def test_after_an_exception_the_rest_is_as_without(folder: Path, step: int, accumulate: int) -> None:
    """An exception after a step, and a start again: weights, data and logs are as without."""
    loop = {"max_duration": 6, "grad_accum_steps": accumulate, "log_interval": 1}
    settings: dict[str, Any] = {"model": Dropping, "loop": loop}
    train = {"shuffle": True, "seed": 3}
    whole = fit(train=rows(5, **train), **settings)
    with pytest.raises(RuntimeError, match="failed"):
        fit(folder, train=rows(5, **train), save={"save_interval": 1}, callbacks=[FailIn("on_train_batch_start", step)],
            **settings)  # fmt: skip
    rest = fit(folder, train=rows(5, **train), save={"save_interval": 1}, **settings)
    assert all(map(torch.equal, whole.trainer.model.parameters(), rest.trainer.model.parameters()))
    assert all(map(torch.equal, whole.trained.data[-len(rest.trained.data) :], rest.trained.data))
    expected = whole.log.values("train/loss")
    assert rest.log.values("train/loss") == {at: expected[at] for at in range(step + 1, 7)}


@pytest.mark.parametrize("interval", [4, 2])
def test_a_failed_evaluation_is_made_up_for(folder: Path, interval: int) -> None:
    """An exception in an evaluation, and a start again: it is made, and the rest is as without."""
    loop = {"max_duration": 8, "eval_interval": interval, "log_interval": 1}
    whole = fit(model=Dropping, loop=loop)
    with pytest.raises(RuntimeError, match="failed"):
        fit(
            folder, model=Dropping, loop=loop, save={"save_interval": 1}, callbacks=[FailIn("on_validate_batch_end", 4)]
        )
    rest = fit(folder, model=Dropping, loop=loop, save={"save_interval": 1})
    expected = whole.log.values("val/loss")
    assert rest.log.values("val/loss") == {step: value for step, value in expected.items() if step >= 4}
    assert all(map(torch.equal, whole.trainer.model.parameters(), rest.trainer.model.parameters()))


def test_a_resume_repeats_no_evaluation(folder: Path) -> None:
    loop = {"eval_interval": "1ep"}
    fit(folder, batches=1, save={}, loop={**loop, "max_duration": "1ep"})
    run = fit(folder, batches=1, save={}, loop={**loop, "max_duration": "2ep"})
    assert run.evaluated.steps == [2]


@pytest.mark.parametrize("failing", list("abc"))
def test_a_failed_evaluation_of_several_loaders_is_made_up_for(folder: Path, failing: str) -> None:
    """An exception in the evaluation of one of several loaders: after a start again all are evaluated."""

    class Fail(Callback):
        def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: Any) -> None:
            if loop.name == failing:
                raise RuntimeError("Trouble")

        def on_validate_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            if trainer.evaluating is not None and trainer.evaluating.name == failing:
                raise RuntimeError("Trouble")

    val, loop = {"a": rows(2), "b": rows(3), "c": rows(1)}, {"eval_interval": 2}
    with pytest.raises(RuntimeError, match="Trouble"):
        fit(folder, val=val, loop=loop, save={"save_interval": 1}, callbacks=[Fail()])
    assert saved(folder) == [1]
    run = fit(folder, val=val, loop=loop, save={"save_interval": 1})
    assert run.evaluated.batches == [2, 3, 1] * 2
    assert {name.split("/")[0] for name in run.log.records[-1].metrics} >= {"a", "b", "c"}


def test_the_counts_of_a_run_are_in_its_state() -> None:
    run = fit(batches=2, loop={"max_duration": "2ep"})
    counts = run.trainer.checkpoint_state()["progress"]
    assert (counts["step"], counts["epoch"], counts["batch"], counts["samples"]) == (4, 2, 0, 4)


def hooks_called(wanted: Sequence[str]) -> tuple[Callback, list[str]]:
    book: list[str] = []

    def method(hook: str) -> Any:
        return lambda self, *args: book.append(hook)

    callback: Callback = type("Book", (Callback,), {hook: method(hook) for hook in wanted})()
    return callback, book


@pytest.mark.parametrize(
    ("hooks", "expected", "evaluates"),
    [
        (OF_STEP, [*OF_STEP, *OF_STEP], False),
        (OF_FIT, OF_FIT, False),
        (OF_EVALUATION, [OF_EVALUATION[0], *OF_EVALUATION[1:3], *OF_EVALUATION[1:3], OF_EVALUATION[3]], True),
    ],
)
def test_hooks_come_in_their_order(hooks: Sequence[str], expected: Sequence[str], evaluates: bool) -> None:
    callback, book = hooks_called(hooks)
    schedule: dict[str, Any] = {"schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    fit(batches=1, val=2 if evaluates else 0, loop={"max_duration": 2}, callbacks=[callback], **schedule)
    assert book == list(expected)


def test_callbacks_are_called_as_given() -> None:
    order: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_start(self, *_: Any) -> None:
            order.append(self.name)

    fit(loop={"max_duration": 1}, callbacks=[Named("first"), Named("second")])
    assert order == ["first", "second"]


@pytest.mark.parametrize("own", [False, True])
def test_a_model_is_in_the_mode_of_what_is_done(own: bool) -> None:
    """A model trains in train mode and is evaluated in evaluation mode, also what was in the latter before."""
    modes: set[tuple[str, bool]] = set()

    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(1, 1)
            self.frozen.eval().requires_grad_(False)

    class See(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            modes.add(("train", (model.frozen if own else model).training))

        def on_validate_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
            modes.add(("val", (model.frozen if own else model).training))

    run = fit(model=Frozen, loop={"eval_interval": 1}, callbacks=[See()])
    run.trainer.validate(rows(1))
    assert modes == {("train", True), ("val", False)}


def test_the_operation_that_gave_nan_is_named_if_asked_for() -> None:
    class Broken(Net):
        def forward(self, batch: Any) -> Any:
            return torch.sqrt(self.layer(batch[0]).sum() * 0.0) * 0.0

    with pytest.raises(RuntimeError, match="returned nan values"), pytest.warns(UserWarning, match="Error detected"):
        fit(model=Broken, callbacks=[AnomalyDetection()])


def test_a_subclass_may_have_more_arguments_and_no_other() -> None:
    class Own(Trainer):
        def __init__(self, mine: int, **settings: Any) -> None:
            super().__init__(**settings)
            self.mine = mine

    trainer = Own(
        3, model=Net, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), seed=0, device="cpu",
        loop=TrainingLoop(max_duration=2, log_interval=None),
    )  # fmt: skip
    assert trainer.fit(rows(2)).finished
    assert trainer.mine == 3
    with pytest.raises(ConfigError, match="Trainer takes no argument 'unknown'"):
        Own(3, model=Net, unknown=1)


def test_callbacks_are_given_what_the_model_returned() -> None:
    seen: list[Any] = []

    class See(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((set(outputs), batch_idx))

    fit(loop={"max_duration": 2}, callbacks=[See()])
    assert seen == [({"loss", "mae"}, 0), ({"loss", "mae"}, 1)]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Counts the samples that were taken."""

    def __init__(self, length: int) -> None:
        self.length, self.taken = length, 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            self.taken += 1
            yield torch.tensor([number / 1024, 0.5]), torch.tensor(1.0)


@pytest.mark.parametrize(("samples", "batch_size", "steps", "limit"), [(3, 1, 3, None), (8, 2, 4, None), (9, 1, 2, 2)])
def test_data_without_a_length_comes_in_order(samples: int, batch_size: int, steps: int, limit: int | None) -> None:
    """Over two epochs each batch is trained on once, in order, and again."""
    data = Stream(samples)
    loop = {"max_duration": 2 * steps, "limit_train_batches": limit}
    run = fit(train=torch.utils.data.DataLoader(data, batch_size=batch_size), val=0, loop=loop)
    first = [float(batch[0, 0]) * 1024 for batch in run.trained.data]
    assert first == [float(number * batch_size) for number in range(steps)] * 2
    assert [index for _, _, index in run.trained.batches] == list(range(steps)) * 2


@pytest.mark.parametrize("steps", [7, 20])
def test_steps_are_made_of_data_without_an_end(steps: int) -> None:
    data = Stream(10**6)
    run = fit(train=torch.utils.data.DataLoader(data, batch_size=4), val=0, loop={"max_duration": steps})
    assert run.trainer.progress.step == steps
    assert data.taken <= 4 * (steps + 3)
