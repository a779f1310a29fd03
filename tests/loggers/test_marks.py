"""A resume reads only what a log has gained since the checkpoint, and leaves the same file as one that reads it all."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_cli import CheckpointerCallback, Trainer, TrainingLoop
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.marks import Mark
from trainer_cli.loggers.text_files import CsvLogger, FileLogger, JsonlLogger, Line


class CountingJsonl(JsonlLogger):
    """Counts the lines that it reads."""

    lines_read = 0

    def read_line(self, line: bytes, start: int) -> Line | None:
        self.lines_read += 1
        return super().read_line(line, start)


def a_record(step: int, clock: float = 0.0, **metrics: float) -> Record:
    return Record(step, step / 10, 1e9 + step + clock, {"train/loss": step / 7, **metrics})


def logged(run: Path, steps: range, logger: FileLogger | None = None) -> FileLogger:
    """A started logger that has logged these steps."""
    logger = JsonlLogger() if logger is None else logger
    logger.start(RunFacts(run_dir=run))
    for step in steps:
        logger.log(a_record(step, **{"val/loss": 1 / step}))
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
    logger.log(a_record(1001))
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
    logger.log(a_record(11))
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
        logger.log(a_record(step, clock=0.5, **{"val/loss": 1 / step}))
    logger.close()


@pytest.mark.parametrize("change", [_edited, _shortened, _without_a_line, _of_another_clock])
def test_a_file_that_is_not_what_was_marked_is_read_whole(change: Callable[[Path], None], tmp_path: Path) -> None:
    logger = logged(tmp_path, range(1, 101))
    state = logger.state_dict()
    for step in range(101, 111):
        logger.log(a_record(step))
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
    make: type[FileLogger], seed: int, tmp_path: Path
) -> None:
    choose = random.Random(seed)
    path = tmp_path / "run" / make().path
    logger, step, states = make(), 0, {0: {}}
    logger.rewind(path.parent, -1)
    logger.start(RunFacts(run_dir=path.parent))
    for _ in range(60):
        event = choose.random()
        if event < 0.6:
            step += choose.randrange(3)
            value = choose.choice([1.0, 2.0, 3.0, math.nan, math.inf])
            logger.log(a_record(step, clock=choose.random(), **{choose.choice(["val/loss", "test/f1"]): value}))
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

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
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
