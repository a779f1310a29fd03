"""Loads of a small classifier: resumes, chosen states, hostile files and files of Composer."""

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
from classifier import (
    STEPS,
    Classifier,
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
from small_runs import StopAt
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
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "link": lambda: {"checkpoint": saver(latest_link=False), "name": "mine"},
        "name": lambda: {"checkpoint": saver()},
        "folder": lambda: {"checkpoint": tc.CheckpointerCallback(save_async=False), "name": "mine"},
    }
    make = makers[lacking]
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

    state = tc.make_sync_checkpointer().read(path)
    # Where the logs stood, and the time spent so far.
    state.pop("log_marks", None)
    return dict(walk(state, ""))


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


STATES = ("model", "optimizer", "schedulers", "progress", "callbacks", "rng")


URLS = [f"{scheme}://my-bucket/my-run-name/my-checkpoints" for scheme in ("gcs", "sftp", "wandb")]


@pytest.mark.parametrize(
    ("patterns", "ignored"),
    [
        (["*.weight"], ["features.0.weight", "features.1.weight", "classifier.weight"]),
        (["classifier.*"], ["classifier.weight", "classifier.bias"]),
        (["classifier.weight", "classifier.bias"], ["classifier.weight", "classifier.bias"]),
        (["features*.weight"], ["features.0.weight", "features.1.weight"]),
    ],
)
def test_ignored_parameters_keep_their_values(patterns: list[str], ignored: list[str]) -> None:
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    fresh = weights(trainer)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=patterns))
    assert_same(weights(trainer), {name: (fresh if name in ignored else saved)[name] for name in saved})
    assert not [name for name in ignored if torch.equal(fresh[name], saved[name])]


def test_a_pattern_that_matches_nothing_is_logged() -> None:
    """A pattern of something else is logged to match nothing; everything is loaded."""
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=["state/optimizers/0"]))
    assert_same(weights(trainer), saved)
    with pytest.raises(tc.ConfigError, match=r"load\.states"):
        tc.LoadOptions(states=["optimizer/0"])


def test_without_the_counts_of_the_run_it_starts_at_step_0() -> None:
    fit(7, checkpoint=saver())
    states = [state for state in STATES if state != "progress"]
    trainer = make_trainer(3)
    trainer.load_checkpoint("checkpoints/step7", tc.LoadOptions(states=states))
    assert trainer.progress.step == 0
    assert trainer.fit(train_loader()).step == 3


def test_the_random_state_is_a_state_by_name() -> None:
    """Dropout after a resume is that of the run only with the random state."""
    straight = weights(fit(10, checkpoint=saver(save_interval=5)))
    without = tc.LoadOptions(states=[state for state in STATES if state != "rng"])
    assert_same(weights(fit(10, "checkpoints/step5", seed=9, load=tc.LoadOptions(states=STATES))), straight)
    other = weights(fit(10, "checkpoints/step5", seed=9, load=without))
    assert any(not torch.equal(straight[name], value) for name, value in other.items())


@pytest.mark.parametrize("left", ["all", "rng", "callbacks", "model"])
def test_a_state_can_be_left_out_of_a_load(left: str) -> None:
    """All but one state is loaded; `all`: nothing is."""
    fit(7, None, tc.EMA(0.5), checkpoint=saver())
    saved = tc.make_sync_checkpointer().read(Path("checkpoints/step7"))
    trainer = make_trainer(callbacks=[tc.EMA(0.5)], seed=9)
    states = [state for state in STATES if state != left]
    trainer.load_checkpoint(
        "checkpoints/step7",
        tc.LoadOptions(states=["model"], ignore_keys=["*"]) if left == "all" else tc.LoadOptions(states=states),
    )
    state = trainer.checkpoint_state()
    key = "classifier.weight"
    average = state["callbacks"].get("EMA", {}).get("average", {})
    loaded = {
        "model": torch.equal(state["model"][key], saved["model"][key]),
        "progress": trainer.progress.step == 7,
        "callbacks": key in average and torch.equal(average[key], saved["callbacks"]["EMA"]["average"][key]),
        "rng": trainer.loading.rng is not None,
    }
    assert loaded == {name: name != left and left != "all" for name in loaded}


def test_every_call_names_the_path_without_a_checkpoint() -> None:
    path = "missing/step5"
    calls: list[Callable[[], object]] = [
        lambda: fit(10, path),
        lambda: make_trainer().load_checkpoint(path),
        lambda: make_trainer().validate(val_loader(), ckpt_path=path),
        lambda: tc.load_checkpoint(path, Classifier()),
        lambda: tc.make_sync_checkpointer().read(Path(path)),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match=path):
            call()


def test_metrics_of_the_saved_step_are_in_checkpoint_and_result() -> None:
    def finish() -> tc.FitResult:
        trainer = make_trainer(4, loop={"eval_interval": 2}, checkpoint=saver(save_interval=2))
        return trainer.fit(train_loader(), val_loader())

    reported = finish().metrics["val/loss"]
    path = tc.latest_checkpoint("checkpoints")
    assert tc.make_sync_checkpointer().metrics(path)["val/loss"] == reported
    assert finish().metrics["val/loss"] == reported


@pytest.mark.parametrize("url", list(URLS))
def test_unknown_stores_are_refused_for_loads(url: str) -> None:
    trainer = make_trainer()
    with pytest.raises(tc.UserError, match="://"):
        trainer.fit(train_loader(), ckpt_path=url)
    assert trainer.progress.step == 0


@pytest.mark.parametrize(
    ("missing", "unexpected"), [(missing, unexpected) for missing in (False, True) for unexpected in (False, True)]
)
def test_missing_and_unexpected_parameters_are_refused(missing: bool, unexpected: bool) -> None:
    torch.manual_seed(3)
    theirs, ours = Classifier(), Classifier()
    if missing:
        del theirs.classifier.bias
        theirs.classifier.register_parameter("bias", None)
    if unexpected:
        theirs.extra = torch.nn.Linear(2, 2)
    tc.save_checkpoint("step1", 0, theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    if missing or unexpected:
        before = {name: value.clone() for name, value in ours.state_dict().items()}
        with pytest.raises(tc.UserError, match="|".join(["classifier.bias"] * missing + ["extra.weight"] * unexpected)):
            tc.load_checkpoint("step1", ours, finetune=True)
        assert_same(ours.state_dict(), before)
    tc.load_checkpoint("step1", ours, finetune=True, strict=not (missing or unexpected))
    common = theirs.state_dict().keys() & ours.state_dict().keys()
    assert not [name for name in common if not torch.equal(theirs.state_dict()[name], ours.state_dict()[name])]
