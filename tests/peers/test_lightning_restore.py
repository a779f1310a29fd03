"""The claims of Lightning's tests about what a training, an evaluation or a model gets back from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Net, fit, make_trainer, rows, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointError,
    LoadOptions,
    Trainer,
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


@pytest.mark.parametrize(("steps", "longer"), [([2, 4], 4), ([2, 4, 6, 8], 8)])
def test_a_finished_run_that_is_started_again(folder: Path, steps: Sequence[int], longer: int) -> None:
    save = {"save_interval": 2}
    fit(folder, batches=2, save=save)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/*")}
    run = fit(folder, batches=2, save=save, loop={"max_duration": longer})
    assert saved(folder) == steps
    assert len(run.trained.batches) == longer - 4
    if longer == 4:
        after = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/*")}
        assert before == after


def test_a_loader_without_a_length_is_resumed_at_an_epoch_end(folder: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (torch.full((2,), float(number)).unsqueeze(0) for number in range(10))

    class Sum(Net):
        def forward(self, batch: Any) -> Any:
            return self.layer(batch[0]).square().mean()

    settings = {"model": Sum, "save": {"save_interval": 1}, "val": 0}
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


@pytest.mark.parametrize("what", ["epoch", "step", "weights", "optimizer", "schedule", "callback"])
def test_all_of_a_training_is_restored(folder: Path, what: str) -> None:
    """A training that goes on from a checkpoint begins with what the first one ended with."""
    first = fit(folder, batches=2, loop={"max_duration": "1ep"}, callbacks=[Mark(7)], **with_schedule())
    first.trainer.save_checkpoint(folder / "saved")
    mark, starts = Mark(), []

    class Start(Callback):
        def on_train_start(
            self, trainer: Trainer, model: nn.Module, train_loader: Any, loop: Any, loop_idx: int
        ) -> None:
            state = trainer.checkpoint_state()
            starts.append(
                {
                    "epoch": (trainer.progress.epoch, trainer.progress.batch),
                    "step": trainer.progress.step,
                    "weights": [parameter.detach().clone() for parameter in model.parameters()],
                    "optimizer": trainer.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
                    "schedule": state["schedulers"],
                    "callback": mark.value,
                }
            )

    second = fit(
        folder, batches=2, loop={"max_duration": "3ep"}, callbacks=[mark, Start()],
        fit_arguments={"ckpt_path": folder / "saved"}, **with_schedule(seed=3),
    )  # fmt: skip
    state, expected = (
        starts[0][what],
        {
            "epoch": (1, 0),
            "step": 2,
            "weights": None,
            "optimizer": None,
            "schedule": first.trainer.checkpoint_state()["schedulers"],
            "callback": 7,
        }[what],
    )
    loaded = make_trainer(**with_schedule())
    loaded.load_checkpoint(folder / "saved")
    if what == "weights":
        assert all(map(torch.equal, state, first.trainer.model.parameters()))
    elif what == "optimizer":
        assert torch.equal(state, first.trainer.optimizer.state_dict()["state"][0]["exp_avg"])
    else:
        assert state == expected
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


class Larger(Net):
    """A Net with one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("saved_model", "model", "name", "strict"),
    [
        (Larger, Net, "more", True),
        (Larger, Net, "more", False),
        (Net, Larger, "more", True),
        (Net, Larger, "more", False),
    ],
)
def test_names_of_one_side_alone_are_refused(
    folder: Path, saved_model: type[nn.Module], model: type[nn.Module], name: str, strict: bool
) -> None:
    make_trainer(model=saved_model).save_checkpoint(folder / "saved")
    trainer = make_trainer(model=model, seed=1)
    options = LoadOptions(states=["model"], strict=strict)
    if strict:
        with pytest.raises(UserError, match=name):
            trainer.load_checkpoint(folder / "saved", options)
    else:
        trainer.load_checkpoint(folder / "saved", options)
        assert torch.equal(trainer.model.layer.weight, make_trainer(model=saved_model).model.layer.weight)


@pytest.mark.parametrize(("step", "left"), [(2, 2), (4, 0)])
def test_a_resume_trains_the_epochs_that_are_left(folder: Path, step: int, left: int) -> None:
    fit(folder, batches=2, save={"save_interval": "1ep"}, loop={"max_duration": "2ep"})
    path = folder / "checkpoints" / f"step{step}"
    run = fit(batches=2, loop={"max_duration": "2ep"}, fit_arguments={"ckpt_path": path})
    assert len(run.trained.batches) == left


def test_weights_alone_resume_no_training_but_are_loaded_as_weights(folder: Path) -> None:
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
