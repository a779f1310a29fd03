"""The claims of Composer's own tests about resuming, and about files of other programs."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer_training import (
    STEPS,
    Classifier,
    StopAt,
    Words,
    assert_same,
    fit,
    make_trainer,
    names,
    saver,
    train_loader,
    val_loader,
    weights,
)
from torch.utils.data import DataLoader

import trainer_cli as tc


class Runs:
    """What calls `function(*arguments)` where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def hostile(kind: str) -> bytes:
    shell = Runs(os.system, "touch ran")
    match kind:
        case "eval":
            return torch_bytes({"state": {"model": Runs(eval, "open('ran', 'w')")}})
        case "torch.save":
            return torch_bytes({"state": {"model": {"weight": torch.ones(1)}, "more": shell}})
        case "pickle":
            return pickle.dumps(shell)
        case _:
            return torch_bytes({"state": Runs(torch.storage._load_from_bytes, torch_bytes(shell))})


@pytest.mark.parametrize("kind", ["eval", "torch.save", "pickle", "storage"])
def test_hostile_files_are_refused_and_run_nothing(folder: Path, kind: str) -> None:
    path = folder / "ep1.pt"
    path.write_bytes(hostile(kind))
    model = tc.LoadOptions(states=["model"])
    calls: list[Callable[[], object]] = [
        lambda: tc.load_checkpoint(path, Classifier(), finetune=True),
        lambda: make_trainer().fit(train_loader(), ckpt_path=path, load=model),
        lambda: make_trainer().validate(val_loader(), ckpt_path=path),
    ]
    for call in calls:
        with pytest.raises(tc.TrainError):
            call()
    assert not Path("ran").exists()


@pytest.mark.parametrize("whole", [True, False])
def test_files_of_composer_give_their_weights(whole: bool) -> None:
    """A file as Composer writes it."""
    torch.manual_seed(3)
    theirs = Classifier()
    state: dict[str, Any] = {"model": theirs.state_dict(), "timestamp": {"Timestamp": {"batch": {"value": 7}}}}
    rest: dict[str, Any] = {}
    if whole:
        state["timestamp"]["Timestamp"]["total_wct"] = datetime.timedelta(seconds=5)
        rest["rng"] = [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
    torch.save({"state": state, **rest}, "ep1.pt")
    trainer = make_trainer()
    trainer.load_checkpoint("ep1.pt", tc.LoadOptions(states=["model"]))
    assert_same(weights(trainer), theirs.state_dict())


def contents(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_a_resume_changes_no_checkpoint_and_goes_on_to_a_larger_duration() -> None:
    """A larger `max_duration` goes on, and leaves the files of earlier checkpoints as they are."""
    fit(5, checkpoint=saver(save_interval=5, save_final=False))
    before = contents("checkpoints/step5")
    trainer = fit(10, checkpoint=saver(save_interval=5, save_final=False))
    assert trainer.progress.step == 10
    assert names() == ["step10", "step5"]
    assert contents("checkpoints/step5") == before


@pytest.mark.parametrize("lacking", ["link", "name", "folder"])
def test_a_resume_needs_neither_link_nor_names(folder: Path, lacking: str) -> None:
    make = {
        "link": lambda: {"checkpoint": saver(latest_link=False), "name": "mine"},
        "name": lambda: {"checkpoint": saver()},
        "folder": lambda: {"checkpoint": tc.CheckpointerCallback(save_async=False), "name": "mine"},
    }[lacking]
    fit(10, None, StopAt(7), **make())
    assert make_and_resume(make) == 7


def make_and_resume(make: Callable[[], dict[str, Any]]) -> int:
    """The step from which a second trainer goes on."""

    class Looks(tc.Callback):
        step = -1

        def on_train_start(self, trainer: tc.Trainer, *_: Any) -> None:
            self.step = trainer.progress.step

    looks = Looks()
    assert fit(10, None, looks, **make()).progress.step == 10
    return looks.step


def compared(path: Path) -> dict[str, torch.Tensor | object]:
    """The state in a checkpoint by path, without the clock."""

    def walk(value: Any, where: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield from walk(part, f"{where}/{key}")
        elif not where.endswith("seconds"):
            yield where, value

    return dict(walk(tc.make_sync_checkpointer().read(path), ""))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor | np.ndarray):
        return bool(torch.equal(torch.as_tensor(first), torch.as_tensor(second)))
    return bool(first == second)


@pytest.mark.parametrize(
    ("seed", "interval", "name", "step", "form"),
    [
        (None, "1ep", "ep{epoch}-step{step}", 5, {}),
        (42, "1ep", "ep{epoch}-step{step}", 5, {}),
        (42, "1ep", "ep{epoch}-step{step}", 5, {"format": "archive", "compression": "gz"}),
        (42, "2st", "ba{step}", 4, {}),
        (42, "1st", "ba{step}", 5, {}),
        (42, "2st", "ba{step}", 6, {}),
    ],
)
def test_a_resumed_run_ends_with_the_same_weights(
    folder: Path, seed: int | None, interval: str, name: str, step: int, form: dict[str, str]
) -> None:
    """From a checkpoint of one folder, saving into another: the last checkpoints are the same."""
    settings: dict[str, Any] = {"save_interval": interval, "name": name, **form}
    fit("2ep", checkpoint=saver("first", **settings), seed=seed)
    start = tc.checkpoint_path("first", step=step)
    fit("2ep", start, checkpoint=saver("second", **settings), seed=seed)
    assert tc.checkpoint_path("second", step=10).name == tc.checkpoint_path("first", step=10).name
    first, second = (compared(tc.checkpoint_path(which, step=10)) for which in ("first", "second"))
    assert list(first) == list(second)
    assert not [key for key in first if not same(first[key], second[key])]


def test_a_hook_may_refuse_a_checkpoint() -> None:
    """Damage is noticed always; a callback may refuse for reasons of its own."""

    class Refuses(tc.Callback):
        def on_before_load_checkpoint(self, trainer: tc.Trainer, path: Path) -> None:
            raise ValueError(f"{path.name} is not wanted")

    fit(2, checkpoint=saver())
    trainer = make_trainer(callbacks=[Refuses()], seed=9)
    before = weights(trainer)
    with pytest.raises(ValueError, match="step2 is not wanted"):
        trainer.fit(train_loader(), ckpt_path="checkpoints/step2")
    assert_same(weights(trainer), before)
    (tensors,) = Path("checkpoints/step2").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x99")
    with pytest.raises(tc.CheckpointError, match=r"digest|damaged"):
        fit(4, "checkpoints/step2")


def shuffling() -> Any:
    return DataLoader(Words(10), batch_size=2, shuffle=True)


@pytest.mark.parametrize("make", [train_loader, shuffling])
def test_a_run_resumes_within_an_epoch(make: Callable[[], Any]) -> None:
    """Stopped within an epoch and resumed: the same weights as without a stop."""
    straight = make_trainer("2ep")
    straight.fit(make())
    first = make_trainer("2ep", callbacks=[StopAt(STEPS + 2)], checkpoint=saver())
    first.fit(make())
    second = make_trainer("2ep", checkpoint=saver())
    second.fit(make())
    assert_same(weights(straight), weights(second))
