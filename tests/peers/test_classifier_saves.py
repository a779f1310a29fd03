"""Saves of a small classifier: intervals, formats, names, copies and links."""

from __future__ import annotations

import math
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from classifier import (
    STEPS,
    assert_same,
    make_trainer,
    names,
    saved_by,
    saver,
    train_loader,
    weights,
)
from small_runs import StopAt

import trainer_cli as tc


def test_a_second_saver_is_refused(folder: Path) -> None:
    with pytest.raises(tc.UserError, match="One saves"):
        make_trainer(callbacks=[saver("second")], checkpoint=saver("first"))
    # What a second one is for: parts of some checkpoints in another folder.
    copies = tc.SaveCheckpointState(["model"], every=4, folder=str(folder / "second"))
    make_trainer(8, callbacks=[copies], checkpoint=saver("first", save_interval=2)).fit(train_loader())
    assert (names("first"), names("second")) == (["step2", "step4", "step6", "step8"], ["step4", "step8"])


class FailsAt(tc.Callback):
    """Puts something into the checkpoint of a step that no checkpoint can hold."""

    def __init__(self, step: int) -> None:
        self.step = step

    def postprocess_checkpoint(self, trainer: tc.Trainer, state: dict[str, Any]) -> None:
        if trainer.progress.step == self.step:
            state["extra"] = object()


def test_a_failed_save_leaves_the_link() -> None:
    trainer = make_trainer(4, callbacks=[FailsAt(4)], checkpoint=saver(save_interval=2, latest_link=True))
    with pytest.raises(tc.TrainError, match="extra"):
        trainer.fit(train_loader())
    assert names() == ["step2"]
    assert Path("checkpoints/latest").resolve().name == "step2"


def test_a_link_to_the_newest_checkpoint_is_there_and_can_be_loaded() -> None:
    trainer = make_trainer("2ep", checkpoint=saver(name="ep{epoch}-ba{batch}", save_interval="1ep", latest_link=True))
    trainer.fit(train_loader())
    assert Path("checkpoints/latest").resolve() == tc.latest_checkpoint("checkpoints").resolve()
    other = make_trainer(seed=1)
    other.load_checkpoint("checkpoints/latest")
    assert other.progress.step == 2 * STEPS
    assert_same(weights(other), weights(trainer))


@pytest.mark.parametrize("kind", [str, Path])
def test_folder_and_name_may_be_strings(folder: Path, kind: type[str] | type[Path]) -> None:
    made = make_trainer("2ep", checkpoint=saver(kind("a/folder"), name="ep{epoch}-ba{batch}", save_interval="1ep"))
    made.fit(train_loader())
    assert names("a/folder") == ["ep1-ba0", "ep2-ba0"]


def test_by_default_each_epoch_is_saved_and_none_is_replaced() -> None:
    def fit(duration: str, ckpt_path: Any) -> None:
        make_trainer(duration, checkpoint=tc.CheckpointerCallback(save_async=False)).fit(
            train_loader(), ckpt_path=ckpt_path
        )

    fit("3ep", None)
    assert names() == ["step0", "step10", "step15", "step5"]
    with pytest.raises(tc.UserError, match="would not be replaced"):
        fit("3ep", None)


class Without(tc.Callback):
    """Leaves a state out of the checkpoints."""

    def __init__(self, key: str) -> None:
        self.key = key

    def postprocess_checkpoint(self, trainer: tc.Trainer, state: dict[str, Any]) -> None:
        del state[self.key]


@pytest.mark.parametrize("key", ["callbacks", "model", "rng"])
def test_states_can_be_left_out_of_checkpoints(key: str) -> None:
    for name, callbacks in (("whole", []), ("less", [Without(key)])):
        make_trainer(2, callbacks=callbacks, checkpoint=saver(name, save_interval=2)).fit(train_loader())
    read = tc.make_sync_checkpointer().read
    whole, less = read(Path("whole/step2")), read(Path("less/step2"))
    assert set(whole) - set(less) == {key}
    assert not set(less) - set(whole)


@pytest.mark.parametrize("newer", ["refuse", "trash"])
def test_going_back_beside_newer_checkpoints(folder: Path, newer: str) -> None:
    """To step 5, in a folder with step 10."""
    straight = make_trainer(10, checkpoint=saver(save_interval=5))
    straight.fit(train_loader())
    before = Path("checkpoints/step10/manifest.json").read_bytes()
    again = make_trainer(10, checkpoint=saver(save_interval=5, newer=newer))
    if newer == "refuse":
        with pytest.raises(tc.UserError, match="newer"):
            again.fit(train_loader(), ckpt_path="checkpoints/step5")
        assert Path("checkpoints/step10/manifest.json").read_bytes() == before
    else:
        again.fit(train_loader(), ckpt_path="checkpoints/step5")
        assert names() == ["step10", "step5"]
        assert Path("checkpoints/step10/manifest.json").read_bytes() != before
        assert_same(weights(straight), weights(again))


def test_by_default_more_than_the_weights_is_saved() -> None:
    saved_by(2, save_interval=2)
    state = tc.make_sync_checkpointer().read(Path("checkpoints/step2"))
    assert {"model", "optimizer", "schedulers", "rng", "progress", "data"} <= set(state)


def test_weights_are_saved_beside_the_checkpoints(folder: Path) -> None:
    copies = tc.SaveCheckpointState(["model"], folder=str(folder / "weights"))
    trainer = make_trainer(2, callbacks=[copies], checkpoint=saver(save_interval=2))
    trainer.fit(train_loader())
    state = tc.make_sync_checkpointer().read(Path("weights/step2"))
    assert set(state) == {"model", "model_versions", "progress"}
    other = make_trainer(seed=1)
    other.load_checkpoint("weights/step2", tc.LoadOptions(states=["model"]))
    assert_same(weights(trainer), weights(other))


def archive_of(compression: str) -> Path:
    trainer = make_trainer(2, checkpoint=saver(compression, save_interval=2, format="archive", compression=compression))
    trainer.fit(train_loader())
    (path,) = Path(compression, "step2").glob("*.tar*")
    other = make_trainer(seed=1)
    other.load_checkpoint(Path(compression, "step2"))
    assert_same(weights(trainer), weights(other))
    return path


@pytest.mark.parametrize("compression", ["bz2", "gz", "lzma", "none", "xz"])
def test_compressed_archives_are_loaded(compression: str) -> None:
    """Python's tarfile reads it, and the program what is in it."""
    path = archive_of(compression)
    with tarfile.open(path) as archive:
        assert "rank0.safetensors" in {Path(name).name for name in archive.getnames()}
    plain = b"rank0.safetensors" in path.read_bytes()
    assert plain is (compression == "none")


def test_a_compressed_archive_is_smaller_than_one_that_is_not() -> None:
    assert archive_of("gz").stat().st_size < archive_of("none").stat().st_size


def test_checkpoints_from_before_a_restart_count_for_the_rotation() -> None:
    def fit(*callbacks: tc.Callback) -> None:
        made = make_trainer(10, callbacks=callbacks, checkpoint=saver(save_interval=2, max_checkpoints=3))
        made.fit(train_loader())

    fit(StopAt(6))
    assert names() == ["step2", "step4", "step6"]
    fit()
    assert names() == ["step10", "step6", "step8"]


@pytest.mark.parametrize("share", ["0.01", "0.25", "0.35"])
def test_an_interval_may_be_a_share_of_the_run(share: str) -> None:
    """At the first step at or after each multiple, and at the last."""
    interval = Fraction(share) * 2 * STEPS
    due = {math.ceil(number * interval) for number in range(1, int(1 / Fraction(share)) + 1)}
    assert saved_by("2ep", save_interval=f"{share}dur") == sorted(due | {2 * STEPS})


def test_a_group_of_epochs_is_no_unit() -> None:
    with pytest.raises(tc.ConfigError, match=r"save_interval.*not a duration"):
        saver(save_interval="1iter")
    assert saved_by("4ep", save_interval="2ep") == [2 * STEPS, 4 * STEPS]


@pytest.mark.parametrize(
    ("interval", "unit", "batch_size", "length"),
    [
        (1, "sp", 4, 1),
        (4, "sp", 1, 1),
        (5, "sp", 4, 1),
        (1, "tok", 1, 1),
        (64, "tok", 1, 16),
        (64, "tok", 4, 16),
        (65, "tok", 1, 16),
        (65, "tok", 4, 16),
    ],
)
def test_samples_and_tokens_count_saves(interval: int, unit: str, batch_size: int, length: int) -> None:
    """A step is saved when its samples or tokens reach a further multiple; and the last step."""
    loader = train_loader(12, batch_size, length)
    counts = [step * batch_size * (length if unit == "tok" else 1) for step in range(12 // batch_size + 1)]
    due = {step for step in range(1, len(counts)) if counts[step] // interval > counts[step - 1] // interval}
    assert saved_by("1ep", loader, save_interval=f"{interval}{unit}") == sorted(due | {len(counts) - 1})
