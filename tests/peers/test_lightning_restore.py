"""The claims of Lightning's tests about what a training, an evaluation or a model gets back from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Net, fit, make_trainer, rows, saved
from torch import nn

from trainer_cli import (
    Callback,
    CheckpointError,
    LoadOptions,
    Trainer,
    UserError,
)

TOP = "test_model_checkpoint: "


def check_resumed_elsewhere(folder: Path, same: bool) -> None:
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


def check_rerun(folder: Path, steps: Sequence[int], longer: int) -> None:
    save = {"save_interval": 2}
    fit(folder, batches=2, save=save)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/*")}
    run = fit(folder, batches=2, save=save, loop={"max_duration": longer})
    assert saved(folder) == steps
    assert len(run.trained.batches) == longer - 4
    if longer == 4:
        after = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/*")}
        assert before == after


def check_resumes_without_length(folder: Path) -> None:
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


def check_restored(folder: Path, what: str) -> None:
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


def check_evaluates_checkpoint(folder: Path, by_path: bool) -> None:
    """An evaluation of a checkpoint gives what its training reported, and counts no step."""
    run = fit(folder, save={"save_interval": 2}, loop={"eval_interval": 2})
    for step, loss in run.log.values("val/loss").items():
        trainer = make_trainer(folder, save={})
        path = folder / "checkpoints" / f"step{step}"
        if by_path or step == 4:
            metrics = trainer.validate(rows(2), path) if by_path else trainer.validate(rows(2))
            assert metrics["val"]["loss"] == loss


def check_no_checkpoint_named(folder: Path) -> None:
    with pytest.raises((CheckpointError, UserError, FileNotFoundError), match="nowhere"):
        fit(fit_arguments={"ckpt_path": folder / "nowhere"})


def check_predictions_after_loading(folder: Path) -> None:
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


def check_strict(folder: Path, saved_model: type[nn.Module], model: type[nn.Module], name: str, strict: bool) -> None:
    make_trainer(model=saved_model).save_checkpoint(folder / "saved")
    trainer = make_trainer(model=model, seed=1)
    options = LoadOptions(states=["model"], strict=strict)
    if strict:
        with pytest.raises(UserError, match=name):
            trainer.load_checkpoint(folder / "saved", options)
    else:
        trainer.load_checkpoint(folder / "saved", options)
        assert torch.equal(trainer.model.layer.weight, make_trainer(model=saved_model).model.layer.weight)


def check_fit_twice(folder: Path) -> None:
    run = fit(folder, batches=1, loop={"max_duration": "2ep"})
    run.trainer.loop = type(run.trainer.loop)(max_duration="4ep", eval_interval=None, log_interval=None)
    run.trainer.fit(rows(1))
    assert [epoch for _, epoch, _ in run.trained.batches] == [0, 1, 2, 3]


def check_middle_of_epoch(folder: Path) -> None:
    whole = fit(batches=5, loop={"max_duration": 8})
    fit(folder, batches=5, save={}, loop={"max_duration": 3})
    rest = fit(folder, batches=5, save={}, loop={"max_duration": 8})
    assert rest.trained.batches == whole.trained.batches[3:]
    assert all(map(torch.equal, rest.trained.data, whole.trained.data[3:]))
    assert all(map(torch.equal, rest.trainer.model.parameters(), whole.trainer.model.parameters()))


def check_fine_tuning(folder: Path) -> None:
    first = fit(folder, batches=2, loop={"max_duration": 4})
    first.trainer.save_checkpoint(folder / "saved")
    second = fit(
        folder, batches=2, loop={"max_duration": 6},
        fit_arguments={"ckpt_path": folder / "saved", "load": LoadOptions(states=["model"])},
    )  # fmt: skip
    assert second.trained.batches[0] == (0, 0, 0)
    assert second.trainer.progress.step == 6


def check_epochs_left(folder: Path, step: int, left: int) -> None:
    fit(folder, batches=2, save={"save_interval": "1ep"}, loop={"max_duration": "2ep"})
    path = folder / "checkpoints" / f"step{step}"
    run = fit(batches=2, loop={"max_duration": "2ep"}, fit_arguments={"ckpt_path": path})
    assert len(run.trained.batches) == left


def check_weights_alone(folder: Path) -> None:
    """A file of weights alone starts no resume, and says so."""
    torch.save(Net().state_dict(), folder / "weights.pt")
    trainer = make_trainer()
    with pytest.raises((UserError, CheckpointError), match="weights"):
        trainer.load_checkpoint(folder / "weights.pt")
    trainer.load_checkpoint(folder / "weights.pt", LoadOptions(states=["model"]))


def check_saved_before_fit(folder: Path) -> None:
    trainer = make_trainer()
    trainer.save_checkpoint(folder / "saved")
    other = make_trainer(seed=4)
    other.load_checkpoint(folder / "saved")
    assert other.progress.step == 0
    assert all(map(torch.equal, trainer.model.parameters(), other.model.parameters()))


CLAIMS: list[Claim] = [
    *claims(
        f"{TOP}test_resume_and_old_checkpoint_files_remain",
        check_resumed_elsewhere,
        {"a resume into another folder leaves the first as it was": (False,)},
    ),
    *claims(
        f"{TOP}test_resume_and_old_checkpoint_files_remain",
        check_resumed_elsewhere,
        {"a resume in the same folder keeps the checkpoint that it began with": (True,)},
        difference="It is kept only as long as it is among the newest: later ones, each whole, replace it by the same "
        "rule as in a run without a break.",
    ),
    *claims(
        f"{TOP}test_resume_training_preserves_old_ckpt_last",
        check_resumed_elsewhere,
        {"the last checkpoint of the old folder stays": (False,)},
    ),
    *claims(
        f"{TOP}test_checkpoint_repeated_strategy",
        check_rerun,
        {"a finished run that is started again makes no step and no file": ([2, 4], 4)},
    ),
    *claims(
        f"{TOP}test_checkpoint_repeated_strategy_extended",
        check_rerun,
        {"a longer run goes on from where it ended": ([2, 4, 6, 8], 8)},
    ),
    *claims(
        f"{TOP}test_ckpt_version_after_rerun_new_trainer",
        check_rerun,
        {"a second trainer on the same folder": ([2, 4], 4)},
        difference="Lightning trains anew and adds -v1 to the names; here the folder belongs to one run, which a "
        "second trainer resumes: finished, there is nothing to do.",
    ),
    *claims(
        f"{TOP}test_load_with_inf_data_loader",
        check_resumes_without_length,
        {"a loader without a length is resumed at an epoch's end": ()},
    ),
    *claims(
        "test_restore: test_trainer_properties_restore_ckpt_path",
        check_restored,
        {
            f"a resumed training begins with the {what}": (what,)
            for what in ("epoch", "step", "weights", "optimizer", "schedule")
        },
    ),
    *claims(
        "test_restore: test_callbacks_state_fit_ckpt_path",
        check_restored,
        {"a resumed training restores the states of callbacks": ("callback",)},
    ),
    *claims(
        "test_restore: test_correct_step_and_epoch",
        check_restored,
        {"a state saved after the fit has the next epoch": ("epoch",), "it has the steps that were made": ("step",)},
    ),
    *claims(
        "test_restore: test_running_test_pretrained_model_cpu",
        check_evaluates_checkpoint,
        {"a new trainer evaluates a checkpoint as its training did": (True,)},
    ),
    *claims(
        "test_trainer: test_checkpoint_path_input_last",
        check_evaluates_checkpoint,
        {"an evaluation without a path takes the newest checkpoint": (False,)},
    ),
    *claims(
        "test_restore: test_try_resume_from_non_existing_checkpoint",
        check_no_checkpoint_named,
        {"a checkpoint that is not there is an error that names it": ()},
    ),
    *claims(
        "test_restore: test_model_saving_loading",
        check_predictions_after_loading,
        {"a loaded model predicts what the saved one did": ()},
    ),
    *claims(
        "test_restore: test_strict_model_load_more_params",
        check_strict,
        {
            "names that only the checkpoint has are refused": (Larger, Net, "more", True),
            "they are left out where loading is not strict": (Larger, Net, "more", False),
        },
    ),
    *claims(
        "test_restore: test_strict_model_load_less_params",
        check_strict,
        {
            "names that only the model has are refused": (Net, Larger, "more", True),
            "they keep their values where loading is not strict": (Net, Larger, "more", False),
        },
    ),
    *claims("test_restore: test_fit_twice", check_fit_twice, {"a longer second fit goes on with the epochs": ()}),
    *claims(
        "test_restore: test_restarting_mid_epoch_raises_warning",
        check_middle_of_epoch,
        {"a training is resumed in the middle of an epoch": ()},
        difference="Lightning warns that the data then differs; here the rest of the epoch is trained, bit for bit as "
        "without a break.",
    ),
    *claims(
        "test_trainer_checkpoint: test_finetuning_with_ckpt_path",
        check_fine_tuning,
        {"a training from another's weights counts its own steps": ()},
    ),
    *claims(
        "test_trainer: test_fit_ckpt_path_epoch_restored",
        check_epochs_left,
        {
            "from the first epoch's checkpoint one epoch is left": (2, 2),
            "from the last epoch's checkpoint none is left": (4, 0),
        },
    ),
    *claims(
        "test_trainer: test_model_checkpoint_only_weights",
        check_weights_alone,
        {"weights alone resume no training, but are loaded as weights": ()},
    ),
    *claims(
        "test_trainer: test_trainer_save_checkpoint_no_model_attached",
        check_saved_before_fit,
        {"a trainer may save before its fit": ()},
        difference="A Lightning trainer has no model before its fit and refuses; here it is made with its model.",
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
