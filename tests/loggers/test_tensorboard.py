"""Event files: readable by TensorBoard's own reader, cut back on resume without a doubled or lost step."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.tensorboard import TensorBoardLogger


def write(run_dir: Path, steps: list[int], *, start_step: int = 0, now: float = 1e9) -> Path:
    """Log these steps as one attempt; where it goes on, cut back first. Returns the attempt's file."""
    logger = TensorBoardLogger()
    if start_step:
        logger.rewind(run_dir, start_step)
    before = set(run_dir.glob("tensorboard/*"))
    logger.start(RunFacts(run_dir=run_dir, start_step=start_step, start_time=now))
    for step in steps:
        logger.log(Record(step, 0.0, now + step, {"train/loss": float(step), "val/loss": 2.0 * step}))
    logger.close()
    (made,) = set(run_dir.glob("tensorboard/*")) - before
    return made


def events(path: Path) -> list:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]


def points(run_dir: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    """What is on the disk, file after file, in TensorBoard's order."""
    return [
        (event.step, value.simple_value)
        for path in sorted(run_dir.glob("tensorboard/*"))
        for event in events(path)
        for value in event.summary.value
        if value.tag == tag
    ]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    write(tmp_path, [1, 2, 3])
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    tensors = accumulator.Tensors("val/loss")
    assert [(event.step, event.wall_time) for event in tensors] == [(1, 1e9 + 1), (2, 1e9 + 2), (3, 1e9 + 3)]
    assert [event.tensor_proto.float_val[0] for event in tensors] == [2.0, 4.0, 6.0]


def test_a_resume_neither_doubles_nor_loses_a_step(tmp_path: Path) -> None:
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], start_step=20)
    write(tmp_path, [50, 60], start_step=40)
    assert points(tmp_path) == [(step, float(step)) for step in (10, 20, 30, 40, 50, 60)]


def test_going_back_behind_an_earlier_resume_cuts_every_file(tmp_path: Path) -> None:
    write(tmp_path, [10, 20, 30])
    write(tmp_path, [30, 40], start_step=20)
    write(tmp_path, [20], start_step=10)
    assert points(tmp_path) == [(10, 10.0), (20, 20.0)]


def test_starting_over_drops_everything(tmp_path: Path) -> None:
    write(tmp_path, [0, 10])
    TensorBoardLogger().rewind(tmp_path, -1)
    assert points(tmp_path) == []
    write(tmp_path, [0, 10])
    assert points(tmp_path) == [(0, 0.0), (10, 10.0)]


def test_a_running_tensorboard_forgets_the_steps_that_are_made_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    write(tmp_path, [10, 20, 30])
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    write(tmp_path, [30, 40], start_step=20)
    accumulator.Reload()
    assert [event.step for event in accumulator.Tensors("train/loss")] == [10, 20, 30, 40]


def test_each_attempt_has_a_file_that_sorts_last_even_if_the_clock_went_back(tmp_path: Path) -> None:
    made = [write(tmp_path, [1], now=now) for now in (2e9, 1e9, 1e9, 3e9)]
    assert made == sorted(made)


@pytest.mark.parametrize("lost", [1, 4, 5, 20, 60])
def test_a_torn_end_is_cut_to_the_last_whole_event(lost: int, tmp_path: Path) -> None:
    path = write(tmp_path, [10, 20])
    os.truncate(path, path.stat().st_size - lost)
    TensorBoardLogger().rewind(tmp_path, 100)
    assert points(tmp_path) == [(10, 10.0)]


@pytest.mark.parametrize(
    "tail", [b"\0" * 64, random.Random(5).randbytes(64), b"\xff" * 12], ids=["zeros", "noise", "ones"]
)
def test_what_is_no_event_at_the_end_goes(tail: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, [10, 20])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    TensorBoardLogger().rewind(tmp_path, 100)
    assert path.read_bytes() == whole


def test_a_damaged_event_in_the_middle_goes_alone(tmp_path: Path) -> None:
    path = write(tmp_path, [10, 20, 30])
    content = bytearray(path.read_bytes())
    event_bytes = (len(content) - content.index(b"train/loss")) // 3
    content[content.index(b"train/loss") + event_bytes] ^= 0xFF
    path.write_bytes(content)
    TensorBoardLogger().rewind(tmp_path, 100)
    assert points(tmp_path) == [(10, 10.0), (30, 30.0)]


def test_rewinding_what_needs_no_cut_touches_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, [10, 20])
    os.utime(path, ns=(1, 1))
    TensorBoardLogger().rewind(tmp_path, 20)
    assert path.stat().st_mtime_ns == 1


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "projector_config.pbtxt").write_text("mine")
    TensorBoardLogger().rewind(tmp_path, -1)
    assert (folder / "projector_config.pbtxt").read_text() == "mine"
