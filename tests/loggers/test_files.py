"""Loggers that write files: what is logged comes back, a resume cuts it back exactly, and a full disk loses nothing."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import nn

from trainer_cli import CheckpointerCallback, Trainer, TrainingLoop
from trainer_cli.loggers import tensorboard, text_files
from trainer_cli.loggers.base import Logger, Record, RunFacts, Table
from trainer_cli.loggers.marks import Mark
from trainer_cli.loggers.media import MEDIA_FILE, MediaLogger
from trainer_cli.loggers.record_keeper import RecordKeeper
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, FileLogger, JsonlLogger, Line, read_records


def _of_jsonl(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _of_csv(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["metric"] == "train/loss"]


def _of_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars("train/loss")] if events.Tags()["scalars"] else []


# A logger, the pattern of its files, and a function that reads the steps in them.
FILES: dict[str, tuple[Callable[[], Logger], str, Callable[[Path], list[int]]]] = {
    "jsonl": (JsonlLogger, "metrics.jsonl", _of_jsonl),
    "csv": (CsvLogger, "metrics.csv", _of_csv),
    "tensorboard": (TensorBoardLogger, "tensorboard/events*", _of_tensorboard),
}
every_kind = pytest.mark.parametrize("kind", FILES)


def a_record(step: int) -> Record:
    metrics = {"train/loss": step / 7, **{f"more{number}": 1.0 for number in range(7)}}
    return Record(step, step / 10, 1e9 + step, metrics)


def attempt(kind: str, folder: Path, steps: list[int], *, since: int | None = None) -> list[int]:
    """Log these steps as one attempt, which goes on from step `since`. Returns the steps that the files have then."""
    make, _, read = FILES[kind]
    logger = make()
    if since is not None:
        logger.rewind(folder, since)
    logger.start(RunFacts(run_dir=folder))
    for step in steps:
        logger.log(a_record(step))
    logger.flush(durable=True)
    logger.close()
    return read(folder)


@every_kind
@pytest.mark.parametrize(
    ("since", "left"), [(-1, []), (0, [0]), (15, [0, 10]), (20, [0, 10, 20]), (99, [0, 10, 20, 30])]
)
def test_rewinding_drops_what_is_later_than_the_step(kind: str, since: int, left: list[int], tmp_path: Path) -> None:
    attempt(kind, tmp_path, [0, 10, 20, 30])
    assert attempt(kind, tmp_path, [since + 1], since=since) == [*left, since + 1]


@every_kind
def test_resumes_neither_double_nor_lose_a_step(kind: str, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [10, 20, 30, 40])
    attempt(kind, tmp_path, [30, 40, 50], since=20)
    assert attempt(kind, tmp_path, [50, 60], since=40) == [10, 20, 30, 40, 50, 60]
    assert attempt(kind, tmp_path, [20], since=10) == [10, 20], "also behind an earlier resume"


NOISE = random.Random(5).randbytes(64)
TAILS = {
    "jsonl": [b'{"step": 3', b'{"step": 3, "epoch": 0.0}', b"\0" * 100, b"\0\0\0\n", b"\xff\xfe\n", b"[1]\n", b"7\n"],
    "csv": [b"2,0.5,1", b"\0" * 64],
    "tensorboard": [b"\0" * 64, NOISE, b"\xff" * 12],
}


@pytest.mark.parametrize(("kind", "tail"), [(kind, tail) for kind, tails in TAILS.items() for tail in tails])
def test_a_resume_drops_what_a_crash_left_at_the_end(kind: str, tail: bytes, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [1, 2])
    (path,) = tmp_path.glob(FILES[kind][1])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert attempt(kind, tmp_path, [3], since=2) == [1, 2, 3]
    assert min(tmp_path.glob(FILES[kind][1])).read_bytes().startswith(whole)


@every_kind
def test_a_resume_that_needs_no_cut_touches_nothing(kind: str, tmp_path: Path) -> None:
    attempt(kind, tmp_path, [1, 2])
    (path,) = tmp_path.glob(FILES[kind][1])
    os.utime(path, ns=(1, 1))
    inode = path.stat().st_ino
    if kind == "tensorboard":
        attempt(kind, tmp_path, [3], since=2)  # It rewinds at its first record, which has a file of its own.
    else:
        FILES[kind][0]().rewind(tmp_path, 2)
    first = min(tmp_path.glob(FILES[kind][1]))
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (1, inode)


def test_rewinding_drops_damage_in_the_middle_and_keeps_what_follows(tmp_path: Path) -> None:
    attempt("jsonl", tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"st\n' + lines[2])
    JsonlLogger().rewind(tmp_path, 10)
    assert path.read_bytes() == lines[0] + lines[2]


def test_a_record_is_one_line_of_json_with_its_keys_in_order() -> None:
    line = JsonlLogger.encode(Record(3, 0.5, 1234.56789, {"train/loss": 0.25, "val/accuracy": 1}))
    assert line == b'{"step": 3, "epoch": 0.5, "time": 1234.568, "train/loss": 0.25, "val/accuracy": 1}\n'


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**60), 2**60)))
def test_every_value_comes_back_from_json_as_it_was_through_float(metrics: dict[str, float]) -> None:
    line = json.loads(
        JsonlLogger.encode(Record(1, 0.0, 0.0, metrics)), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    for key in metrics.keys() - {"step", "epoch", "time"}:
        assert repr(float(line[key])) == repr(float(metrics[key]))


def test_the_records_between_two_steps_are_read_without_a_truncated_last_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [JsonlLogger.encode(a_record(step)) for step in (1, 2, 3, 3, 4, 3)]
    path.write_bytes(b"".join(lines).rstrip(b"\n"))
    assert [record.step for record in read_records(path, 1, 3)] == [2, 3, 3]
    assert next(read_records(path, 1, 3)).metrics == a_record(2).metrics
    assert list(read_records(tmp_path / "none", 1, 3)) == []


def test_a_record_of_pictures_alone_has_no_line(tmp_path: Path) -> None:
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(Record(1, 0.0, 0.0, {}, texts={"sample": "a"}))
    logger.log(Record(2, 0.0, 0.0, {}))
    logger.close()
    assert _of_jsonl(tmp_path) == [2]


def test_each_metric_of_a_step_has_a_row_of_csv_with_its_exact_value_below_one_header(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = CsvLogger()
        logger.start(RunFacts(run_dir=tmp_path))
        logger.log(Record(step, step / 4, 1e9 + step, {"train/loss": 1 / 3, 'odd,"name"': float("nan")}))
        logger.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [(row["step"], row["metric"], row["value"]) for row in csv.DictReader(file)]
    assert rows == [(step, *row) for step in "12" for row in (("train/loss", repr(1 / 3)), ('odd,"name"', "nan"))]


def test_a_line_is_readable_as_soon_as_it_is_logged_and_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    logger = JsonlLogger(str(tmp_path / "elsewhere" / "metrics.jsonl"))
    logger.start(RunFacts(run_dir=tmp_path / "run"))
    logger.log(a_record(1))
    assert _of_jsonl(tmp_path / "elsewhere") == [1]
    logger.close()
    assert not (tmp_path / "run").exists()


@every_kind
def test_what_was_flushed_for_a_checkpoint_survives_a_power_cut_with_the_name_of_its_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, pattern, _ = FILES[kind]
    synced, fsync = set[int](), os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    logger = make()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(a_record(1))
    logger.flush(durable=True)
    (path,) = tmp_path.glob(pattern)
    assert {path.stat().st_ino, path.parent.stat().st_ino} <= synced
    logger.close()


# A full disk


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail, with a part written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kept(logger: Logger, run_dir: Path, *, tolerant: bool = True) -> tuple[RecordKeeper, list[float]]:
    """A keeper of the logger's records, which is started, and the time of its clock."""
    now = [0.0]
    keeper = RecordKeeper("x", logger, lambda: now[0])
    keeper.tolerant = tolerant
    keeper.start(RunFacts(run_dir=run_dir), 0)
    return keeper, now


@every_kind
@pytest.mark.parametrize("from_start", [False, True])
def test_records_neither_repeat_nor_vanish_where_there_is_space_again(
    kind: str, from_start: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, pattern, read = FILES[kind]
    keeper, now = kept(make(), tmp_path)
    first = 1 if from_start else 4
    for step in range(1, first):
        keeper.log(a_record(step))
    sizes = [path.stat().st_size for path in tmp_path.glob(pattern)]
    # The limit is that of each file, and TensorBoard's logger begins another one.
    with largest_file(10 if kind == "tensorboard" else max(sizes, default=0) + 100):
        for step in range(first, 8):
            keeper.log(a_record(step))
            keeper.flush(durable=False)
            keeper.flush(durable=True)
            now[0] += 100
    for step in range(8, 10):
        keeper.log(a_record(step))
    keeper.close()
    assert read(tmp_path) == list(range(1, 10))
    assert caplog.text.count("cannot be written") == 1
    assert len(list(tmp_path.glob(pattern))) <= 2


@every_kind
def test_a_start_that_fails_again_and_again_leaves_no_file_open_and_no_second_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, pattern, read = FILES[kind]
    attempt(kind, tmp_path / "import", [1])
    failures = [OSError(errno.EIO, "no answer") for _ in range(3)]

    def sync(folder: Path) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(text_files, "sync", sync)
    monkeypatch.setattr(tensorboard, "sync", sync)
    lowest = _lowest_descriptor()
    now = [0.0]
    keeper = RecordKeeper("x", make(), lambda: now[0])
    keeper.tolerant = True
    keeper.start(RunFacts(run_dir=tmp_path, start_step=1), 0)
    for step in range(1, 6):
        now[0] += 100
        keeper.log(a_record(step))
    keeper.close()
    assert read(tmp_path) == [1, 2, 3, 4, 5]
    assert len(list(tmp_path.glob(pattern))) == 1
    assert _lowest_descriptor() == lowest


def _lowest_descriptor() -> int:
    """The lowest number that no open file has."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@every_kind
def test_without_the_policy_a_full_disk_ends_the_training_with_an_error(kind: str, tmp_path: Path) -> None:
    make, pattern, read = FILES[kind]
    keeper, _ = kept(make(), tmp_path, tolerant=False)
    keeper.log(a_record(1))
    size = max(path.stat().st_size for path in tmp_path.glob(pattern))
    with largest_file(size + 100), pytest.raises(OSError, match="File too large"):
        keeper.log(a_record(2))
    keeper.close()
    if kind != "tensorboard":
        assert read(tmp_path) == [1], "nothing of a failed record is left"


def test_a_run_that_ends_on_a_full_disk_says_how_many_records_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, _ = kept(JsonlLogger(), tmp_path)
    with largest_file(0):
        for step in (1, 2, 3):
            keeper.log(a_record(step))
        keeper.close()
    assert "x lacks 3 records" in caplog.text


# A resume reads only what a log has gained since the checkpoint, and leaves the same file as one that reads it all.


class CountingJsonl(JsonlLogger):
    """Counts the lines that it reads."""

    lines_read = 0

    def read_line(self, line: bytes, start: int) -> Line | None:
        self.lines_read += 1
        return super().read_line(line, start)


def a_full_record(step: int, clock: float = 0.0, **metrics: float) -> Record:
    return Record(step, step / 10, 1e9 + step + clock, {"train/loss": step / 7, **metrics})


def logged(run: Path, steps: range, logger: FileLogger | None = None) -> FileLogger:
    """A started logger that has logged these steps."""
    logger = JsonlLogger() if logger is None else logger
    logger.start(RunFacts(run_dir=run))
    for step in steps:
        logger.log(a_full_record(step, **{"val/loss": 1 / step}))
    return logger


def resumed(run: Path, state: Mapping[str, Any], step: int) -> CountingJsonl:
    logger = CountingJsonl()
    logger.load_state_dict(json.loads(json.dumps(state)))
    logger.rewind(run, step)
    return logger


@pytest.mark.parametrize("keep", [1000, 999], ids=["after the step", "at a pending evaluation"])
def test_a_resume_reads_no_record_before_the_one_of_the_checkpoints_step(keep: int, tmp_path: Path) -> None:
    logger = logged(tmp_path, range(1, 1001))
    state = logger.state_dict()
    logger.log(a_full_record(1001))
    logger.close()
    second = resumed(tmp_path, state, keep)
    assert second.lines_read == 2
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, keep + 1))
    second.start(RunFacts(run_dir=tmp_path))
    assert second.metric_ranges(tmp_path / "metrics.jsonl") == JsonlLogger.read_ranges(tmp_path / "metrics.jsonl")


def test_a_mark_lies_before_all_records_of_its_newest_step(tmp_path: Path) -> None:
    logger = logged(tmp_path, range(1, 101))
    logger.log(Record(100, 1.0, 2e9, {"test/loss": 0.5}))
    second = resumed(tmp_path, logger.state_dict(), 99)
    logger.close()
    assert second.lines_read == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 1.0, 3.0], (1.0, 2, 3.0, 3, 3.0)),
        ([1.0, 1.0, 1.0], (1.0, 3, 1.0, 3, 1.0)),
        ([2.0, -math.inf, math.inf, math.nan], (2.0, 1, 2.0, 1, math.nan)),
        ([math.nan, 2.0], (2.0, 2, 2.0, 2, 2.0)),
        ([math.inf], (None, 0, None, 0, math.inf)),
    ],
)
def test_the_newest_of_equal_values_is_best_and_none_that_is_not_finite(
    values: list[float], expected: tuple[float | None, int, float | None, int, float]
) -> None:
    mark = Mark()
    for step, value in enumerate(values, 1):
        mark = mark.after(1, step, {"val/loss": value})
    assert repr(tuple(mark.ranges["val/loss"])) == repr(expected)


def test_a_record_that_the_checkpoints_step_got_after_its_save_stays(tmp_path: Path) -> None:
    logger = logged(tmp_path, range(1, 11))
    state = logger.state_dict()
    logger.log(Record(10, 1.0, 2e9, {"test/loss": 0.5}))
    logger.log(a_full_record(11))
    logger.close()
    second = resumed(tmp_path, state, 10)
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"test/loss") == 1
    second.start(RunFacts(run_dir=tmp_path))
    assert "test/loss" in (second.metric_ranges(tmp_path / "metrics.jsonl") or {})


def _edited(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step": 97,', b'"step": 98,'))


def _shortened(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:50]))


def _without_a_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:90] + lines[91:]))


def _of_another_clock(path: Path) -> None:
    path.unlink()
    logger = JsonlLogger()
    logger.start(RunFacts(run_dir=path.parent))
    for step in range(1, 111):
        logger.log(a_full_record(step, clock=0.5, **{"val/loss": 1 / step}))
    logger.close()


@pytest.mark.parametrize("change", [_edited, _shortened, _without_a_line, _of_another_clock])
def test_a_file_that_is_not_what_was_marked_is_read_whole(change: Callable[[Path], None], tmp_path: Path) -> None:
    logger = logged(tmp_path, range(1, 101))
    state = logger.state_dict()
    for step in range(101, 111):
        logger.log(a_full_record(step))
    logger.close()
    path = tmp_path / "metrics.jsonl"
    change(path)
    lines = path.read_bytes().splitlines(keepends=True)
    second = resumed(tmp_path, state, 100)
    assert second.lines_read == len(lines)
    assert path.read_bytes() == b"".join(line for line in lines if json.loads(line)["step"] <= 100)


@pytest.mark.parametrize(
    "state",
    [{}, {"size_bytes": 3}, {"size_bytes": "x", "step": 1, "ranges": {}, "digest": ""},
     {"size_bytes": 3, "step": 1, "ranges": {"val/loss": [1.0]}, "digest": ""},
     {"size_bytes": 3, "step": 1, "ranges": [], "digest": ""}],
)  # fmt: skip
def test_a_state_of_another_version_is_no_mark(state: dict[str, Any]) -> None:
    assert Mark.parse(state) is None


def test_a_log_of_another_program_has_no_mark_and_one_that_grows_beside_us_has_none_either(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    logger = logged(tmp_path, range(2, 4))
    assert logger.state_dict() == {}
    logger.close()
    logger.rewind(tmp_path, 3)
    logger.start(RunFacts(run_dir=tmp_path))
    assert logger.state_dict() != {}
    assert logger.metric_ranges(tmp_path / "metrics.jsonl") is not None
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"x")
    assert logger.state_dict() == {}
    assert logger.metric_ranges(tmp_path / "metrics.jsonl") is None


@pytest.mark.parametrize("make", [JsonlLogger, CsvLogger])
@pytest.mark.parametrize("seed", range(6))
def test_a_rewind_by_a_mark_leaves_the_bytes_that_one_without_it_leaves(
    make: Callable[[], FileLogger], seed: int, tmp_path: Path
) -> None:
    choose = random.Random(seed)
    path = tmp_path / "run" / make().path
    logger, step = make(), 0
    states: dict[int, dict[str, Any]] = {0: {}}
    logger.rewind(path.parent, -1)
    logger.start(RunFacts(run_dir=path.parent))
    for _ in range(60):
        event = choose.random()
        if event < 0.6:
            step += choose.randrange(3)
            value = choose.choice([1.0, 2.0, 3.0, math.nan, math.inf])
            logger.log(a_full_record(step, clock=choose.random(), **{choose.choice(["val/loss", "test/f1"]): value}))
        elif event < 0.7:
            # An evaluation outside of a fit, of an earlier or a later checkpoint.
            logger.log(Record(choose.randrange(step + 5), 0.0, choose.random(), {"val/loss": choose.random()}))
        elif event < 0.85:
            states[step] = json.loads(json.dumps(logger.state_dict()))
        else:
            logger.close()
            content = path.read_bytes()
            # A kill in the middle of a write, behind what the checkpoint has flushed.
            step = choose.choice(list(states))
            marked = states[step].get("size_bytes", len(content))
            content = content[: max(marked, len(content) - choose.randrange(40))]
            path.write_bytes(content)
            (tmp_path / "whole").mkdir(exist_ok=True)
            (tmp_path / "whole" / path.name).write_bytes(content)
            keep = step - choose.randrange(2)
            make().rewind(tmp_path / "whole", keep)
            logger = make()
            logger.load_state_dict(states[step])
            logger.rewind(path.parent, keep)
            assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
            states = {saved: state for saved, state in states.items() if saved <= step}
            logger.start(RunFacts(run_dir=path.parent))
        if isinstance(logger, JsonlLogger):
            assert repr(logger.metric_ranges(path)) == repr(JsonlLogger.read_ranges(path))
    logger.close()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.linear(batch).mean()


def a_fit(folder: Path, steps: int, logger: JsonlLogger) -> None:
    model = Loss()
    data = [torch.ones(2)] * 8
    Trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_duration=steps, log_interval=1, eval_interval=4),
        checkpoint=CheckpointerCallback(folder / "checkpoints", save_interval=10),
        loggers={"jsonl": logger},
        run_dir=folder,
    ).fit(data, data)


def test_a_fit_that_resumes_reads_one_record_of_its_log_and_knows_the_metrics_of_all(tmp_path: Path) -> None:
    a_fit(tmp_path, 20, JsonlLogger())
    logger = CountingJsonl()
    a_fit(tmp_path, 30, logger)
    path = tmp_path / "metrics.jsonl"
    assert logger.lines_read == 1
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == list(range(1, 31))
    assert logger.metric_ranges(path) == JsonlLogger.read_ranges(path)
    assert set(JsonlLogger.read_ranges(path)) == {"val/loss"}


# What is kept of texts, images, histograms and tables: exactly once, bounded, and readable by others.


GREY = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
TABLE = Table(("class", "a", "b"), (("a", 3, 1), ("b", 0, 5)), is_matrix=True)


def record(step: int, **media: Any) -> Record:
    return Record(step, step / 10, 1e9 + step, {"train/loss": 0.5}, **(media or {"texts": {"t": f"text {step}"}}))


def started(folder: Path, keep: int = -1, **settings: Any) -> MediaLogger:
    """A logger of an attempt that keeps the records up to a step."""
    logger = MediaLogger(**settings)
    logger.rewind(folder, keep)
    logger.start(RunFacts(run_dir=folder))
    return logger


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / MEDIA_FILE).read_text().splitlines()]


def test_every_kind_is_in_the_line_of_its_step_and_images_are_files_beside_it(tmp_path: Path) -> None:
    logger = started(tmp_path)
    histograms = {"h": np.array([0.0, 0.5, 1.0, 1.0]), "empty": np.zeros(0)}
    logger.log(record(7, texts={"t": "<b>"}, images={"i/1": GREY}, histograms=histograms, tables={"m": TABLE}))
    logger.log(Record(8, 0.8, 1e9, {"train/loss": 0.5}))
    logger.close()
    (line,) = lines(tmp_path)
    assert line["step"] == 7
    assert line["texts"] == {"t": "<b>"}
    assert line["tables"] == {"m": {"columns": ["class", "a", "b"], "rows": [["a", 3, 1], ["b", 0, 5]], "matrix": True}}
    assert list(line["histograms"]) == ["h"]
    assert sum(line["histograms"]["h"]["counts"]) == 4
    assert line["histograms"]["h"]["edges"][::64] == [0, 1]
    assert "train/loss" not in line
    assert np.array_equal(np.asarray(Image.open(tmp_path / line["images"]["i/1"])), GREY[..., 0])


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_of_all_channels_are_read_back_bit_for_bit(channels: int, mode: str, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 9, channels)).astype(np.uint8)
    logger = started(tmp_path)
    logger.log(record(1, images={"i": image}))
    content = (tmp_path / lines(tmp_path)[0]["images"]["i"]).read_bytes()
    logger.close()
    read = Image.open(io.BytesIO(content))
    assert read.mode == mode
    assert np.array_equal(np.asarray(read).reshape(image.shape), image)


def test_nothing_is_created_before_the_first_medium(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log(Record(1, 0.1, 1e9, {"train/loss": 0.5}))
    logger.flush(durable=True)
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resume_drops_what_is_later_than_its_checkpoint_and_writes_it_once(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in (1, 2, 3):
        logger.log(record(step, texts={"t": str(step)}, images={"i": GREY + step}))
        logger.flush(durable=True)
        if step == 2:
            state = logger.state_dict()
    logger.close()
    # What a crash tears off, and an image whose line was not written.
    with open(tmp_path / MEDIA_FILE, "a") as file:
        file.write('{"step": 4, "te')
    (tmp_path / "media" / "step4-0123456789abcdef.png").write_bytes(b"torn")
    (tmp_path / "media" / "mine.png").write_bytes(b"of the user")
    resumed = MediaLogger()
    resumed.load_state_dict(state)
    resumed.rewind(tmp_path, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "media").glob("step*"))) == 2
    assert (tmp_path / "media" / "mine.png").exists()
    resumed.start(RunFacts(run_dir=tmp_path))
    resumed.log(record(3, texts={"t": "3"}, images={"i": GREY + 3}))
    resumed.close()
    assert [line["texts"]["t"] for line in lines(tmp_path)] == ["1", "2", "3"]
    for line in lines(tmp_path):
        assert np.array_equal(np.asarray(Image.open(tmp_path / line["images"]["i"])), GREY[..., 0] + line["step"])


def test_media_are_bounded_with_one_warning_also_over_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in (0, 1):
        logger = started(tmp_path, keep=attempt * 9, most_bytes=2000)
        for step in range(10 * attempt, 10 * attempt + 10):
            logger.log(record(step, texts={"t": "x" * 200}))
        logger.close()
    size = (tmp_path / MEDIA_FILE).stat().st_size
    assert 1500 < size <= 2000
    assert caplog.text.count("are left out of them") == 2, "once in each attempt"


def test_an_image_that_cannot_be_written_leaves_no_line(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file where the folder should be")
    logger = started(tmp_path)
    with pytest.raises(OSError, match="media"):
        logger.log(record(1, images={"i": GREY}))
    assert (tmp_path / MEDIA_FILE).read_bytes() == b""
    logger.close()
