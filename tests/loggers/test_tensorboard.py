"""Event files: what TensorBoard's own reader shows, on a resume without a doubled or lost step."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from trainer_cli.loggers import tensorboard_files
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.tensorboard import TensorBoardLogger


def write(run_dir: Path, steps: list[int], *, start_step: int | None = None) -> Path:
    """Log these steps as one attempt, which goes on from `start_step`. Returns the attempt's file."""
    logger = TensorBoardLogger()
    if start_step is not None:
        logger.rewind(run_dir, start_step)
    logger.start(RunFacts(run_dir=run_dir))
    for step in steps:
        logger.log(Record(step, 0.0, 1e9 + step, {"train/loss": float(step), "val/größe": 2.0 * step}))
    logger.close()
    return files(run_dir)[-1]


def files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("tensorboard/events*"))


def shown(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(run_dir: Path) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in shown(run_dir).Scalars("train/loss")]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3])
    assert [(one.step, one.wall_time, one.value) for one in shown(tmp_path).Scalars("val/größe")] == [
        (1, 1e9 + 1, 2.0), (2, 1e9 + 2, 4.0), (3, 1e9 + 3, 6.0),
    ]  # fmt: skip


def test_what_32_bits_cannot_hold_is_infinite_and_not_a_number_stays_one(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(Record(1, 0.0, 0.0, {"up": 1e300, "down": -1e300, "none": math.nan}))
    logger.close()
    up, down, none = (shown(tmp_path).Scalars(tag)[0].value for tag in ("up", "down", "none"))
    assert (up, down) == (math.inf, -math.inf)
    assert math.isnan(none)


def test_text_images_and_histograms_are_written_with_the_writer(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    with pytest.raises(RuntimeError, match="between start"):
        _ = logger.writer
    logger.start(RunFacts(run_dir=tmp_path))
    logger.writer.add_text("sample", "once upon a time", 5)
    logger.writer.add_image("digit", np.zeros((1, 4, 6), dtype=np.uint8), 5)
    logger.writer.add_histogram("weights", np.arange(10.0), 5)
    logger.close()
    found = shown(tmp_path)
    (text,) = found.Tensors("sample/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (5, b"once upon a time")
    (image,) = found.Images("digit")
    assert (image.step, image.height, image.width) == (5, 4, 6)
    (histogram,) = found.Histograms("weights")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (5, 10, 9.0)


def test_texts_images_and_histograms_of_a_record_are_shown(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    images = {
        tag: np.full(shape, 7, dtype=np.uint8)
        for tag, shape in {"grey": (4, 6, 1), "colour": (5, 3, 3), "clear": (5, 3, 4)}.items()
    }
    logger.log(
        Record(
            5, 0.0, 1e9, {}, texts={"sample": "once"}, images=images,
            histograms={"weights": np.arange(10.0), "nothing": np.zeros(0)},
        )
    )  # fmt: skip
    logger.close()
    found = shown(tmp_path)
    (text,) = found.Tensors("sample/text_summary")
    assert (text.step, text.wall_time, text.tensor_proto.string_val[0]) == (5, 1e9, b"once")
    sizes = {
        tag: (image.step, image.height, image.width) for tag in found.Tags()["images"] for image in found.Images(tag)
    }
    assert sizes == {"grey": (5, 4, 6), "colour": (5, 5, 3), "clear": (5, 5, 3)}
    assert found.Tags()["histograms"] == ["weights"]
    (histogram,) = found.Histograms("weights")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (5, 10, 9.0)


def attempt(run_dir: Path, start_step: int, config: str, **hparams: bool | float | str) -> None:
    """An attempt that starts at a step and logs the next one."""
    logger = TensorBoardLogger()
    logger.rewind(run_dir, start_step if start_step else -1)
    logger.start(RunFacts(run_dir=run_dir, start_step=start_step, config=config, hparams=hparams))
    logger.log(Record(start_step + 1, 0.0, 0.0, {"train/loss": 1.0}))
    logger.close()


def configs(run_dir: Path) -> list[tuple[int, str]]:
    return [(one.step, one.tensor_proto.string_val[0].decode()) for one in shown(run_dir).Tensors("config")]


def sessions(run_dir: Path) -> list[tuple[str, dict[str, object]]]:
    """The name and the hyperparameters of each event that has some, in all files."""
    events = [Event.FromString(record) for path in files(run_dir) for record in RawEventFileLoader(str(path)).Load()]
    values = [value for event in events for value in event.summary.value if value.tag == SESSION_START_INFO_TAG]
    infos = [HParamsPluginData.FromString(one.metadata.plugin_data.content).session_start_info for one in values]
    return [
        (info.group_name, {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()})
        for info in infos
    ]


def test_the_config_and_the_hyperparameters_are_shown_once_over_resumes(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    for start_step in (0, 10, 20, 20, 0):
        attempt(run, start_step, "lr: 1\nname: x\n", lr=1.0, fused=True, model="cnn")
        assert configs(run) == [(0, "    lr: 1\n    name: x\n")]
        assert sessions(run) == [(f"mine ({run.parent})", {"lr": 1.0, "fused": True, "model": "cnn"})]


def test_a_changed_config_is_added_at_its_step_and_changed_hyperparameters_replace_the_old_ones(tmp_path: Path) -> None:
    for start_step, lr in ((0, 1), (10, 2), (20, 2), (30, 1)):
        attempt(tmp_path, start_step, f"lr: {lr}\n", lr=lr)
        assert [one for _, one in sessions(tmp_path)] == [{"lr": lr}]
    assert configs(tmp_path) == [(0, "    lr: 1\n"), (10, "    lr: 2\n"), (30, "    lr: 1\n")]
    attempt(tmp_path, 5, "lr: 1\n", lr=1)
    assert configs(tmp_path) == [(0, "    lr: 1\n")]


def test_a_run_that_is_not_described_has_neither(tmp_path: Path) -> None:
    attempt(tmp_path, 0, "")
    assert shown(tmp_path).Tags()["tensors"] == []


def test_a_killed_and_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from trainer_cli.loggers.base import Record, RunFacts
        from trainer_cli.loggers.tensorboard import TensorBoardLogger

        logger = TensorBoardLogger()
        logger.start(RunFacts(run_dir=Path(sys.argv[1])))
        for step in (10, 20, 30):
            logger.log(Record(step, 0.0, 0.0, {"train/loss": float(step)}))
            logger.flush(durable=step == 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], timeout=500)
    (killed,) = files(tmp_path)
    os.truncate(killed, killed.stat().st_size - 3)
    write(tmp_path, [30, 40], start_step=20)
    assert points(tmp_path) == [(10, 10.0), (20, 20.0), (30, 30.0), (40, 40.0)]


def test_a_resume_drops_later_steps_and_a_torn_record_from_the_files(tmp_path: Path) -> None:
    older = write(tmp_path, [1, 2, 3, 4])
    with open(older, "ab") as file:
        file.write(older.read_bytes()[-40:-7])
    write(tmp_path, [3], start_step=2)
    older = files(tmp_path)[0]
    records = [Event.FromString(record) for record in RawEventFileLoader(str(older)).Load()]
    assert [event.step for event in records if event.HasField("summary")] == [1, 1, 2, 2]
    assert older.stat().st_size == sum(len(event.SerializeToString()) + 16 for event in records)
    assert points(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_running_tensorboard_forgets_the_steps_that_are_made_again(tmp_path: Path) -> None:
    first = write(tmp_path, [10, 20, 30])
    first.rename(first.with_name("events.out.tfevents.1000000000.host.1.0"))
    running = shown(tmp_path)
    write(tmp_path, [30, 40], start_step=20)
    running.Reload()
    assert [one.step for one in running.Scalars("train/loss")] == [10, 20, 30, 40]


def test_each_attempt_has_a_file_that_sorts_last_even_if_the_clock_went_back(tmp_path: Path) -> None:
    first = write(tmp_path, [1])
    first.rename(first.with_name("events.out.tfevents.9000000000.host.1.0"))
    for step in range(1, 13):
        assert "host" not in write(tmp_path, [step + 1], start_step=step).name
    assert [step for step, _ in points(tmp_path)] == list(range(1, 14))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's device that refuses every write")
def test_a_write_that_fails_names_the_file_and_close_does_not_raise_it_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = TensorBoardLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(Record(1, 0.0, 0.0, {"train/loss": 1.0}))
    (path,) = files(tmp_path)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        logger.log(Record(2, 0.0, 0.0, {"train/loss": 1.0}))
    assert caught.value.filename == str(path)
    logger.close()
    assert capfd.readouterr().err == ""


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "projector_config.pbtxt").write_text("mine")
    write(tmp_path, [1], start_step=-1)
    assert (folder / "projector_config.pbtxt").read_text() == "mine"


def test_records_after_a_fit_drop_none_of_the_fit(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.rewind(tmp_path, -1)
    for steps in ((1, 2, 3), (3, 2)):
        logger.start(RunFacts(run_dir=tmp_path, start_step=steps[0], config="lr: 1\n"))
        for step in steps:
            logger.log(Record(step, 0.0, 0.0, {"train/loss" if steps == (1, 2, 3) else "test/loss": float(step)}))
        logger.close()
    # Another process that only evaluates.
    write(tmp_path, [2])
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 2]
    assert [one.step for one in shown(tmp_path).Scalars("test/loss")] == [3, 2]
    assert configs(tmp_path) == [(1, "    lr: 1\n")]


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's counts of a process")
@pytest.mark.parametrize("keep", [2000, 1999], ids=["after the step", "at a pending evaluation"])
def test_a_resume_reads_no_event_before_the_checkpoints_step(keep: int, tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.rewind(tmp_path, -1)
    logger.start(RunFacts(run_dir=tmp_path, config="lr: 1\n", hparams={"lr": 1.0}))
    for step in range(1, 2001):
        logger.log(Record(step, 0.0, 0.0, {"train/loss": float(step)}))
    state = json.loads(json.dumps(logger.state_dict()))
    logger.log(Record(2001, 0.0, 0.0, {"train/loss": 1.0}))
    logger.close()
    assert files(tmp_path)[0].stat().st_size > 80_000
    second = TensorBoardLogger()
    second.load_state_dict(state)
    second.rewind(tmp_path, keep)
    second.start(RunFacts(run_dir=tmp_path, start_step=2000, config="lr: 1\n", hparams={"lr": 1.0}))
    before = bytes_read()
    second.log(Record(keep + 1, 0.0, 0.0, {"train/loss": 7.0}))
    assert bytes_read() - before < 40_000
    second.close()
    assert [step for step, _ in points(tmp_path)] == list(range(1, keep + 2))
    assert configs(tmp_path) == [(0, "    lr: 1\n")]
    assert len(sessions(tmp_path)) == 1


def test_other_hyperparameters_replace_those_of_a_long_file_of_which_hardly_an_event_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, object] = {}
    read: list[int] = []
    read_records = tensorboard_files._read_records

    def count(path: Path, start: int) -> Iterator[tuple[int, int, bytes]]:
        for entry in read_records(path, start):
            read.append(entry[0])
            yield entry

    monkeypatch.setattr(tensorboard_files, "_read_records", count)
    for attempt_number, rate in enumerate((1.0, 2.0, 2.0, 3.0)):
        logger, begin = TensorBoardLogger(), 500 * attempt_number
        logger.load_state_dict(state)
        logger.rewind(tmp_path, begin or -1)
        logger.start(RunFacts(run_dir=tmp_path, start_step=begin, config=f"lr: {rate}\n", hparams={"lr": rate}))
        for step in range(begin + 1, begin + 501):
            logger.log(Record(step, 0.0, 0.0, {"train/loss": float(step)}))
        state = json.loads(json.dumps(logger.state_dict()))
        logger.close()
        assert [hparams for _, hparams in sessions(tmp_path)] == [{"lr": rate}]
    assert [step for step, _ in points(tmp_path)] == list(range(1, 2001))
    assert configs(tmp_path) == [(0, "    lr: 1.0\n"), (500, "    lr: 2.0\n"), (1500, "    lr: 3.0\n")]
    assert len(read) < 60


@pytest.mark.parametrize("seed", range(5))
def test_a_resume_by_marks_leaves_the_event_files_that_one_without_them_leaves(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    run, whole = tmp_path / "run", tmp_path / "all"
    logger, step, settings = TensorBoardLogger(), 0, 1
    saved: dict[int, tuple[dict[str, object], dict[str, int]]] = {0: ({}, {})}

    def begin(folder: Path, keep: int, state: dict[str, object]) -> TensorBoardLogger:
        begun = TensorBoardLogger()
        begun.load_state_dict(state)
        begun.rewind(folder / "x", keep)
        facts = RunFacts(
            run_dir=folder / "x", name="x", start_step=step, config=f"lr: {settings}\n", hparams={"lr": settings}
        )
        begun.start(facts)
        return begun

    logger = begin(run, -1, {})
    for _ in range(50):
        event = choose.random()
        if event < 0.55:
            step += choose.randrange(3)
            texts = {"text": str(step)} if choose.random() < 0.3 else {}
            logger.log(Record(step, 0.0, choose.random(), {"train/loss": choose.random()}, texts=texts))
        elif event < 0.6:
            logger.writer.add_scalar("mine", choose.random(), choose.randrange(step + 5))
        elif event < 0.8:
            logger.flush(durable=True)
            saved[step] = json.loads(json.dumps(logger.state_dict())), sizes(run)
        else:
            logger.close()
            step = choose.choice(list(saved))
            state, flushed = saved[step]
            torn = choose.choice(list(run.glob("x/tensorboard/*")) or [None])
            if torn is not None:
                # A kill tears what is written after the checkpoint.
                least = flushed.get(torn.name, 0)
                os.truncate(torn, max(least, torn.stat().st_size - choose.randrange(60)))
            shutil.rmtree(whole, ignore_errors=True)
            if run.exists():
                shutil.copytree(run, whole)
            settings += choose.random() < 0.2
            keep = step - choose.randrange(2)
            record = Record(step + 1, 0.0, 0.0, {"train/loss": 0.0})
            for folder, known in ((whole, {}), (run, state)):
                logger = begin(folder, keep, known)
                logger.log(record)
                if folder == whole:
                    logger.close()
            ours, theirs = ([path.read_bytes() for path in files(folder / "x")] for folder in (run, whole))
            assert ours[:-1] == theirs[:-1]
            assert len(ours[-1]) == len(theirs[-1]), "the run is described again in both, or in neither"
            step += 1
            saved = {at: mark for at, mark in saved.items() if at < step}
    logger.close()


def sizes(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in files(run / "x")}
